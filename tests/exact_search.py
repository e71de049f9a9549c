"""Brute force: the oracle of the vector indexes. Correct by inspection, never fast."""

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
