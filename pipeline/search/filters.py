"""Metadata filters: JSON, checked against the table's schema and compiled to a condition on documents.

    {"kind": "module", "year": [2019, 2020]}                        columns with a value, or one of several
    {"type": eq|ne|gt|gte|lt|lte|contains, "key": …, "value": …}    the grammar of OpenAI's vector stores,
    {"type": in|nin, "key": …, "value": […]}                        with `contains` and nulls
    {"type": is_null|is_not_null, "key": …}
    {"type": and|or, "filters": […]}

A filter restricts the documents before they are searched. No part of it is ever SQL text: columns come from a
list, values become typed literals. LanceDB, whose literals they are, is imported with the first filter:
importing it takes longer than a search without one. Its expressions know neither lists nor nulls. A column
that is asked about those is read, and tested in Arrow; such tests and expressions are combined as sets of
positions. A column of texts or whole numbers that is asked for a value is kept in memory where it is small:
one tenant of many costs little then.

``contains`` asks for a part of a text, case and all, or for an element of a list. ``in`` asks of a list
whether it holds any of the values, ``nin`` whether it holds none. An object without ``key`` and ``filters``
names columns: a list of values stands for ``in``, null for ``is_null``, one value for ``eq``, or for
``contains`` where the column holds lists. Nulls follow SQL: a null matches no comparison, ``ne`` and ``nin``
included. ``like``, ``not`` and arithmetic are left out on purpose. Strings compare by code point, floats as
64-bit numbers, timestamps as instants (a value without UTC offset counts as UTC where the column has a time
zone). A value that does not fit raises :class:`FilterError`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import operator
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.errors import (
    CairnError,
    ConfigError,
    FilterError,
    RestrictionError,
    StorageError,
    TryAgainError,
    is_panic,
)
from cairn.pipeline.index.generation import ColumnValues, Elsewhere, Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.types import RESERVED_COLUMNS, is_filterable
from jaxtyping import Bool, Int64

if TYPE_CHECKING:
    from lancedb.expr import Expr

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

MAX_DEPTH = 8
MAX_NODES = 256
MAX_LIST_VALUES = 1_000

STORED_FILTER_COLUMNS = ("doc_id", "title", "source_file", "cluster_id", "num_tokens")
"""Columns of every collection that may be filtered on, beside the metadata."""
TREE_FIELDS: Final = frozenset({"key", "filters"})
"""An object with one of these fields is a node of a tree; one without names columns."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_ORDERS = ("gt", "gte", "lt", "lte")
_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*")
_LISTS = ("in", "nin")
_NULLS = ("is_null", "is_not_null")
_LOGIC = ("and", "or")
_TYPES = (*_COMPARISONS, "contains", *_LISTS, *_NULLS, *_LOGIC)
_EXPRESSION = re.compile(r"\s*(?P<key>.+?)\s*(?P<sign>>=|<=|!=|==|=|>|<|~)\s*(?P<value>.*?)\s*", re.DOTALL)
_SIGNS = {"=": "eq", "==": "eq", "!=": "ne", ">": "gt", ">=": "gte", "<": "lt", "<=": "lte", "~": "contains"}
_SIGNS_OF_LISTS = {"eq": "contains", "contains": "contains", "ne": "nin"}
MAX_STRING_BYTES = 8_192

