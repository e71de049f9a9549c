from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.lab.evaluate.passages import best_passages, overlapping_passages, window_passages
from cairn.pipeline.search.windows import window_scores


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
    assert np.all(passages.end_chunk_P - passages.first_chunk_P <= size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_best_passages_read_nothing_twice_and_begin_with_the_best(encoded, size):
    passages = window_passages(encoded, size)
    scores = passages.vectors_PV @ encoded.query_vectors_QV[1]
    spans = best_passages(scores, passages, 10_000)
    read = [
        (d, c)
        for d, s, e in zip(spans.document_S, spans.start_S, spans.end_S, strict=True)
        for c in range(s, e)
    ]
    best = int(np.argmax(scores))

    assert len(read) == len(set(read)) == sum(encoded.end_char - encoded.start_char)
    assert spans.document_S[0] == passages.document_P[best]
    assert spans.start_S[0] == encoded.start_char[passages.first_chunk_P[best]]
    assert spans.end_S[0] == encoded.end_char[passages.end_chunk_P[best] - 1]


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


def test_overlapping_chunks_are_read_once(encoded):
    # Every chunk reaches half into the next one of its document.
    last = encoded.chunk_offsets[1:] - 1
    reach = encoded.end_char.copy()
    reach[:-1] += (encoded.end_char - encoded.start_char)[1:] // 2
    reach[last] = encoded.end_char[last]
    passages = overlapping_passages(replace(encoded, end_char=reach))
    spans = best_passages(passages.vectors_PV @ encoded.query_vectors_QV[1], passages, 10_000)
    read = [
        (d, c)
        for d, s, e in zip(spans.document_S, spans.start_S, spans.end_S, strict=True)
        for c in range(s, e)
    ]

    assert np.array_equal(passages.start_char_M[passages.first_chunk_P], encoded.start_char)
    assert np.array_equal(passages.end_char_M[passages.end_chunk_P - 1], reach)
    assert len(read) == len(set(read)) == sum(encoded.end_char[last])


def test_chunks_that_do_not_overlap_are_their_own_passages(encoded):
    found, expected = overlapping_passages(encoded), window_passages(encoded, 1)

    assert np.array_equal(found.first_chunk_P, expected.first_chunk_P)
    assert np.array_equal(found.end_chunk_P, expected.end_chunk_P)
    assert np.array_equal(found.start_char_M, expected.start_char_M)
    assert np.array_equal(found.end_char_M, expected.end_char_M)
