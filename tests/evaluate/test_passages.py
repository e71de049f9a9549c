from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluate.passages import FIRST_LOOK, best_passages, window_passages
from pipeline.search.windows import window_scores


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_window_scores_equal_those_of_a_search(encoded, size):
    passages = window_passages(encoded, size)
    query = encoded.query_vectors_QV[0]
    expected = [
        window_scores(encoded.chunk_vectors_MV[a:b], query, size)
        for a, b in zip(encoded.chunk_offsets[:-1], encoded.chunk_offsets[1:], strict=True)
    ]

    assert passages.vectors_PV @ query == pytest.approx(np.concatenate(expected), abs=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_windows_stay_inside_their_document(encoded, size):
    passages = window_passages(encoded, size)
    owner = encoded.chunk_document

    assert np.array_equal(owner[passages.first_chunk_P], passages.document_P)
    assert np.array_equal(owner[passages.end_chunk_P - 1], passages.document_P)
    assert np.array_equal(passages.start_char_P, encoded.start_char[passages.first_chunk_P])
    assert np.array_equal(passages.end_char_P, encoded.end_char[passages.end_chunk_P - 1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_best_passages_never_overlap_and_fall_in_score(encoded, size):
    passages = window_passages(encoded, size)
    scores = passages.vectors_PV @ encoded.query_vectors_QV[1]
    spans = best_passages(scores, passages, 10_000)
    read = [(d, c) for d, s, e in zip(spans.document_S, spans.start_S, spans.end_S, strict=True) for c in range(s, e)]
    score_of = {
        (d, s, e): score
        for d, s, e, score in zip(passages.document_P, passages.start_char_P, passages.end_char_P, scores.tolist(), strict=True)
    }
    chosen = [score_of[key] for key in zip(spans.document_S, spans.start_S, spans.end_S, strict=True)]

    assert len(read) == len(set(read))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == scores.max()


def test_passages_end_where_the_budget_is_passed(encoded):
    passages = window_passages(encoded, 1)
    spans = best_passages(passages.vectors_PV @ encoded.query_vectors_QV[2], passages, 50)
    lengths = (spans.end_S - spans.start_S).tolist()

    assert sum(lengths[:-1]) < 50 <= sum(lengths)


def test_passages_without_a_score_are_never_read(encoded):
    passages = window_passages(encoded, 1)
    scores = np.full(len(passages.document_P), -np.inf)
    scores[[3, 5]] = 0.1, 0.2

    assert len(best_passages(scores, passages, 10_000).start_S) == 2


def test_passages_beyond_the_first_look_are_found_when_the_budget_asks_for_them(encoded):
    passages = window_passages(encoded, 1)
    copies = 40
    many = type(passages)(
        vectors_PV=np.tile(passages.vectors_PV, (copies, 1)),
        document_P=np.arange(copies * len(passages.document_P)),
        first_chunk_P=np.arange(copies * len(passages.document_P)),
        end_chunk_P=np.arange(copies * len(passages.document_P)) + 1,
        start_char_P=np.zeros(copies * len(passages.document_P), np.int64),
        end_char_P=np.full(copies * len(passages.document_P), 10),
    )
    assert len(many.document_P) > 2 * FIRST_LOOK

    spans = best_passages(np.random.default_rng(0).random(len(many.document_P)), many, 10 * (FIRST_LOOK + 20))

    assert len(spans.start_S) == FIRST_LOOK + 20