_INT64 = range(-(2**63), 2**63)
_UINT64 = range(-(2**63), 2**64)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@contextlib.contextmanager
def table_errors(action: str, layout: CollectionLayout | None = None) -> Generator[None]:
    """Report what Lance raises while a search reads tables in one sentence, without its text.

    That may hold paths and values. ``action`` reads like "reading the answer's documents".
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, CairnError) or not (
            isinstance(error, RuntimeError | OSError | ValueError) or is_panic(error)
        ):
            raise
        if "timeout" in str(error).lower():
            raise TryAgainError(f"{action} did not finish in time; try again, or ask for less") from error
        advice = f"; run `{layout.command('verify')}`" if layout else ""
        raise StorageError(f"{action} failed{advice}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class IsNull:
    """A column has no value; ``is_negated`` asks for those that have one."""

    column: str
    is_negated: bool

    def matches(self, column_N: pa.Array) -> Bool[np.ndarray, " N"]:
        """Tell of each row whether it matches."""
        return np.asarray(column_N.is_valid() if self.is_negated else column_N.is_null())


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldsAny:
    """A list holds at least one of ``values``, or none of them. A null matches neither."""

    column: str
    values: pa.Array
    is_negated: bool

    def matches(self, column_N: pa.ListArray) -> Bool[np.ndarray, " N"]:
        """Tell of each row whether it matches."""
        is_one = pc.is_in(column_N.flatten().cast(self.values.type), value_set=self.values)
        holds_N = np.zeros(len(column_N), np.bool_)
        holds_N[np.asarray(pc.list_parent_indices(column_N))[np.asarray(is_one)]] = True
        return np.asarray(column_N.is_valid()) & (~holds_N if self.is_negated else holds_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class HasValue:
    """A metadata column of texts or whole numbers has one of ``members``. A null matches none."""

    column: str
    data_type: pa.DataType
    members: Sequence[Any]

    def positions(self, column: ColumnValues) -> Int64[np.ndarray, " A"]:
        """Return which documents match, ascending."""
        wanted = literals(self.column, self.data_type, self.members)
        wanted = wanted.cast(column.values.type)
        if len(wanted) == 1:  # a quarter of the time
            code = column.values.index(wanted[0]).as_py()
            return np.flatnonzero(column.codes_N == code) if code >= 0 else np.empty(0, np.int64)
        is_wanted = np.asarray(pc.is_in(column.values, value_set=wanted))
        return np.flatnonzero(np.append(is_wanted, False)[column.codes_N])

    def expression(self) -> Expr:
        """Return the condition as LanceDB has it."""
        values = [literal(self.column, self.data_type, each) for each in self.members]
        return _column(self.column) == values[0] if len(values) == 1 else _column(self.column).isin(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """Conditions of which all or any must match."""

    kind: Literal["and", "or"]
    parts: Sequence[Condition]


Condition: TypeAlias = "Expr | IsNull | HoldsAny | HasValue | Combined"


def combined(kind: Literal["and", "or"], parts: Sequence[Condition]) -> Condition:
    """Return one condition of several; expressions become one, which Lance answers at once."""
    tests = [part for part in parts if isinstance(part, IsNull | HoldsAny | HasValue | Combined)]
    expressions = [part for part in parts if not isinstance(part, IsNull | HoldsAny | HasValue | Combined)]
    if expressions:
        joined = reduce(lambda one, other: one & other if kind == "and" else one | other, expressions)
        if not tests:
            return joined
        return Combined(kind=kind, parts=[joined, *tests])
    return tests[0] if len(tests) == 1 else Combined(kind=kind, parts=tests)


def allowed_documents(
    generation: Generation, condition: Condition, timeout: dt.timedelta | None, num_parts: int = 1
) -> Int64[np.ndarray, " A"]:
    """Return the positions of all documents that a condition matches, ascending.

    ``num_parts`` says of how many partitions the generation is one.
    """
    if not generation.num_documents:
        return np.empty(0, dtype=np.int64)
    if isinstance(condition, Combined):
        found = [allowed_documents(generation, part, timeout) for part in condition.parts]
        return reduce(np.intersect1d if condition.kind == "and" else np.union1d, found)
    if generation.parts:
        starts = zip(generation.part_starts, generation.parts, strict=False)
        within = partial(
            allowed_documents, condition=condition, timeout=timeout, num_parts=len(generation.parts)
        )
        return np.concatenate([start + within(part) for start, part in starts])
    with table_errors("reading the filter's documents", generation.layout):
        if isinstance(condition, HasValue):
            column = generation.column_values(condition.column, num_parts)
            if column is not None:
                return condition.positions(column)
            condition = condition.expression()
        search = generation.document_table.search()
        is_test = isinstance(condition, IsNull | HoldsAny)
        rows = (
            (search if is_test else search.where(condition))
            .with_row_id(True)
            .select(["_rowid", condition.column] if is_test else ["_rowid"])
            .limit(generation.num_documents)
            .to_arrow(timeout=timeout)
        )
    row_ids = rows.column("_rowid").to_numpy()
    if is_test:
        row_ids = row_ids[condition.matches(rows.column(condition.column).combine_chunks())]
    return np.sort(generation.position_of_row_ids(row_ids))


def matching_documents(
    generation: Generation,
    filters: Mapping[str, Any] | None,
    restriction: Mapping[str, Any] | None = None,
    timeout: dt.timedelta | None = None,
) -> Int64[np.ndarray, " A"] | None:
    """Return the positions of all documents that match both filters, ascending; None where neither asks.

    See :func:`compile_both`.
    """
    condition = compile_both(filters, restriction, generation.document_schema)
    if condition is None:
        return None
    if isinstance(generation, Elsewhere):
        return generation.matching(filters, restriction, timeout)
    return allowed_documents(generation, condition, timeout)


def filterable_columns(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns a filter may name, with their types.

    The stored ones, then the metadata of a type that filters know.
    """
    names = [name for name in STORED_FILTER_COLUMNS if name in schema.names]
    names += [name for name in schema.names if name not in RESERVED_COLUMNS]
    return {
        name: schema.field(name).type
        for name in dict.fromkeys(names)
        if is_filterable(schema.field(name).type)
    }


