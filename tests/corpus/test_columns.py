import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from cairn.pipeline.corpus.columns import (
    fitted,
    joined,
    not_showable,
    parse_type,
    stored_type,
    unfit,
    value_bytes,
    without_views,
)
from hypothesis import given
from hypothesis import strategies as st

STRINGS = pa.array(["a", None, "", "käse", "a"])
LISTS = pa.array([["a", None], None, [], ["käse", "b", "b"]], pa.list_(pa.string()))


def naive_bytes(value: str | list[str | None] | None) -> int:
    if isinstance(value, list):
        return sum(map(naive_bytes, value))
    return len((value or "").encode())


def as_dictionary_list(lists: pa.ListArray) -> pa.Array:
    return lists.cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))


@pytest.mark.parametrize(
    "column",
    [
        STRINGS,
        STRINGS.slice(1, 3),
        STRINGS.cast(pa.large_string()),
        without_views(STRINGS.cast(pa.string_view())),
        without_views(LISTS.cast(pa.list_(pa.string_view()))),
        STRINGS.dictionary_encode(),
        STRINGS.dictionary_encode().slice(2),
        LISTS,
        LISTS.slice(1),
        LISTS.cast(pa.large_list(pa.string())),
        pa.nulls(3, pa.dictionary(pa.int32(), pa.string())),
        as_dictionary_list(LISTS),
        as_dictionary_list(LISTS).slice(1, 3),
    ],
)
def test_value_bytes_equals_the_bytes_of_the_plain_values(column: pa.Array) -> None:
    assert value_bytes(column).tolist() == [naive_bytes(value) for value in column.to_pylist()]


ZONED = pa.timestamp("us", "Europe/Paris")


@pytest.mark.parametrize(
    "target",
    [
        *(pa.int64(), pa.float64(), pa.date32(), pa.decimal128(4, 2), ZONED),
        *(pa.list_(each) for each in (pa.int64(), pa.decimal128(4, 2), ZONED)),
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        *(pa.array([2.5]), pa.array(["a"]), pa.array([["a"]]), pa.array([Decimal("12345.678")])),
        *(pa.array([0], pa.timestamp("ns", "UTC")), pa.array([[Decimal("12345.678")]])),
    ],
)
def test_a_value_fits_the_type_that_its_fault_names(target: pa.DataType, value: pa.Array) -> None:
    _, bad = fitted(value, target)
    told = re.search("to (.*) makes it fit", unfit("x", target, value.type)) if bad is not None else None
    if told is not None:
        assert fitted(value, parse_type("x", told[1]))[1] is None
        assert fitted(pa.nulls(1, target), parse_type("x", told[1]))[1] is None


DAY = dt.datetime(2024, 5, 31)  # noqa: DTZ001 (a column without a zone)


