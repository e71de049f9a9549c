"""Trees of Cairn's filters for frameworks whose negations match documents without a value.

In Cairn a null matches no comparison, as in SQL. In Haystack and LlamaIndex a document without a value is
unlike every value.
"""

from __future__ import annotations

from typing import Any, Final

from cairn.pipeline.errors import FilterError

OPPOSITES: Final = {
    "eq": "ne",
    "ne": "eq",
    "gt": "lte",
    "lte": "gt",
    "lt": "gte",
    "gte": "lt",
    "in": "nin",
    "nin": "in",
    "and": "or",
    "or": "and",
    "is_null": "is_not_null",
    "is_not_null": "is_null",
}


def compared(kind: str, key: str, value: Any, *, is_negated: bool) -> dict[str, Any]:
    """Return a comparison with a value that is not null, or its opposite."""
    if is_negated and kind not in OPPOSITES:
        raise FilterError(
            f"a filter must not negate {kind}, got NOT around one; say which values there may be"
        )
    tree = {"type": OPPOSITES[kind] if is_negated else kind, "key": key, "value": value}
    if (kind in ("ne", "nin")) == is_negated:
        return tree
    return {"type": "or", "filters": [tree, {"type": "is_null", "key": key}]}


def joined(kind: str, trees: list[dict[str, Any]], *, is_negated: bool) -> dict[str, Any]:
    """Return trees, of which each is negated already where the whole is, as one by `and` or `or`."""
    return {"type": OPPOSITES[kind] if is_negated else kind, "filters": trees}