def require_groupable(column: str | None, schema: pa.Schema) -> None:
    """Raise :class:`ConfigError` unless documents can be grouped by this column, or by none."""
    columns = [name for name, kind in filterable_columns(schema).items() if not pa.types.is_list(kind)]
    if column is not None and column not in columns:
        raise ConfigError(f"group_by must be one of {', '.join(columns)}, got {column[:80]!r}")


def compile_filter(tree: Mapping[str, Any], schema: pa.Schema) -> Condition:
    """Check a filter against the documents table's schema and return the condition it stands for.

    Any violation raises :class:`FilterError`.
    """
    return _Compiler(filterable_columns(schema)).compile(tree, depth=1)


def compile_restriction(tree: Mapping[str, Any], schema: pa.Schema) -> Condition:
    """Compile a filter that its caller did not choose.

    One that does not fit raises :class:`RestrictionError`.
    """
    try:
        return compile_filter(tree, schema)
    except FilterError as error:
        raise RestrictionError(str(error)) from error


def compile_both(
    filters: Mapping[str, Any] | None, restriction: Mapping[str, Any] | None, schema: pa.Schema
) -> Condition | None:
    """Compile two filters, each by itself, into one condition that asks for both; None where there is none.

    ``filters`` without a column ask for nothing.
    ``restriction`` is the one that its caller did not choose, see :func:`compile_restriction`.
    """
    allowed = None if restriction is None else compile_restriction(restriction, schema)
    wanted = None if filters is None or filters == {} else compile_filter(filters, schema)
    if allowed is None or wanted is None:
        return allowed if wanted is None else wanted
    return combined("and", [allowed, wanted])


def text_order_warnings(tree: Mapping[str, Any], schema: pa.Schema) -> list[str]:
    """Say where a checked filter compares texts with a number by their order, which is that of letters."""
    if "filters" in tree:
        return [each for child in tree["filters"] for each in text_order_warnings(child, schema)]
    if tree.get("type") not in _ORDERS or not is_text(schema.field(tree["key"]).type):
        return []
    key, value = tree["key"], tree["value"]
    if not _NUMBER.fullmatch(value):
        return []
    sentence = f"column {key!r} is text and compared with {shown_value(value)} letter by letter"
    return [f"{sentence}: '10' comes before '9'; ingest the column as numbers"]


def parse_filter(expressions: Sequence[str], schema: pa.Schema) -> dict[str, Any] | None:
    """Turn ``key=value``, ``key!=value``, ``key>=value``, ``key~value``, … into a filter that requires all.

    None where there are none. The first sign ends the key; the rest, stripped of blanks, is the value, read
    by the column's type (``true``/``false`` for booleans). ``~`` asks whether the column contains the value,
    and so does ``=`` of a list. A JSON object is a filter by itself.
    """
    parts = [
        _parse_json(expression)
        if expression.lstrip().startswith("{")
        else _parse_expression(expression, filterable_columns(schema))
        for expression in expressions
    ]
    for part in parts:
        compile_filter(part, schema)
    if len(parts) <= 1:
        return parts[0] if parts else None
    return {"type": "and", "filters": parts}


