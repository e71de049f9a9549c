"""Metadata filters: JSON, checked against the table's schema and compiled to a condition on documents.

    {"kind": "module", "year": [2019, 2020]}                        columns with a value, or one of several
    {"type": eq|ne|gt|gte|lt|lte|contains, "key": …, "value": …}    the grammar of OpenAI's vector stores,
    {"type": in|nin, "key": …, "value": […]}                        with `contains` and nulls
    {"type": is_null|is_not_null, "key": …}
    {"type": and|or, "filters": […]}

A filter restricts the documents before they are searched. No part of it is ever SQL text: columns come from a
list, values become typed ones of Arrow. The columns that it asks are read in one scan, and tested in Arrow. A
column of texts or whole numbers that is asked for a value is kept in memory where it is small: one tenant of
many costs little then.

``contains`` asks for a part of a text, case and all, or for an element of a list. ``in`` asks of a list
whether it holds any of the values, ``nin`` whether it holds none. An object without ``key`` and ``filters``
names columns: a list of values stands for ``in``, null for ``is_null``, one value for ``eq``, or for
``contains`` where the column holds lists. Nulls follow SQL: a null matches no comparison, ``ne`` and ``nin``
included. ``like``, ``not`` and arithmetic are left out on purpose. Strings compare by code point, floats as
64-bit numbers, timestamps as instants (a value without UTC offset counts as UTC where the column has a time
zone). A value that does not fit raises :class:`FilterError`.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.errors import ConfigError, FilterError, RestrictionError, TryAgainError
from cairn.pipeline.index.generation import (
    OBJECT_BYTES,
    ColumnValues,
    Elsewhere,
    Generation,
    table_errors,
)
from cairn.pipeline.options import shown
from cairn.pipeline.search_options import SearchOptions, column_options
from cairn.pipeline.types import RESERVED_COLUMNS, is_filterable
from jaxtyping import Bool, Int64

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

MAX_DEPTH = 8
MAX_NODES = 256
MAX_LIST_VALUES = 1_000

STORED_FILTER_COLUMNS = ("doc_id", "title", "source_file", "cluster_id", "num_tokens")
"""Columns of every collection that may be filtered on, beside the metadata."""
TREE_FIELDS: Final = frozenset({"key", "filters"})
"""An object with one of these fields is a node of a tree; one without names columns."""

_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "gt": pc.greater,
    "gte": pc.greater_equal,
    "lt": pc.less,
    "lte": pc.less_equal,
}
_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*")
_LISTS = ("in", "nin")
_NULLS = ("is_null", "is_not_null")
_LOGIC = ("and", "or")
_TYPES = ("eq", "ne", *_ORDERS, "contains", *_LISTS, *_NULLS, *_LOGIC)
_EXPRESSION = re.compile(r"\s*(?P<key>.+?)\s*(?P<sign>>=|<=|!=|==|=|>|<|~)\s*(?P<value>.*?)\s*", re.DOTALL)
_SIGNS = {"=": "eq", "==": "eq", "!=": "ne", ">": "gt", ">=": "gte", "<": "lt", "<=": "lte", "~": "contains"}
_SIGNS_OF_LISTS = {"eq": "contains", "contains": "contains", "ne": "nin"}
MAX_STRING_BYTES = 8_192

_INT64 = range(-(2**63), 2**63)
_UINT64 = range(-(2**63), 2**64)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


Holds: TypeAlias = Callable[[pa.Array], pa.Array]
"""Tells of each value of a column whether it is asked for, of null as it likes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnTest:
    """Asks one column something of each document. Null matches where ``is_null`` says so.

    A column that ``is_kept`` is kept in memory where there is room. ``asks`` says what is asked by
    ``values``, where tests of one column may be joined.
    """

    column: str
    holds: Holds
    is_null: bool = False
    is_kept: bool = False
    asks: str = ""
    values: pa.Array | None = None

    def matches(self, column_N: pa.Array) -> Bool[np.ndarray, " N"]:
        """Tell of each row whether it matches."""
        return np.asarray(pc.fill_null(self.holds(column_N), self.is_null))


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """Conditions of which all or any must match."""

    kind: Literal["and", "or"]
    parts: Sequence[Condition]


