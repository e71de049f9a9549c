"""Asymmetric K-means against FAISS alone on the same points; goal: at most 1.2 times its seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import faiss
import numpy as np
import pytest
from cairn.pipeline.cluster.asymmetric_kmeans import pair_points, train_clusters
from cairn.pipeline.config import ClusterConfig

pytestmark = pytest.mark.bench

NUM_DOCUMENTS, VECTOR_DIM, NUM_CLUSTERS, NUM_ITERATIONS, REPEATS = 32_768, 128, 181, 20, 3


def pairs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    topic = rng.integers(0, NUM_CLUSTERS, NUM_DOCUMENTS)
    sides = [
        rng.standard_normal((NUM_CLUSTERS, VECTOR_DIM))[topic]
        + rng.standard_normal((NUM_DOCUMENTS, VECTOR_DIM))
        for _ in range(2)
    ]
    phi, psi = (side.astype(np.float32) for side in sides)
    faiss.normalize_L2(phi)
    faiss.normalize_L2(psi)
    return phi, psi


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_bench_train_clusters_against_faiss_alone(capsys: pytest.CaptureFixture[str]) -> None:
    phi, psi = pairs()
    points = pair_points(phi, psi)
    config = ClusterConfig(num_clusters=NUM_CLUSTERS, num_iterations=NUM_ITERATIONS)

    def faiss_alone() -> np.ndarray:
        kmeans = faiss.Kmeans(
            points.shape[1],
            NUM_CLUSTERS,
            niter=NUM_ITERATIONS,
            seed=config.seed,
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=len(points),
        )
        kmeans.train(points)
        return kmeans.centroids

    def ours() -> np.ndarray:
        return train_clusters(phi, psi, config, surrogate_fingerprint="bench").centroids_KP

    np.testing.assert_array_equal(ours(), faiss_alone())
    measured = [(seconds(ours), seconds(faiss_alone)) for _ in range(REPEATS)]
    ratio = statistics.median(mine / theirs for mine, theirs in measured)
    with capsys.disabled():
        print(
            f"\ntrain_clusters / faiss.Kmeans on the same {len(points)} points, K={NUM_CLUSTERS}: "
            f"{ratio:.2f} x (goal 1.2 x)"
        )
