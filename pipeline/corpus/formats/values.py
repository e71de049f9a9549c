"""Values of files without types of their own: a pass that learns the columns, and values made columns.

    whole numbers and others   double               lists     list of what their elements are
    numbers, booleans, texts   text, as JSON        objects   no column that can be kept

A whole number that does not fit 64 bits is a text. Texts are not checked: the row checks refuse those that
are not valid UTF-8, by their reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, cast

import pyarrow as pa
from cairn.pipeline.corpus.formats.format import DECODE_ERRORS, SourceFile, Undecoded
from cairn.pipeline.corpus.source_record import Footer

MAX_COLUMNS: Final = 10_000
_INT64: Final = range(-(2**63), 2**63)
OBJECT: Final = pa.struct([])
"""What stands for objects and nested lists; nothing looks into them."""


def footer_of(file: SourceFile, parts: Iterable[Mapping[str, pa.DataType] | int | Undecoded]) -> Footer:
    """Return the footer of what a pass yields: types of columns, numbers of rows, and what is damaged.

    A pass that fails has met the beginning of the file, and the rest counts as one row, which reading it
    quarantines. Where nothing was met, the error is raised: the file is damaged. So is one with more than
    ``MAX_COLUMNS`` columns, whose names and types would all be kept in memory: :class:`ValueError`.
    """
    types: dict[str, pa.DataType] = {}
    num_rows = 0
    try:
        for part in parts:
            if isinstance(part, int):
                num_rows += part
            elif isinstance(part, Undecoded):
                num_rows += part.num_rows or 1
            else:
                for name, arrow_type in part.items():
                    types[name] = joined(types.get(name, pa.null()), arrow_type)
            if len(types) > MAX_COLUMNS:
                break
    except DECODE_ERRORS as error:
        file.require_reachable(error)
        if not types:
            raise
        num_rows += 1
    if len(types) > MAX_COLUMNS:
        raise ValueError(f"a file must have at most {MAX_COLUMNS} columns, got more")
    return Footer(schema=pa.schema([*types.items()]), num_rows=num_rows)


def type_of(value: object) -> pa.DataType:
    """Return the type of one value, null for None."""
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if value in _INT64 else pa.string()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, list | tuple):
        elements = cast("Sequence[object]", value)
        if any(isinstance(element, list | tuple | dict) for element in elements):
            return OBJECT  # however deeply they are nested: nothing looks into them
        element = reduce(joined, map(type_of, elements), pa.null())
        return OBJECT if pa.types.is_nested(element) else pa.list_(element)
    return OBJECT


def joined(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Return the type of a column that holds values of both."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(joined(first.value_type, second.value_type))
    if pa.types.is_nested(first) or pa.types.is_nested(second):
        return OBJECT
    numbers = {pa.int64(), pa.float64()}
    return pa.float64() if {first, second} == numbers else pa.string()


def as_column(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return values as a column of a type that :func:`joined` gave for them, or of text."""
    if pa.types.is_list(arrow_type):
        lengths = [0 if value is None else len(value) for value in values]
        offsets = pa.array([0, *lengths], pa.int32()).to_numpy().cumsum(dtype="int32")
        elements = [element for value in values if value is not None for element in value]
        mask = pa.array([value is None for value in values])
        flat = as_column(elements, arrow_type.value_type)
        return pa.ListArray.from_arrays(pa.array(offsets), flat, type=arrow_type, mask=mask)
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        as_bytes = pa.binary() if pa.types.is_string(arrow_type) else pa.large_binary()
        encoded = [None if value is None else _text(value) for value in values]
        return pa.array(encoded, as_bytes).view(arrow_type)
    if pa.types.is_floating(arrow_type):
        return pa.array([None if value is None else float(value) for value in values], arrow_type)
    return pa.array(values, arrow_type)


def _text(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogate, as names of this machine have for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
