from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.evaluate import baselines
from cairn.pipeline.lab.evaluate.baselines import (
    LexicalHits,
    PieceRanker,
    convex,
    max_sim,
    scaled,
    score_pieces,
    search_bm25,
)
from cairn.pipeline.lab.evaluate.encodings import EncodedSet, Encoding
from cairn.pipeline.lab.evaluate.measures import Answer
from cairn.pipeline.lab.evaluate.systems import BaselineRanking, System
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.token_vectors.codebook import token_idf
from cairn.pipeline.types import silent_progress

DOC_IDS = [f"d{number:02d}" for number in range(12)]
TEXTS = ["old stone path", "stone stone river", "mountain", "river path walk river", "cat"]


def hits(*rows: list[tuple[int, float]]) -> LexicalHits:
    return LexicalHits(
        positions=[np.array([position for position, _ in row], np.int64) for row in rows],
        scores=[np.array([score for _, score in row], np.float32) for row in rows],
        index_bytes=0,
    )


DOCUMENT_HITS = hits(*[[(query, 4.0), (query + 3, 2.0), (11, 0.5)] for query in range(6)])
PIECE_HITS = hits(*[[(2 * query, 4.0), (1, 2.0)] if query else [(7, 1.0)] for query in range(6)])


def answers(encoded: EncodedSet, ranking: BaselineRanking, **given: object) -> list[Answer]:
    system = System(name=ranking, encoding=Encoding(encoder=EncoderConfig()), ranking=ranking)
    ranker = PieceRanker(DOC_IDS, encoded, DOCUMENT_HITS, PIECE_HITS, **given)
    return ranker.rank(system, np.ones(len(encoded.query_vectors_QV), np.bool_))


def read(encoded: EncodedSet, answer: Answer) -> list[int]:
    """Return the pieces of an answer, which share no text."""
    assert answer.passages is not None
    places = list(zip(encoded.chunk_document.tolist(), encoded.start_char.tolist(), strict=True))
    found = zip(answer.passages.document_S.tolist(), answer.passages.start_S.tolist(), strict=True)
    return [places.index(place) for place in found]


def test_dense_ranking_is_that_of_the_cosines_and_bm25_holds_what_bm25_found(encoded):
    for query_V, answer in zip(encoded.query_vectors_QV, answers(encoded, "dense"), strict=True):
        cosine_M = encoded.chunk_vectors_MV @ query_V
        best_N = np.maximum.reduceat(cosine_M, encoded.chunk_offsets[:-1])

        assert answer.documents.positions.tolist() == np.argsort(-best_N).tolist()
        assert read(encoded, answer) == np.argsort(-cosine_M).tolist()
    found = answers(encoded, "bm25")
    places = [each.documents.positions.tolist() for each in found]
    assert places == [[query, query + 3, 11] for query in range(6)]
    assert [read(encoded, found[query]) for query in (0, 3)] == [[7], [6, 1]]


def test_max_sim_moves_the_best_pieces_of_the_convex_ranking(encoded):
    asked: list[np.ndarray] = []

    def judge(asked_QK: np.ndarray) -> np.ndarray:
        asked.append(asked_QK)
        # The last of the pieces asked for is judged far above the others.
        return np.eye(asked_QK.shape[1], dtype=np.float32)[[-1] * len(asked_QK)] * 5

    judged, plain = answers(encoded, "convex+maxsim", max_sim_of=judge), answers(encoded, "convex")

    assert asked[0].shape == (6, len(encoded.chunk_vectors_MV))
    assert any(
        a.documents.positions.tolist() != b.documents.positions.tolist()
        for a, b in zip(judged, plain, strict=True)
    )


def test_equal_scores_are_ranked_by_id(encoded):
    level = replace(encoded, query_vectors_QV=np.zeros_like(encoded.query_vectors_QV))
    system = System(name="x", encoding=Encoding(encoder=EncoderConfig()), ranking="dense")
    found = PieceRanker(DOC_IDS[::-1], level).rank(system, np.zeros(6, np.bool_), depth=3)

    assert found[0].documents.positions.tolist() == [11, 10, 9]
    assert found[0].passages is None


def test_overlapping_pieces_are_read_once_and_the_best_one_first(encoded):
    # Every piece reaches half into the next one of its document.
    last = encoded.chunk_offsets[1:] - 1
    reach = encoded.end_char.copy()
    reach[:-1] += (encoded.end_char - encoded.start_char)[1:] // 2
    reach[last] = encoded.end_char[last]
    for query, answer in enumerate(answers(replace(encoded, end_char=reach), "dense")):
        spans, best = (
            answer.passages,
            int(np.argmax(encoded.chunk_vectors_MV @ encoded.query_vectors_QV[query])),
        )
        assert spans is not None
        rows = list(zip(spans.document_S.tolist(), spans.start_S.tolist(), spans.end_S.tolist(), strict=True))
        characters = [(document, place) for document, start, end in rows for place in range(start, end)]

        assert rows[0] == (encoded.chunk_document[best], encoded.start_char[best], reach[best])
        assert len(characters) == len(set(characters)) == sum(encoded.end_char[last])


