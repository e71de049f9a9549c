"""Inner products whose bits depend on the row and the query alone, on the kernels of several processors.

A search that is cut into shards therefore has the scores of one that is not, and copies of a text tie.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.search.reader import window_scores
from cairn.pipeline.token_vectors.codebook import TokenCodebook

ROOT = Path(__file__).parents[1]
VECTOR_DIMS = (16, 48, 384)


@pytest.mark.parametrize("vector_dim", VECTOR_DIMS)
def test_a_row_has_the_same_products_beside_any_others(vector_dim: int) -> None:
    rng = np.random.default_rng(0)
    vectors_NV = rng.normal(size=(1_000, vector_dim)).astype(np.float32)
    query_qV = rng.normal(size=(12, vector_dim)).astype(np.float32)
    codes = rng.integers(0, 256, (1_000, 8), np.uint8)
    centroids = rng.normal(size=(8, 256, vector_dim // 8)).astype(np.float16)
    codebook = TokenCodebook(centroids=centroids, weights_X=np.ones(4, np.float16))
    dense, tokens = window_scores(vectors_NV, query_qV[0], 1), codebook.similarities(codes, query_qV)
    for first, count in ((0, 1), (1, 2), (3, 31), (10, 257), (999, 1)):
        rows = slice(first, first + count)
        np.testing.assert_array_equal(window_scores(vectors_NV[rows].copy(), query_qV[0], 1), dense[rows])
        np.testing.assert_array_equal(codebook.similarities(codes[rows].copy(), query_qV), tokens[rows])


def test_copies_of_a_row_tie() -> None:
    rng = np.random.default_rng(0)
    vectors_NV = np.repeat(rng.normal(size=(1, 384)).astype(np.float32), 300, axis=0)
    scores = window_scores(vectors_NV, rng.normal(size=384).astype(np.float32), 1)
    np.testing.assert_array_equal(scores, np.full(300, scores[0]))


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
        "claims.test_copies_of_a_row_tie()\n"
        "for vector_dim in claims.VECTOR_DIMS:\n"
        "    claims.test_a_row_has_the_same_products_beside_any_others(vector_dim)"
    )
    places = [str(ROOT), str(ROOT / "pipeline/face")]
    done = subprocess.run(
        [sys.executable, "-c", program, *places], env=environment, capture_output=True, text=True
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"this processor lacks instructions of {kernels}")
    assert done.returncode == 0, done.stderr
