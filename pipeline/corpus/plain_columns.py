"""Measure string columns before they are made plain, and make them plain in pieces that fit.

Between decoding and the row checks of stage 1. A dictionary column of a thousand rows may be a gigabyte once
plain; its size is known from the dictionary alone. It does not check what the strings hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from jaxtyping import Int64

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers


def without_views(column: pa.Array) -> pa.Array:
    """Return a column whose strings are no views: Arrow cannot filter those yet."""
    arrow_type = column.type
    if pa.types.is_string_view(arrow_type):
        return column.cast(pa.large_string())
    if _is_list(arrow_type):
        element = (
            pa.large_string() if pa.types.is_string_view(arrow_type.value_type) else arrow_type.value_type
        )
        return (
            column
            if pa.types.is_list(arrow_type) and element == arrow_type.value_type
            else column.cast(pa.list_(element))
        )
    return column


def value_bytes(column: pa.Array) -> Int64[np.ndarray, " N"]:
    """Count the string bytes a row would hold once plain, without making it plain.

    0 for null and for other types.
    """
    arrow_type = column.type
    if pa.types.is_dictionary(arrow_type):
        per_entry = value_bytes(column.dictionary)
        indices = column.indices
        if not len(per_entry):
            return np.zeros(len(column), np.int64)
        return np.where(np.asarray(column.is_valid()), per_entry[np.asarray(indices.fill_null(0))], 0)
    if _is_list(arrow_type):
        ends = np.concatenate([[0], np.cumsum(value_bytes(column.flatten()))])
        offsets = _offsets(column)
        return (ends[offsets[1:]] - ends[offsets[:-1]]).astype(np.int64)
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        return np.asarray(pc.binary_length(column).fill_null(0)).astype(np.int64)
    return np.zeros(len(column), np.int64)


def plain(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Return a column as its stored type: dictionaries resolved, widths unified, strings not yet checked."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary.take(column.indices)
    elif _is_list(column.type) and pa.types.is_list(target):
        values = plain(column.flatten(), target.value_type)
        mask = column.is_null() if column.null_count else None
        # The type is given: a footer may name the element otherwise, and two names make two types.
        return pa.ListArray.from_arrays(
            pa.array(_offsets(column), pa.int32()), values, type=target, mask=mask
        )
    return column if column.type == target else column.cast(target)


def _is_list(arrow_type: pa.DataType) -> bool:
    return pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)


def _offsets(column: pa.Array) -> Int64[np.ndarray, " N_plus_1"]:
    lengths = np.asarray(pc.list_value_length(column).fill_null(0))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def pieces(row_bytes: Int64[np.ndarray, " N"], budget_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into consecutive (start, stop) of at most ``budget_bytes``, one row at least."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + budget_bytes, side="right")), start + 1)
        yield start, stop
        start = stop