Condition: TypeAlias = "ColumnTest | Combined"


def combined(kind: Literal["and", "or"], parts: Sequence[Condition]) -> Condition:
    """Return one condition of several; what one test of a column can ask is asked at once."""
    joined = dict[tuple[str, str], list[ColumnTest]]()
    others: list[Condition] = []
    for part in parts:
        for each in part.parts if isinstance(part, Combined) and part.kind == kind else [part]:
            if isinstance(each, ColumnTest) and each.asks and kind in _ASKS[each.asks][1]:
                joined.setdefault((each.column, each.asks), []).append(each)
            else:
                others.append(each)
    parts = [*(_joined(kind, tests) for tests in joined.values()), *others]
    return parts[0] if len(parts) == 1 else Combined(kind=kind, parts=parts)


def _joined(kind: Literal["and", "or"], tests: Sequence[ColumnTest]) -> ColumnTest:
    first = tests[0]
    if len(tests) == 1:
        return first
    values = pa.concat_arrays([test.values for test in tests])
    if first.asks in _ORDERS:
        is_least = (first.asks in ("gt", "gte")) == (kind == "or")
        values = pa.array([(pc.min if is_least else pc.max)(values)], values.type)
    return _joinable(first.asks, values, column=first.column, is_kept=first.is_kept)


