"""Values of metadata filters: checked against their column's type, and made literals of it.

Strings compare by code point, floats as 64-bit numbers, timestamps as instants (a value without UTC offset
counts as UTC where the column has a time zone). A value that does not fit raises :class:`FilterError`.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import FilterError

if TYPE_CHECKING:
    from lancedb.expr import Expr

MAX_STRING_BYTES = 8_192

_INT64 = range(-(2**63), 2**63)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def is_text(data_type: pa.DataType) -> bool:
    """Tell whether values are strings, in a dictionary or not."""
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def literal(key: str, data_type: pa.DataType, value: Any) -> Expr:
    """Return the typed literal of a value that fits its column, as LanceDB has it."""
    from lancedb.expr import lit

    checked = lit(_checked(key, data_type, value))
    # Lance reads a literal timestamp in the column's own zone.
    return checked.cast(_instant_type(data_type)) if pa.types.is_timestamp(data_type) else checked


def literals(key: str, data_type: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Return values that fit a column's type in the type that they are compared in.

    Whole numbers that no value of the column can equal are left out.
    """
    checked = [_checked(key, data_type, value) for value in values]
    if is_text(data_type):
        return pa.array(checked, pa.string())
    if pa.types.is_boolean(data_type) or pa.types.is_date(data_type):
        return pa.array(checked, pa.bool_() if pa.types.is_boolean(data_type) else pa.date32())
    if pa.types.is_timestamp(data_type):
        return pa.array(checked, pa.int64()).cast(_instant_type(data_type))
    if pa.types.is_floating(data_type):
        return pa.array(checked, pa.float64())
    bounds = np.iinfo(data_type.to_pandas_dtype())
    return pa.array(
        [int(number) for number in checked if bounds.min <= number <= bounds.max and number == int(number)],
        data_type,
    )


def _checked(key: str, data_type: pa.DataType, value: Any) -> Any:
    """Return a value as its column's type is compared, or refuse it."""
    if is_text(data_type):
        return _string(key, value)
    if pa.types.is_boolean(data_type):
        return _boolean(key, value)
    if pa.types.is_date(data_type):
        return _date(key, value)
    return _ticks(key, data_type, value) if pa.types.is_timestamp(data_type) else number_of(key, value)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FilterError(
            f"column {key!r} is boolean: its value must be true or false, got {shown_value(value)}"
        )
    return value


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FilterError(f"column {key!r} is text: its value must be a string, got {shown_value(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise FilterError(
            f"the value of column {key!r} must be valid Unicode, got a lone surrogate"
        ) from None
    if size > MAX_STRING_BYTES:
        raise FilterError(
            f"the value of column {key!r} must have at most {MAX_STRING_BYTES:,} bytes, got {size:,}"
        )
    return value


def number_of(key: str, value: Any) -> int | float:
    """Return a finite number of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {shown_value(value)}")
    if isinstance(value, int) and value not in _INT64:
        raise FilterError(f"the value of column {key!r} must fit 64 bits, got {shown_value(value)}")
    if not math.isfinite(value):
        raise FilterError(f"the value of column {key!r} must be finite, got {value}")
    return value


def _date(key: str, value: Any) -> dt.date:
    sentence = f"column {key!r} is a date: its value must read like 2024-05-31, got {shown_value(value)}"
    if isinstance(value, str):
        try:
            value = dt.date.fromisoformat(value)
        except ValueError:
            raise FilterError(sentence) from None
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise FilterError(sentence)
    return value


def _instant_type(data_type: pa.TimestampType) -> pa.TimestampType:
    return pa.timestamp("ns" if data_type.unit == "ns" else "us", data_type.tz)


def _ticks(key: str, data_type: pa.TimestampType, value: Any) -> int:
    """Return the instant in the unit of :func:`_instant_type`.

    Nanoseconds beyond 2262, which Lance wraps, are refused.
    """
    example = "2024-05-31T08:30:00" if data_type.tz is None else "2024-05-31T08:30:00Z"
    sentence = f"column {key!r} is a timestamp: its value must read like {example}, got {shown_value(value)}"
    if isinstance(value, str):
        try:
            value = dt.datetime.fromisoformat(value)
        except ValueError:
            raise FilterError(sentence) from None
    if not isinstance(value, dt.datetime):
        raise FilterError(sentence)
    if value.tzinfo is None:
        value = value.replace(tzinfo=dt.UTC)
    elif data_type.tz is None:
        raise FilterError(
            f"column {key!r} has no time zone: its value must have no UTC offset, got "
            f"{shown_value(value.isoformat())}"
        )
    ticks = (value - _EPOCH) // dt.timedelta(microseconds=1) * (1_000 if data_type.unit == "ns" else 1)
    if ticks not in _INT64:
        raise FilterError(
            f"the value of column {key!r} must lie between the years 1678 and 2262, got "
            f"{shown_value(value.isoformat())}"
        )
    return ticks


def shown_value(value: Any) -> str:
    """Show a scalar's beginning or a container's size.

    A message never carries a document, and deep nesting is never walked.
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:79]!r}…"
    if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return (
        f"{type(value).__name__} of {len(value)} items"
        if isinstance(value, list | tuple | Mapping)
        else f"a value of type {type(value).__name__}"
    )
