"""The columns of a corpus: which types are stored, and the one rule by which a value takes its column's type.

    joined    the type of a column in which values of two types stand, of files or of rows
    fitted    values as a type: each that fits it without loss, and a mark for each that does not
    batch_of  rows of Python values, as JSON, YAML and callers have them, as a batch

A value fits a type without loss: a whole number one of wider numbers or of doubles, a time a finer unit, a
single value a list, a text a number that is written plainly, and all of them a text. Sizes of strings are
measured before they are made plain: a dictionary of a thousand rows may be a gigabyte once it is.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from functools import reduce
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.quarantine import Reason
from cairn.pipeline.errors import UsageError
from cairn.pipeline.options import shown
from jaxtyping import Bool, Int64

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers
Mask = Bool[np.ndarray, " N"]

OBJECT: Final = pa.struct([])
"""What stands for objects and nested lists; nothing looks into them."""
OBJECTS: Final = b"cairn.objects"
"""Metadata of a field that has objects beside values of its type, or others that are not kept: which."""
DECIMALS: Final = b"cairn.decimals"
"""Metadata of a field of numbers that were texts: how they were written, as :func:`decimals_of` has it."""
MAX_DECIMALS: Final = 1_000
"""More ways to write the decimals of a column are no versions, and no more of them are kept."""
KINDS: Final = b"cairn.kinds"
"""Metadata of a field of texts whose values are of several kinds: which."""
FAULT: Final = "\0fault"
"""A column that a format may add to its rows: null, or a reason to refuse the row, a blank and details."""
_TYPES: Final = ("string", "int64", "double", "bool", "date32[day]", "timestamp[us]")
_INT64: Final = range(-(2**63), 2**63)
_INTEGER_DIGITS: Final = 20
"""How many digits an integer of 64 bits has at most."""
PLAIN_INTEGER: Final = "0|[1-9][0-9]{0,17}|(?:[1-8][0-9]|9[01])[0-9]{17}"
"""How a whole number of 64 bits is written without its sign; of the largest, some stay texts."""
_NUMBER: Final = r"^-?((0|[1-9][0-9]{0,%s})(\.[0-9]*)?|\.[0-9]+)([eE][-+][0-9]{1,3})?$"
PLAIN: Final[Mapping[str, pa.DataType]] = {
    rf"^-?({PLAIN_INTEGER})$": pa.int64(),
    _NUMBER % 14: pa.float64(),
    r"^(?i:true|false)$": pa.bool_(),
}
"""How texts are written that are values of a type. A leading zero makes a text: it would be lost.

So does an exponent without a sign, as in 12E3: programs write one.
"""
WITH_COMMA: Final = r"^[^\pL0-9,.\[\]]*[0-9][0-9. '\x{a0}\x{202f}]*,[0-9]+\s*(?:[^\pL0-9,.\[\]]*|[A-Z]{3})$"
"""A number with a comma, also one between thousands, and also beside signs such as `€` and `%`.

One in square brackets is a range of PostgreSQL.
"""
_NESTED: Final = (list, tuple, dict)
_SHOWABLE: Final = (-62_135_596_800, 253_402_300_800)
"""The seconds from 0001-01-01 to the end of 9999-12-31."""


BIG_INTEGERS: Final = "integers beyond 64 bits"
BIG_INTEGER: Final = pa.large_string()
"""The type of a whole number beyond 64 bits, which is kept as a text."""
LONG_INTEGERS: Final = "integers beyond 53 bits"
LONG_INTEGER: Final = pa.dictionary(pa.int8(), pa.int64())
"""What is met beside `int64` where a whole number is no double: floats in its column make all texts."""
TEXTS_OF: Final = {pa.float64(): pa.string(), pa.list_(pa.float64()): pa.list_(pa.string())}


class WrittenNumber(str):
    """A number as it is written, which a column of numbers reads, and one of texts keeps with its zeros."""

    __slots__ = ()


_TYPES_OF: Final[Mapping[type, pa.DataType]] = {
    type(None): pa.null(),
    str: pa.string(),
    WrittenNumber: pa.float64(),
    float: pa.float64(),
    bool: pa.bool_(),
}
"""The types of values, where the class tells them."""
_KEPT: Final = {*_TYPES_OF, int}
_OF_ARROW: Final = (dt.date, dt.time, dt.timedelta, Decimal, bytes, np.datetime64, np.timedelta64)
"""Classes of values whose type Arrow tells."""


def is_text(arrow_type: pa.DataType) -> bool:
    """Tell whether values are strings, however they are stored, or UUIDs, which are kept as such."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return isinstance(arrow_type, pa.UuidType) or is_text(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type):
        return is_text(arrow_type.value_type)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(arrow_type) for is_kind in kinds)