def allowed_documents(
    generation: Generation, condition: Condition, timeout: dt.timedelta | None
) -> Int64[np.ndarray, " A"]:
    """Return the positions of all documents that a condition matches, ascending."""
    until = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
    parts = generation.parts or [generation]
    starts = generation.part_starts if generation.parts else [0]
    found = [
        start + np.flatnonzero(_Scan(part, condition, until, len(parts)).matches())
        for start, part in zip(starts, parts, strict=False)
        if part.num_documents
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


class _Scan:
    """Tests the documents of a generation without partitions, those of one batch of the table at a time."""

    def __init__(self, generation: Generation, condition: Condition, until: float, num_parts: int) -> None:
        self.generation, self.condition, self.until = generation, condition, until
        self.num_parts = num_parts
        self.kept: dict[int, tuple[ColumnValues, Int64[np.ndarray, " V"]]] = {}
        """By a test's ``id``: its column in memory, and the numbers of the values that match."""

    def matches(self) -> Bool[np.ndarray, " N"]:
        """Tell of each document whether it matches."""
        generation, num_documents = self.generation, self.generation.num_documents
        with table_errors("reading the filter's documents", generation.layout):
            asked = list(
                dict.fromkeys(test.column for test in _tests(self.condition) if not self._keep(test))
            )
            if not asked:
                return self._mask(self.condition, slice(0, num_documents))
            mask_N, end = np.empty(num_documents, np.bool_), 0
            for batch in generation.scan_columns(asked):
                rows = slice(end, end := end + batch.num_rows)
                if end <= num_documents:
                    mask_N[rows] = self._mask(self.condition, rows, batch)
        if end != num_documents:
            raise generation.layout.damaged(
                f"table `documents` of {generation.layout.name!r} must hold the documents of generation "
                f"{generation.number}",
                "verify",
            )
        return mask_N

    def _keep(self, test: ColumnTest) -> bool:
        self._require_time()
        column = self.generation.column_values(test.column, self.num_parts) if test.is_kept else None
        if column is not None:
            self.kept[id(test)] = column, np.flatnonzero(test.matches(column.values))
        return column is not None

    def _require_time(self) -> None:
        if time.monotonic() > self.until:
            raise TryAgainError(
                "reading the filter's documents did not finish in time; try again, or ask less"
            )

    def _mask(
        self, condition: Condition, rows: slice, batch: pa.RecordBatch | None = None
    ) -> Bool[np.ndarray, " B"]:
        """Join the parts one by one, until none can change the whole."""
        if isinstance(condition, Combined):
            is_and = condition.kind == "and"
            mask_B = self._mask(condition.parts[0], rows, batch)
            for part in condition.parts[1:]:
                if not mask_B.any() if is_and else mask_B.all():
                    break
                own_B = self._mask(part, rows, batch)
                mask_B = mask_B & own_B if is_and else mask_B | own_B
            return mask_B
        self._require_time()
        if id(condition) not in self.kept:
            assert batch is not None, "the column is in memory or in the scan"
            return condition.matches(batch.column(condition.column))
        column, found = self.kept[id(condition)]
        codes_B = column.codes_N[rows]
        if len(found) == 1:  # a quarter of the time
            return codes_B == found[0]
        is_held = np.zeros(len(column.values) + 1, np.bool_)  # null is the last
        is_held[found] = True
        return is_held[codes_B]


def _tests(condition: Condition) -> Iterator[ColumnTest]:
    if isinstance(condition, ColumnTest):
        yield condition
    else:
        for part in condition.parts:
            yield from _tests(part)


def matching_documents(
    generation: Generation,
    filters: Mapping[str, Any] | None,
    restriction: Mapping[str, Any] | None = None,
    timeout: dt.timedelta | None = None,
) -> Int64[np.ndarray, " A"] | None:
    """Return the positions of all documents that match both filters, ascending; None where neither asks.

    See :func:`compile_both`. What is asked again of a generation is not looked for again.
    """
    asked = _asked(filters, restriction)
    known = generation.matches.get(asked)
    if known is not None:
        return known
    condition = compile_both(filters, restriction, generation.document_schema)
    if condition is None:
        return None
    if isinstance(generation, Elsewhere):
        found = generation.matching(filters, restriction, timeout)
    else:
        found = allowed_documents(generation, condition, timeout)
    # A filter that leaves nothing, or names a thousand ids, takes memory, too.
    generation.matches.add(asked, found, found.nbytes + sys.getsizeof(asked) + OBJECT_BYTES)
    return found


def check_filters(
    generation: Generation, filters: Mapping[str, Any] | None, restriction: Mapping[str, Any] | None
) -> None:
    """Refuse filters that do not fit a generation, as :func:`compile_both` does; those known are none."""
    if generation.matches.get(_asked(filters, restriction)) is None:
        compile_both(filters, restriction, generation.document_schema)


def _asked(filters: Mapping[str, Any] | None, restriction: Mapping[str, Any] | None) -> str:
    return repr((filters, restriction))


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


def require_columns(options: SearchOptions, schema: pa.Schema) -> None:
    """Raise :class:`ConfigError` where an option names a column that no filter can, or one of lists."""
    for name in column_options():
        column = getattr(options, name)
        if column is None:
            continue
        columns = [name for name, kind in filterable_columns(schema).items() if not pa.types.is_list(kind)]
        if column not in columns:
            raise ConfigError(f"{name} must be one of {', '.join(columns)}, got {column[:80]!r}")


def compile_filter(tree: Mapping[str, Any], schema: pa.Schema) -> Condition:
    """Check a filter against the documents table's schema and return the condition it stands for.

    Any violation raises :class:`FilterError`.
    """
    return _Compiler(filterable_columns(schema)).compile(tree, depth=1)


def compile_both(
    filters: Mapping[str, Any] | None, restriction: Mapping[str, Any] | None, schema: pa.Schema
) -> Condition | None:
    """Compile two filters, each by itself, into one condition that asks for both; None where there is none.

    ``filters`` without a column ask for nothing. ``restriction`` is one that its caller did not choose: where
    it does not fit, :class:`RestrictionError` is raised.
    """
    conditions: list[Condition] = []
    if restriction is not None:
        try:
            conditions.append(compile_filter(restriction, schema))
        except FilterError as error:
            raise RestrictionError(str(error)) from error
    if filters is not None and filters != {}:
        conditions.append(compile_filter(filters, schema))
    return combined("and", conditions) if conditions else None


def text_order_warnings(tree: Mapping[str, Any], schema: pa.Schema) -> list[str]:
    """Say where a checked filter compares texts with a number by their order, which is that of letters."""
    if not TREE_FIELDS & tree.keys():
        return []
    if "filters" in tree:
        return [each for child in tree["filters"] for each in text_order_warnings(child, schema)]
    if tree.get("type") not in _ORDERS or not is_text(schema.field(tree["key"]).type):
        return []
    key, value = tree["key"], tree["value"]
    if not _NUMBER.fullmatch(value):
        return []
    sentence = f"column {key!r} is text and compared with {shown(value)} letter by letter"
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
                f"a filter must be an object that names columns or has a `type`, got {shown(node)}"
            )
        if not TREE_FIELDS & node.keys():
            plain = cast("Mapping[Any, Any]", node)
            return combined("and", [self._compile_plain(key, value) for key, value in plain.items()])
        self._count()
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise FilterError(f"a filter's `type` must be one of {', '.join(_TYPES)}, got {shown(kind)}")
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
            return ColumnTest(column=key, holds=pc.is_null, is_null=True)
        if isinstance(value, list | tuple):
            return self._compile_members("in", key, data_type, cast("Sequence[Any]", value))
        if isinstance(value, Mapping):
            raise FilterError(
                f"the value of column {key!r} must be a value or a list of them, got {shown(value)}; "
                'a comparison reads like {"type": "gte", "key": …, "value": …}'
            )
        return _members_test("in", key, data_type, [value])

    def _compile_logic(self, kind: Literal["and", "or"], node: Mapping[str, Any], depth: int) -> Condition:
        _require_fields(kind, node, {"type", "filters"})
        children = node["filters"]
        if not isinstance(children, list | tuple) or not children:
            raise FilterError(
                f"`filters` of `{kind}` must be a list of at least one filter, got {shown(children)}"
            )
        return combined(kind, [self.compile(child, depth + 1) for child in cast("list[Any]", children)])

    def _compile_leaf(self, kind: str, node: Mapping[str, Any]) -> Condition:
        _require_fields(kind, node, {"type", "key"} if kind in _NULLS else {"type", "key", "value"})
        key = node["key"]
        data_type = _require_column(key, self.columns)
        if kind in _NULLS:
            is_null = kind == "is_null"
            return ColumnTest(column=key, holds=pc.is_null if is_null else pc.is_valid, is_null=is_null)
        value = node["value"]
        if kind in _LISTS:
            return self._compile_members(kind, key, data_type, value)
        if pa.types.is_list(data_type):
            if kind != "contains":
                raise FilterError(
                    f"column {key!r} holds lists and must be asked with contains, in, nin, is_null or "
                    f"is_not_null, got `{kind}`"
                )
            return _members_test("in", key, data_type, [value])
        if kind == "contains":
            if not is_text(data_type):
                raise FilterError(f"`contains` must ask a column of text or lists, got {key!r}; use `eq`")
            part = _string(key, value)
            return _joinable("contains", pa.array([part], pa.large_string()), column=key)
        if pa.types.is_boolean(data_type) and kind not in ("eq", "ne"):
            raise FilterError(
                f"column {key!r} is boolean and must be compared with eq, ne, in or nin, got `{kind}`"
            )
        if kind in ("eq", "ne"):
            return _members_test("in" if kind == "eq" else "nin", key, data_type, [value])
        return _order(kind, key, data_type, _checked(key, data_type, value))

    def _compile_members(self, kind: str, key: str, data_type: pa.DataType, values: Any) -> Condition:
        if not isinstance(values, list | tuple) or not 1 <= len(values) <= MAX_LIST_VALUES:
            raise FilterError(
                f"`{kind}` on {key!r} must have a list of 1 to {MAX_LIST_VALUES:,} values, got "
                f"{shown(values)}"
            )
        return _members_test(kind, key, data_type, cast("Sequence[Any]", values))


