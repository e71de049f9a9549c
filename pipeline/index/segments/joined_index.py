"""The vector indexes of several segments, searched as one by position among the rows that are left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.index.protocol import NO_POSITION, VectorIndex
from pipeline.index.segments.deleted import DeletedRows


class JoinedIndex:
    """A :class:`~pipeline.index.protocol.VectorIndex` over segments, in their order.

    Each comes with its deleted rows, which its own index already leaves out of every answer.
    """

    def __init__(self, parts: Sequence[tuple[VectorIndex, DeletedRows]]) -> None:
        self._parts = [(index, deleted) for index, deleted in parts if deleted.num_live]
        self._vector_dim = parts[0][0].vector_dim
        self._ends = np.cumsum([deleted.num_live for _, deleted in self._parts], dtype=np.int64)

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
        scores = [np.full((len(queries_QV), top_k), -np.inf, np.float32)]
        positions = [np.full((len(queries_QV), top_k), NO_POSITION, np.int64)]
        wanted = None if allowed is None else np.unique(allowed)
        for (index, deleted), begin, end in self._places():
            stored = None
            if wanted is not None:
                own = wanted[slice(*np.searchsorted(wanted, (begin, end)).tolist())]
                if not len(own):
                    continue
                stored = deleted.stored_of(own - begin)
            found_QK, stored_QK = index.search(queries_QV, min(top_k, end - begin), stored)
            is_found = stored_QK != NO_POSITION
            own_QK = stored_QK.copy()
            own_QK[is_found] = deleted.live_of(stored_QK[is_found]) + begin
            scores.append(found_QK)
            positions.append(own_QK)
        scores_QF, positions_QF = np.concatenate(scores, axis=1), np.concatenate(positions, axis=1)
        last = np.where(positions_QF == NO_POSITION, np.iinfo(np.int64).max, positions_QF)
        order = np.lexsort((last, -scores_QF), axis=1)[:, :top_k]
        return np.take_along_axis(scores_QF, order, axis=1), np.take_along_axis(positions_QF, order, axis=1)

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

    def _places(self) -> list[tuple[tuple[VectorIndex, DeletedRows], int, int]]:
        """Return each part with its first position and the first one behind it."""
        ends = self._ends.tolist()
        return list(zip(self._parts, [0, *ends[:-1]], ends, strict=True))