class _Compiler:
    """One walk over a tree, counting its nodes."""

    def __init__(self, columns: Mapping[str, pa.DataType]) -> None:
        self.columns = columns
        self.num_nodes = 0

    def compile(self, node: Any, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise FilterError(
                f"a filter must be at most {MAX_DEPTH} levels deep; flatten nested `and` and `or`"
            )
        if not isinstance(node, Mapping) or not node:
            raise FilterError(
                f"a filter must be an object that names columns or has a `type`, got {shown_value(node)}"
            )
        if not TREE_FIELDS & node.keys():
            plain = cast("Mapping[Any, Any]", node)
            return combined("and", [self._compile_plain(key, value) for key, value in plain.items()])
        self._count()
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise FilterError(
                f"a filter's `type` must be one of {', '.join(_TYPES)}, got {shown_value(kind)}"
            )
        if kind in ("and", "or"):
            return self._compile_logic(kind, node, depth)
        return self._compile_leaf(kind, node)

    def _count(self) -> None:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise FilterError(f"a filter must have at most {MAX_NODES} nodes; use `in` for a list of values")

    def _compile_plain(self, key: Any, value: Any) -> Condition:
        self._count()
        data_type = _require_column(key, self.columns)
        if value is None:
            return IsNull(column=key, is_negated=False)
        if isinstance(value, list | tuple):
            return self._compile_members("in", key, data_type, cast("Sequence[Any]", value))
        if isinstance(value, Mapping):
            raise FilterError(
                f"the value of column {key!r} must be a value or a list of them, got {shown_value(value)}; "
                'a comparison reads like {"type": "gte", "key": …, "value": …}'
            )
        if pa.types.is_list(data_type):
            return _holds_any(key, data_type, [value], is_negated=False)
        return _has_value(key, data_type, [value])

    def _compile_logic(self, kind: Literal["and", "or"], node: Mapping[str, Any], depth: int) -> Condition:
        _require_fields(kind, node, {"type", "filters"})
        children = node["filters"]
        if not isinstance(children, list | tuple) or not children:
            raise FilterError(
                f"`filters` of `{kind}` must be a list of at least one filter, got {shown_value(children)}"
            )
        return combined(kind, [self.compile(child, depth + 1) for child in cast("list[Any]", children)])

    def _compile_leaf(self, kind: str, node: Mapping[str, Any]) -> Condition:
        _require_fields(kind, node, {"type", "key"} if kind in _NULLS else {"type", "key", "value"})
        key = node["key"]
        data_type = _require_column(key, self.columns)
        if kind in _NULLS:
            return IsNull(column=key, is_negated=kind == "is_not_null")
        value = node["value"]
        if kind in _LISTS:
            return self._compile_members(kind, key, data_type, value)
        if pa.types.is_list(data_type):
            if kind != "contains":
                raise FilterError(
                    f"column {key!r} holds lists and must be asked with contains, in, nin, is_null or "
                    f"is_not_null, got `{kind}`"
                )
            return _holds_any(key, data_type, [value], is_negated=False)
        if kind == "contains":
            if not is_text(data_type):
                raise FilterError(f"`contains` must ask a column of text or lists, got {key!r}; use `eq`")
            return _column(key).contains(literal(key, data_type, value))
        if pa.types.is_boolean(data_type) and kind not in ("eq", "ne"):
            raise FilterError(
                f"column {key!r} is boolean and must be compared with eq, ne, in or nin, got `{kind}`"
            )
        if kind == "eq":
            return _has_value(key, data_type, [value])
        return _COMPARISONS[kind](_column(key), literal(key, data_type, value))

    def _compile_members(self, kind: str, key: str, data_type: pa.DataType, values: Any) -> Condition:
        if not isinstance(values, list | tuple) or not 1 <= len(values) <= MAX_LIST_VALUES:
            raise FilterError(
                f"`{kind}` on {key!r} must have a list of 1 to {MAX_LIST_VALUES:,} values, got "
                f"{shown_value(values)}"
            )
        members = cast("Sequence[Any]", values)
        if pa.types.is_list(data_type):
            return _holds_any(key, data_type, members, is_negated=kind == "nin")
        if kind == "in":
            return _has_value(key, data_type, members)
        return ~_column(key).isin([literal(key, data_type, member) for member in members])


def _column(key: str) -> Any:
    from lancedb.expr import col

    return col(key)


def _has_value(key: str, data_type: pa.DataType, members: Sequence[Any]) -> Condition:
    found = HasValue(column=key, data_type=data_type, members=members)
    if key not in STORED_FILTER_COLUMNS and (is_text(data_type) or pa.types.is_integer(data_type)):
        literals(key, data_type, members)  # refuses what does not fit
        return found
    return found.expression()


def _holds_any(key: str, data_type: pa.ListType, values: Sequence[Any], *, is_negated: bool) -> HoldsAny:
    return HoldsAny(column=key, values=literals(key, data_type.value_type, values), is_negated=is_negated)


def _require_fields(kind: str, node: Mapping[str, Any], expected: set[str]) -> None:
    if set(node) != expected:
        raise FilterError(
            f"a `{kind}` filter must have exactly the fields {', '.join(sorted(expected))}, got "
            f"{shown_value(', '.join(sorted(map(str, node))))}"
        )


def _require_column(key: Any, columns: Mapping[str, pa.DataType]) -> pa.DataType:
    if not isinstance(key, str) or key not in columns:
        raise FilterError(f"a filter's `key` must be one of {', '.join(columns)}, got {shown_value(key)}")
    return columns[key]


def _parse_json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise FilterError(
            f"a filter that begins with a brace must be a JSON object, got {shown_value(text)}"
        ) from None


def _parse_expression(expression: str, columns: Mapping[str, pa.DataType]) -> dict[str, Any]:
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise FilterError(
            "a filter must read like key=value, key!=value, key>=value or key~value, or be a JSON object, "
            f"got {shown_value(expression)}"
        )
    key, kind = match["key"], _SIGNS[match["sign"]]
    data_type = _require_column(key, columns)
    if not pa.types.is_list(data_type):
        return {"type": kind, "key": key, "value": _parse_value(key, data_type, match["value"])}
    if kind not in _SIGNS_OF_LISTS:
        raise FilterError(
            f"column {key!r} holds lists and must be asked with =, != or ~, got {match['sign']}"
        )
    value = _parse_value(key, data_type.value_type, match["value"])
    kind = _SIGNS_OF_LISTS[kind]
    return {"type": kind, "key": key, "value": value if kind == "contains" else [value]}


def _parse_value(key: str, data_type: pa.DataType, text: str) -> Any:
    if pa.types.is_boolean(data_type):
        if text.lower() not in ("true", "false"):
            raise FilterError(
                f"column {key!r} is boolean: its value must be true or false, got {shown_value(text)}"
            )
        return text.lower() == "true"
    if pa.types.is_integer(data_type) or pa.types.is_floating(data_type):
        for read in (int, float):
            try:
                return _number_of(key, data_type, read(text))
            except FilterError:
                raise
            except ValueError:
                continue
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {shown_value(text)}")
    literal(key, data_type, text)
    return text


def is_text(data_type: pa.DataType) -> bool:
    """Tell whether values are strings, in a dictionary or not."""
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def literal(key: str, data_type: pa.DataType, value: Any) -> Expr:
    """Return the typed literal of a value that fits its column, as LanceDB has it."""
    from lancedb.expr import lit

    checked = _checked(key, data_type, value)
    if isinstance(checked, int) and checked not in _INT64:  # larger than the numbers that LanceDB takes
        return lit(str(checked)).cast(pa.uint64())
    # Lance reads a literal timestamp in the column's own zone.
    return lit(checked).cast(_instant_type(data_type)) if pa.types.is_timestamp(data_type) else lit(checked)


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
    if pa.types.is_timestamp(data_type):
        return _ticks(key, data_type, value)
    return _number_of(key, data_type, value)


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


def _number_of(key: str, data_type: pa.DataType, value: Any) -> int | float:
    """Return a finite number of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {shown_value(value)}")
    if isinstance(value, int) and value not in (_UINT64 if pa.types.is_uint64(data_type) else _INT64):
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
