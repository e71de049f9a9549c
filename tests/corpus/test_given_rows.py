"""Rows of values: alike by file, by `add` and over HTTP; nothing of what Python gives is lost or changed."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.given_rows import source_of
from cairn.pipeline.corpus.scan import Scan
from cairn.pipeline.errors import DocumentsRefusedError
from cairn.pipeline.line.written_rows import checked_rows

from tests.corpus.checked_rows import checked

CONFIG = CorpusConfig(id_column="doc_id")
DAY, TIME = dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 23, 59)  # noqa: DTZ001 (a column without a zone)
ZONED = TIME.replace(tzinfo=dt.timezone(dt.timedelta(hours=5)))
FINE = pd.Timestamp("2024-01-01 01:02:03.123456789")
AS_TEXTS = "all are kept as texts, and filters compare them as such"
LONG, BIG = 2**53 + 1, 2**70
Read = tuple[list[Any], list[Any], list[str], list[str]]


def rows_of(values: list[Any]) -> list[dict[str, Any]]:
    documents = [{"doc_id": str(place), "title": None, "text": "x"} for place in range(len(values))]
    return [
        document | ({} if value is ... else {"v": value})
        for document, value in zip(documents, values, strict=True)
    ]


def told(scan: Scan) -> list[str]:
    names = [each.file.name for each in scan.files]
    return [warning.replace(name, "memory") for warning in scan.warnings for name in names]


def read(source: Any, stored: list[Any] | None = None) -> Read:
    """Return the columns, the values, what was told and what was refused."""
    found = checked(source, config=CONFIG, stored=stored)
    details = [row["detail"] for row in found.rejected]
    return list(found.scan.metadata_fields), [row.get("v") for row in found.rows], told(found.scan), details


def read_given(values: list[Any]) -> Read:
    return read(source_of(rows_of(values), CONFIG))


@pytest.mark.parametrize("stored", [None, "int64", "double", "string", "bool", "list<double>", "date32"])
@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5, None],
        [1.5, True],
        [[1, 2.5, True], ["a"], []],
        [["a", 1, 2.5, True]],
        [[1, 2.5, None]],
        [[], ...],
        [LONG, 0.5],
        [[LONG], [0.5]],
        [LONG, 2],
        [BIG, 2],
        [[BIG, 2]],
        ["007", 7, "2024-02-30", "2024-02-29"],
        [{"a": 1}, 3, [[1]]],
        [[{"a": 1}], [2]],
        [0.1, 1e300, 1e16, -0.0],
        [False, None, ...],
    ],
    ids=repr,
)
def test_the_same_records_are_the_same_columns_by_file_by_add_and_over_http(
    tmp_path: Path, values: list[Any], stored: str | None
) -> None:
    fields: list[Any] | None = None
    if stored is not None:
        fields = [pa.field("v", pa.list_(pa.float64()) if "list" in stored else pa.type_for_alias(stored))]
    rows = rows_of(values)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    by_file, by_add = read(str(lines), fields), read(source_of(rows, CONFIG), fields)
    assert by_add == by_file
    flat = [{name: row[name] for name in ("doc_id", "title", "text")} for row in rows]
    sent = [
        document | {"metadata": {name: row[name] for name in row.keys() & {"v"}}}
        for document, row in zip(flat, rows, strict=True)
    ]
    if refused := by_file[3]:
        with pytest.raises(DocumentsRefusedError) as caught:
            checked_rows(json.loads(json.dumps(sent)), CONFIG, fields or [])
        assert [detail for _, detail in caught.value.faults] == refused
        return
    batch, scan = checked_rows(json.loads(json.dumps(sent)), CONFIG, fields or [])
    kept = [row.get("v") for row in batch.to_pylist()]
    assert (list(scan.metadata_fields), kept, told(scan), []) == by_file


@pytest.mark.parametrize(
    ("values", "kept", "kinds"),
    [
        ([DAY, TIME], ["2024-01-01", "2024-01-01 23:59:00"], "dates and times"),
        ([TIME, DAY], ["2024-01-01 23:59:00", "2024-01-01"], "dates and times"),
        ([TIME, ZONED], ["2024-01-01 23:59:00", "2024-01-01 23:59:00+05:00"], "times and times of zones"),
        ([[DAY, TIME]], [["2024-01-01", "2024-01-01 23:59:00"]], "dates and times"),
        ([1.5, True], ["1.5", "true"], "booleans and numbers"),
        ([[1, 2.5, True]], [["1", "2.5", "true"]], "booleans and numbers"),
        ([["a", 1, 2.5, True]], [["a", "1", "2.5", "true"]], "booleans and numbers and texts"),
        ([[1, 2.5, None]], [[1.0, 2.5, None]], ""),
        ([LONG, 0.5], [str(LONG), "0.5"], "integers beyond 53 bits and numbers"),
        ([BIG, 1.0], [str(BIG), "1.0"], "integers beyond 64 bits and numbers"),
        ([LONG, 2], [LONG, 2], ""),
        ([np.int64(5), np.float64(1.5), 2], [5.0, 1.5, 2.0], ""),
        ([TIME, None], [TIME, None], ""),
        ([TIME, FINE], [pd.Timestamp(TIME), FINE], ""),
        ([ZONED, ZONED.astimezone(dt.UTC)], [ZONED, ZONED], ""),
        ([Decimal("1.50"), 2, Decimal("NaN")], [Decimal("1.50"), Decimal("2.00"), None], ""),
        ([Decimal("1E+40"), Decimal("0.5")], [Decimal("1E+40"), Decimal("0.5")], ""),
        ([PurePosixPath("a/b")], ["a/b"], ""),
        ([{"b", "a"}], [["a", "b"]], ""),
        ([[np.int64(1), np.datetime64("NaT"), None]], [[1, None, None]], ""),
    ],
)
def test_values_of_a_column_are_kept_as_they_are_or_as_texts(
    values: list[Any], kept: list[Any], kinds: str
) -> None:
    _, found, warnings, _ = read_given(values)
    assert found == kept
    warnings = [warning for warning in warnings if "filters cannot" not in warning]
    assert warnings == ([f"column 'v' holds {kinds}, as in memory: {AS_TEXTS}"] if kinds else [])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"x", "values of type binary"),
        ([b"x", "y"], "lists of values of type binary"),
        (pd.Period("2024-01"), "values of type Period"),
        (range(2), "values of type range"),
        (dt.timedelta(1), "values of type duration[us]"),
        ({"a": 1}, "objects or nested lists"),
    ],
)
def test_a_value_that_no_column_takes_is_null_and_told_by_its_type(value: Any, what: str) -> None:
    fields, found, warnings, _ = read_given([value, None])
    assert (fields, found) == ([], [None, None])
    assert warnings == [f"column 'v' of memory cannot be stored: it holds {what}; it is left out"]
    _, found, warnings, _ = read_given([value, "7"])
    assert found in ([None, "7"], [None, ["7"]])
    assert f"values of column 'v' in memory are left out: it holds {what}" in warnings


def test_an_infinite_value_and_one_that_can_be_no_id_refuse_their_rows_by_name() -> None:
    *_, details = read_given([Decimal("Infinity"), 1.0])
    assert details == ["column 'v' holds NaN or infinity"]
    rows = [{"doc_id": each, "text": "x"} for each in ("a", b"b", {"c": 1}, PurePosixPath("d"))]
    *_, details = read(source_of(rows, CONFIG))
    assert details == [
        f"column 'doc_id' must hold texts, got {each} that does not fit"
        for each in ("binary", "an object or a nested list")
    ]


def test_a_row_without_keys_is_one_without_an_id() -> None:
    for rows in ([{}], [{}, {}], [{}, {"doc_id": "a", "text": "x"}]):
        *_, details = read(source_of(rows, CONFIG))
        assert details == ["the id is null"] * sum(not row for row in rows)


@pytest.mark.parametrize(
    ("objects", "kept"),
    [
        ([1, "a"], ["1", "a"]),
        ([DAY, TIME], ["2024-01-01", "2024-01-01 23:59:00"]),
        ([1.5, True], ["1.5", "true"]),
        (["a", None], ["a", None]),
        ([np.array([1.0]), None], [[1.0], None]),
    ],
    ids=repr,
)
def test_objects_in_a_frame_of_pandas_are_read_as_rows_are(objects: list[Any], kept: list[Any]) -> None:
    column = pd.Series(objects, dtype=object, index=["a", "b"])
    frame = pd.DataFrame({"text": ["x", "y"], "v": column, "n": np.array([1, 2], np.int64)}, ["a", "b"])
    frame.index.name = "doc_id"
    fields, found, _, _ = read(source_of(frame, CONFIG))
    assert found == kept
    assert [field.name for field in fields] == ["v", "n"]


@pytest.mark.parametrize(
    ("column", "kept"),
    [
        (pd.arrays.SparseArray([0, 5]), [0, 5]),
        (pd.Categorical([1, "a"]), ["1", "a"]),
        (np.array([1j, 2]), [None, None]),
    ],
    ids=["sparse", "mixed", "complex"],
)
def test_a_frame_of_pandas_with_a_column_that_arrow_does_not_take_is_read_as_rows(
    column: Any, kept: list[Any]
) -> None:
    frame = pd.DataFrame({"doc_id": ["a", "b"], "text": "x", "v": column})
    _, found, warnings, details = read(source_of(frame, CONFIG))
    assert (found, details) == (kept, [])
    assert ("values of type complex" in " ".join(warnings)) == (kept == [None, None])


def test_an_index_of_pandas_that_counts_may_hold_the_ids() -> None:
    frame = pd.DataFrame({"text": ["x", "y"], "v": [1, 2]}, pd.RangeIndex(10, 30, 10, name="doc_id"))
    found = checked(source_of(frame, CONFIG), config=CONFIG)
    assert [row["doc_id"] for row in found.rows] == ["10", "20"]


@pytest.mark.parametrize("kind", [pl.Int128, pl.UInt128])
@pytest.mark.parametrize(
    ("values", "kept", "told_of"),
    [
        ([5, 2**63 - 1, None], [5, 2**63 - 1, None], ""),
        (
            [5, BIG],
            ["5", str(BIG)],
            f"column 'v' holds integers beyond 64 bits and numbers, as in memory: {AS_TEXTS}",
        ),
        ([[5], [7, None]], [[5], [7, None]], ""),
        (
            [{"a": 5}],
            [None],
            "column 'v' of memory cannot be stored: it holds objects or nested lists; it is left out",
        ),
    ],
    ids=repr,
)
def test_integers_of_128_bits_in_a_frame_of_polars_are_read_as_in_rows(
    kind: Any, values: list[Any], kept: list[Any], told_of: str
) -> None:
    nested = {list: pl.List(kind), dict: pl.Struct({"a": kind})}.get(type(values[0]), kind)
    ids = pl.Series([7 + place for place in range(len(values))], dtype=kind)
    fine = pl.Series([FINE.value] * len(values)).cast(pl.Datetime("ns"))
    frame = pl.DataFrame({"doc_id": ids, "text": "x", "v": pl.Series(values, dtype=nested), "fine": fine})
    fields, found, warnings, details = read(source_of(frame, CONFIG))
    assert (found, details) == (kept, [])
    assert {field.name: str(field.type) for field in fields}["fine"] == "timestamp[ns]"
    assert [each for each in warnings if "filters cannot" not in each] == ([told_of] if told_of else [])
