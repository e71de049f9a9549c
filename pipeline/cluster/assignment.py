"""Place documents in clusters: the nearest centroid of their first-order point φ(d)⊕ψ(q).

Streams: memory grows with a block of rows, not with the corpus. Trains nothing.

    N documents    V surrogate dim    P = 2V point dim    K clusters
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.errors import FingerprintMismatchError, ModelError
from cairn.pipeline.types import TextEmbedder
from jaxtyping import Float32, Int32

BLOCK_ROWS = 8_192
"""Rows scored at once: 16 MiB of scores at 512 clusters."""

TIE_COSINE = 1e-6
"""Cosines closer than this are a tie.

Float32 rounding depends on the shape of a product, and a cluster id must not.
"""


def first_order_points(
    phi_NV: Float32[np.ndarray, "N V"], psi_NV: Float32[np.ndarray, "N V"]
) -> Float32[np.ndarray, "N P"]:
    """Return φ(d)⊕ψ(q), L2-normalised; a pair of zero vectors stays zero."""
    points_NP = np.concatenate((phi_NV, psi_NV), axis=1, dtype=np.float32)
    squared_N = np.einsum("np,np->n", points_NP, points_NP)
    if not np.isfinite(squared_N).all():
        raise ModelError("surrogate vectors must be finite, got NaN or infinity; check the model's weights")
    points_NP /= np.sqrt(np.where(squared_N > 0, squared_N, 1.0))[:, None]
    return points_NP


def nearest_centroids(
    points_NP: Float32[np.ndarray, "N P"], centroids_KP: Float32[np.ndarray, "K P"]
) -> Int32[np.ndarray, " N"]:
    """Return the centroid of the highest cosine for each point.

    Ties go to the lowest id, so a zero point goes to cluster 0.
    """
    assignments_N = np.empty(len(points_NP), dtype=np.int32)
    for start in range(0, len(points_NP), BLOCK_ROWS):
        scores_NK = points_NP[start : start + BLOCK_ROWS] @ centroids_KP.T
        is_best_NK = scores_NK >= scores_NK.max(axis=1, keepdims=True) - TIE_COSINE
        assignments_N[start : start + BLOCK_ROWS] = is_best_NK.argmax(axis=1)
    return assignments_N


def assign(
    clusters: Clusters, phi_NV: Float32[np.ndarray, "N V"], psi_NV: Float32[np.ndarray, "N V"]
) -> Int32[np.ndarray, " N"]:
    """Return the cluster of each document."""
    width = 2 * phi_NV.shape[1]
    if clusters.centroids_KP.shape[1] != width:
        raise FingerprintMismatchError(
            f"surrogate pairs must have the centroids' {clusters.centroids_KP.shape[1]} dims, got "
            f"{width}; use the clusters' own surrogate"
        )
    assignments_N = np.empty(len(phi_NV), dtype=np.int32)
    for start in range(0, len(phi_NV), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        assignments_N[rows] = nearest_centroids(
            first_order_points(phi_NV[rows], psi_NV[rows]), clusters.centroids_KP
        )
    return assignments_N


class ClusterAssigner:
    """Assigns streamed rows, with the surrogate the clusters were trained in and no other."""

    def __init__(self, clusters: Clusters, embedder: TextEmbedder) -> None:
        if embedder.fingerprint != clusters.surrogate_fingerprint:
            raise FingerprintMismatchError(
                "the surrogate must be the one the clusters were trained with "
                f"({clusters.surrogate_fingerprint[:12]}), "
                f"got {embedder.fingerprint[:12]}; use the same model, or build the collection again"
            )
        self.clusters = clusters
        self._embedder = embedder

    def assign_texts(
        self, titles: Sequence[str | None], texts: Sequence[str], queries: Sequence[str | None]
    ) -> Int32[np.ndarray, " N"]:
        """Return the cluster of each document, of which title and query may be missing."""
        assignments_N = np.empty(len(texts), dtype=np.int32)
        for start in range(0, len(texts), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            asked = query_side(titles[rows], queries[rows], texts[rows])
            phi_NV, psi_NV = self._embedder.embed(texts[rows]), self._embedder.embed(asked)
            assignments_N[rows] = assign(self.clusters, phi_NV, psi_NV)
        return assignments_N