def test_scores_of_shares_equal_their_definitions():
    none = np.zeros(0, np.int64), np.zeros(0, np.float32)
    cosines = np.array([0.1, 0.5, 0.3], np.float32)

    assert convex(cosines, np.array([2]), np.array([4.0], np.float32)) == pytest.approx([-1, 1, 1], abs=1e-6)
    assert convex(np.full(3, 0.5, np.float32), *none).tolist() == [0.0, 0.0, 0.0]
    assert scaled(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert scaled(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def naive_bm25(query: str, text: str, k1: float = 1.2, b: float = 0.75) -> float:
    words = [candidate.split() for candidate in TEXTS]
    average = sum(map(len, words)) / len(words)
    own = text.split()
    score = 0.0
    for word in query.split():
        holders = sum(word in candidate for candidate in words)
        idf = math.log(1 + (len(words) - holders + 0.5) / (holders + 0.5))
        count = own.count(word)
        score += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * len(own) / average))
    return score


def test_bm25_equals_the_formula_best_first_within_a_limit():
    queries = ["stone path", "river", "zebra"]
    found, best = (search_bm25(TEXTS, queries, limit, silent_progress) for limit in (10, 1))

    for query, positions, scores in zip(queries, found.positions, found.scores, strict=True):
        expected = {
            index: naive_bm25(query, text)
            for index, text in enumerate(TEXTS)
            if set(query.split()) & set(text.split())
        }
        assert dict(zip(positions.tolist(), scores.tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-3
        )
        assert np.all(np.diff(scores) <= 0)
    assert [each.tolist() for each in best.positions] == [[0], [3], []]
    assert found.index_bytes > 0
    ties = search_bm25(["stone", "river", "stone", "stone"], ["stone"], 10, silent_progress)
    assert ties.positions[0].tolist() == [0, 2, 3]


def test_max_sim_of_pieces_some_of_them_empty_equals_the_sum_written_out():
    rng = np.random.default_rng(0)
    query, token = rng.standard_normal((5, 8)), rng.standard_normal((30, 8))
    weights, lengths = np.array([0.5, 0.0, 2.0, 1.0, 3.0]), np.array([0, 4, 9, 0, 1, 16, 0])
    expected: list[float] = []
    for piece in np.split(token, np.cumsum(lengths)[:-1]):
        best = [max((float(q @ d) for d in piece), default=0.0) for q in query]
        expected.append(sum(w * b for w, b in zip(weights, best, strict=True)) / weights.sum())

    assert max_sim(query, weights, token, lengths) == pytest.approx(expected, abs=1e-5)
    assert not max_sim(query, 0 * weights, token, lengths).any()


def test_max_sim_of_any_block_size_is_that_of_token_states_with_idf(judged, tiny_config, monkeypatch):
    encoder = replace(tiny_config, batch_tokens=64, query_prefix="the river ")
    backbone = load_backbone(encoder)
    asked = np.array([[0, 3], [2, 1], [1, 0]])

    def states_of(text: str, prefix: str) -> tuple[list[int], np.ndarray]:
        before, ids = (
            backbone.tokenizer.encode(each, add_special_tokens=False).ids for each in (prefix, text)
        )
        row = np.array([[backbone.cls_id, *before, *ids, backbone.landmark_id]])
        states_TD = backbone.hidden_states(row, np.array([row.shape[1]]))[0, 1 + len(before) : -1]
        return ids, torch.nn.functional.normalize(states_TD, dim=1).numpy()

    pieces = [states_of(text, "") for text in judged.texts]
    ids = np.concatenate([each for each, _ in pieces])
    offsets = np.concatenate([[0], np.cumsum([len(each) for each, _ in pieces])])
    idf = token_idf(ids, offsets, backbone.tokenizer.get_vocab_size())
    expected = [
        [(states_TD @ pieces[piece][1].T).max(axis=1) @ (idf[own] / idf[own].sum()) for piece in asked_K]
        for asked_K, (own, states_TD) in zip(
            asked, (states_of(query, "the river ") for query in judged.queries), strict=True
        )
    ]
    for size in (1, 2, 100):
        monkeypatch.setattr(baselines, "BLOCK_PIECES", size)
        found = score_pieces(encoder, judged.texts, judged.queries, asked, silent_progress)

        assert found == pytest.approx(np.array(expected), abs=2e-3)
