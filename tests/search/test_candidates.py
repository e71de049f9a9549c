from typing import Any

import numpy as np
import pytest
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.search import candidates
from cairn.pipeline.search.candidates import (
    PassageScores,
    best_of_documents,
    chunk_positions,
    merge_nominees,
    nominate_by_chunk,
    nominate_by_document,
    nominate_by_passage_bm25,
    score_chunks,
    score_documents,
    score_windows,
    window_cosines,
)
from cairn.pipeline.search.reader import LocalScores


@pytest.fixture(scope="module")
def generation(stones: Any) -> Generation:
    return open_generation(stones.layout)


@pytest.fixture
def query(make_encoder: Any) -> np.ndarray:
    return make_encoder().encode_queries(["a query"])


def test_chunk_positions_are_all_chunks_of_the_documents(generation: Generation) -> None:
    documents = np.array([5, 2, 40])
    expected = [
        p for d in documents for p in range(generation.chunk_offsets[d], generation.chunk_offsets[d + 1])
    ]
    assert chunk_positions(generation, documents).tolist() == expected
    assert len(chunk_positions(generation, documents[:0])) == 0


def test_nominate_by_document_equals_brute_force(
    generation: Generation, stones: Any, query: np.ndarray
) -> None:
    expected = np.argsort(-(stones.document_vectors @ query[0]), kind="stable")[:7]
    assert nominate_by_document(generation, query, 7, None)[0].tolist() == expected.tolist()


def test_nominate_by_chunk_widens_until_there_are_enough_documents(
    generation: Generation, stones: Any, query: np.ndarray
) -> None:
    best = [float((vectors @ query[0]).max()) for vectors in stones.chunk_vectors]
    expected = np.argsort(-np.array(best), kind="stable")
    found = nominate_by_chunk(generation, query, 20, 20, None)[0]
    assert len(found) >= 20
    assert found[:20].tolist() == expected[:20].tolist()


def test_nominate_by_chunk_stays_within_the_filter(generation: Generation, query: np.ndarray) -> None:
    allowed = np.array([3, 9, 27])
    assert sorted(nominate_by_chunk(generation, query, 2, 3, allowed)[0]) == allowed.tolist()


def test_nominate_by_passage_bm25_takes_the_documents_of_the_best_passages(generation: Generation) -> None:
    scores = np.zeros(generation.num_chunks, np.float32)
    first = generation.chunk_offsets.tolist()
    scores[[first[9], first[4], first[5] - 1, first[40], first[7]]] = 5.0, 4.0, 3.0, 2.0, 2.0
    passages = PassageScores(scores_M=scores)
    assert nominate_by_passage_bm25(generation, passages, 10).tolist() == [9, 4, 7, 40]
    assert nominate_by_passage_bm25(generation, passages, 3).tolist() == [9, 4]
    none = PassageScores(scores_M=np.zeros_like(scores))
    assert nominate_by_passage_bm25(generation, none, 3).tolist() == []
    few = np.array([first[4], first[7], first[9]])
    assert nominate_by_passage_bm25(
        generation, PassageScores(scores_M=scores[few], chunks=few), 2
    ).tolist() == [9, 4]


def test_best_of_documents_is_the_maximum_over_each_ones_chunks(generation: Generation) -> None:
    scores = np.random.default_rng(0).random(generation.num_chunks, np.float32)
    positions = np.array([0, 7, 8, 59])
    expected = [
        scores[generation.chunk_offsets[p] : generation.chunk_offsets[p + 1]].max() for p in positions
    ]
    own = scores[chunk_positions(generation, positions)]
    assert best_of_documents(generation, own, positions).tolist() == expected
    assert len(best_of_documents(generation, own[:0], positions[:0])) == 0


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


def test_score_documents_equals_brute_force(generation: Generation, stones: Any, query: np.ndarray) -> None:
    positions = np.array([0, 1, 2, 30, 59])
    np.testing.assert_allclose(
        score_documents(generation, positions, query[0]),
        stones.document_vectors[positions] @ query[0],
        atol=1e-6,
    )


@pytest.mark.parametrize("block", [1, 10, 10_000])
def test_score_chunks_equals_brute_force_for_any_block(
    generation: Generation, stones: Any, query: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "BLOCK_CHUNKS", block)
    positions = np.array([0, 1, 7, 8, 58])
    scored = score_chunks(generation, positions, query[0])
    expected = [stones.chunk_vectors[position] @ query[0] for position in positions]
    np.testing.assert_allclose(scored, np.concatenate(expected), atol=1e-6)
    best = best_of_documents(generation, scored, positions)
    np.testing.assert_allclose(best, [scores.max() for scores in expected], atol=1e-6)


def test_score_chunks_of_no_documents_is_empty(generation: Generation, query: np.ndarray) -> None:
    none = np.empty(0, np.int64)
    scored = score_chunks(generation, none, query[0])
    assert len(scored) == 0
    assert len(best_of_documents(generation, scored, none)) == 0


@pytest.mark.parametrize("block", [1, 10, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_score_windows_equals_brute_force_for_any_block(
    generation: Generation,
    stones: Any,
    query: np.ndarray,
    size: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "BLOCK_CHUNKS", block)
    monkeypatch.setattr(candidates, "BLOCK_WINDOWS", block)
    positions = np.array([0, 1, 5, 6, 7, 30, 59])
    cosines = window_cosines(generation, positions, query[0], size)
    found = score_windows(generation, positions, size, cosines)
    expected = []
    for owner, position in enumerate(positions):
        vectors, offset = stones.chunk_vectors[position], int(generation.chunk_offsets[position])
        for start in range(max(len(vectors) - size, 0) + 1):
            total = vectors[start : start + size].sum(axis=0)
            score = float(total @ query[0] / np.linalg.norm(total))
            expected.append((owner, offset + start, offset + min(start + size, len(vectors)), score))
    owners, firsts, ends, scores = zip(*expected, strict=True)
    assert (found.owner.tolist(), found.first.tolist(), found.end.tolist()) == (
        list(owners),
        list(firsts),
        list(ends),
    )
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_scores_of_chunk_vectors_decoded_once_are_those_of_vectors_decoded_each_time(
    generation: Generation, query: np.ndarray, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = np.array([0, 1, 5, 6, 7, 30, 59])
    decoded: list[int] = []
    reconstruct = type(generation.chunks).reconstruct

    def counted(index: Any, places: np.ndarray) -> np.ndarray:
        decoded.append(len(places))
        return reconstruct(index, places)

    def scores() -> list[np.ndarray]:
        found = LocalScores(generation, positions, query[0], 1, lambda _: None)
        some = [found.windows(chosen, size).cosine_W for chosen in (np.arange(7), np.array([6, 2]))]
        return [found.chunks(), *some]

    monkeypatch.setattr(type(generation.chunks), "reconstruct", counted)
    once = scores()
    assert len(decoded) == 1
    monkeypatch.setattr("cairn.pipeline.search.reader.HELD_CHUNKS", 0)
    for kept, read in zip(once, scores(), strict=True):
        np.testing.assert_array_equal(kept, read)


def test_score_windows_of_no_documents_is_empty(generation: Generation, query: np.ndarray) -> None:
    none = np.empty(0, np.int64)
    cosines = window_cosines(generation, none, query[0], 2)
    assert len(score_windows(generation, none, 2, cosines).scores) == 0
