"""What a request must be before a route sees it: for this server, authorised, strict JSON of bounded size.

A page on another site must not reach a server on its reader's machine: the Host must be one this server
answers for (DNS rebinding), and an Origin must be the server's own. There is no CORS. The whole body is read
and checked here: RFC 8259 has neither NaN nor lone surrogates, and the depth is bounded to protect parsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from cairn.pipeline.errors import CairnError
from cairn.pipeline.serve.keys import EVERYTHING, Keyring
from cairn.pipeline.serve.page_routes import PAGE_PATHS
from cairn.pipeline.serve.problems import (
    BODY_AMBIGUOUS,
    BODY_SLOW,
    BODY_TOO_LARGE,
    BODY_UNEXPECTED,
    HOST_REFUSED,
    INVALID_JSON,
    KEY_MISSING,
    KEY_UNKNOWN,
    KEYS_UNREADABLE,
    MEDIA_TYPE_REFUSED,
    ORIGIN_REFUSED,
    ProblemError,
)
from cairn.pipeline.serve.settings import MAX_BODY_BYTES, ServeSettings
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

GRANT: Final = "cairn.grant"
"""Where a request's grant stands in its scope."""
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json"}) | PAGE_PATHS
"""What anybody may ask: nothing there depends on a collection."""

_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
BODY_SECONDS: Final = 5.0
"""Within which a body must have arrived."""


class Guard:
    """An ASGI layer that refuses what must not reach a route."""

    def __init__(self, app: ASGIApp, *, settings: ServeSettings, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring
        self._hosts = _allowed_hosts(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, note its grant, and pass it on with its body read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._check_addressee(headers)
        if (
            "transfer-encoding" in headers and "content-length" in headers
        ):  # a proxy may have gone by the other one (RFC 9112 §6.1)
            raise ProblemError(
                BODY_AMBIGUOUS, "send Content-Length or Transfer-Encoding", headers={"Connection": "close"}
            )
        if scope["path"] not in OPEN_PATHS:
            scope[GRANT] = self._grant(headers)
        if scope["method"] != "POST" and "transfer-encoding" in headers:  # of any length
            raise ProblemError(BODY_UNEXPECTED, "send none", headers={"Connection": "close"})
        if scope["method"] == "POST":
            receive = _replay(await _read_json(headers, receive))
        await self._app(scope, receive, send)

    def _check_addressee(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise ProblemError(HOST_REFUSED, "name it with --allowed-host where it is this server's")
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise ProblemError(ORIGIN_REFUSED, "call it from a page it serves itself, or from a program")

    def _grant(self, headers: Headers) -> object:
        if not self._keyring.is_required:
            return EVERYTHING
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise ProblemError(
                KEY_MISSING, "send it as `Authorization: Bearer KEY`; `cairn keys create` makes one"
            )
        try:
            grant = self._keyring.grant_of(token.strip())
        except CairnError:
            raise ProblemError(
                KEYS_UNREADABLE, "the server's keeper has to restore the file of keys"
            ) from None
        if grant is None:
            raise ProblemError(KEY_UNKNOWN, "it is mistyped, or was revoked")
        return grant


def _allowed_hosts(settings: ServeSettings) -> frozenset[str] | None:
    """Return the names the server answers for, None for all.

    Beyond loopback keys protect it, which a rebound page does not have.
    """
    named = {_without_port(host.lower()) for host in settings.allowed_hosts}
    if settings.is_loopback:
        return frozenset({*_LOCAL_NAMES, settings.host.lower(), *named})
    return frozenset(named) or None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


async def _read_json(headers: Headers, receive: Receive) -> bytes:
    """Return the whole body, which is JSON.

    Anything else raises :class:`ProblemError` as early as it shows.
    """
    _check_headers(headers)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(receive)
    except TimeoutError:
        raise ProblemError(
            BODY_SLOW, f"it may take {BODY_SECONDS:.0f} seconds", headers={"Connection": "close"}
        ) from None
    try:
        from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError:
        raise ProblemError(
            INVALID_JSON,
            "send UTF-8 JSON without NaN, Infinity and numbers of thousands of digits, at most 200 deep",
        ) from None
    return body


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the caller has gone: what is left is no JSON
            break
        part: bytes = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def _check_headers(headers: Headers) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" or headers.get("content-encoding", "identity").lower() != "identity":
        raise ProblemError(MEDIA_TYPE_REFUSED, "send `Content-Type: application/json`, not compressed")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()


def _too_large() -> ProblemError:
    return ProblemError(
        BODY_TOO_LARGE, f"it may have {MAX_BODY_BYTES:,} bytes", headers={"Connection": "close"}
    )


def _replay(body: bytes) -> Callable[[], Awaitable[Message]]:
    """Return a receive that gives the body once more, and then the end of the connection."""
    messages: list[Mapping[str, object]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return dict(messages.pop()) if messages else {"type": "http.disconnect"}

    return receive