def is_list(arrow_type: pa.DataType) -> bool:
    """Tell whether values are lists, of any length or of one."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(arrow_type) for is_kind in kinds)


def is_number(arrow_type: pa.DataType) -> bool:
    """Tell whether values are whole numbers, floats or decimals."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(is_kind(arrow_type) for is_kind in kinds)


def stored_type(arrow_type: pa.DataType) -> pa.DataType | None:
    """Return the type a metadata column is stored as, None when it is not kept."""
    if not is_list(arrow_type):
        return _stored_scalar(arrow_type)
    if pa.types.is_null(arrow_type.value_type):
        return pa.list_(pa.null())
    element = _stored_scalar(arrow_type.value_type)
    # Nothing shows a list of nanoseconds without pandas.
    is_fine = element is not None and pa.types.is_timestamp(element) and element.unit == "ns"
    return element and pa.list_(pa.timestamp("us", element.tz) if is_fine else element)


def _stored_scalar(arrow_type: pa.DataType) -> pa.DataType | None:
    if is_text(arrow_type):
        return pa.string()
    if pa.types.is_dictionary(arrow_type):
        return _stored_scalar(arrow_type.value_type)
    if pa.types.is_decimal(arrow_type) and arrow_type.bit_width < 128:  # Lance has no smaller ones
        return pa.decimal128(arrow_type.precision, arrow_type.scale)
    if pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None:
        try:
            pa.scalar(0, arrow_type).as_py()
        except (pa.ArrowException, ValueError, LookupError):  # a zone that Python does not know
            return None
    kinds = (pa.types.is_boolean, is_number, pa.types.is_date, pa.types.is_timestamp)
    return arrow_type if any(is_kind(arrow_type) for is_kind in kinds) else None


def parse_type(name: str, text: str) -> pa.DataType:
    """Return the type that a user gives a metadata column, as it is stored; any other is refused."""
    element = re.fullmatch(r"list\[(.+)\]", text)
    try:
        found = _named_type(text if element is None else element[1])
    except ValueError:
        found = pa.null()
    stored = stored_type(found if element is None else pa.list_(found))
    if stored is None or pa.types.is_null(found):
        raise UsageError(
            f"the type of column {name!r} must be one such as {', '.join(_TYPES)} or list[string], got "
            f"{shown(text)}"
        )
    return stored


def _named_type(text: str) -> pa.DataType:
    """Return the type that Arrow calls so; it finds none of decimals and zones by itself."""
    if number := re.fullmatch(r"decimal[0-9]+\(([0-9]{1,2}), ?([0-9]{1,2})\)", text):
        precision, scale = map(int, number.groups())
        if scale > precision:  # Arrow makes one, and no file takes it
            raise ValueError(text)
        return (pa.decimal128 if precision <= 38 else pa.decimal256)(precision, scale)
    zoned = re.fullmatch(r"timestamp\[(s|ms|us|ns), ?tz=(.+)\]", text)
    return pa.type_for_alias(text) if zoned is None else pa.timestamp(zoned[1], zoned[2])


def plain_type(column: pa.Array) -> pa.DataType:
    """Return the type of which all texts of a column are plainly written values."""
    if column.null_count == len(column):
        return pa.null()
    for pattern, arrow_type in PLAIN.items():
        if pc.all(pc.match_substring_regex(column, pattern)).as_py():
            return arrow_type
    return (
        BIG_INTEGER
        if pc.all(pc.match_substring_regex(column, r"^-?(0|[1-9][0-9]*)$")).as_py()
        else pa.string()
    )


