"""Scores that become one ranking, and windows judged by token vectors against MaxSim of decoded vectors."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cairn.pipeline.index.segments.segment import CodeColumn, TokenVectors
from cairn.pipeline.search.fusion import (
    JUDGED_WINDOWS,
    MAX_QUERY_TOKENS,
    LateFusion,
    LateQuery,
    Scale,
    Windows,
    best_places,
    document_scores,
    judge_windows,
    window_max_sim,
    with_neighbours,
)
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.token_vectors.codebook import TokenCodebook
from cairn.pipeline.types import QueryTokens
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.late_models import random_codebook


def test_scale_begins_at_the_lowest_where_none_passes_the_floor() -> None:
    scores = np.array([2.0, 4.0, 3.0])
    assert Scale.of(scores, floor=9.0).apply(scores).tolist() == [0.0, 1.0, 0.5]
    equal = np.array([0.3, 0.3])
    assert Scale.of(equal, floor=0.3).apply(equal).tolist() == [1.0, 1.0]


def test_query_that_the_model_does_not_know_is_ranked_by_words_where_they_are_found() -> None:
    cosines = np.array([0.64, 0.998, 0.995, 0.93])  # of texts of a script that the model does not know
    found = np.array([7.4, 0.0, 2.0, 0.0])
    options = SearchOptions(granularity="document")
    scores, _ = document_scores(
        options, {"document": cosines}, bm25_N=found, average_chunk=0.9, is_known=False
    )

    assert scores == pytest.approx(found / 7.4)
    alone, fusion = document_scores(options, {"document": cosines}, average_chunk=0.9, is_known=False)
    assert fusion is None
    assert alone == pytest.approx(cosines)


@given(own=arrays(np.float64, st.integers(0, 40), elements=st.floats(-1, 1)), data=st.data())
def test_passages_with_their_neighbours_stay_between_the_scores_of_their_document(
    own: np.ndarray, data: st.DataObject
) -> None:
    owner = np.sort(data.draw(arrays(np.int64, len(own), elements=st.integers(0, 5))))
    near = with_neighbours(own, owner)
    for document in np.unique(owner):
        inside = owner == document
        assert near[inside].min() >= own[inside].min() - 1e-12
        assert near[inside].max() <= own[inside].max() + 1e-12
        assert near[inside] == pytest.approx(with_neighbours(own[inside], owner[inside]))


def test_max_sim_is_a_fifth_of_a_documents_score_beside_bm25_and_half_of_a_passages() -> None:
    dense = np.array([0.5, 0.9, 0.1])
    scores, fusion = document_scores(
        SearchOptions(), {"document": dense, "chunk": dense}, bm25_N=np.array([2.0, 1.0, 0.0])
    )
    late = LateFusion.of(scores, fusion, average_chunk=0.1)
    max_sim = np.array([1.0, 0.0, 0.5])
    assert late.documents(scores, max_sim) == pytest.approx((2 * scores + max_sim / 2) / 2.5)
    assert late.passages(scores, max_sim) == pytest.approx((scores + max_sim) / 2)
    alone = LateFusion.of(dense, None, average_chunk=0.1)  # without BM25 it is half of every score
    expected = (np.array([0.5, 1.0, 0.0]) + max_sim) / 2
    assert alone.documents(dense, max_sim) == pytest.approx(expected)
    assert alone.passages(dense, max_sim) == pytest.approx(expected)


MODEL_DIM, VOCABULARY = 24, 40


def make_column(codebook: TokenCodebook, sizes: np.ndarray, seed: int) -> CodeColumn:
    codes = np.random.default_rng(seed).integers(0, 256, (int(sizes.sum()), codebook.vector_bytes + 1))
    return CodeColumn(
        rows=codes.astype(np.uint8), offsets_M1=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    )


def make_stored(num_bytes: int = 8) -> TokenVectors:
    """Return 40 chunks of 0 to 9 tokens; the first of every four begins a document and may have a title."""
    codebook = random_codebook(MODEL_DIM, num_bytes=num_bytes)
    generator = np.random.default_rng(1)
    titles = np.where(np.arange(40) % 8 == 0, 3, 0)
    return TokenVectors(
        codebook=codebook,
        chunks=make_column(codebook, generator.integers(0, 10, 40), 2),
        titles=make_column(codebook, titles, 3),
    )


def make_query(ids: list[int]) -> QueryTokens:
    states = np.random.default_rng(4).standard_normal((len(ids), MODEL_DIM)).astype(np.float32)
    places = np.arange(len(ids))
    return QueryTokens(
        states_TD=states, ids_T=np.array(ids, np.int32), start_char=places, end_char=places + 1
    )


def naive_max_sim(stored: TokenVectors, query: LateQuery, first: int, end: int, title: int) -> float:
    read = (stored.chunks.read(np.arange(first, end)), stored.titles.read(np.array([title])))
    codes, centroids = np.concatenate([each.codes for each in read]), stored.codebook.centroids
    both = centroids[np.arange(len(centroids)), codes].reshape(len(codes), MODEL_DIM).astype(np.float32)
    return float((both @ query.vectors_qV.T).max(axis=0) @ query.weights_q) if len(both) else 0.0


@pytest.mark.parametrize("num_bytes", [3, 8, 24])
def test_window_max_sim_is_that_of_decoded_vectors(num_bytes: int):
    stored = make_stored(num_bytes)
    query = LateQuery.of(make_query([3, 1, 4, 1]), stored.codebook)
    assert query is not None
    windows = [(first, min(first + size, 40), first // 4 * 4) for first in range(38) for size in (1, 2, 3)]
    found = window_max_sim(stored, query, Windows(*map(np.array, zip(*windows, strict=True))))

    expected = [naive_max_sim(stored, query, *window) for window in windows]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_window_without_a_token_scores_nothing():
    codebook = random_codebook(MODEL_DIM)
    empty = make_column(codebook, np.zeros(3, np.int64), 0)
    query = LateQuery.of(make_query([1]), codebook)
    assert query is not None
    stored = TokenVectors(codebook=codebook, chunks=empty, titles=empty)

    found = window_max_sim(stored, query, Windows(np.array([0, 1]), np.array([2, 3]), np.array([0, 0])))
    assert found.tolist() == [0.0, 0.0]


def test_query_whose_tokens_weigh_nothing_is_not_judged():
    weightless = replace(random_codebook(MODEL_DIM), weights_X=np.zeros(VOCABULARY, np.float16))

    assert LateQuery.of(make_query([1, 2]), weightless) is None
    assert LateQuery.of(make_query([]), random_codebook(MODEL_DIM)) is None


def test_long_query_is_judged_by_its_heaviest_tokens():
    codebook = random_codebook(MODEL_DIM)
    query = LateQuery.of(make_query([place % VOCABULARY for place in range(500)]), codebook)

    assert query is not None
    assert len(query.places_q) == MAX_QUERY_TOKENS
    assert query.weights_q.sum() == pytest.approx(1.0, abs=1e-5)
    lightest = np.sort(codebook.weights_X[np.arange(500) % VOCABULARY])[-MAX_QUERY_TOKENS]
    assert codebook.weights_X[query.places_q % VOCABULARY].min() == lightest


def test_judged_are_the_best_windows_and_others_gain_nothing():
    stored = make_stored()
    query = LateQuery.of(make_query([3, 1]), stored.codebook)
    assert query is not None
    first = np.repeat(np.arange(36), 2)
    end = first + np.tile([1, 2], 36)
    scores = np.random.default_rng(5).random(len(first))
    judged = judge_windows(
        partial(window_max_sim, stored, query), scores, Windows(first, end, first // 4 * 4)
    )

    assert len(judged.first_J) == JUDGED_WINDOWS
    kept = np.argsort(-scores)[:JUDGED_WINDOWS]
    assert sorted(judged.first_J) == sorted(first[kept])
    assert judged.scaled(judged.max_sim_J).min() == 0.0
    assert judged.scaled(judged.max_sim_J).max() == 1.0
    assert judged.spread(np.array([37]))[0] == np.float32(judged.low)


def test_best_places_ties_go_to_the_earlier():
    assert best_places(np.array([1.0, 2.0, 2.0, 0.0, 2.0]), 2).tolist() == [1, 2]
    assert best_places(np.array([0.5, 1.0]), 5).tolist() == [1, 0]


def test_windows_of_many_chunks_take_no_more_memory_than_a_block():
    codebook = random_codebook(MODEL_DIM)
    sizes = np.full(8_000, 16)
    stored = TokenVectors(
        codebook=codebook,
        chunks=make_column(codebook, sizes, 0),
        titles=make_column(codebook, np.zeros(len(sizes), np.int64), 0),
    )
    query = LateQuery.of(make_query([place % VOCABULARY for place in range(128)]), codebook)
    assert query is not None
    windows = Windows(np.array([0, 5]), np.array([7_000, 8_000]), np.array([0, 0]))
    tracemalloc.start()
    found = window_max_sim(stored, query, windows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 30 * 2**20
    expected = naive_max_sim(stored, query, 5, 8_000, 0)
    assert found[1] == pytest.approx(expected, abs=1e-5)
