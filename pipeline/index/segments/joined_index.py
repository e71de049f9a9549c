"""The vector indexes of several segments, searched as one by position among the rows that are left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cairn.pipeline.index.faiss_index import FaissIndex, best_first
from cairn.pipeline.index.protocol import NO_POSITION
from cairn.pipeline.index.segments.deleted import DeletedRows
from jaxtyping import Float32, Int64


class JoinedIndex:
    """A :class:`~cairn.pipeline.index.protocol.VectorIndex` over segments, in their order.

    Each comes with its deleted rows, which its own index already leaves out of every answer.
    """

    def __init__(self, parts: Sequence[tuple[FaissIndex, DeletedRows]]) -> None:
        self._parts = [(index, deleted) for index, deleted in parts if deleted.num_live]
        self._vector_dim = parts[0][0].vector_dim
        self._ends = np.cumsum([deleted.num_live for _, deleted in self._parts], dtype=np.int64)
        self._sharing = _sharing([index for index, _ in self._parts])

    @property
    def num_vectors(self) -> int:
        """Count the vectors that are left."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def vector_dim(self) -> int:
        """Return V."""
        return self._vector_dim

    def search(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Return the ``top_k`` best of each query, best first, ties by lower position."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        queries_QV = np.ascontiguousarray(queries_QV, dtype=np.float32)
        nearest = None
        if self._sharing and allowed is None:
            num_lists = max(index.nprobe for index in self._sharing)
            nearest = self._sharing[0].nearest_lists(queries_QV, num_lists)
        wanted = None if allowed is None else np.unique(allowed)
        for (index, deleted), begin, end in self._places():
            stored = None
            if wanted is not None:
                own = wanted[slice(*np.searchsorted(wanted, (begin, end)).tolist())]
                if not len(own):
                    continue
                stored = deleted.stored_of(own - begin)
            scores_QF, stored_QF = index.find(
                queries_QV, min(top_k, end - begin), stored, nearest if index in self._sharing else None
            )
            own_QF = deleted.live_of(stored_QF)
            found.append((scores_QF, np.where(stored_QF == NO_POSITION, NO_POSITION, own_QF + begin)))
        if not found:
            found = [(np.empty((len(queries_QV), 0), np.float32), np.empty((len(queries_QV), 0), np.int64))]
        scores, positions = zip(*found, strict=True)
        return best_first(np.concatenate(scores, axis=1), np.concatenate(positions, axis=1), top_k)

    def reconstruct(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions, in their order."""
        positions = np.asarray(positions, np.int64)
        owners = np.searchsorted(self._ends, positions, side="right")
        vectors_AV = np.empty((len(positions), self._vector_dim), np.float32)
        for owner in np.unique(owners).tolist():
            index, deleted = self._parts[owner]
            own = np.flatnonzero(owners == owner)
            stored = deleted.stored_of(positions[own] - (self._ends[owner] - deleted.num_live))
            vectors_AV[own] = index.reconstruct(stored)
        return vectors_AV

    def _places(self) -> list[tuple[tuple[FaissIndex, DeletedRows], int, int]]:
        """Return each part with its first position and the first one behind it."""
        ends = self._ends.tolist()
        return list(zip(self._parts, [0, *ends[:-1]], ends, strict=True))


def _sharing(indexes: Sequence[FaissIndex]) -> list[FaissIndex]:
    """Return the indexes that share the centroids of the first that has some, [] where it is alone."""
    centroids = [index.shared_centroids for index in indexes]
    first = next((each for each in centroids if each is not None), None)
    alike = [
        index
        for index, own in zip(indexes, centroids, strict=True)
        if first is not None and own is not None and np.array_equal(own, first)
    ]
    return alike if len(alike) > 1 else []
