"""Which shard has which documents: whole partitions, one after another.

    partitions   p0 p1 p2 │ p3 p4 │ p5 p6        as many of them in each shard, more or less

A shard numbers its documents and chunks from 0 in the order of the collection, so that ties within a shard
are ties of the collection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int64

Places = Int64[np.ndarray, " _"]


def cut_partitions(num_partitions: int, num_shards: int) -> list[range]:
    """Return the partitions of each shard, none without any; a collection without partitions is one."""
    bounds = np.linspace(0, max(1, num_partitions), num_shards + 1).astype(np.int64)
    return [range(first, end) for first, end in pairwise(np.unique(bounds).tolist())]


class Placement:
    """The documents and chunks of each shard, given how many each has."""

    def __init__(self, num_documents: Sequence[int], num_chunks: Sequence[int]) -> None:
        self._documents, self._chunks = (np.cumsum([0, *each])[:-1] for each in (num_documents, num_chunks))
        self.filled = [shard for shard, count in enumerate(num_documents) if count]
        """The shards that have documents."""

    def split_documents(self, documents: Places) -> Iterator[tuple[int, Places, Places]]:
        """Yield each shard that has some of these, where they stand among them, and its own numbers."""
        return _split(documents, self._documents)

    def split_chunks(self, chunks: Places) -> Iterator[tuple[int, Places, Places]]:
        """Yield what :meth:`split_documents` does, of chunks."""
        return _split(chunks, self._chunks)

    def documents_of(self, shard: int, numbers: Places) -> Places:
        """Return the positions of a shard's documents, by its own numbers."""
        return numbers + self._documents[shard]

    def chunks_of(self, shard: int, numbers: Places) -> Places:
        """Return the positions of a shard's chunks, by its own numbers."""
        return numbers + self._chunks[shard]


def _split(positions: Places, bounds: Places) -> Iterator[tuple[int, Places, Places]]:
    owners = np.searchsorted(bounds, positions, side="right") - 1
    for owner in np.flatnonzero(np.bincount(owners)).tolist():
        places = np.flatnonzero(owners == owner)
        yield owner, places, positions[places] - bounds[owner]
