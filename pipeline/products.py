"""Inner products with a query, in pieces that BLAS does not share among threads.

NumPy's BLAS gives a product of a few thousand rows to all threads. They then wait for each other, spinning:
beside other work on the machine a search took two to three times as long.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float32

_UNSHARED: Final = {1: 9_000, 2: 262_000}
"""Multiplications that OpenBLAS still does on one thread, by the dimensions of the query."""
_MOST_PIECES: Final = 1_000
"""Products of more pieces gain from threads."""


def inner_products(
    vectors_NV: Float32[np.ndarray, "N V"], query: Float32[np.ndarray, "V ..."]
) -> Float32[np.ndarray, "N ..."]:
    """Return ``vectors_NV @ query`` for one query vector or the columns of several."""
    num_rows = max(1, _UNSHARED[query.ndim] // max(1, query.size))
    if not num_rows < len(vectors_NV) <= num_rows * _MOST_PIECES:
        return vectors_NV @ query
    products = np.empty((len(vectors_NV), *query.shape[1:]), np.float32)
    for first in range(0, len(vectors_NV), num_rows):
        piece = slice(first, first + num_rows)
        np.matmul(vectors_NV[piece], query, out=products[piece])
    return products
