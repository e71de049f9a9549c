"""Train the clusters of a corpus: asymmetric K-means over pairs (φ(d), ψ(q)), on FAISS.

Source: Morris & Rush 2024 (CDE), §4.1, eq. 3: every pair is two points, φ(d)⊕ψ(q) and ψ(q)⊕φ(d), so that a
document near another's query counts like a query near another's document. The paper runs Euclidean K-means
on each domain's GTR vectors for 100 steps and keeps the best of 3 attempts. Differs: spherical K-means on
L2-normalised points; a cheaper surrogate; 20 iterations, one attempt unless :class:`ClusterConfig` says so;
sqrt(N) clusters instead of N / batch size. Documents are assigned by their first point.

Both orders of a pair are separate points to K-means, so where titles and texts look different, clusters come
in mirrored couples, one of which no document's first point chooses: such clusters have size 0 and are
harmless.

    N documents    V surrogate dim    M = 2N points    P = 2V point dim    K clusters    I iterations
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
from cairn.pipeline.cluster.assignment import first_order_points, nearest_centroids
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.config import ClusterConfig
from cairn.pipeline.errors import SourceError
from cairn.pipeline.faiss_device import train_kmeans
from jaxtyping import Float32, Float64

MAX_CLUSTERS = 512
"""As many as there are context documents by default, so that each cluster can be seen by the encoder."""


def choose_num_clusters(num_documents: int) -> int:
    """Return round(sqrt(N)), at least 1, at most :data:`MAX_CLUSTERS`.

    sqrt balances the number of clusters against their size: 65,536 documents give 256 clusters of 256, each a
    contrastive batch. Above 262,144 documents the number stays and clusters grow, to be split when batches
    are packed.
    """
    return min(MAX_CLUSTERS, max(1, round(math.sqrt(num_documents))))


def pair_points(
    phi_NV: Float32[np.ndarray, "N V"], psi_NV: Float32[np.ndarray, "N V"]
) -> Float32[np.ndarray, "M P"]:
    """Return both orders of every pair, L2-normalised.

    Rows 0 … N - 1 are φ(d)⊕ψ(q), rows N … 2N - 1 are ψ(q)⊕φ(d).
    """
    first_NP = first_order_points(phi_NV, psi_NV)
    num_documents, width = phi_NV.shape
    points_MP = np.empty((2 * num_documents, 2 * width), dtype=np.float32)
    points_MP[:num_documents] = first_NP
    points_MP[num_documents:, :width] = first_NP[:, width:]
    points_MP[num_documents:, width:] = first_NP[:, :width]
    return points_MP


def train_clusters(
    phi_NV: Float32[np.ndarray, "N V"],
    psi_NV: Float32[np.ndarray, "N V"],
    config: ClusterConfig,
    *,
    surrogate_fingerprint: str,
    surrogate_state: Mapping[str, np.ndarray] | None = None,
    initial_centroids_KP: Float32[np.ndarray, "K P"] | None = None,
) -> Clusters:
    """Cluster a sample of documents; every row is used, none is drawn from it.

    There are as many clusters as asked for or chosen, but never more than documents or distinct points;
    initial centroids replace both rules. Bit-equal between runs with the same number of threads: FAISS splits
    its products by thread, so another number may move last bits.
    """
    if not len(phi_NV):
        raise SourceError("clusters must be trained on at least one document, got none")
    points_MP = pair_points(phi_NV, psi_NV)
    wanted = min(len(phi_NV), config.num_clusters or choose_num_clusters(len(phi_NV)))
    centroids_KP, objective_I = _lloyd(_without_zero_rows(points_MP), wanted, config, initial_centroids_KP)
    assignments_N = nearest_centroids(points_MP[: len(phi_NV)], centroids_KP)
    return Clusters(
        centroids_KP=centroids_KP,
        sizes_K=np.bincount(assignments_N, minlength=len(centroids_KP)).astype(np.int64),
        objective_I=objective_I,
        surrogate_fingerprint=surrogate_fingerprint,
        surrogate_state=dict(surrogate_state or {}),
        settings={**asdict(config), "num_documents": len(phi_NV)},
    )


def _lloyd(
    points_MP: Float32[np.ndarray, "M P"],
    wanted: int,
    config: ClusterConfig,
    initial_centroids_KP: Float32[np.ndarray, "K P"] | None,
) -> tuple[Float32[np.ndarray, "K P"], Float64[np.ndarray, " I"]]:
    """Run FAISS and return unit centroids and the objective before each update.

    Nothing but zero vectors gives one zero centroid.
    """
    num_points, width = points_MP.shape
    num_clusters = (
        _count_distinct(points_MP, wanted) if initial_centroids_KP is None else len(initial_centroids_KP)
    )
    if not num_points:
        return np.zeros((1, width), dtype=np.float32), np.zeros(0)
    parameters = {
        "niter": config.num_iterations,
        "nredo": config.num_redos,
        "seed": config.seed,
        "spherical": True,
        "min_points_per_centroid": 1,
        # Only the constructor honours it; without it FAISS keeps 256 points a centroid.
        "max_points_per_centroid": num_points,
    }
    kmeans = train_kmeans(points_MP, num_clusters, parameters, initial_centroids_KP)
    centroids_KP, similarity_I = kmeans.centroids, kmeans.obj
    return centroids_KP, 2.0 - 2.0 * similarity_I / num_points


def _without_zero_rows(points_MP: np.ndarray) -> np.ndarray:
    """Drop the points of documents without a known word in text and query.

    They would pull no centroid, but could become one.
    """
    is_nonzero_M = points_MP.any(axis=1)
    return points_MP if is_nonzero_M.all() else points_MP[is_nonzero_M]


def _count_distinct(points_MP: np.ndarray, enough: int) -> int:
    """Count distinct rows, stopping at ``enough``: almost always after as many rows."""
    seen: set[bytes] = set()
    for row in points_MP:
        seen.add(row.tobytes())
        if len(seen) >= enough:
            break
    return len(seen)