def decimals_of(column: pa.Array) -> frozenset[str]:
    """Return how decimals are written: the whole number, how many, and where several begin or end with 0."""
    found = pc.extract_regex(column, r"^-?(?P<whole>[0-9]*)\.(?P<decimals>[0-9]+)$").drop_null()
    whole, decimals = found.flatten()
    count = pc.utf8_length(decimals)
    zero = pc.if_else(
        pc.match_substring_regex(decimals, "^0."),
        "first",
        pc.if_else(pc.match_substring_regex(decimals, ".0$"), "last", ""),
    )
    ways = pc.binary_join_element_wise(whole, count.cast(pa.string()), zero, ":")
    return frozenset(pc.unique(ways).to_pylist())


class Learned:
    """The columns of a file that a pass over its rows meets, and how their numbers are written, in bounds."""

    def __init__(self) -> None:
        self.types: dict[str, pa.DataType] = {}
        self._met: dict[str, set[pa.DataType]] = {}
        self._decimals: dict[str, frozenset[str]] = {}
        self._waiting: dict[str, list[str]] = {}

    def add(self, name: str, found: Collection[pa.DataType]) -> None:
        """Take the types of values of a column."""
        known = self._met.setdefault(name, set())
        if not known.issuperset(found):  # a type that is joined already changes nothing
            known.update(found)
            self.types[name] = reduce(joined, found, self.types.get(name, pa.null()))

    def add_value(self, name: str, value: object) -> None:
        """Take a value, or a list of them, of which those are told that are written numbers."""
        self.add(name, types_of(value))
        if type(value) is str or self._are_many(name):
            return
        values = cast("list[object]", value) if isinstance(value, list) else [value]
        if written := [str(each) for each in values if isinstance(each, WrittenNumber)]:
            waiting = self._waiting.setdefault(name, [])
            waiting += written
            if len(waiting) >= MAX_DECIMALS:
                self.add_numbers(name, pa.array(self._waiting.pop(name)))

    def add_numbers(self, name: str, column: pa.Array) -> None:
        """Take the numbers of a column as texts."""
        if not self._are_many(name):
            self._decimals[name] = self._decimals.get(name, frozenset()) | decimals_of(column)

    def _are_many(self, name: str) -> bool:
        return len(self._decimals.get(name, ())) > MAX_DECIMALS

    def field(self, name: str) -> pa.Field:
        """Return the field of a column, with what its values were beside its type."""
        if name in self._waiting:
            self.add_numbers(name, pa.array(self._waiting.pop(name)))
        unkept = sorted({_named(each) for each in self._met[name] if is_unkept(each)})
        kinds = sorted({kind_of(each) or "" for each in self._met[name] if not is_unkept(each)} - {""})
        is_mixed = len(kinds) > 1 or kinds == [BIG_INTEGERS]
        metadata = {
            DECIMALS: " ".join(sorted(self._decimals[name])) if name in self._decimals else None,
            KINDS: ", ".join(kinds) if is_mixed else None,
            OBJECTS: " and ".join(unkept) or None,
        }
        told = {mark: text for mark, text in metadata.items() if text is not None}
        return pa.field(name, self.types[name], metadata=told)

    def schema(self) -> pa.Schema:
        """Return the fields of all columns."""
        return pa.schema([*map(self.field, self.types)])


def are_names(decimals: Set[str]) -> bool:
    """Whether numbers are names, as versions: 3.10 is another one than 3.1, because 3.9 stands beside it.

    A whole number has decimals of several lengths, and some end with a zero, which a number would lose. None
    of several begins with one, as those of prices do. Prices such as 1.5 and 2.50 are numbers.
    """
    lengths, with_zero = dict[str, set[str]](), set[str]()
    for whole, count, zero in (each.split(":") for each in decimals):
        if zero == "first":
            return False
        lengths.setdefault(whole, set()).add(count)
        with_zero.update([whole] if zero else [])
    return len(decimals) <= MAX_DECIMALS and any(len(lengths[whole]) > 1 for whole in with_zero)


