import dataclasses
from typing import Any

import numpy as np
import pytest

from pipeline.errors import ConfigError, UsageError
from pipeline.search.options import SearchKeywords, SearchOptions, check_queries, unit_vectors


def test_search_keywords_are_the_fields_of_the_options() -> None:
    assert set(SearchKeywords.__annotations__) == {field.name for field in dataclasses.fields(SearchOptions)}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 201}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"top_k": 10**5000}, "top_k"),
        ({"passages": -1}, "passages"),
        ({"passages": 51}, "passages"),
        ({"granularity": "word"}, "document, chunk, both"),
        ({"hybrid": "yes"}, "hybrid"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": "128"}, "chunk_tokens"),
        ({"max_candidates": 5}, "max_candidates"),
        ({"max_candidates": 1_001}, "max_candidates"),
        ({"max_characters": 0}, "max_characters"),
        ({"max_characters": 1_000_001}, "max_characters"),
        ({"max_characters": 2_000, "passages": 0}, "passages = 0"),
        ({"weights": {"title": 1.0}}, "document, chunk, bm25"),
        ({"weights": {"chunk": float("nan")}}, "chunk"),
        ({"weights": {"chunk": -1.0}}, "chunk"),
        ({"weights": [1, 2]}, "mapping"),
        ({"weights": {"document": 0, "chunk": 0, "bm25": 0}}, "weights"),
        ({"weights": {"document": 0, "chunk": 0}}, "document and chunk"),
    ],
)
def test_search_options_out_of_bounds_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        SearchOptions(**options)


def test_search_options_candidates_grow_with_top_k() -> None:
    assert [SearchOptions(top_k=top_k).num_candidates for top_k in (1, 50, 200)] == [50, 100, 400]


def test_search_options_weights_override_only_what_they_name() -> None:
    options = SearchOptions(weights={"bm25": 2})
    assert [options.weight(part) for part in ("document", "chunk", "bm25")] == [0.25, 0.75, 2.0]


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
