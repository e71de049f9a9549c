from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.token_vectors.max_sim import max_sim, token_idf


def tokens(rows: int, seed: int = 0, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def naive(query: np.ndarray, weights: np.ndarray, token: np.ndarray, first: int, end: int) -> float:
    if first == end or not weights.sum():
        return 0.0
    best = [max(float(q @ d) for d in token[first:end]) for q in query]
    return sum(w * b for w, b in zip(weights, best, strict=True)) / weights.sum()


def test_max_sim_of_overlapping_and_empty_windows_equals_the_sum_written_out():
    query, token, weights = tokens(5, 1), tokens(30, 2), np.array([0.5, 0.0, 2.0, 1.0, 3.0])
    first, end = np.array([0, 3, 3, 29, 10, 30]), np.array([4, 9, 3, 30, 30, 30])

    assert max_sim(query, weights, token, first, end) == pytest.approx(
        [naive(query, weights, token, f, e) for f, e in zip(first, end, strict=True)], abs=1e-5
    )


def test_max_sim_does_not_depend_on_the_order_of_tokens_and_takes_half_precision():
    query, token = tokens(3, 1), tokens(12, 2).astype(np.float16)
    bounds = np.array([0]), np.array([12])
    shuffled = token[np.random.default_rng(0).permutation(12)]

    assert max_sim(query, np.ones(3), token, *bounds) == pytest.approx(
        max_sim(query, np.ones(3), shuffled, *bounds), abs=1e-6
    )


def test_token_idf_counts_texts_not_occurrences():
    found = token_idf(np.array([1, 1, 2, 1], np.int32), np.array([0, 3, 4, 4]), 4)

    # Three texts: id 1 stands in two of them, id 2 in one, ids 0 and 3 in none.
    assert found == pytest.approx(np.log1p([3.5 / 0.5, 1.5 / 2.5, 2.5 / 1.5, 3.5 / 0.5]))