def type_of(value: object) -> pa.DataType:
    """Return the type of one value, null for None; one that is not kept has a type that is not stored."""
    known = _TYPES_OF.get(type(value))
    if known is not None:
        return known
    if isinstance(value, int):
        return pa.int64() if value in _INT64 else BIG_INTEGER
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, _NESTED):
        return reduce(joined, types_of(value))
    if isinstance(value, _OF_ARROW):
        with contextlib.suppress(pa.ArrowException):  # as of a zone that is off by seconds
            found = pa.scalar(value).type
            is_fine = isinstance(value, dt.datetime) and getattr(value, "nanosecond", 0)  # of pandas
            return pa.timestamp("ns", found.tz) if is_fine else found
    return pa.struct([(type(value).__name__, pa.null())])


def types_of(value: object) -> Sequence[pa.DataType]:
    """Return the types of a value: of a list those of its items, where they are several."""
    if not isinstance(value, _NESTED):
        found = type_of(value)
        return [found, LONG_INTEGER] if found == pa.int64() and _is_long(value) else [found]
    if isinstance(value, dict):
        return [OBJECT]
    items = cast("Sequence[object]", value)
    kinds = set(map(type, items))
    if kinds <= _TYPES_OF.keys():
        found = [_TYPES_OF[kind] for kind in kinds]
    elif not kinds.isdisjoint(_NESTED):
        return [OBJECT]
    else:
        found = [*dict.fromkeys(map(type_of, items))]
        found += [LONG_INTEGER] if any(map(_is_long, items)) else []
    unkept = [each for each in found if is_unkept(each)]
    return [pa.list_(each) for each in unkept[:1] or found or [pa.null()]]


def _is_long(value: object) -> bool:
    return isinstance(value, int) and value in _INT64 and int(float(value)) != value


def is_unkept(arrow_type: pa.DataType) -> bool:
    """Tell whether values of a type are left out of columns: objects, nested lists, bytes and others."""
    return stored_type(arrow_type) is None and not pa.types.is_null(arrow_type)


def _is_left_out(value: object) -> bool:
    kinds = set(map(type, cast("Sequence[object]", value))) if isinstance(value, list) else {type(value)}
    return not kinds <= _KEPT and is_unkept(type_of(value))


def _named(arrow_type: pa.DataType) -> str:
    """Say what values of a type are that are left out."""
    if is_list(arrow_type):
        return f"lists of {_named(arrow_type.value_type)}"
    if not pa.types.is_struct(arrow_type):
        return f"values of type {arrow_type}"
    return f"values of type {arrow_type[0].name}" if len(arrow_type) else "objects or nested lists"


def kind_of(arrow_type: pa.DataType) -> str | None:
    """Say of which kind the values of a type are, or the elements of lists, None of none."""
    if is_list(arrow_type):
        return kind_of(arrow_type.value_type)
    if arrow_type == BIG_INTEGER:
        return BIG_INTEGERS
    if arrow_type == LONG_INTEGER:
        return LONG_INTEGERS
    if is_text(arrow_type):
        return "texts"
    if is_number(arrow_type):
        return "numbers"
    if pa.types.is_boolean(arrow_type):
        return "booleans"
    if pa.types.is_date(arrow_type):
        return "dates"
    if pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None:
        return "times of zones"
    return "times" if pa.types.is_temporal(arrow_type) else None


def learned_column(
    name: str, values: Sequence[object], target: pa.DataType | None = None
) -> tuple[pa.Field, pa.Array, str | None]:
    """Return Python values as a column of ``target``, else of the type that holds them, and the first fault.

    A value that is not kept is null, and its type stands in the field.
    """
    learned = Learned()
    for value in values or [None]:
        learned.add(name, types_of(value))
    own = learned.types[name]
    asked, target = target, target or (pa.null() if is_unkept(own) else own)
    batch = batch_of([{name: value} for value in values], {name: target}, ())
    faults = batch.column(FAULT).drop_null()
    if len(faults) and asked is None and own in TEXTS_OF:  # integers that floats would round
        return learned_column(name, values, TEXTS_OF[own])
    fault = faults[0].as_py().partition(" ")[2] if len(faults) else None
    return learned.field(name).with_type(target), batch.column(0), fault


