"""The page at ``/``: a search box, a map of the corpus and the collection's health.

    index.html ─▶ page.css, page.js ─▶ api.js, hits.js, reader.js, … ─▶ /v1, as any other client

Everything lies in ``page_assets`` and is read once; nothing comes from elsewhere, nothing is built. d3 and
the font Inter are their publishers' own files, with their licences. The page may run its own scripts only, no
inline ones and no ``eval``. Contents of documents are inserted as text, which Trusted Types enforce.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request, Response

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy of the page and of its assets."""

_MEDIA_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_STABLE: Final = (_MEDIA_TYPES["svg"], _MEDIA_TYPES["woff2"])


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    headers: dict[str, str]


def _read_assets() -> dict[str, _Asset]:
    """Return the page's files by the path they are asked for."""
    found: dict[str, _Asset] = {}
    for entry in resources.files("cairn.pipeline.serve").joinpath("page_assets").iterdir():
        media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = _Asset(content, _headers(content, media_type))
    return found


def _headers(content: bytes, media_type: str) -> dict[str, str]:
    return {
        "Content-Type": media_type,
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        # Scripts are asked about each time: a server that was brought up to date has another page.
        "Cache-Control": "max-age=86400" if media_type in _STABLE else "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }


_ASSETS: Final = _read_assets()
PAGE_PATHS: Final = frozenset(_ASSETS)
"""Open to anybody: the page itself says nothing of any collection, and asks for a key where one is needed."""

router = APIRouter(include_in_schema=False)


async def _give(request: Request) -> Response:
    asset = _ASSETS[request.scope["path"]]
    if request.headers.get("if-none-match") == asset.headers["ETag"]:
        return Response(status_code=304, headers=asset.headers)
    return Response(asset.content, headers=asset.headers)


for _path in sorted(PAGE_PATHS):
    router.add_api_route(_path, _give, methods=["GET"])
