"""What is nominated and how it is scored, against brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.generation import Generation, open_generation, table_errors
from cairn.pipeline.index.segments.words import sparse_term
from cairn.pipeline.lexical import bm25 as bm25_module
from cairn.pipeline.search import reader
from cairn.pipeline.search.filters import allowed_documents, compile_filter
from cairn.pipeline.search.reader import (
    MAX_WORDS,
    BM25Scores,
    LocalReader,
    LocalScores,
    NearestAsked,
    ScoresAsked,
    best_documents,
    bm25_documents,
    bm25_passages,
    bounded_words,
    few_documents,
    merge_nominees,
    nominate_by_passage_bm25,
    score_windows,
    sparse_documents,
    words_asked,
)
from cairn.pipeline.types import SPARSE_STEP


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
    allowed = np.array([3, 9, 27])
    within = nominees(generation, query, num_chunks=2, min_documents=3, allowed=allowed)
    assert sorted(within) == allowed.tolist()


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


def test_merged_nominees_are_the_union_ascending_cut_where_their_chunks_are_too_many(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merged(*rankings: list[int], least: int = 1) -> list[int]:
        return merge_nominees(generation, [np.array(each, np.int64) for each in rankings], least).tolist()

    assert merged([7, 3], [3, 1], []) == [1, 3, 7]
    counts = np.diff(generation.chunk_offsets)
    monkeypatch.setattr(reader, "MAX_SCORED_CHUNKS", int(counts[[9, 4, 8]].sum()))
    assert merged([9, 8, 1], [4, 2, 0])[0] != 0, "the lowest in every ranking goes"
    assert merged([9, 8, 1], [4, 8, 0]) == [4, 8, 9]
    monkeypatch.setattr(reader, "MAX_SCORED_CHUNKS", 1)
    assert merged(list(range(10)), least=4) == [0, 1, 2, 3]


def scores_of(generation: Generation, positions: np.ndarray, query: np.ndarray) -> LocalScores:
    return LocalScores(generation, positions, query[0], None)


@pytest.mark.parametrize("block", [1, 10, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_scores_of_candidates_and_their_windows_equal_brute_force_for_any_block(
    generation: Generation,
    stones: Any,
    query: np.ndarray,
    size: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "BLOCK_WINDOWS", block)
    monkeypatch.setattr(reader, "BLOCK_CHUNKS", block)
    positions, chosen = np.array([0, 1, 5, 6, 7, 30, 59]), np.array([1, 5, 2])
    decoded, reconstruct = list[int](), type(generation.chunks).reconstruct
    counted = lambda index, rows: (decoded.append(len(rows)), reconstruct(index, rows))[1]  # noqa: E731
    monkeypatch.setattr(type(generation.chunks), "reconstruct", counted)
    scores = scores_of(generation, positions, query)
    for places in (np.arange(7), chosen, np.empty(0, np.int64)):
        own = positions[places]
        found = score_windows(generation, own, size, scores.windows(places, size).cosine_W)
        expected = []
        for owner, position in enumerate(own):
            vectors, offset = stones.chunk_vectors[position], int(generation.chunk_offsets[position])
            for start in range(max(len(vectors) - size, 0) + 1):
                total = vectors[start : start + size].sum(axis=0)
                score = float(total @ query[0] / np.linalg.norm(total))
                expected.append((owner, offset + start, offset + min(start + size, len(vectors)), score))
        owners, firsts, ends, cosines = ([row[part] for row in expected] for part in range(4))
        assert (found.owner.tolist(), found.places.first_W.tolist()) == (owners, firsts)
        assert found.places.end_W.tolist() == ends
        np.testing.assert_allclose(found.scores, cosines, atol=1e-6)
    chunks = [(stones.chunk_vectors[position] @ query[0]).max() for position in positions]
    np.testing.assert_allclose(scores.chunks(), chunks, atol=1e-6)
    once = sum(len(stones.chunk_vectors[position]) for position in positions)
    assert block < once or sum(decoded) == once, "what fits a block is decoded once"
    np.testing.assert_allclose(scores.documents(), stones.document_vectors[positions] @ query[0], atol=1e-6)
    none = scores_of(generation, np.empty(0, np.int64), query)
    assert [len(none.documents()), len(none.chunks())] == [0, 0]


def words_of(generation: Generation, query: str) -> Any:
    return words_asked(query, generation.query_languages)


def found_ids(generation: Generation, query: str, where: Any = None, limit: int = 60) -> list[str]:
    allowed = None if where is None else allowed_documents(generation, where, None)
    few = few_documents(generation, allowed)
    bm25 = bm25_documents(generation, words_of(generation, query), few)
    positions, scores = best_documents(generation, bm25, allowed, limit)
    assert sorted(scores, reverse=True) == scores.tolist()
    return [generation.doc_ids[position].as_py() for position in positions]


@pytest.mark.parametrize(
    "query",
    ["the of and", "???", "AND", "unknownword", "日本語", "\x00", "()", '"', 'stone17"', "stone17 AND (",
     "+stone17 -", "stone17 OR OR NOT", "stone17^9~", "text:stone17", "'stone17' --", "stone17*"],
)  # fmt: skip
def test_bm25_has_no_syntax_and_of_no_indexed_word_finds_nothing(generation: Generation, query: str) -> None:
    assert found_ids(generation, query)[:1] == ["doc-0-017"] * ("stone17" in query)


def test_bm25_filter_comes_before_the_limit(generation: Generation, stones: Any) -> None:
    tree = {"type": "eq", "key": "cluster_id", "value": 3}
    where = compile_filter(tree, generation.document_schema)
    expected = {row["doc_id"] for row in stones.rows if row["cluster_id"] == 3}
    found = found_ids(generation, "granite basalt slate marble", where, limit=10)
    assert len(found) == 10
    assert set(found) <= expected


@pytest.mark.parametrize("where", [None, {"cluster_id": 0}])
def test_best_documents_and_passages_that_tie_at_the_end_are_those_of_the_lowest_ids(
    alike: Any, where: Any
) -> None:
    ids = [f"doc-{place * 7 % 12:02d}" for place in range(12)]
    generation = open_generation(alike(ids))
    condition = where and compile_filter(where, generation.document_schema)
    assert sorted(found_ids(generation, "slate stone0", condition, limit=5)) == sorted(ids)[:5]
    passages = bm25_passages(generation, words_of(generation, "stone0"), 1, None, None)
    assert passages is not None
    best = nominate_by_passage_bm25(generation, passages, 5)
    assert sorted(generation.ids_of(best)) == sorted(ids)[:5]


def test_bounded_words_keep_order_and_are_bounded_with_three_repeats_at_most() -> None:
    assert bounded_words("a b A c a a b") == "a b A c a b"
    assert len(bounded_words(" ".join(f"w{i}" for i in range(1000))).split()) == MAX_WORDS


def test_table_errors_hide_the_text_of_the_error() -> None:
    with pytest.raises(StorageError, match="reading failed") as caught, table_errors("reading"):
        raise RuntimeError("lance error: /root/secret/path.lance:17")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("allowed", [[2, 3, 17, 40, 59], [17]])
@pytest.mark.parametrize("query", ["granite basalt stone17 title", "stone3 17", "unknownword"])
def test_bm25_of_few_allowed_documents_is_that_of_a_look_at_all(
    generation: Generation, monkeypatch: pytest.MonkeyPatch, query: str, allowed: Any
) -> None:
    allowed, firsts = np.array(allowed), generation.chunk_offsets[:-1]
    found: list[list[list[float]]] = []
    words = words_of(generation, query)
    for share, counts in ((1, 1 << 22), (1, 1), (1_000, 1)):  # those alone, a word at a time, then all
        monkeypatch.setattr(reader, "FEW_SHARE", share)
        monkeypatch.setattr(bm25_module, "BLOCK_COUNTS", counts)
        few = few_documents(generation, allowed)
        assert (few is None) == (share > 1)
        documents = best_documents(generation, bm25_documents(generation, words, few), allowed, 4)
        passages = [bm25_passages(generation, words, size, allowed, few) for size in (1, 2, 50)]
        scores = [np.zeros(60) if each is None else each.of(firsts) for each in passages]
        found.append([each.tolist() for each in (*documents, *scores)])
    assert found[0] == found[1] == found[2]


NUM_TOKENS = 12
QUERY = {token: 0.5 + token / 7 for token in (0, 2, 3, 7, 11, 40)}


class Words:
    """Postings of a dense table of steps, chunk by token."""

    def __init__(self, steps_MX: np.ndarray) -> None:
        self._steps_MX = steps_MX

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = [token for token in range(NUM_TOKENS) if sparse_term(token) == term]
        steps_M = self._steps_MX[:, tokens[0]] if tokens else np.zeros(0, np.uint8)
        return np.flatnonzero(steps_M), steps_M[steps_M > 0]


@pytest.fixture
def sparse_generation() -> Any:
    generator = np.random.default_rng(4)
    counts_N = generator.integers(1, 30, size=40)
    steps_MX = generator.integers(1, 256, size=(counts_N.sum(), NUM_TOKENS)).astype(np.uint8)
    steps_MX[generator.random(steps_MX.shape) < 0.9] = 0
    return SimpleNamespace(
        chunk_offsets=np.append(0, np.cumsum(counts_N)),
        chunk_documents=np.repeat(np.arange(len(counts_N)), counts_N),
        sparse_words=Words(steps_MX),
        steps_MX=steps_MX,
    )


def by_every_passage(generation: Any, size: int) -> np.ndarray:
    asked = [token for token in QUERY if token < NUM_TOKENS]
    weights = np.array([QUERY[token] for token in asked]) * SPARSE_STEP
    return np.array(
        [
            max(
                generation.steps_MX[at : min(at + size, end), asked].max(0) @ weights
                for at in range(first, end)
            )
            for first, end in zip(generation.chunk_offsets, generation.chunk_offsets[1:], strict=False)
        ]
    )


@pytest.mark.parametrize("block", [20, 100_000])
@pytest.mark.parametrize("limit", [1, 6, 100])
@pytest.mark.parametrize("size", [1, 3, 16, 50])
def test_best_documents_are_those_of_every_passage(
    sparse_generation: Any, monkeypatch: pytest.MonkeyPatch, size: int, limit: int, block: int
) -> None:
    monkeypatch.setattr(reader, "BLOCK_POSTINGS", block)
    monkeypatch.setattr(reader, "BLOCK_CHUNKS", block)
    expected = by_every_passage(sparse_generation, size)
    for allowed in (None, np.arange(0, 40, 3)):
        documents, scores = sparse_documents(sparse_generation, QUERY, size, allowed, limit)

        chosen = np.arange(40) if allowed is None else allowed
        ranked = sorted(chosen[expected[chosen] > 0].tolist(), key=lambda place: (-expected[place], place))
        assert documents.tolist() == ranked[:limit]
        assert scores == pytest.approx(expected[documents], rel=1e-6)


def test_tokens_that_stand_nowhere_find_nothing(sparse_generation: Any) -> None:
    documents, scores = sparse_documents(sparse_generation, {40: 1.0}, 3, None, 5)

    assert not len(documents)
    assert not len(scores)
