from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import UsageError
from cairn.pipeline.search.searcher import check_queries, unit_vectors


@pytest.mark.parametrize("query", ["", "   \n\t ", "x" * 8_193, "é" * 4_097, "\ud800", 7, None])
def test_check_queries_bad_query_is_refused(query: Any) -> None:
    with pytest.raises(UsageError):
        check_queries([query])


def test_check_queries_of_8192_bytes_passes() -> None:
    check_queries(["é" * 4_096])


@pytest.mark.parametrize("queries", [[], "one text", ["q"] * 1_025])
def test_check_queries_bad_batch_is_refused(queries: Any) -> None:
    with pytest.raises(UsageError):
        check_queries(queries)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_unit_vectors_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(UsageError, match="finite"):
        unit_vectors(np.array([[1.0, bad]], np.float32), 2)


@pytest.mark.parametrize(
    "vectors", [np.zeros((1, 2)), np.ones((1, 3)), np.ones(2), np.ones((0, 2)), np.array([["a", "b"]])]
)
def test_unit_vectors_of_another_shape_or_zero_are_refused(vectors: np.ndarray) -> None:
    with pytest.raises(UsageError):
        unit_vectors(vectors, 2)


def test_unit_vectors_huge_values_are_normalised_without_overflow() -> None:
    assert unit_vectors(np.array([[3e38, 0.0]], np.float32), 2).tolist() == [[1.0, 0.0]]
