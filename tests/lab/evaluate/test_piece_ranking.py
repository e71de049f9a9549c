from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.evaluate.encodings import EncodedSet, Encoding
from cairn.pipeline.lab.evaluate.lexical import LexicalHits
from cairn.pipeline.lab.evaluate.piece_ranking import PieceRanker, convex, reciprocal_ranks, scaled
from cairn.pipeline.lab.evaluate.systems import PieceRanking, System

DOC_IDS = [f"d{number:02d}" for number in range(12)]


@pytest.fixture
def words(encoded: EncodedSet) -> LexicalHits:
    generator = np.random.default_rng(5)
    count = len(encoded.chunk_vectors_MV)
    return LexicalHits(
        positions=[generator.permutation(count)[:9] for _ in encoded.query_vectors_QV],
        scores=[
            np.sort(generator.uniform(1, 8, 9))[::-1].astype(np.float32) for _ in encoded.query_vectors_QV
        ],
        index_bytes=1,
    )


def system(ranking: PieceRanking) -> System:
    encoding = Encoding(encoder=EncoderConfig(), stride_tokens=32)
    return System(name=ranking, encoding=encoding, ranking=ranking)


def every(encoded: EncodedSet) -> np.ndarray:
    return np.ones(len(encoded.query_vectors_QV), bool)


def test_convex_adds_what_stands_above_the_mean_and_shares_of_bm25():
    scores = convex(np.array([0.1, 0.5, 0.3], np.float32), np.array([2]), np.array([4.0], np.float32))

    assert scores == pytest.approx([-1.0, 1.0, 1.0], abs=1e-6)


def test_convex_without_words_or_differences_is_finite():
    none = np.zeros(0, np.int64), np.zeros(0, np.float32)

    assert convex(np.full(3, 0.5, np.float32), *none).tolist() == [0.0, 0.0, 0.0]


def test_reciprocal_ranks_add_both_lists():
    scores = reciprocal_ranks(np.array([0.9, 0.1, 0.5], np.float32), np.array([1]))

    assert scores == pytest.approx([1 / 61, 1 / 63 + 1 / 61, 1 / 62])


def test_scaled_lies_between_0_and_1_and_takes_equal_scores():
    assert scaled(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert scaled(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("ranking", ["dense", "convex", "piece-rrf", "piece-bm25", "whitened"])
def test_documents_score_as_their_best_piece(encoded: EncodedSet, words: LexicalHits, ranking: PieceRanking):
    answers = PieceRanker(DOC_IDS, encoded, words, None).rank(system(ranking), every(encoded))
    for query, answer in enumerate(answers):
        assert answer.passages is not None
        # The best passage lies in the best document.
        assert answer.passages.document_S[0] == answer.documents.positions[0]
        if ranking == "piece-bm25":
            held = set(encoded.chunk_document[words.positions[query]].tolist())
            assert set(answer.documents.positions.tolist()) == held


def test_dense_ranking_is_that_of_the_cosines(encoded: EncodedSet):
    answers = PieceRanker(DOC_IDS, encoded, None, None).rank(system("dense"), every(encoded))
    for query_V, answer in zip(encoded.query_vectors_QV, answers, strict=True):
        best_N = np.maximum.reduceat(encoded.chunk_vectors_MV @ query_V, encoded.chunk_offsets[:-1])

        assert answer.documents.positions.tolist() == np.argsort(-best_N).tolist()


def test_max_sim_moves_the_best_pieces_of_the_convex_ranking(encoded: EncodedSet, words: LexicalHits):
    asked: list[np.ndarray] = []

    def judge(asked_QK: np.ndarray) -> np.ndarray:
        asked.append(asked_QK)
        # The last of the pieces asked for is judged far above the others.
        return np.eye(asked_QK.shape[1], dtype=np.float32)[[-1] * len(asked_QK)] * 5

    few = replace(system("convex+maxsim"), name="few")
    answers = PieceRanker(DOC_IDS, encoded, words, judge).rank(few, every(encoded))
    plain = PieceRanker(DOC_IDS, encoded, words, None).rank(system("convex"), every(encoded))

    assert asked[0].shape == (6, len(encoded.chunk_vectors_MV))
    assert any(
        answer.documents.positions.tolist() != other.documents.positions.tolist()
        for answer, other in zip(answers, plain, strict=True)
    )


def test_answers_do_not_depend_on_the_order_of_documents_ids_break_ties(encoded: EncodedSet):
    level = replace(encoded, query_vectors_QV=np.zeros_like(encoded.query_vectors_QV))
    answers = PieceRanker(DOC_IDS[::-1], level, None, None).rank(system("dense"), every(encoded), depth=3)

    assert answers[0].documents.positions.tolist() == [11, 10, 9]