def _members_test(kind: str, key: str, data_type: pa.DataType, values: Sequence[Any]) -> ColumnTest:
    """Ask whether a column has one of some values, whether a list holds one, or whether none of them."""
    is_list = pa.types.is_list(data_type)
    own_type = data_type.value_type if is_list else data_type
    members = _members(own_type, [_checked(key, own_type, value) for value in values])
    is_kept = kind == "in" and (is_text(data_type) or pa.types.is_integer(data_type))
    return _joinable(
        f"{kind} list" if is_list else kind,
        members,
        column=key,
        is_kept=is_kept and key not in STORED_FILTER_COLUMNS,
    )


def _joinable(asks: str, values: pa.Array, *, column: str, is_kept: bool = False) -> ColumnTest:
    holds = partial(_ASKS[asks][0], values=values)
    return ColumnTest(column=column, holds=holds, is_kept=is_kept, asks=asks, values=values)


def _is_one(column: pa.Array, values: pa.Array) -> pa.Array:
    column = _compared(column)
    return pc.equal(column, values[0]) if len(values) == 1 else pc.is_in(column, value_set=values)


def _list_holds(column: pa.ListArray, values: pa.Array) -> pa.Array:
    holds_N = np.zeros(len(column), np.bool_)
    parents = np.asarray(pc.list_parent_indices(column))
    holds_N[parents[np.asarray(pc.fill_null(_is_one(column.flatten(), values), False))]] = True
    return pa.array(holds_N, mask=np.asarray(column.is_null()))


