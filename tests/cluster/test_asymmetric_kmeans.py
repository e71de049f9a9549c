"""Clusters of pairs: how they are trained, and which of them a text belongs to."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from cairn.pipeline.cluster import assignment
from cairn.pipeline.cluster.assignment import (
    ClusterAssigner,
    assign,
    first_order_points,
    nearest_centroids,
)
from cairn.pipeline.cluster.asymmetric_kmeans import (
    MAX_CLUSTERS,
    choose_num_clusters,
    pair_points,
    train_clusters,
)
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.config import ClusterConfig
from cairn.pipeline.errors import FingerprintMismatchError, ModelError, SourceError


def topics(
    num_documents: int = 240, num_topics: int = 6, dim: int = 16, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make pairs around well-separated topics whose queries lie elsewhere than their documents."""
    rng = np.random.default_rng(seed)
    topic = np.arange(num_documents) % num_topics
    centres = 4 * rng.standard_normal((2, num_topics, dim))
    phi, psi = (centres[side][topic] + rng.standard_normal((num_documents, dim)) for side in range(2))
    return unit(phi), unit(psi), topic


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)).astype(np.float32)


def train(phi: np.ndarray, psi: np.ndarray, initial: np.ndarray | None = None, **settings: int) -> Clusters:
    return train_clusters(
        phi, psi, ClusterConfig(**settings), surrogate_fingerprint="test", initial_centroids_KP=initial
    )


def naive_points(phi: np.ndarray, psi: np.ndarray) -> np.ndarray:
    rows = [np.concatenate(pair) for pair in zip(phi, psi, strict=True)] + [
        np.concatenate(pair) for pair in zip(psi, phi, strict=True)
    ]
    return np.array([row / np.linalg.norm(row) for row in rows])


def naive_objective(points: np.ndarray, centroids: np.ndarray) -> float:
    return float(
        np.mean([min(np.sum((point - centroid) ** 2) for centroid in centroids) for point in points])
    )


def naive_lloyd(points: np.ndarray, centroids: np.ndarray, iterations: int) -> np.ndarray:
    for _ in range(iterations):
        nearest = [int(np.argmax(centroids @ point)) for point in points]
        sums = [
            np.sum([point for point, k in zip(points, nearest, strict=True) if k == cluster], axis=0)
            for cluster in range(len(centroids))
        ]
        centroids = np.array([total / np.linalg.norm(total) for total in sums])
    return centroids


def test_train_clusters_from_given_centroids_equals_naive_lloyd() -> None:
    phi, psi, _ = topics()
    points = naive_points(phi, psi)
    np.testing.assert_allclose(pair_points(phi, psi), points, atol=1e-6)
    initial = points[[0, 1, 2, 3, 4, 5, 240, 241]].astype(np.float32)
    trained = train(phi, psi, initial, num_iterations=4)
    np.testing.assert_allclose(trained.centroids_KP, naive_lloyd(points, initial, 4), atol=1e-5)
    before_the_last_update = naive_objective(points, naive_lloyd(points, initial, 3))
    assert trained.objective_I[-1] == pytest.approx(before_the_last_update, rel=1e-4)


def test_train_clusters_finds_the_topics_that_were_put_in() -> None:
    phi, psi, topic = topics()
    trained = train(phi, psi, num_clusters=24, num_redos=3)
    found = assign(trained, phi, psi)
    assert all(len(set(topic[found == cluster])) == 1 for cluster in set(found))


def test_train_clusters_keeps_the_best_of_its_attempts() -> None:
    rng = np.random.default_rng(5)
    phi, psi = unit(rng.standard_normal((200, 6))), unit(rng.standard_normal((200, 6)))
    one, best = (train(phi, psi, num_clusters=20, num_redos=count).objective_I[-1] for count in (1, 8))
    assert best < one


def test_train_clusters_uses_every_point_beyond_256_a_cluster() -> None:
    phi, psi, _ = topics(num_documents=900)
    trained = train(phi, psi, num_clusters=1, num_iterations=1)
    np.testing.assert_allclose(
        trained.centroids_KP[0], unit(naive_points(phi, psi).sum(axis=0)[None])[0], atol=1e-5
    )


