"""Pack clusters of unequal size into batches of one size, so that a batch holds neighbours.

    cluster of 700 ─▶ 256 │ 256 │ 188 ┐
    cluster of  90 ─▶ 90              ├─ laid along a tour of the clusters ─▶ 256 │ 256 │ … rest left over
    cluster of 300 ─▶ 256 │ 44        ┘

The tour is greedy: from a random cluster always on to the nearest centroid not yet visited.

Source: Morris & Rush 2024 (CDE), §4.1 (packing) and §10.5 (greedy travelling salesman). A cluster's points
are shuffled first, so every epoch draws other batches. Differs: whole batches are cut from a large cluster
before its rest goes on the tour.

    N points    K clusters    P point dim    B batches
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cairn.pipeline.errors import ConfigError
from jaxtyping import Float32, Int32, Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatches:
    """Whole batches, one a row, and the points that filled none; every point is in one of the two, once."""

    batches_BN: Int64[np.ndarray, "B size"]
    left_over: Int64[np.ndarray, " rest"]


def pack(
    cluster_N: Int32[np.ndarray, " N"],
    centroids_KP: Float32[np.ndarray, "K P"],
    batch_size: int,
    generator: np.random.Generator,
) -> PackedBatches:
    """Pack points 0 … N - 1 by their clusters; the same generator state gives the same batches."""
    if batch_size < 1:
        raise ConfigError(f"the size of a batch must be at least 1, got {batch_size}")
    shuffled = generator.permutation(len(cluster_N))
    order = shuffled[np.argsort(cluster_N[shuffled], kind="stable")]
    bounds = np.searchsorted(cluster_N[order], np.arange(len(centroids_KP) + 1))
    whole: list[np.ndarray] = []
    rests: dict[int, np.ndarray] = {}
    for cluster in np.unique(cluster_N).tolist():
        points = order[bounds[cluster] : bounds[cluster + 1]]
        num_whole = len(points) // batch_size * batch_size
        whole.append(points[:num_whole])
        if num_whole < len(points):
            rests[cluster] = points[num_whole:]
    clusters = np.array(list(rests), np.int64)
    visits = greedy_tour(centroids_KP[clusters], generator)
    along_tour = np.concatenate(
        [np.zeros(0, np.int64), *(rests[cluster] for cluster in clusters[visits].tolist())]
    )
    num_whole = len(along_tour) // batch_size * batch_size
    packed = np.concatenate([np.zeros(0, np.int64), *whole, along_tour[:num_whole]])
    return PackedBatches(batches_BN=packed.reshape(-1, batch_size), left_over=along_tour[num_whole:])


def greedy_tour(
    centroids_KP: Float32[np.ndarray, "K P"], generator: np.random.Generator
) -> Int64[np.ndarray, " K"]:
    """Visit every centroid once: the first at random, then always the nearest by inner product.

    Ties go to the lowest number.
    """
    num_clusters = len(centroids_KP)
    visits_K = np.empty(num_clusters, np.int64)
    if not num_clusters:
        return visits_K
    is_visited_K = np.zeros(num_clusters, np.bool_)
    here = int(generator.integers(num_clusters))
    for step in range(num_clusters):
        visits_K[step] = here
        is_visited_K[here] = True
        here = int(np.where(is_visited_K, -np.inf, centroids_KP @ centroids_KP[here]).argmax())
    return visits_K
