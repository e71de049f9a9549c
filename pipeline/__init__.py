"""Cairn's line, from a Parquet corpus to answers.

    corpus ─▶ cluster ─▶ context ─▶ encode ─▶ index ─▶ search

Public names, also those of the package ``cairn``: :func:`open_collection`, :class:`Collection`,
:func:`load_encoder`, :class:`TextEncoder`, :class:`CairnClient`, :class:`AsyncCairnClient`,
:class:`CairnError` and ``__version__``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.client import AsyncCairnClient, CairnClient
    from pipeline.collection import Collection, open_collection
    from pipeline.encode.text_encoder import TextEncoder, load_encoder
    from pipeline.errors import CairnError

    __version__: str

__all__ = [
    "AsyncCairnClient",
    "CairnClient",
    "CairnError",
    "Collection",
    "TextEncoder",
    "__version__",
    "load_encoder",
    "open_collection",
]

_HOMES = {
    "AsyncCairnClient": "pipeline.client",
    "CairnClient": "pipeline.client",
    "CairnError": "pipeline.errors",
    "Collection": "pipeline.collection",
    "TextEncoder": "pipeline.encode.text_encoder",
    "load_encoder": "pipeline.encode.text_encoder",
    "open_collection": "pipeline.collection",
}


def __getattr__(name: str) -> Any:
    # Every stage imports this package first. Loading the whole line for each of them would cost seconds and
    # bring torch into index and search.
    if name == "__version__":
        from importlib.metadata import version

        return version("cairn-retrieval")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
