"""Inner products with a query whose bits depend on the row and the query alone, not on the rows beside it.

A search that is cut into shards therefore has the scores of one that is not, and copies of a text tie. A
product of a matrix sums a row in another order for each place among the others: BLAS takes rows by 12 where
it can, and the rest by 4, and gives a large product to all threads, which wait for each other, spinning. So
all products here have one shape, eight rows, in which every row is summed alike.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float32

_TILE_ROWS: Final = 8
"""Taken by 4 on kernels of 4 and of 12 rows, and at once on wider ones."""


def inner_products(
    vectors_NV: Float32[np.ndarray, "N V"], query: Float32[np.ndarray, "V ..."]
) -> Float32[np.ndarray, "N ..."]:
    """Return ``vectors_NV @ query`` for one query vector or the columns of several."""
    if query.ndim == 1:
        return np.vecdot(vectors_NV, query)
    products_NQ = np.empty((len(vectors_NV), query.shape[1]), np.float32)
    num_tiled = len(vectors_NV) - len(vectors_NV) % _TILE_ROWS
    tiles = vectors_NV[:num_tiled].reshape(-1, _TILE_ROWS, vectors_NV.shape[1])
    np.matmul(tiles, query, out=products_NQ[:num_tiled].reshape(-1, _TILE_ROWS, query.shape[1]))
    if num_tiled < len(vectors_NV):
        last = np.zeros((_TILE_ROWS, vectors_NV.shape[1]), np.float32)
        last[: len(vectors_NV) - num_tiled] = vectors_NV[num_tiled:]
        products_NQ[num_tiled:] = (last @ query)[: len(vectors_NV) - num_tiled]
    return products_NQ
