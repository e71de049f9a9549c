from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.vector_index.exact_index import ExactIndex


def naive_search(vectors: np.ndarray, query: np.ndarray, top_k: int, allowed: list[int]) -> list[int]:
    """Ten lines that cannot be wrong."""
    scored = sorted((-float(np.float32(vectors[i] @ query)), i) for i in allowed)
    found = [i for _, i in scored[:top_k]]
    return found + [-1] * (top_k - len(found))


def grid_vectors(count: int) -> np.ndarray:
    """Small whole numbers: every inner product is exact, and many are equal."""
    return np.random.default_rng(0).integers(-2, 3, (count, 4)).astype(np.float32)


@pytest.mark.parametrize("allowed", [None, [7, 3, 3, 19], []])
def test_exact_search_equals_naive_search_with_ties(allowed: list[int] | None) -> None:
    vectors, queries = grid_vectors(40), grid_vectors(5)
    positions = None if allowed is None else np.array(allowed, dtype=np.int64)
    _, found = ExactIndex(vectors).search(queries, 8, positions)
    expected = [
        naive_search(vectors, query, 8, sorted(set(range(40) if allowed is None else allowed)))
        for query in queries
    ]
    assert found.tolist() == expected
