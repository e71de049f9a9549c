from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.products import inner_products

ROOT = Path(__file__).parents[1]
VECTOR_DIMS = (16, 48, 384)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (12,), (70,))


@pytest.mark.parametrize("num_vectors", [0, 1, 23, 24, 1_000, 30_000])
@pytest.mark.parametrize("query_shape", [(), (12,), (70,)])
def test_pieces_give_the_product_of_the_whole(num_vectors: int, query_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    vectors_NV = rng.normal(size=(num_vectors, 384)).astype(np.float32)
    query = rng.normal(size=(384, *query_shape)).astype(np.float32)
    products = inner_products(vectors_NV, query)
    assert (products.shape, products.dtype) == ((num_vectors, *query_shape), np.float32)
    np.testing.assert_allclose(products, vectors_NV @ query, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vector_dim", VECTOR_DIMS)
@pytest.mark.parametrize("query_shape", SHAPES)
def test_a_row_has_the_same_product_beside_any_others(vector_dim: int, query_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    vectors_NV = rng.normal(size=(1_000, vector_dim)).astype(np.float32)
    query = rng.normal(size=(vector_dim, *query_shape)).astype(np.float32)
    whole = inner_products(vectors_NV, query)
    for first, count in ((0, 1), (1, 2), (3, 31), (10, 257), (999, 1)):
        piece = inner_products(vectors_NV[first : first + count].copy(), query)
        np.testing.assert_array_equal(piece, whole[first : first + count])


@pytest.mark.parametrize("query_shape", SHAPES)
def test_copies_of_a_row_tie(query_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    vectors_NV = np.repeat(rng.normal(size=(1, 384)).astype(np.float32), 300, axis=0)
    products = inner_products(vectors_NV, rng.normal(size=(384, *query_shape)).astype(np.float32))
    np.testing.assert_array_equal(products, np.broadcast_to(products[0], products.shape))


@pytest.mark.parametrize("kernels", ["Haswell", "Zen", "SkylakeX", "Sandybridge"])
def test_products_are_the_same_on_the_kernels_of_other_processors(kernels: str) -> None:
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernels}
    program = (
        "import numpy; from threadpoolctl import threadpool_info; "
        "print({info['architecture'] for info in threadpool_info() if info['internal_api'] == 'openblas'})"
    )
    started = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    names = {kernels, "Haswell"} if kernels == "Zen" else {kernels}  # an older OpenBLAS gives Zen Haswell's
    if not any(name in started.stdout for name in names):
        pytest.skip(f"this processor or NumPy has no {kernels} kernels")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from tests import test_products as claims\n"
        "for shape in claims.SHAPES:\n"
        "    claims.test_copies_of_a_row_tie(shape)\n"
        "    for vector_dim in claims.VECTOR_DIMS:\n"
        "        claims.test_a_row_has_the_same_product_beside_any_others(vector_dim, shape)"
    )
    places = [str(ROOT), str(ROOT / "pipeline/face")]
    done = subprocess.run(
        [sys.executable, "-c", program, *places], env=environment, capture_output=True, text=True
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"this processor lacks instructions of {kernels}")
    assert done.returncode == 0, done.stderr
