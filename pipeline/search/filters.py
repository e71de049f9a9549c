"""Metadata filters: a JSON tree, checked against the table's schema and compiled to a LanceDB expression.

Grammar (OpenAI vector stores): ``{type: eq|ne|gt|gte|lt|lte, key, value}``, ``{type: in|nin, key, value:
[...]}``, ``{type: and|or, filters: [...]}``. A filter restricts the documents before they are searched. No
part of it is ever SQL text: columns come from a list, values become typed literals. LanceDB, whose literals
they are, is imported with the first filter: importing it takes longer than a search without one.

Nulls follow SQL: a null matches no comparison, ``ne`` and ``nin`` included. Strings compare by code point,
floats as 64-bit numbers, timestamps as instants (a value without UTC offset counts as UTC where the column
has a time zone). ``like``, ``not`` and arithmetic are left out on purpose.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.errors import FilterError, RestrictionError
from pipeline.types import RESERVED_COLUMNS

if TYPE_CHECKING:
    from lancedb.expr import Expr

MAX_DEPTH = 8
MAX_NODES = 256
MAX_LIST_VALUES = 1_000
MAX_STRING_BYTES = 8_192

STORED_FILTER_COLUMNS = ("doc_id", "title", "source_file", "cluster_id", "num_tokens")
"""Columns of every collection that may be filtered on, beside the metadata."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_LISTS = ("in", "nin")
_LOGIC = ("and", "or")
_TYPES = (*_COMPARISONS, *_LISTS, *_LOGIC)
_EXPRESSION = re.compile(r"\s*(?P<key>.+?)\s*(?P<sign>>=|<=|!=|==|=|>|<)\s*(?P<value>.*?)\s*", re.DOTALL)
_SIGNS = {"=": "eq", "==": "eq", "!=": "ne", ">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}
_INT64 = range(-(2**63), 2**63)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def filterable_columns(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns a filter may name, with their types.

    The stored ones, then the metadata of a comparable type.
    """
    names = [name for name in STORED_FILTER_COLUMNS if name in schema.names]
    names += [name for name in schema.names if name not in RESERVED_COLUMNS]
    return {
        name: schema.field(name).type
        for name in dict.fromkeys(names)
        if _is_comparable(schema.field(name).type)
    }


def compile_filter(tree: Mapping[str, Any], schema: pa.Schema) -> Expr:
    """Check a filter tree against the documents table's schema and return the expression.

    Any violation raises :class:`FilterError`.
    """
    return _Compiler(filterable_columns(schema)).compile(tree, depth=1)


def compile_restriction(tree: Mapping[str, Any], schema: pa.Schema) -> Expr:
    """Compile a filter that its caller did not choose.

    One that does not fit raises :class:`RestrictionError`.
    """
    try:
        return compile_filter(tree, schema)
    except FilterError as error:
        raise RestrictionError(str(error)) from error


def parse_filter(expressions: Sequence[str], schema: pa.Schema) -> dict[str, Any] | None:
    """Turn ``key=value``, ``key!=value``, ``key>=value``, … into a filter tree that requires all of them.

    None where there are none. The first sign ends the key; the rest, stripped of blanks, is the value, read
    by the column's type (``true``/``false`` for booleans).
    """
    leaves = [_parse_expression(expression, filterable_columns(schema)) for expression in expressions]
    if len(leaves) <= 1:
        return leaves[0] if leaves else None
    return {"type": "and", "filters": leaves}


class _Compiler:
    """One walk over a tree, counting its nodes."""

    def __init__(self, columns: Mapping[str, pa.DataType]) -> None:
        self.columns = columns
        self.num_nodes = 0

    def compile(self, node: Any, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise FilterError(
                f"a filter must be at most {MAX_DEPTH} levels deep; flatten nested `and` and `or`"
            )
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise FilterError(f"a filter must have at most {MAX_NODES} nodes; use `in` for a list of values")
        if not isinstance(node, Mapping):
            raise FilterError(f"a filter must be an object with `type`, got {_shown(node)}")
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise FilterError(f"a filter's `type` must be one of {', '.join(_TYPES)}, got {_shown(kind)}")
        if kind in _LOGIC:
            return self._compile_logic(kind, node, depth)
        return self._compile_leaf(kind, node)

    def _compile_logic(self, kind: str, node: Mapping[str, Any], depth: int) -> Expr:
        _require_fields(kind, node, {"type", "filters"})
        children = node["filters"]
        if not isinstance(children, list | tuple) or not children:
            raise FilterError(
                f"`filters` of `{kind}` must be a list of at least one filter, got {_shown(children)}"
            )
        compiled = [self.compile(child, depth + 1) for child in children]
        return reduce(operator.and_ if kind == "and" else operator.or_, compiled)

    def _compile_leaf(self, kind: str, node: Mapping[str, Any]) -> Expr:
        from lancedb.expr import col

        _require_fields(kind, node, {"type", "key", "value"})
        key, value = node["key"], node["value"]
        data_type = _require_column(key, self.columns)
        column = col(key)
        if kind in _LISTS:
            if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_LIST_VALUES:
                raise FilterError(
                    f"`{kind}` on {key!r} must have a list of 1 to {MAX_LIST_VALUES:,} values, got "
                    f"{_shown(value)}"
                )
            found = column.isin([_literal(key, data_type, item) for item in value])
            return found if kind == "in" else ~found
        if pa.types.is_boolean(data_type) and kind not in ("eq", "ne"):
            raise FilterError(
                f"column {key!r} is boolean and must be compared with eq, ne, in or nin, got `{kind}`"
            )
        return _COMPARISONS[kind](column, _literal(key, data_type, value))


def _require_fields(kind: str, node: Mapping[str, Any], expected: set[str]) -> None:
    if set(node) != expected:
        raise FilterError(
            f"a `{kind}` filter must have exactly the fields {', '.join(sorted(expected))}, got "
            f"{_shown(', '.join(sorted(map(str, node))))}"
        )


def _require_column(key: Any, columns: Mapping[str, pa.DataType]) -> pa.DataType:
    if not isinstance(key, str) or key not in columns:
        raise FilterError(f"a filter's `key` must be one of {', '.join(columns)}, got {_shown(key)}")
    return columns[key]


def _is_comparable(data_type: pa.DataType) -> bool:
    return (
        _is_string(data_type)
        or pa.types.is_boolean(data_type)
        or pa.types.is_integer(data_type)
        or pa.types.is_floating(data_type)
        or pa.types.is_date(data_type)
        or pa.types.is_timestamp(data_type)
    )


def _is_string(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def _literal(key: str, data_type: pa.DataType, value: Any) -> Expr:
    """Return the typed literal of a value that fits its column."""
    from lancedb.expr import lit

    if _is_string(data_type):
        return lit(_string(key, value))
    if pa.types.is_boolean(data_type):
        if not isinstance(value, bool):
            raise FilterError(
                f"column {key!r} is boolean: its value must be true or false, got {_shown(value)}"
            )
        return lit(value)
    if pa.types.is_date(data_type):
        return lit(_date(key, value))
    if pa.types.is_timestamp(data_type):
        return _timestamp(key, data_type, value)
    return lit(_number(key, value))


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FilterError(f"column {key!r} is text: its value must be a string, got {_shown(value)}")
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


def _number(key: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {_shown(value)}")
    if isinstance(value, int) and value not in _INT64:
        raise FilterError(f"the value of column {key!r} must fit 64 bits, got {_shown(value)}")
    if not math.isfinite(value):
        raise FilterError(f"the value of column {key!r} must be finite, got {value}")
    return value


def _date(key: str, value: Any) -> dt.date:
    if isinstance(value, str):
        try:
            value = dt.date.fromisoformat(value)
        except ValueError:
            raise FilterError(
                f"column {key!r} is a date: its value must read like 2024-05-31, got {_shown(value)}"
            ) from None
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise FilterError(
            f"column {key!r} is a date: its value must read like 2024-05-31, got {_shown(value)}"
        )
    return value


def _timestamp(key: str, data_type: pa.TimestampType, value: Any) -> Expr:
    """Return the instant as a cast integer.

    Lance reads a literal timestamp in the column's own zone, and wraps nanoseconds beyond 2262.
    """
    example = "2024-05-31T08:30:00" if data_type.tz is None else "2024-05-31T08:30:00Z"
    sentence = f"column {key!r} is a timestamp: its value must read like {example}, got {_shown(value)}"
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
            f"{_shown(value.isoformat())}"
        )
    from lancedb.expr import lit

    unit = "ns" if data_type.unit == "ns" else "us"
    ticks = (value - _EPOCH) // dt.timedelta(microseconds=1) * (1_000 if unit == "ns" else 1)
    if ticks not in _INT64:
        raise FilterError(
            f"the value of column {key!r} must lie between the years 1678 and 2262, got "
            f"{_shown(value.isoformat())}"
        )
    return lit(ticks).cast(pa.timestamp(unit, data_type.tz))


def _parse_expression(expression: str, columns: Mapping[str, pa.DataType]) -> dict[str, Any]:
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise FilterError(
            f"a filter must read like key=value, key!=value or key>=value, got {_shown(expression)}"
        )
    key, text = match["key"], match["value"]
    return {
        "type": _SIGNS[match["sign"]],
        "key": key,
        "value": _parse_value(key, _require_column(key, columns), text),
    }


def _parse_value(key: str, data_type: pa.DataType, text: str) -> Any:
    if pa.types.is_boolean(data_type):
        if text.lower() not in ("true", "false"):
            raise FilterError(
                f"column {key!r} is boolean: its value must be true or false, got {_shown(text)}"
            )
        return text.lower() == "true"
    if pa.types.is_integer(data_type) or pa.types.is_floating(data_type):
        for read in (int, float):
            try:
                return _number(key, read(text))
            except FilterError:
                raise
            except ValueError:
                continue
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {_shown(text)}")
    _literal(key, data_type, text)
    return text


def _shown(value: Any) -> str:
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
