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
