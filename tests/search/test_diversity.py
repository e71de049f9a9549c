"""Documents chosen by group and by maximal marginal relevance, against naive choices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search import diversity
from cairn.pipeline.search.diversity import NO_GROUP, chosen_places
from cairn.pipeline.search.searcher import Searcher
from hypothesis import given
from hypothesis import strategies as st

QUERIES = ["granite slate", "stone17 chalk flint", "é quartz"]


def naive_mmr(scores: np.ndarray, vectors: np.ndarray, count: int, weight: float) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < min(count, len(scores)):
        values = {
            place: weight * scores[place]
            - (1 - weight) * max((float(vectors[place] @ vectors[other]) for other in chosen), default=0.0)
            for place in range(len(scores))
            if place not in chosen
        }
        chosen.append(max(values, key=lambda place: (values[place], -place)))
    return chosen


@given(seed=st.integers(0, 999), weight=st.sampled_from([0.0, 0.3, 0.5, 1.0]), count=st.integers(1, 12))
def test_marginal_relevance_chooses_as_the_naive_loop(seed: int, weight: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((10, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = np.sort(rng.random(10))[::-1]
    found = chosen_places(scores, count, vectors_NV=vectors, mmr=weight)
    assert found == naive_mmr(scores, vectors, count, weight)


@given(
    groups=st.lists(st.integers(NO_GROUP, 3), max_size=20), size=st.integers(1, 3), count=st.integers(1, 9)
)
def test_groups_keep_the_best_of_each_and_never_limit_documents_without_a_value(
    groups: list[int], size: int, count: int
) -> None:
    scores = np.linspace(1.0, 0.0, len(groups))
    found = chosen_places(scores, count, groups_N=np.array(groups, np.int32), group_size=size)
    expected = [
        place for place, group in enumerate(groups) if group == NO_GROUP or groups[:place].count(group) < size
    ]
    assert found == expected[:count]


def ids_of(searcher: Searcher, query: str, **options: Any) -> list[str]:
    return [hit.doc_id for hit in searcher.search(query, **options).hits]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    ("column", "size"), [("cluster_id", 1), ("cluster_id", 3), ("year", 1), ("title", 1)]
)
def test_grouped_answer_is_the_whole_ranking_without_what_is_too_much(
    searcher: Searcher, query: str, column: str, size: int
) -> None:
    whole = searcher.search(query, top_k=60).hits
    values = {
        row["doc_id"]: row[column]
        for row in searcher.generation.dataset.to_table(columns=["doc_id", column]).to_pylist()
    }
    seen: Counter[Any] = Counter()
    expected: list[str] = []
    for hit in whole:
        value = values[hit.doc_id]
        seen[value] += 1
        if value is None or seen[value] <= size:
            expected.append(hit.doc_id)
    found = ids_of(searcher, query, top_k=10, group_by=column, group_size=size)
    assert found == expected[:10]
    options: dict[str, Any] = {"top_k": 10, "group_by": column, "group_size": size}
    assert sorted(ids_of(searcher, query, **options, max_characters=100_000)) == sorted(found)


def test_columns_that_are_grouped_by_are_forgotten_beyond_some(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversity, "MOST_COLUMNS", 1)
    read = [diversity.group_codes(searcher.generation, column) for column in ("year", "title", "year")]
    assert list(diversity._codes[searcher.generation]) == ["year"]  # pyright: ignore[reportPrivateUsage]
    np.testing.assert_array_equal(read[0], read[2])


def test_grouped_answer_is_filled_beyond_the_first_candidates(searcher: Searcher) -> None:
    clusters = {
        row["doc_id"]: row["cluster_id"]
        for row in searcher.generation.dataset.to_table(columns=["doc_id", "cluster_id"]).to_pylist()
    }
    short = 0
    for query in QUERIES:
        first = ids_of(searcher, query, top_k=4, max_candidates=4, hybrid=False, granularity="document")
        short += len({clusters[doc_id] for doc_id in first}) < 4
        options = {"group_by": "cluster_id", "hybrid": False, "granularity": "document"}
        found = ids_of(searcher, query, top_k=4, max_candidates=4, **options)
        assert len(found) == len({clusters[doc_id] for doc_id in found}) == 4
        filters = {"cluster_id": [1, 2]}
        assert len(ids_of(searcher, query, top_k=4, max_candidates=4, filters=filters, **options)) == 2
    assert short


def test_pages_of_a_diversified_ranking_are_those_of_one_answer(searcher: Searcher) -> None:
    options: dict[str, Any] = {"group_by": "year", "group_size": 4, "mmr": 0.6, "max_candidates": 30}
    whole = ids_of(searcher, QUERIES[0], top_k=20, **options)
    pages = [
        doc_id
        for offset in range(0, 20, 5)
        for doc_id in ids_of(searcher, QUERIES[0], top_k=5, offset=offset, **options)
    ]
    assert pages == whole
    assert len(whole) == len(set(whole)) == 20


def test_marginal_relevance_of_1_is_the_ranking_and_less_is_more_diverse(searcher: Searcher) -> None:
    plain, same, diverse = (
        ids_of(searcher, QUERIES[0], top_k=8, **options) for options in ({}, {"mmr": 1.0}, {"mmr": 0.1})
    )
    assert plain == same
    assert diverse[0] == plain[0]
    assert set(diverse) != set(plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_by": "colour"}, "group_by must be one of doc_id"),
        ({"group_by": "tags"}, "group_by must be one of doc_id"),
        ({"group_size": 2}, "must come with group_by"),
        ({"mmr": 1.5}, "mmr must be"),
    ],
)
def test_options_that_cannot_choose_are_refused(searcher: Searcher, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        searcher.search(QUERIES[0], **options)