def _is_none(column: pa.Array, values: pa.Array, held: Callable[..., pa.Array]) -> pa.Array:
    return pc.and_kleene(pc.is_valid(column), pc.invert(held(column, values)))  # of null it is not said


def _has_part(column: pa.Array, values: pa.Array) -> pa.Array:
    """Tell of texts whether they hold one of some parts, by regular expressions: they take half the time."""
    column = _compared(column)
    patterns, room = list[list[str]](), 0
    for value in values.to_pylist():
        size = len(value.encode())
        if size > room or not patterns:
            patterns.append([])
            room = MAX_STRING_BYTES  # a longer expression would be slow
        room -= size
        patterns[-1].append(re.escape(value))
    found = [pc.match_substring_regex(column, "|".join(each)) for each in patterns]
    return reduce(pc.or_, found)


def _compare(column: pa.Array, values: pa.Array, order: Callable[[Any, Any], Any]) -> pa.Array:
    return order(_compared(column), values[0])


_ASKS: Final[dict[str, tuple[Callable[..., pa.Array], tuple[str, ...]]]] = {
    "in": (_is_one, ("or",)),
    "in list": (_list_holds, ("or",)),
    "nin": (partial(_is_none, held=_is_one), ("and",)),
    "nin list": (partial(_is_none, held=_list_holds), ("and",)),
    "contains": (_has_part, ("or",)),
    **{kind: (partial(_compare, order=order), ("and", "or")) for kind, order in _ORDERS.items()},
}
"""What tells whether values are what is asked, and by what such tests of one column may be joined."""


def _order(kind: str, key: str, data_type: pa.DataType, value: Any) -> ColumnTest:
    """Compare a column with a value by their order; whole numbers with what lies between them, too."""
    stored = _stored_type(data_type)
    if not pa.types.is_integer(stored):
        value = float(value) if pa.types.is_floating(stored) else value
        return _joinable(kind, pa.array([value], stored), column=key)
    is_upper, bounds = kind in ("lt", "lte"), np.iinfo(stored.to_pandas_dtype())
    below, above = math.floor(value), math.ceil(value)
    bound = {"gt": below + 1, "gte": above, "lt": above - 1, "lte": below}[kind]
    if bound < bounds.min or bound > bounds.max:
        is_all = (bound > bounds.max) == is_upper
        return ColumnTest(column=key, holds=lambda column: pc.and_(pc.is_valid(column), is_all))
    return _joinable("lte" if is_upper else "gte", pa.array([bound], stored), column=key)


def _stored_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type that a column's values are compared in: days and instants are whole numbers."""
    if is_text(data_type):
        return pa.large_string()
    if pa.types.is_floating(data_type):
        return pa.float64()
    if pa.types.is_date32(data_type):
        return pa.int32()
    return pa.int64() if pa.types.is_temporal(data_type) else data_type


def _compared(column: pa.Array) -> pa.Array:
    """Return a column in the type that its values are compared in."""
    column = column.cast(_stored_type(column.type))
    return pc.add(column, 0.0) if pa.types.is_floating(column.type) else column  # there is one zero


