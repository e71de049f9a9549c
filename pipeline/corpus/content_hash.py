"""One SHA-256 a row over everything that is stored of it: equal digests mean nothing has to be encoded again.

Canonical form, fields in the order title, text, query, metadata by name; a null field adds nothing, so that
an absent column and a null one are the same content:

    field = size(name) name kind value       kind = one letter for the family of types
    value = size(bytes) bytes                size = 8 bytes, little-endian
    list  = size(body) body, body = the elements, each as a value or as the null mark

Numbers and decimals are hashed as Arrow prints them, hence independent of the width a file stores them in;
times as the count since the epoch. The id and the file name are not content.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.corpus.columns import is_list

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

ROLES = ("title", "text", "query")
NULL_ELEMENT = b"\xff" * 8  # no size is that large


def content_hashes(columns: Mapping[str, pa.Array]) -> list[str]:
    """Digest rows of ``title``, ``text``, ``query`` and metadata columns, as lower-case hex."""
    ordered = [
        *(name for name in ROLES if name in columns),
        *sorted(name for name in columns if name not in ROLES),
    ]
    rows = _join([_frame_field(name, columns[name]) for name in ordered], null_as=b"")
    offsets = (
        np.frombuffer(rows.buffers()[1], np.int64)[rows.offset : rows.offset + len(rows) + 1].tolist()
        if len(rows)
        else [0]
    )
    data = memoryview(rows.buffers()[2] or b"")
    sha256 = hashlib.sha256
    return [sha256(data[start:stop]).hexdigest() for start, stop in itertools.pairwise(offsets)]


def _join(parts: list[Any], null_as: bytes | None = None) -> pa.Array:
    """Concatenate binary columns row by row; a null part makes a null, unless ``null_as`` stands for it."""
    handling = "emit_null" if null_as is None else "replace"
    return pc.binary_join_element_wise(
        *parts, pa.scalar(b"", pa.large_binary()), null_handling=handling, null_replacement=null_as or b""
    )


def _sized(values: pa.Array) -> pa.Array:
    """Put its size before each binary value."""
    sizes = np.asarray(pc.fill_null(pc.binary_length(values), 0)).astype("<i8")
    sizes_column = pa.Array.from_buffers(
        pa.binary(8), len(values), [None, pa.py_buffer(sizes.tobytes())]
    ).cast(pa.large_binary())
    return _join([sizes_column, values])


def _frame_field(name: str, column: pa.Array) -> pa.Array:
    name_bytes = name.encode()
    prefix = len(name_bytes).to_bytes(8, "little") + name_bytes + _kind(column.type)
    if is_list(column.type):
        elements = pc.fill_null(_sized(_values(column.flatten())), pa.scalar(NULL_ELEMENT, pa.large_binary()))
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        bodies = pc.binary_join(
            pa.ListArray.from_arrays(offsets, elements), pa.scalar(b"", pa.large_binary())
        )
        values = pc.if_else(column.is_valid(), bodies, pa.scalar(None, pa.large_binary()))
    else:
        values = _values(column)
    return _join([pa.scalar(prefix, pa.large_binary()), _sized(values)])


def _values(column: pa.Array) -> pa.Array:
    """Return each value's canonical bytes."""
    if pa.types.is_large_binary(column.type):
        return column
    if pa.types.is_timestamp(column.type) or pa.types.is_date64(column.type):
        column = column.cast(pa.int64())  # printing a zoned time needs a database of zones
    elif pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_float16(column.type):
        column = column.cast(pa.float32())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        column = column.cast(pa.string())
    return column.cast(pa.large_string()).cast(pa.large_binary())


def _kind(arrow_type: pa.DataType) -> bytes:
    """Name the family of types that prints equal values equally."""
    if is_list(arrow_type):
        return b"l" + _kind(arrow_type.value_type)
    families = (
        (pa.types.is_string, b"s"),
        (pa.types.is_large_string, b"s"),
        (pa.types.is_large_binary, b"v"),
        (pa.types.is_boolean, b"b"),
        (pa.types.is_integer, b"i"),
        (pa.types.is_floating, b"f"),
        (pa.types.is_decimal, b"d"),
        (pa.types.is_date32, b"t"),
        (pa.types.is_date64, b"u"),
    )
    for belongs, letter in families:
        if belongs(arrow_type):
            return letter
    return f"T{arrow_type.unit}{arrow_type.tz or ''};".encode()