def joined(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Return the type of a column that holds values of both, or that of the others where some are objects."""
    if first == second or pa.types.is_null(second) or second == LONG_INTEGER:
        return first
    if pa.types.is_null(first) or is_unkept(first):
        return second
    if is_unkept(second):
        return first
    if is_list(first) or is_list(second):
        return pa.list_(joined(*(each.value_type if is_list(each) else each for each in (first, second))))
    if is_number(first) and is_number(second):
        return _joined_numbers(first, second)
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second) and bool(first.tz) == bool(second.tz):
        return max(first, second, key=lambda each: ["s", "ms", "us", "ns"].index(each.unit))
    if pa.types.is_date(first) and pa.types.is_date(second):
        return pa.date32()
    return pa.string()


def _joined_numbers(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(first) and pa.types.is_floating(second):
        return max(first, second, key=lambda each: each.bit_width)
    if pa.types.is_floating(first) or pa.types.is_floating(second):
        return pa.float64()
    if decimals := [each for each in (first, second) if pa.types.is_decimal(each)]:
        scale = max(each.scale for each in decimals)
        whole = max(each.precision - each.scale for each in decimals)
        whole = whole if len(decimals) == 2 else max(whole, _INTEGER_DIGITS)
        if all(each.bit_width <= 128 for each in decimals):
            return pa.decimal128(min(whole + scale, 38), scale)
        return pa.decimal256(min(whole + scale, 76), scale)
    if pa.types.is_signed_integer(first) == pa.types.is_signed_integer(second):
        return max(first, second, key=lambda each: each.bit_width)
    signed, unsigned = (first, second) if pa.types.is_signed_integer(first) else (second, first)
    wider = {8: pa.int16(), 16: pa.int32()}.get(unsigned.bit_width, pa.int64())
    return max(signed, wider, key=lambda each: each.bit_width)


def fitted(column: pa.Array, target: pa.DataType) -> tuple[pa.Array, Mask | None]:
    """Return values as a column of a stored type, null where one does not fit, and where that is.

    Dictionaries are resolved and widths unified. None says that all fit. Strings are not checked.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary.take(column.indices)
    if column.type == target:
        return column, None
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target), None
    if is_list(target):
        return _fitted_list(column, target)
    if is_list(column.type):
        return pa.nulls(len(column), target), np.asarray(column.is_valid())
    if is_text(target):
        return column.cast(target), None
    if is_text(column.type):
        return _parsed(column, target)
    if not _are_of_a_kind(column.type, target):
        return pa.nulls(len(column), target), np.asarray(column.is_valid())
    return _fitted_each(column, target, lambda part: _cast(part, target))


def _fitted_list(column: pa.Array, target: pa.DataType) -> tuple[pa.Array, Mask | None]:
    if is_list(column.type):
        lengths = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
        elements = column.flatten()
    else:
        lengths, elements = np.asarray(column.is_valid()).astype(np.int64), column.drop_null()
    values, bad_elements = fitted(elements, target.value_type)
    bad = None
    if bad_elements is not None:
        bad = _marked(len(column), np.repeat(np.arange(len(column)), lengths)[bad_elements])
    mask = column.is_null() if column.null_count else None
    # The type is given: a footer may name the element otherwise, and two names make two types.
    return pa.ListArray.from_arrays(_offsets(lengths), values, type=target, mask=mask), bad


