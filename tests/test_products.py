from __future__ import annotations

import numpy as np
import pytest

from pipeline.products import inner_products


@pytest.mark.parametrize("num_vectors", [0, 1, 23, 24, 1_000, 30_000])
@pytest.mark.parametrize("query_shape", [(), (12,), (70,)])
def test_pieces_give_the_product_of_the_whole(num_vectors: int, query_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    vectors_NV = rng.normal(size=(num_vectors, 384)).astype(np.float32)
    query = rng.normal(size=(384, *query_shape)).astype(np.float32)
    products = inner_products(vectors_NV, query)
    assert (products.shape, products.dtype) == ((num_vectors, *query_shape), np.float32)
    np.testing.assert_allclose(products, vectors_NV @ query, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vector_dim", [16, 48, 384])
@pytest.mark.parametrize("query_shape", [(), (1,), (12,), (70,)])
def test_a_row_has_the_same_product_beside_any_others(vector_dim: int, query_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    vectors_NV = rng.normal(size=(1_000, vector_dim)).astype(np.float32)
    query = rng.normal(size=(vector_dim, *query_shape)).astype(np.float32)
    whole = inner_products(vectors_NV, query)
    for first, count in ((0, 1), (1, 2), (3, 31), (10, 257), (999, 1)):
        piece = inner_products(vectors_NV[first : first + count].copy(), query)
        np.testing.assert_array_equal(piece, whole[first : first + count])
