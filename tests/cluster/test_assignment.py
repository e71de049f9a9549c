from __future__ import annotations

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
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.errors import FingerprintMismatchError


class FirstLetters:
    """Embeds a text by counting the letters a to d."""

    fingerprint = "letters"
    vector_dim = 4

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.array(
            [[text.count(letter) for letter in "abcd"] for text in texts], dtype=np.float32
        ).reshape(-1, 4)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)


def clusters_at(centroids: np.ndarray, fingerprint: str = "letters") -> Clusters:
    unit = (centroids / np.linalg.norm(centroids, axis=1, keepdims=True)).astype(np.float32)
    return Clusters(
        centroids_KP=unit,
        sizes_K=np.zeros(len(unit), np.int64),
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
    points = np.concatenate([phi, psi], axis=1)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
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
