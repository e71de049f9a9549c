"""Cairn's line, from a Parquet corpus to answers.

    corpus ─▶ cluster ─▶ context ─▶ encode ─▶ index ─▶ search

Public names: :func:`open_collection`, :func:`load_encoder`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.collection import Collection, open_collection
    from pipeline.encode.text_encoder import TextEncoder, load_encoder

__all__ = ["Collection", "TextEncoder", "load_encoder", "open_collection"]

_HOMES = {
    "Collection": "pipeline.collection",
    "open_collection": "pipeline.collection",
    "TextEncoder": "pipeline.encode.text_encoder",
    "load_encoder": "pipeline.encode.text_encoder",
}


def __getattr__(name: str) -> Any:
    # Every stage imports this package first; loading the whole line for each of them would cost seconds and
    # bring torch into index and search.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
