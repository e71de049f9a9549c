"""Brute force: the oracle of the vector indexes, correct by inspection and never fast, and vectors for it."""

from __future__ import annotations

import numpy as np


def nearest(
    vectors_NV: np.ndarray, queries_QV: np.ndarray, top_k: int, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Return the positions of the best inner products, ties by position, -1 where there are fewer."""
    positions = np.arange(len(vectors_NV)) if allowed is None else np.unique(allowed)
    scores_QN = queries_QV @ vectors_NV[positions].T
    best = [positions[np.argsort(-scores, kind="stable")[:top_k]] for scores in scores_QN]
    return np.array([np.pad(row, (0, top_k - len(row)), constant_values=-1) for row in best])


def clustered_vectors(count: int, seed: int = 0) -> np.ndarray:
    """Return unit vectors of 32 dimensions around forty topics."""
    topics, rng = np.random.default_rng(99).standard_normal((40, 32)), np.random.default_rng(seed)
    vectors = topics[rng.integers(0, 40, count)] + 0.6 * rng.standard_normal((count, 32))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