@pytest.mark.parametrize(
    ("given", "target", "kept"),
    [
        (pa.array([2, 2**53 + 1]), pa.float64(), [2.0, ...]),
        (pa.array([2.0, 1.5]), pa.int64(), [2, ...]),
        (pa.array([0.5, 0.1]), pa.float32(), [0.5, ...]),
        (pa.array([1, 300]), pa.int8(), [1, ...]),
        (pa.array([7, 2**63], pa.uint64()), pa.int64(), [7, ...]),
        (pa.array([3]), pa.decimal128(12, 2), [Decimal("3.00")]),
        (pa.array([Decimal("1.50")]), pa.decimal128(12, 3), [Decimal("1.500")]),
        (pa.array([90210, -1]), pa.string(), ["90210", "-1"]),
        (pa.array(["90210", "007", "n/a", None]), pa.int64(), [90210, ..., ..., None]),
        (pa.array(["3.0", "-4.", "3.5", "3.01"]), pa.int64(), [3, -4, ..., ...]),
        (pa.array(["1.50", ".5", "1,5"]), pa.float64(), [1.5, 0.5, ...]),
        (pa.array(["True", "FALSE", "yes"]), pa.bool_(), [True, False, ...]),
        (pa.array(["2024-05-31", "soon"]), pa.date32(), [DAY.date(), ...]),
        (pa.array([True]), pa.int64(), [...]),
        (pa.array([1]), pa.bool_(), [...]),
        (pa.array([DAY], pa.timestamp("s")), pa.timestamp("us"), [DAY]),
        (pa.array([0, 1_001], pa.timestamp("us")), pa.timestamp("ms"), [dt.datetime(1970, 1, 1), ...]),  # noqa: DTZ001
        (pa.array([DAY], pa.timestamp("us", "UTC")), pa.timestamp("us"), [...]),
        (pa.array([[], ["a"], None]), pa.list_(pa.string()), [[], ["a"], None]),
        (pa.array([[None]], pa.list_(pa.null())), pa.list_(pa.string()), [[None]]),
        (pa.array(["a", None]), pa.list_(pa.string()), [["a"], None]),
        (pa.array([["1"], ["x"]]), pa.list_(pa.int64()), [[1], ...]),
        (pa.array([[1], None]), pa.int64(), [..., None]),
        (pa.nulls(2), pa.list_(pa.string()), [None, None]),
        (pa.nulls(2), pa.string(), [None, None]),
        *(
            (column, target, column.to_pylist())
            for column, target in (
                (STRINGS.dictionary_encode().slice(1), pa.large_string()),
                (without_views(STRINGS.cast(pa.string_view())), pa.string()),
                (as_dictionary_list(LISTS).slice(1), pa.list_(pa.string())),
                (LISTS.cast(pa.large_list(pa.string())), pa.list_(pa.string())),
                (pa.array([[1], None, [2, 3]], pa.list_(pa.int8())), pa.list_(pa.int32())),
                (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), pa.list_(pa.float64())),
            )
        ),
    ],
)
def test_a_value_takes_a_type_that_it_fits_without_loss(
    given: pa.Array, target: pa.DataType, kept: list[Any]
) -> None:
    column, bad = fitted(given, target)
    column.validate(full=True)
    assert column.type == target
    marks = [False] * len(given) if bad is None else bad.tolist()
    values = zip(column.to_pylist(), marks, strict=True)
    assert [... if mark else value for value, mark in values] == kept


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.int8(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint64(), pa.int64(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(12, 3), pa.decimal128(12, 3)),
        (pa.decimal128(10, 2), pa.float64(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.int64(), pa.string()),
        (pa.list_(pa.int8()), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.list_(pa.null()), pa.string(), pa.list_(pa.string())),
        (pa.struct([]), pa.string(), pa.string()),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.string()),
        (pa.date32(), pa.date64(), pa.date32()),
    ],
)
def test_joined_is_symmetric(first: pa.DataType, second: pa.DataType, expected: pa.DataType) -> None:
    assert joined(first, second) == joined(second, first) == expected


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.large_string(), pa.string()),
        (pa.large_list(pa.string_view()), pa.list_(pa.string())),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32())),
        (pa.decimal128(9, 2), pa.decimal128(9, 2)),
        (pa.decimal32(5, 2), pa.decimal128(5, 2)),
        (pa.list_(pa.timestamp("ns")), pa.list_(pa.timestamp("us"))),
        (pa.timestamp("ms", "Nowhere/City"), None),
        (pa.struct([("a", pa.int8())]), None),
        (pa.map_(pa.string(), pa.int8()), None),
        (pa.binary(), None),
        (pa.list_(pa.list_(pa.int8())), None),
        (pa.time32("s"), None),
    ],
)
def test_stored_type_keeps_flat_values_only(given: pa.DataType, kept: pa.DataType | None) -> None:
    assert stored_type(given) == kept


@given(st.sampled_from([pa.date32(), pa.date64(), *map(pa.timestamp, ("s", "ms", "us"))]), st.data())
def test_what_counts_as_showable_is_shown(arrow_type: pa.DataType, data: st.DataObject) -> None:
    ticks = data.draw(
        st.integers(-(2**31), 2**31 - 1) if arrow_type == pa.date32() else st.integers(-(2**62), 2**62)
    )
    if arrow_type == pa.date64():
        ticks -= ticks % 86_400_000
    column = pa.array([ticks], pa.int32() if arrow_type == pa.date32() else pa.int64()).cast(arrow_type)
    hidden = not_showable(column)
    assert hidden is not None
    if not hidden[0]:
        assert column[0].as_py().year in range(1, 10_000)


@pytest.mark.parametrize(
    ("zone", "first", "last"),
    [(None, 0, 0), ("UTC", 0, 0), ("+05:30", 0, 19_800), ("-12:00", 43_200, 0), ("Europe/Berlin", 0, 3_600)],
)
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_the_first_and_last_moments_that_a_zone_shows_are_kept(
    unit: str, zone: str | None, first: int, last: int
) -> None:
    begin, end = -62_135_596_800 + first, 253_402_300_799 - last
    ticks = [each * 1000 ** ["s", "ms", "us"].index(unit) for each in (begin - 1, begin, end, end + 1)]
    column = pa.array(ticks, pa.int64()).cast(pa.timestamp(unit, zone))
    hidden = not_showable(pa.concat_arrays([column, pa.nulls(1, column.type)]))
    assert hidden is not None
    assert hidden.tolist() == [True, False, False, True, False]