def _members(data_type: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Return values as they are compared, without whole numbers that no value of the column can equal."""
    stored = _stored_type(data_type)
    if pa.types.is_integer(stored):
        bounds = np.iinfo(stored.to_pandas_dtype())
        values = [int(each) for each in values if bounds.min <= each <= bounds.max and each == int(each)]
    elif pa.types.is_floating(stored):
        values = [each + 0.0 for each in values]
    return pa.array(values, stored)


def _require_fields(kind: str, node: Mapping[str, Any], expected: set[str]) -> None:
    if set(node) != expected:
        raise FilterError(
            f"a `{kind}` filter must have exactly the fields {', '.join(sorted(expected))}, got "
            f"{shown(', '.join(sorted(map(str, node))))}"
        )


def _require_column(key: Any, columns: Mapping[str, pa.DataType]) -> pa.DataType:
    if not isinstance(key, str) or key not in columns:
        raise FilterError(f"a filter's `key` must be one of {', '.join(columns)}, got {shown(key)}")
    return columns[key]


def _parse_json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise FilterError(
            f"a filter that begins with a brace must be a JSON object, got {shown(text)}"
        ) from None


def _parse_expression(expression: str, columns: Mapping[str, pa.DataType]) -> dict[str, Any]:
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise FilterError(
            "a filter must read like key=value, key!=value, key>=value or key~value, or be a JSON object, "
            f"got {shown(expression)}"
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
                f"column {key!r} is boolean: its value must be true or false, got {shown(text)}"
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
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {shown(text)}")
    _checked(key, data_type, text)
    return text


def is_text(data_type: pa.DataType) -> bool:
    """Tell whether values are strings, in a dictionary or not."""
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def _checked(key: str, data_type: pa.DataType, value: Any) -> Any:
    """Return a value as its column's type is compared, or refuse it."""
    if is_text(data_type):
        return _string(key, value)
    if pa.types.is_boolean(data_type):
        return _boolean(key, value)
    if pa.types.is_date(data_type):
        return _days(key, data_type, value)
    if pa.types.is_timestamp(data_type):
        return _ticks(key, data_type, value)
    return _number_of(key, data_type, value)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FilterError(f"column {key!r} is boolean: its value must be true or false, got {shown(value)}")
    return value


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FilterError(f"column {key!r} is text: its value must be a string, got {shown(value)}")
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
        raise FilterError(f"column {key!r} is numeric: its value must be a number, got {shown(value)}")
    if isinstance(value, int) and value not in (_UINT64 if pa.types.is_uint64(data_type) else _INT64):
        raise FilterError(f"the value of column {key!r} must fit 64 bits, got {shown(value)}")
    if not math.isfinite(value):
        raise FilterError(f"the value of column {key!r} must be finite, got {value}")
    return value


def _days(key: str, data_type: pa.DataType, value: Any) -> int:
    """Return the day in the unit of its column."""
    sentence = f"column {key!r} is a date: its value must read like 2024-05-31, got {shown(value)}"
    if isinstance(value, str):
        try:
            value = dt.date.fromisoformat(value)
        except ValueError:
            raise FilterError(sentence) from None
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise FilterError(sentence)
    days = (value - _EPOCH.date()).days
    return days if pa.types.is_date32(data_type) else days * 86_400_000


_TICKS_A_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def _ticks(key: str, data_type: pa.TimestampType, value: Any) -> Fraction:
    """Return the instant in the unit of its column."""
    example = "2024-05-31T08:30:00" if data_type.tz is None else "2024-05-31T08:30:00Z"
    sentence = f"column {key!r} is a timestamp: its value must read like {example}, got {shown(value)}"
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
            f"{shown(value.isoformat())}"
        )
    microseconds = (value - _EPOCH) // dt.timedelta(microseconds=1)
    ticks = Fraction(microseconds * _TICKS_A_SECOND[data_type.unit], 1_000_000)
    if not -(2**63) <= ticks < 2**63:
        raise FilterError(
            f"the value of column {key!r} must lie between the years 1678 and 2262, got "
            f"{shown(value.isoformat())}"
        )
    return ticks