def test_train_clusters_of_odd_corpora_has_the_clusters_there_are_and_writes_no_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for num_documents in (1, 2, 3):
        trained = train(*topics(num_documents=num_documents)[:2], num_clusters=8)
        assert trained.num_clusters == trained.sizes_K.sum() == num_documents
    row, zeros = np.repeat(unit(np.arange(1, 9)[None]), 50, axis=0), np.zeros((5, 8), np.float32)
    assert train(row, row, num_clusters=4).sizes_K.tolist() == [50]
    trained = train(zeros, zeros, num_clusters=3)
    assert trained.sizes_K.tolist() == [5]
    assert not trained.centroids_KP.any()
    train(*topics(num_documents=60)[:2], num_clusters=30)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SourceError, match="at least one document"):
        train(zeros[:0], zeros[:0])
    with pytest.raises(ModelError, match="finite"):
        train(np.full((3, 8), np.nan, np.float32), np.ones((3, 8), np.float32))


def test_train_clusters_with_some_zero_vectors_ignores_them() -> None:
    phi, psi, _ = topics()
    blank = np.zeros((40, phi.shape[1]), np.float32)
    trained = train(np.vstack((phi, blank)), np.vstack((psi, blank)), num_clusters=6)
    np.testing.assert_array_equal(trained.centroids_KP, train(phi, psi, num_clusters=6).centroids_KP)


SCRIPT = """
import hashlib, numpy as np
from cairn.pipeline.cluster import train_clusters
from cairn.pipeline.config import ClusterConfig
rng = np.random.default_rng(7)
phi, psi = (rng.standard_normal((400, 16)).astype(np.float32) for _ in range(2))
found = train_clusters(phi, psi, ClusterConfig(), surrogate_fingerprint="test")
print(hashlib.sha256(found.centroids_KP.tobytes()).hexdigest())
"""


def test_train_clusters_in_another_process_is_bit_equal() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    rng = np.random.default_rng(7)
    phi, psi = (rng.standard_normal((400, 16)).astype(np.float32) for _ in range(2))
    assert printed.stdout.strip() == hashlib.sha256(train(phi, psi).centroids_KP.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("num_documents", "expected"), [(0, 1), (1, 1), (2, 1), (100, 10), (65_536, 256), (10**9, MAX_CLUSTERS)]
)
def test_choose_num_clusters_is_the_bounded_square_root(num_documents: int, expected: int) -> None:
    assert choose_num_clusters(num_documents) == expected


class FirstLetters:
    """Embeds a text by counting the letters a to d."""

    fingerprint = "letters"
    vector_dim = 4

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return unit(np.array([[text.count(letter) for letter in "abcd"] for text in texts]).reshape(-1, 4))


def clusters_at(centroids: np.ndarray, fingerprint: str = "letters") -> Clusters:
    return Clusters(
        centroids_KP=unit(centroids),
        sizes_K=np.zeros(len(centroids), np.int64),
        objective_I=np.zeros(0),
        surrogate_fingerprint=fingerprint,
    )


@pytest.mark.parametrize("block", [7, 1_000])
def test_assign_equals_naive_nearest_centroid_whatever_the_blocks(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(assignment, "BLOCK_ROWS", block)
    phi, psi = np.random.default_rng(5).standard_normal((2, 300, 6)).astype(np.float32)
    clusters = clusters_at(np.random.default_rng(6).standard_normal((17, 12)))
    points = unit(np.concatenate([phi, psi], axis=1))
    naive = [np.argmin(np.linalg.norm(point - clusters.centroids_KP, axis=1)) for point in points]
    np.testing.assert_array_equal(assign(clusters, phi, psi), naive)
    np.testing.assert_allclose(first_order_points(phi, psi), points, atol=1e-6)


def test_nearest_centroids_within_rounding_takes_the_lowest_id() -> None:
    point = np.array([[0.6, 0.8]], np.float32)
    centroids = np.array([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8 + 2e-7]], np.float32)
    assert nearest_centroids(point, centroids).tolist() == [1]
    assert nearest_centroids(np.zeros((2, 2), np.float32), centroids).tolist() == [0, 0]


def test_assign_with_vectors_of_another_width_or_surrogate_is_refused() -> None:
    with pytest.raises(FingerprintMismatchError, match="12 dims"):
        assign(clusters_at(np.ones((2, 12))), np.ones((1, 5), np.float32), np.ones((1, 5), np.float32))
    with pytest.raises(FingerprintMismatchError, match="trained with"):
        ClusterAssigner(clusters_at(np.ones((2, 8)), fingerprint="other"), FirstLetters())


@pytest.mark.parametrize("block", [2, 1_000])
def test_assign_texts_pairs_each_text_with_its_query_side(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(assignment, "BLOCK_ROWS", block)
    clusters = clusters_at(
        np.array([[1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 1, 0]])
    )
    assigner = ClusterAssigner(clusters, FirstLetters())
    assigned = assigner.assign_texts([None, "bbb", "bbb"], ["aaa", "aaa", "aaa"], [None, None, "ccc"])
    assert assigned.tolist() == [0, 1, 2]
