"""Brute force in numpy: the oracle every other index is measured against.

Reads all vectors for each query and holds them in memory; correct by inspection, never fast. Not what a
collection is served from.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64

NO_POSITION = -1
"""Fills the answer where fewer than ``top_k`` vectors were found; its score is minus infinity."""


class VectorIndex(Protocol):
    """N vectors of V dimensions, searched by inner product."""

    @property
    def num_vectors(self) -> int:
        """Count the vectors."""
        ...

    @property
    def vector_dim(self) -> int:
        """Return V."""
        ...

    def search(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Return the scores and positions of the ``top_k`` best vectors of each query, best first.

        Ties go to the lower position. ``allowed`` restricts the answer to these positions (any order, no
        repeats needed); None allows all. Missing answers are position -1 with score -inf, at the end of the
        row.
        """
        ...

    def reconstruct(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions, in their order; quantised kinds return an approximation."""
        ...


class ExactIndex:
    """Inner products against every vector, in float32."""

    def __init__(self, vectors_NV: Float32[np.ndarray, "N V"]) -> None:
        self._vectors_NV = np.ascontiguousarray(vectors_NV, dtype=np.float32)

    def search(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Search as :class:`VectorIndex` does."""
        positions = np.arange(len(self._vectors_NV)) if allowed is None else np.unique(allowed)
        scores_QN = queries_QV @ self._vectors_NV[positions].T
        return best_first(scores_QN, np.broadcast_to(positions, scores_QN.shape), top_k)


def best_first(
    scores_QF: Float32[np.ndarray, "Q F"], positions_QF: Int64[np.ndarray, "Q F"], top_k: int
) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
    """Return the ``top_k`` best of each row by score, then position, padded where there are fewer.

    What is missing scores minus infinity.
    """
    num_found = scores_QF.shape[1]
    scores_QK = np.full((len(scores_QF), top_k), -np.inf, dtype=np.float32)
    positions_QK = np.full((len(scores_QF), top_k), NO_POSITION, dtype=np.int64)
    for row, (scores, positions) in enumerate(zip(scores_QF, positions_QF, strict=True)):
        if num_found > top_k:
            is_near = scores >= np.partition(scores, num_found - top_k)[num_found - top_k]
            scores, positions = scores[is_near], positions[is_near]
        order = np.lexsort((positions, -scores))[:top_k]
        scores_QK[row, : len(order)], positions_QK[row, : len(order)] = scores[order], positions[order]
    return scores_QK, positions_QK
