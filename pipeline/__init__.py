"""Cairn's line, from a Parquet corpus to answers.

    corpus ─▶ cluster ─▶ context ─▶ encode ─▶ index ─▶ search

Public names: :func:`open_collection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.collection import Collection, open_collection

__all__ = ["Collection", "open_collection"]


def __getattr__(name: str) -> Any:
    # Every stage imports this package first; loading the whole line for each of them would cost seconds and bring torch into index and
    # search.
    if name in __all__:
        import pipeline.collection

        return getattr(pipeline.collection, name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
