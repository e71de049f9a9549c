"""Inner products with a query whose bits depend on the row and the query alone, not on the rows beside it.

A search that is cut into shards therefore has the scores of one that is not. NumPy's BLAS sums a product of
a matrix and a vector in another order for each place of a row among the others. It also gives a product of a
few thousand rows to all threads. They then wait for each other, spinning: beside other work on the machine a
search took two to three times as long.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float32

_UNSHARED: Final = 262_000
"""Multiplications that OpenBLAS still does on one thread."""
_TILE_ROWS: Final = 8
_MOST_ROWS: Final = 256


def inner_products(
    vectors_NV: Float32[np.ndarray, "N V"], query: Float32[np.ndarray, "V ..."]
) -> Float32[np.ndarray, "N ..."]:
    """Return ``vectors_NV @ query`` for one query vector or the columns of several."""
    if query.ndim == 1:
        return np.vecdot(vectors_NV, query)
    # BLAS chooses its kernel by the shape of a product: all have the same one.
    num_rows = _TILE_ROWS * max(
        1, min(_MOST_ROWS // _TILE_ROWS, _UNSHARED // (_TILE_ROWS * max(1, query.size)))
    )
    products = np.empty((len(vectors_NV), *query.shape[1:]), np.float32)
    num_whole = len(vectors_NV) - len(vectors_NV) % num_rows
    for first in range(0, num_whole, num_rows):
        piece = slice(first, first + num_rows)
        np.matmul(vectors_NV[piece], query, out=products[piece])
    if num_whole < len(vectors_NV):
        last = np.zeros((num_rows, vectors_NV.shape[1]), np.float32)
        last[: len(vectors_NV) - num_whole] = vectors_NV[num_whole:]
        products[num_whole:] = (last @ query)[: len(vectors_NV) - num_whole]
    return products
