"""Which shards a query is for: those that hold the clusters nearest to it.

A cluster's centroid is the direction of the mean of its chunks' vectors, of a sample where there are many. It
lies where vectors of queries lie, and the query is encoded anyway. The centroids that
``cairn.pipeline.cluster`` trained lie in the space of its surrogate, in which a query would have to be
embedded once more.

K clusters    S shards    C sampled chunks    V vector dim
"""

from __future__ import annotations

from typing import Final

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.products import inner_products
from cairn.pipeline.ragged import places_in_groups
from cairn.pipeline.search.shards.placement import Placement
from jaxtyping import Bool, Float32, Int64

SAMPLED_CHUNKS: Final = 64
"""Chunks of each cluster that stand for it."""


class Routes:
    """Routes queries over the shards of one generation to the shards of the ``num_clusters`` nearest."""

    def __init__(self, generation: Generation, placement: Placement, num_clusters: int) -> None:
        self._num_clusters = num_clusters
        self._cluster_ids = generation.cluster_ids
        self._held = np.unique(self._cluster_ids)
        self._centroids_KV = cluster_centroids(generation)
        shape = len(self._centroids_KV), len(placement.documents)
        self._is_in_KS: Bool[np.ndarray, "K S"] = np.zeros(shape, np.bool_)
        for shard, documents in enumerate(placement.documents):
            self._is_in_KS[np.unique(self._cluster_ids[documents]), shard] = True

    def shards(
        self, vector_V: Float32[np.ndarray, " V"], allowed: Int64[np.ndarray, " A"] | None
    ) -> set[int]:
        """Return the shards with the nearest of the clusters that have allowed documents; ties by number."""
        held = self._held if allowed is None else np.unique(self._cluster_ids[allowed])
        scores = inner_products(self._centroids_KV[held], vector_V)
        nearest = held[np.argsort(-scores, kind="stable")[: self._num_clusters]]
        return set(np.flatnonzero(self._is_in_KS[nearest].any(axis=0)).tolist())


def cluster_centroids(generation: Generation) -> Float32[np.ndarray, "K V"]:
    """Return the unit centroid of the chunks of each cluster, 0 of one without documents."""
    cluster_M = generation.cluster_ids[generation.chunk_documents]
    order = np.argsort(cluster_M, kind="stable")
    counts_K = np.bincount(cluster_M)
    taken_K = np.minimum(counts_K, SAMPLED_CHUNKS)
    firsts_K = np.cumsum(counts_K) - counts_K
    # Evenly spread over a cluster.
    steps_C = places_in_groups(taken_K) * np.repeat(counts_K, taken_K) // np.repeat(taken_K, taken_K)
    places_C = np.repeat(firsts_K, taken_K) + steps_C
    chunks_C = np.sort(order[places_C])
    sums_KV = np.zeros((len(counts_K), generation.chunks.vector_dim), np.float32)
    np.add.at(sums_KV, cluster_M[chunks_C], generation.chunks.reconstruct(chunks_C))
    lengths_K = np.linalg.norm(sums_KV, axis=1, keepdims=True)
    return np.divide(sums_KV, lengths_K, out=sums_KV, where=lengths_K > 0)