def _offsets(lengths: Sequence[int] | Int64[np.ndarray, " N"]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _marked(num_rows: int, rows: np.ndarray) -> Mask:
    marks = np.zeros(num_rows, bool)
    marks[rows] = True
    return marks


def _are_of_a_kind(first: pa.DataType, second: pa.DataType) -> bool:
    if is_number(first) or pa.types.is_boolean(first):
        return is_number(second) if is_number(first) else pa.types.is_boolean(second)
    if not (pa.types.is_temporal(first) and pa.types.is_temporal(second)):
        return False
    zones = [pa.types.is_timestamp(each) and each.tz is not None for each in (first, second)]
    return zones[0] == zones[1]


def _cast(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Cast values, or raise :class:`ArrowInvalid` where one changes: Arrow narrows floats without a word."""
    if pa.types.is_decimal(target) and pa.types.is_integer(column.type):
        return column.cast(pa.decimal128(38, 0)).cast(target)
    taken = column.cast(target)
    are_floats = pa.types.is_floating(target) and pa.types.is_floating(column.type)
    is_wider = are_floats and target.bit_width > column.type.bit_width
    if not is_wider and not taken.cast(column.type).equals(column):
        raise pa.ArrowInvalid("a value changes")
    return taken


def _parsed(column: pa.Array, target: pa.DataType) -> tuple[pa.Array, Mask | None]:
    """Return texts as values of a type in which they are written plainly."""
    if pa.types.is_integer(target):  # its bounds, and the precision of decimals, are told by the cast
        column = pc.replace_substring_regex(column, r"^(-?[0-9]+)\.0*$", r"\1")
        pattern = "^-?(0|[1-9][0-9]*)$"
    elif pa.types.is_decimal(target):
        pattern = _NUMBER % 75
    else:
        kind = pa.float64() if is_number(target) else target
        pattern = next((each for each, of in PLAIN.items() if of == kind), None)
    if pattern is None:  # times
        return _fitted_each(column, target, lambda part: part.cast(pa.string()).cast(target))
    is_plain = pc.match_substring_regex(column, pattern)
    bad = np.asarray(pc.fill_null(pc.invert(is_plain), False))
    taken, beyond = _fitted_each(
        pc.if_else(pa.array(~bad), column, None), target, lambda part: part.cast(target)
    )
    bad = bad if beyond is None else bad | beyond
    return taken, bad if bad.any() else None


def _fitted_each(
    column: pa.Array, target: pa.DataType, take: Callable[[pa.Array], pa.Array]
) -> tuple[pa.Array, Mask | None]:
    """Take all values at once, one by one where that fails."""
    try:
        return take(column), None
    except pa.ArrowException:
        pass
    bad = np.zeros(len(column), bool)
    parts: list[pa.Array] = []
    for row in range(len(column)):
        try:
            parts.append(take(column.slice(row, 1)))
        except pa.ArrowException:
            bad[row] = True
            parts.append(pa.nulls(1, target))
    return pa.concat_arrays([pa.nulls(0, target), *parts]), bad


def batch_of(
    rows: Sequence[Mapping[str, Any] | str], types: Mapping[str, pa.DataType], roles: Collection[str]
) -> pa.RecordBatch:
    """Return rows of Python values as columns of ``types``, with a column :data:`FAULT`.

    A row that is a text is a damaged one, and the text says how. An object is null, and a fault in a column
    of ``roles``: :func:`type_of` lets a warning tell of others.
    """
    faults: list[str | None] = [
        f"{Reason.DAMAGED_ROWS} {row}" if isinstance(row, str) else None for row in rows
    ]
    arrays: list[pa.Array] = []
    for name, target in types.items():
        values = [None if isinstance(row, str) else row.get(name) for row in rows]
        column, bad = _objects_of(values, target) if _holds_objects(target) else _column_of(values, target)
        for place in np.flatnonzero(bad).tolist():
            if _is_not_finite(values[place]):
                faults[place] = (
                    faults[place] or f"{Reason.NAN_METADATA} column {name!r} holds NaN or infinity"
                )
            elif values[place] is not None and (name in roles or not _is_left_out(values[place])):
                faults[place] = faults[place] or unfit(name, target, type_of(values[place]))
        arrays.append(column)
    return pa.RecordBatch.from_arrays([*arrays, pa.array(faults, pa.string())], names=[*types, FAULT])


def role_names(config: CorpusConfig) -> set[str]:
    """Return the columns that hold, or may hold, an id, title, text, query or vectors."""
    asked = {
        config.id_column,
        config.title_column or "title",
        config.text_column,
        config.query_column or "query",
    }
    return asked | {"id", "text"} | ({config.vector_column} if config.vector_column else set())


def unfit(name: str, target: pa.DataType, own: pa.DataType) -> str:
    """Say of a row that a value does not fit its column, and which type would hold both."""
    if is_unkept(own) or is_text(target):
        advice = ""
    else:
        both = joined(target, own)
        wider = str(pa.string() if both == target else both.value_type if is_list(both) else both)
        wider = f"list[{wider}]" if is_list(both) else wider
        advice = f"; `cairn retype` to {wider} makes it fit"
    name_of_class = own[0].name if pa.types.is_struct(own) and len(own) else str(own)
    got = {OBJECT: "an object or a nested list", BIG_INTEGER: BIG_INTEGERS}.get(own, name_of_class)
    kind = "texts" if is_text(target) else target
    return f"{Reason.UNFIT_VALUE} column {name!r} must hold {kind}, got {got} that does not fit{advice}"


def _holds_objects(arrow_type: pa.DataType) -> bool:
    return is_list(arrow_type) and pa.types.is_struct(arrow_type.value_type)


def _objects_of(values: Sequence[Any], target: pa.DataType) -> tuple[pa.Array, Mask]:
    """Return lists of objects as a column of ``target``, null where one has other values."""

    def taken(some: Sequence[Any]) -> pa.Array | None:
        try:
            return pa.array(some, target)
        except (pa.ArrowException, TypeError):
            return None

    values = [_with_floats(value) for value in values]
    column = taken(values)
    if column is not None:
        return column, np.zeros(len(values), bool)
    bad = np.array([taken([value]) is None for value in values], bool)
    return pa.array([None if is_bad else each for is_bad, each in zip(bad, values, strict=True)], target), bad


def _with_floats(value: Any) -> Any:
    """Return a value of JSON with every number read."""
    if isinstance(value, list):
        return [_with_floats(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _with_floats(each) for name, each in cast("dict[str, Any]", value).items()}
    return float(value) if isinstance(value, WrittenNumber) else value


def _column_of(values: Sequence[Any], target: pa.DataType) -> tuple[pa.Array, Mask]:
    if is_list(target):
        lists = [
            value if value is None or isinstance(value, list | tuple) else [value]
            for value in (None if _is_left_out(value) else value for value in values)
        ]
        flat = [each for value in lists if value is not None for each in cast("Sequence[Any]", value)]
        lengths = [0 if value is None else len(value) for value in lists]
        elements, bad_elements = _column_of(flat, target.value_type)
        are_null = np.array([value is None for value in lists], bool)
        bad = are_null | _marked(len(values), np.repeat(np.arange(len(values)), lengths)[bad_elements])
        own = pa.ListArray.from_arrays(
            _offsets(lengths), elements, type=pa.list_(target.value_type), mask=pa.array(are_null)
        )
    else:
        kinds, bad, kept = set(map(type, values)), np.zeros(len(values), bool), values
        if not kinds <= _KEPT:
            bad = np.array([isinstance(value, _NESTED) or _is_left_out(value) for value in values], bool)
            kept = [None if is_bad else value for value, is_bad in zip(values, bad.tolist(), strict=True)]
        if is_text(target) and float in kinds:
            bad |= np.array([isinstance(each, float) and not math.isfinite(each) for each in kept], bool)
        elif WrittenNumber in kinds and not is_text(target):
            kept = [_with_floats(value) for value in kept]
        if pa.types.is_integer(target) and not kinds.isdisjoint((float, WrittenNumber)):
            # As floats beside others, large whole numbers would lose digits.
            are_whole = [not isinstance(each, float) or each.is_integer() for each in kept]
            bad |= ~np.array(are_whole, bool)
            whole = zip(kept, are_whole, strict=True)
            kept = [
                int(each) if is_whole and isinstance(each, float) else each if is_whole else None
                for each, is_whole in whole
            ]
        own = _natural(kept, target)
    column, more = fitted(own, target)
    return column, bad if more is None else bad | more


def _is_not_finite(value: Any) -> bool:
    """Tell whether a value is NaN or infinity, or a list with one in it."""
    values = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, float) and not math.isfinite(each) for each in values)


def _natural(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """Return values of one kind as they are, others as texts, which fit where their values do."""
    kinds = {type(value) for value in values if value is not None}
    with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
        if kinds == {bool}:
            return pa.array(values, pa.bool_())
        if kinds <= {str, WrittenNumber}:  # half a character is told of its row later
            return pa.array(values, pa.string())
        if kinds == {int}:
            return pa.array(values, pa.int64())
        if kinds <= {float, int} and not is_text(target):
            return pa.array(values, pa.float64())
        if kinds.isdisjoint(_TYPES_OF) and not is_text(target):
            own = reduce(joined, map(type_of, values), pa.null())
            if not is_text(own):
                return pa.array(values, own)
    return pa.array([None if value is None else _as_bytes(value) for value in values], pa.binary()).view(
        pa.string()
    )


def _as_bytes(value: Any) -> bytes:
    is_of_json = isinstance(value, bool | int | float | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if is_of_json else str(value)
    return text.encode("utf-8", "surrogatepass")


def not_showable(column: pa.Array) -> Mask | None:
    """Return which dates and times Python cannot show, None where a column holds no times."""
    arrow_type = column.type
    if is_list(arrow_type):
        bad = not_showable(column.flatten())
        return None if bad is None else of_elements(column, bad)
    if not pa.types.is_temporal(arrow_type):
        return None
    if pa.types.is_date32(arrow_type):
        ticks, per_second = column.cast(pa.int32()), 1 / 86_400
    else:
        ticks = column.cast(pa.int64())
        unit = "ms" if pa.types.is_date64(arrow_type) else arrow_type.unit
        per_second = 1000 ** ["s", "ms", "us", "ns"].index(unit)
    low, high = (round(bound * per_second) for bound in _SHOWABLE)
    values = np.asarray(pc.fill_null(ticks, 0))
    bad = (values < low) | (values >= high)
    if pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None:  # a zone may shift one out
        day = 86_400 * per_second
        is_near = ~bad & ((values < low + day) | (values >= high - day))
        near = np.unique(values[is_near])
        out = [each for each in near if not _is_shown(pa.scalar(each, pa.int64()).cast(arrow_type))]
        bad |= is_near & np.isin(values, out)
    return bad


def _is_shown(time: pa.Scalar) -> bool:
    try:
        time.as_py()
    except (ValueError, OverflowError):
        return False
    return True


def of_elements(column: pa.Array, bad: Mask) -> Mask:
    """Mark the lists that hold a marked one of their flattened elements; null lists hold none."""
    lengths = np.asarray(pc.list_value_length(column).fill_null(0))
    return _marked(len(column), np.repeat(np.arange(len(column)), lengths)[bad])


def without_views(column: pa.Array) -> pa.Array:
    """Return a column whose strings are no views, which Arrow cannot filter yet, and no UUIDs or others."""
    arrow_type = column.type
    if isinstance(arrow_type, pa.UuidType):
        return pa.array([None if each is None else str(each) for each in column.to_pylist()], pa.string())
    if isinstance(arrow_type, pa.BaseExtensionType):
        return without_views(cast("Any", column).storage)
    if pa.types.is_string_view(arrow_type):
        return column.cast(pa.large_string())
    if pa.types.is_dictionary(arrow_type):
        plain = without_views(column.dictionary)
        same = plain.type == arrow_type.value_type
        return column if same else pa.DictionaryArray.from_arrays(column.indices, plain)
    if not is_list(arrow_type):
        return column
    element = arrow_type.value_type
    if isinstance(element, pa.BaseExtensionType) or pa.types.is_dictionary(element):
        offsets = _offsets(np.asarray(pc.list_value_length(column).fill_null(0)))
        return pa.ListArray.from_arrays(offsets, without_views(column.flatten()), mask=column.is_null())
    plain_element = pa.large_string() if pa.types.is_string_view(element) else element
    is_plain = pa.types.is_list(arrow_type) and plain_element == element
    return column if is_plain else column.cast(pa.list_(plain_element))


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
    if is_list(arrow_type):
        ends = np.concatenate([[0], np.cumsum(value_bytes(column.flatten()))])
        lengths = np.asarray(pc.list_value_length(column).fill_null(0))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return (ends[offsets[1:]] - ends[offsets[:-1]]).astype(np.int64)
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        return np.asarray(pc.binary_length(column).fill_null(0)).astype(np.int64)
    return np.zeros(len(column), np.int64)


def pieces(row_bytes: Int64[np.ndarray, " N"], budget_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into consecutive (start, stop) of at most ``budget_bytes``, one row at least."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + budget_bytes, side="right")), start + 1)
        yield start, stop
        start = stop
