"""Brute force in numpy: the oracle every other index is measured against.

Reads all vectors for each query and holds them in memory; correct by inspection, never fast. Not what a
collection is served from.
"""

from __future__ import annotations

import numpy as np
from cairn.pipeline.index.protocol import NO_POSITION
from jaxtyping import Float32, Int64


class ExactIndex:
    """Inner products against every vector, in float32."""

    def __init__(self, vectors_NV: Float32[np.ndarray, "N V"]) -> None:
        self._vectors_NV = np.ascontiguousarray(vectors_NV, dtype=np.float32)

    @property
    def num_vectors(self) -> int:
        """Count the vectors."""
        return self._vectors_NV.shape[0]

    @property
    def vector_dim(self) -> int:
        """Return V."""
        return self._vectors_NV.shape[1]

    def search(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Return the ``top_k`` best of each query, best first, ties by lower position."""
        positions = np.arange(self.num_vectors) if allowed is None else np.unique(allowed)
        return top_k_of(queries_QV @ self._vectors_NV[positions].T, positions, top_k)

    def reconstruct(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions, in their order."""
        return self._vectors_NV[positions]


def top_k_of(
    scores_QN: Float32[np.ndarray, "Q N"], positions_N: Int64[np.ndarray, " N"], top_k: int
) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
    """Select the ``top_k`` best columns of each row.

    ``positions_N`` ascends, so a stable sort breaks ties by position.
    """
    num_queries, num_found = scores_QN.shape[0], min(top_k, scores_QN.shape[1])
    scores_QK = np.full((num_queries, top_k), -np.inf, dtype=np.float32)
    positions_QK = np.full((num_queries, top_k), NO_POSITION, dtype=np.int64)
    order = np.argsort(-scores_QN, axis=1, kind="stable")[:, :num_found]
    scores_QK[:, :num_found] = np.take_along_axis(scores_QN, order, axis=1)
    positions_QK[:, :num_found] = positions_N[order]
    return scores_QK, positions_QK
