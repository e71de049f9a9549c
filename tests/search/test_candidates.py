from typing import Any

import numpy as np
import pytest
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.search import candidates, reader
from cairn.pipeline.search.candidates import (
    BM25Scores,
    merge_nominees,
    nominate_by_passage_bm25,
    score_windows,
)
from cairn.pipeline.search.reader import LocalReader, LocalScores, NearestAsked, ScoresAsked


@pytest.fixture(scope="module")
def generation(stones: Any) -> Generation:
    return open_generation(stones.layout)


@pytest.fixture
def query(make_encoder: Any) -> np.ndarray:
    return make_encoder().encode_queries(["a query"])


def nominees(generation: Generation, query: np.ndarray, **asked: Any) -> np.ndarray:
    """Return the documents that one index nominates."""
    asked = {"num_documents": None, "num_chunks": None, "min_documents": 1, "allowed": None, **asked}
    nominate = LocalReader(generation).nominate(query, NearestAsked(**asked))
    (found,) = nominate(0, ScoresAsked(parts=(), words=None, size=None)).lists
    return found


def test_chunks_that_nominate_are_widened_until_there_are_enough_documents(
    generation: Generation, stones: Any, query: np.ndarray
) -> None:
    best = [float((vectors @ query[0]).max()) for vectors in stones.chunk_vectors]
    expected = np.argsort(-np.array(best), kind="stable")
    found = nominees(generation, query, num_chunks=20, min_documents=20)
    assert len(found) >= 20
    assert found[:20].tolist() == expected[:20].tolist()


def test_chunks_that_nominate_stay_within_the_filter(generation: Generation, query: np.ndarray) -> None:
    allowed = np.array([3, 9, 27])
    found = nominees(generation, query, num_chunks=2, min_documents=3, allowed=allowed)
    assert sorted(found) == allowed.tolist()


def test_nominate_by_passage_bm25_takes_the_documents_of_the_best_passages(generation: Generation) -> None:
    scores = np.zeros(generation.num_chunks, np.float32)
    first = generation.chunk_offsets.tolist()
    scores[[first[9], first[4], first[5] - 1, first[40], first[7]]] = 5.0, 4.0, 3.0, 2.0, 2.0
    passages = BM25Scores(scores_M=scores)
    assert nominate_by_passage_bm25(generation, passages, 10).tolist() == [9, 4, 7, 40]
    assert nominate_by_passage_bm25(generation, passages, 3).tolist() == [9, 4]
    none = BM25Scores(scores_M=np.zeros_like(scores))
    assert nominate_by_passage_bm25(generation, none, 3).tolist() == []
    few = np.array([first[4], first[7], first[9]])
    assert nominate_by_passage_bm25(generation, BM25Scores(scores_M=scores[few], rows=few), 2).tolist() == [
        9,
        4,
    ]


def test_merge_nominees_is_the_union_ascending(generation: Generation) -> None:
    merged = merge_nominees(generation, [np.array([7, 3]), np.array([3, 1]), np.array([], np.int64)], 1)
    assert merged.tolist() == [1, 3, 7]


def test_merge_nominees_over_budget_keeps_what_ranks_highest_anywhere(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = np.diff(generation.chunk_offsets)
    monkeypatch.setattr(candidates, "MAX_SCORED_CHUNKS", int(counts[[9, 4, 8]].sum()))
    assert merge_nominees(generation, [np.array([9, 8, 1]), np.array([4, 2, 0])], 1).tolist()[:1] != [0]
    assert set(merge_nominees(generation, [np.array([9, 8, 1]), np.array([4, 8, 0])], 1)) == {4, 8, 9}


def test_merge_nominees_over_budget_keeps_the_least_number(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "MAX_SCORED_CHUNKS", 1)
    assert merge_nominees(generation, [np.arange(10)], 4).tolist() == [0, 1, 2, 3]


def scores_of(generation: Generation, positions: np.ndarray, query: np.ndarray) -> LocalScores:
    return LocalScores(generation, positions, query[0], None)


def decoded_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(candidates, "BLOCK_WINDOWS", block)
    monkeypatch.setattr(reader, "BLOCK_CHUNKS", block)
    monkeypatch.setattr(reader, "blocks", lambda counts: candidates.blocks(counts, block))


@pytest.mark.parametrize("block", [1, 10, 10_000])
def test_scores_of_candidates_equal_brute_force_for_any_block(
    generation: Generation, stones: Any, query: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded_in_blocks(monkeypatch, block)
    positions = np.array([0, 1, 7, 8, 58])
    scores = scores_of(generation, positions, query)
    documents = stones.document_vectors[positions] @ query[0]
    chunks = [(stones.chunk_vectors[position] @ query[0]).max() for position in positions]
    np.testing.assert_allclose(scores.documents(), documents, atol=1e-6)
    np.testing.assert_allclose(scores.chunks(), chunks, atol=1e-6)


@pytest.mark.parametrize("block", [1, 10, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_windows_of_candidates_equal_brute_force_for_any_block(
    generation: Generation,
    stones: Any,
    query: np.ndarray,
    size: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded_in_blocks(monkeypatch, block)
    positions, chosen = np.array([0, 1, 5, 6, 7, 30, 59]), np.array([1, 5, 2])
    scores = scores_of(generation, positions, query)
    for places in (np.arange(7), chosen):
        own = positions[places]
        found = score_windows(generation, own, size, scores.windows(places, size).cosine_W)
        expected = []
        for owner, position in enumerate(own):
            vectors, offset = stones.chunk_vectors[position], int(generation.chunk_offsets[position])
            for start in range(max(len(vectors) - size, 0) + 1):
                total = vectors[start : start + size].sum(axis=0)
                score = float(total @ query[0] / np.linalg.norm(total))
                expected.append((owner, offset + start, offset + min(start + size, len(vectors)), score))
        owners, firsts, ends, cosines = map(list, zip(*expected, strict=True))
        assert (found.owner.tolist(), found.first.tolist(), found.end.tolist()) == (owners, firsts, ends)
        np.testing.assert_allclose(found.scores, cosines, atol=1e-6)


def test_chunk_vectors_of_candidates_are_decoded_once(
    generation: Generation, query: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    reconstruct = type(generation.chunks).reconstruct

    def counted(index: Any, places: np.ndarray) -> np.ndarray:
        decoded.append(len(places))
        return reconstruct(index, places)

    monkeypatch.setattr(type(generation.chunks), "reconstruct", counted)
    scores = scores_of(generation, np.array([0, 1, 5]), query)
    scores.chunks()
    scores.windows(np.array([2, 0]), 2)
    assert len(decoded) == 1


def test_no_candidates_have_no_scores(generation: Generation, query: np.ndarray) -> None:
    none = np.empty(0, np.int64)
    scores = scores_of(generation, none, query)
    cosines = scores.windows(none, 2).cosine_W
    assert [len(scores.documents()), len(scores.chunks()), len(cosines)] == [0, 0, 0]
    assert len(score_windows(generation, none, 2, cosines).scores) == 0
