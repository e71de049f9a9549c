"""What every vector index of the line answers: the exact oracle and the FAISS files alike.

Vectors are addressed by position: the row of the stored table they came from, 0..N-1. Names of documents are
the generation's business, not the index's.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int64

NO_POSITION = -1
"""Fills the answer where fewer than ``top_k`` vectors were found; its score is minus infinity."""


@runtime_checkable
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
