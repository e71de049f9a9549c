from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.context.whitening import PRIOR_VECTORS, Whitening


@pytest.fixture
def sample() -> np.ndarray:
    generator = np.random.default_rng(0)
    return (generator.standard_normal((400, 6)) * [3, 2, 1, 1, 0.5, 0.25] + 1).astype(np.float32)


def naive(vectors: np.ndarray, sample: np.ndarray, gamma: float) -> np.ndarray:
    """Map one vector after the other, by the singular values of a sample with its prior."""
    trust = len(sample) / (len(sample) + PRIOR_VECTORS)
    mean = sample.astype(np.float64).mean(0)
    covariance = np.cov(sample.astype(np.float64), rowvar=False, bias=True)
    width = len(mean)
    shrunk = trust * covariance + (1 - trust) * np.trace(covariance) / width * np.eye(width)
    axes, variances, _ = np.linalg.svd(shrunk)
    rows = []
    for vector in vectors:
        moved = vector - trust * mean
        row = sum(
            (axis @ moved) * variance ** (-gamma / 2) * axis
            for axis, variance in zip(axes.T, variances, strict=True)
        )
        rows.append(row / np.linalg.norm(row))
    return np.array(rows)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_whitening_is_that_of_the_naive_sum_over_axes(sample: np.ndarray, gamma: float):
    found = Whitening.of(sample, gamma).apply(sample[:20])

    assert found == pytest.approx(naive(sample[:20], sample, gamma), abs=1e-5)


def test_full_whitening_makes_a_large_sample_nearly_round(sample: np.ndarray):
    many = np.repeat(sample, 1_000, axis=0)
    whitening = Whitening.of(many, gamma=1.0)

    mapped = (many - whitening.mean_V) @ whitening.matrix_VV
    assert np.cov(mapped, rowvar=False, bias=True) == pytest.approx(np.eye(6), abs=0.01)


@pytest.mark.parametrize("size", [1, 3])
def test_a_small_sample_gives_vectors_of_length_one(sample: np.ndarray, size: int):
    found = Whitening.of(sample[:size], gamma=0.3).apply(sample[:size])

    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_equal_vectors_in_the_sample_keep_their_direction(sample: np.ndarray):
    equal = np.repeat(sample[:1], 50, axis=0)
    found = Whitening.of(equal, gamma=0.3).apply(equal)

    assert found[0] == pytest.approx(sample[0] / np.linalg.norm(sample[0]), abs=1e-4)
