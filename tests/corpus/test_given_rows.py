"""Rows that Python gives: values of several kinds in a column lose nothing, and no row is passed over."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import KINDS
from cairn.pipeline.corpus.given_rows import table_of

DAY, TIME = dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 23, 59)  # noqa: DTZ001 (a column without a zone)
ZONED = TIME.replace(tzinfo=dt.timezone(dt.timedelta(hours=5)))


@pytest.mark.parametrize(
    ("values", "kept", "kinds"),
    [
        ([DAY, TIME], ["2024-01-01", "2024-01-01 23:59:00"], "dates, times"),
        ([TIME, DAY], ["2024-01-01 23:59:00", "2024-01-01"], "dates, times"),
        ([TIME, ZONED], ["2024-01-01 23:59:00", "2024-01-01 23:59:00+05:00"], "times, times of zones"),
        ([[DAY, TIME]], [["2024-01-01", "2024-01-01 23:59:00"]], "dates, times"),
        ([1.5, True], ["1.5", "true"], "booleans, numbers"),
        ([[1, 2.5, True]], [["1", "2.5", "true"]], "booleans, numbers"),
        ([2**53 + 1, 0.5], [str(2**53 + 1), "0.5"], "integers beyond 64 bits, numbers"),
        ([np.int64(5), np.float64(1.5), 2], [5.0, 1.5, 2.0], ""),
        ([TIME, None], [TIME, None], ""),
        ([Decimal("1.50"), 2, Decimal("NaN")], [Decimal("1.50"), Decimal("2.00"), None], ""),
        ([PurePosixPath("a/b")], ["a/b"], ""),
    ],
)
def test_values_of_a_column_are_kept_as_they_are_or_as_texts(
    values: list[Any], kept: list[Any], kinds: str
) -> None:
    table = table_of([{"id": "a", "text": "x", "v": value} for value in values], CorpusConfig())
    assert table.column("v").to_pylist() == kept
    assert (table.field("v").metadata or {}).get(KINDS, b"").decode() == kinds


def test_a_row_without_keys_is_one() -> None:
    assert table_of([{}, {}], CorpusConfig()).num_rows == 2


def test_a_frame_with_objects_of_several_kinds_is_taken_row_by_row() -> None:
    frame = pd.DataFrame({"text": ["x", "y"], "v": [1, "a"]}, index=pd.Index(["a", "b"], name="id"))
    table = table_of(frame, CorpusConfig())
    assert table.select(["id", "v"]).to_pylist() == [{"id": "a", "v": "1"}, {"id": "b", "v": "a"}]
    assert table.schema.field("v").type == pa.string()
