"""Vectors of rows: what is packed of them, and what each bad one is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.corpus.given_vectors import WHOLE, packed, vector_records

GOOD = {"start": 0, "end": 8, "vector": [3.0, 4.0]}
TYPES = {
    "lists": pa.list_(pa.float64()),
    "large": pa.large_list(pa.float32()),
    "fixed": pa.list_(pa.float32(), 2),
    "half": pa.list_(pa.float16()),
    "whole numbers": pa.list_(pa.int64()),
}


@pytest.mark.parametrize("arrow_type", TYPES.values(), ids=TYPES)
def test_vectors_of_every_type_are_packed_as_unit_vectors(arrow_type: pa.DataType) -> None:
    values = [[3, 4], None, [0, 2]]
    if pa.types.is_float16(arrow_type.value_type):
        values = [value and [np.float16(each) for each in value] for value in values]
    column = pa.array([None, *values], arrow_type).slice(1)
    cells, faults = packed(column, np.array([5, 5, 5]), 2)
    assert faults.tolist() == ["", "null", ""]
    (first,), (last,) = (np.frombuffer(cells[row].as_py(), vector_records(2)) for row in (0, 2))
    assert (first["end"], last["end"]) == (WHOLE, WHOLE)
    np.testing.assert_allclose([first["vector"], last["vector"]], [[0.6, 0.8], [0.0, 1.0]], rtol=1e-6)


def test_chunks_are_packed_with_their_spans_also_of_a_sliced_column() -> None:
    rows = [[GOOD], [{**GOOD, "end": 5}, {"start": 4, "end": 8, "vector": [0.0, -1.0]}], None]
    column = pa.array([[GOOD, GOOD], *rows]).slice(1)
    cells, faults = packed(column, np.array([8, 8, 8]), 2)
    assert faults.tolist() == ["", "", "null"]
    records = np.frombuffer(cells[1].as_py(), vector_records(2))
    assert records[["start", "end"]].tolist() == [(0, 5), (4, 8)]
    np.testing.assert_allclose(records["vector"], [[0.6, 0.8], [0.0, -1.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1.0], "one of 1"),
        ([], "one of 0"),
        ([0.0, 0.0], "a zero vector"),
        ([1.0, float("nan")], "one with null, NaN"),
        ([1.0, None], "one with null, NaN"),
        ([1e200, 1e200], "too large a number"),
        ([{**GOOD, "vector": None}], "a chunk without 'vector'"),
        ([GOOD, None], "a chunk without 'start' and 'end' and 'vector'"),
        ([{**GOOD, "end": 9}], "a chunk from 0 to 9 in a text of 8 characters"),
        ([{**GOOD, "start": -1}], "a chunk from -1 to 8 in a text of 8 characters"),
        ([GOOD, {**GOOD, "start": None, "end": None}], "a chunk without 'start' and 'end'"),
        ([{**GOOD, "start": 8}], "a chunk from 8 to 8 in a text of 8 characters"),
        ([GOOD, GOOD], "a chunk from 0 to 8 out of order"),
        ([GOOD, {"start": 4, "end": 8, "vector": [-3.0, -4.0]}], "chunks whose vectors cancel out"),
    ],
)
def test_a_vector_that_cannot_be_used_is_told(value: Any, told: str) -> None:
    _, faults = packed(pa.array([value]), np.array([8]), 2)
    assert told in faults[0]


def test_a_row_of_no_chunks_is_told() -> None:
    _, faults = packed(pa.array([[], [GOOD]]), np.array([8, 8]), 2)
    assert faults.tolist() == ["no chunk", ""]


def test_chunks_that_cancel_out_but_for_rounding_are_told() -> None:
    angles = 0.1 + np.arange(3) * 2 * np.pi / 3
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).tolist()
    chunks = [{"start": 2 * at, "end": 2 * at + 2, "vector": vector} for at, vector in enumerate(vectors)]
    _, faults = packed(pa.array([chunks]), np.array([8]), 2)
    assert "cancel out" in faults[0]
