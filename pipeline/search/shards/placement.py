"""Which shard has which documents: runs of them in their order, or the clusters of the collection.

    order      d0 d1 d2 │ d3 d4 d5 │ d6 d7                cut where the chunks are about equal
    cluster    clusters along a tour of neighbours ─▶ cut between two clusters, or within a big one

A shard numbers its documents and chunks in the order of the collection, so that ties within a shard are ties
of the collection. Every process computes the placement by itself; a fingerprint tells whether it is the same.

N documents    S shards    K clusters
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from cairn.pipeline.cluster.packing import greedy_tour
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.names import CLUSTERS_ARROW
from cairn.pipeline.types import PlaceBy
from jaxtyping import Int32, Int64

Places = Int64[np.ndarray, " _"]

MOST_MOVED: Final = 0.25
"""How far a cut moves to the end of a cluster, in shards: a cluster that ends further away is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a generation is cut into shards, and which of them a search asks.

    ``route_clusters`` says of how many clusters the shards are asked, the nearest ones; None asks all.
    """

    num_shards: int
    place_by: PlaceBy = "order"
    route_clusters: int | None = None


class Placement:
    """Where each document of a generation is; ``documents`` are those of each shard, ascending."""

    def __init__(self, generation: Generation, documents: Sequence[Places]) -> None:
        self.documents = documents
        self._chunk_offsets, self._chunk_documents = generation.chunk_offsets, generation.chunk_documents
        sizes_N = np.diff(self._chunk_offsets)
        self._owner_N = np.empty(len(sizes_N), np.int32)
        self._number_N = np.empty(len(sizes_N), np.int64)
        self._first_chunk_N = np.empty(len(sizes_N), np.int64)
        self._offsets: list[Places] = []
        for shard, own in enumerate(documents):
            offsets = np.append(0, np.cumsum(sizes_N[own]))
            self._owner_N[own], self._number_N[own] = shard, np.arange(len(own))
            self._first_chunk_N[own] = offsets[:-1]
            self._offsets.append(offsets)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of which shard has which document."""
        return hashlib.sha256(self._owner_N.tobytes()).hexdigest()

    def owners(self, documents: Places) -> Int32[np.ndarray, " _"]:
        """Return the shard of each document."""
        return self._owner_N[documents]

    def split_documents(self, documents: Places) -> Iterator[tuple[int, Places, Places]]:
        """Yield each shard that has some of these, where they stand among them, and its own numbers."""
        for shard, places in _by_owner(self.owners(documents)):
            yield shard, places, self._number_N[documents[places]]

    def split_chunks(self, chunks: Places) -> Iterator[tuple[int, Places, Places]]:
        """Yield what :meth:`split_documents` does, of chunks."""
        documents = self._chunk_documents[chunks]
        numbers = chunks - self._chunk_offsets[documents] + self._first_chunk_N[documents]
        for shard, places in _by_owner(self.owners(documents)):
            yield shard, places, numbers[places]

    def documents_of(self, shard: int, numbers: Places) -> Places:
        """Return the positions of a shard's documents, by its own numbers."""
        return self.documents[shard][numbers]

    def chunks_of(self, shard: int, numbers: Places) -> Places:
        """Return the positions of a shard's chunks, by its own numbers."""
        offsets = self._offsets[shard]
        own = np.searchsorted(offsets, numbers, side="right") - 1
        return self._chunk_offsets[self.documents[shard][own]] + numbers - offsets[own]


def place(generation: Generation, num_shards: int, place_by: PlaceBy) -> Placement:
    """Place the documents of a generation; shards have about as many chunks each.

    There are fewer shards where there are few documents.
    """
    if place_by == "order":
        order_N = np.arange(generation.num_documents)
        ends = np.arange(generation.num_documents + 1)
    else:
        rank_K = _cluster_ranks(generation)
        rank_N = rank_K[generation.cluster_ids]
        order_N = np.argsort(rank_N, kind="stable")
        ends = np.append(0, np.cumsum(np.bincount(rank_N, minlength=len(rank_K))))
    sizes_N = np.diff(generation.chunk_offsets)[order_N]
    cuts = cut_points(np.append(0, np.cumsum(sizes_N)), ends, num_shards)
    return Placement(generation, [np.sort(order_N[first:end]) for first, end in pairwise(cuts.tolist())])


def cut_points(
    offsets: Int64[np.ndarray, " N_plus_1"], ends: Int64[np.ndarray, " _"], num_shards: int
) -> Int64[np.ndarray, " S_plus_1"]:
    """Return where to cut documents in a row, at one of ``ends`` where one is near.

    ``offsets`` are the chunks before each document; ``ends`` are the places between clusters.
    """
    wanted = np.linspace(0, int(offsets[-1]), num_shards + 1)
    cuts = np.searchsorted(offsets, wanted)
    above = np.minimum(np.searchsorted(offsets[ends], wanted), len(ends) - 1)
    below = np.maximum(above - 1, 0)
    is_below = wanted - offsets[ends[below]] < offsets[ends[above]] - wanted
    nearest = np.where(is_below, ends[below], ends[above])
    is_near = np.abs(offsets[nearest] - wanted) <= MOST_MOVED * offsets[-1] / num_shards
    return np.unique(np.where(is_near, nearest, cuts))


def _cluster_ranks(generation: Generation) -> Int64[np.ndarray, " K"]:
    """Return the place of each cluster on a tour of neighbours; by number where no centroids are kept."""
    num_clusters = int(generation.cluster_ids.max(initial=0)) + 1
    if CLUSTERS_ARROW not in generation.manifest.files:
        return np.arange(num_clusters)
    centroids_KP = Clusters.read(generation.side_file(CLUSTERS_ARROW)).centroids_KP
    tour_K = greedy_tour(centroids_KP, np.random.default_rng(0))
    rank_K = np.empty(len(tour_K), np.int64)
    rank_K[tour_K] = np.arange(len(tour_K))
    return rank_K


def _by_owner(owners: Int32[np.ndarray, " _"]) -> Iterator[tuple[int, Places]]:
    for owner in np.unique(owners).tolist():
        yield owner, np.flatnonzero(owners == owner)
