from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluate.whitening import soft_whitening, whiten


@pytest.fixture
def sample() -> np.ndarray:
    generator = np.random.default_rng(0)
    return (generator.standard_normal((400, 6)) * [3, 2, 1, 1, 0.5, 0.25] + 1).astype(np.float32)


def test_full_whitening_makes_the_sample_round(sample: np.ndarray):
    mean, matrix = soft_whitening(sample, gamma=1.0)

    assert np.cov((sample - mean) @ matrix, rowvar=False, bias=True) == pytest.approx(np.eye(6), abs=1e-3)


def test_no_whitening_only_centres(sample: np.ndarray):
    centred = sample - sample.mean(0)
    expected = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    found = whiten(sample, *soft_whitening(sample, gamma=0.0))

    assert found @ found.T == pytest.approx(expected @ expected.T, abs=1e-4)


def test_a_sample_smaller_than_its_width_gives_finite_vectors(sample: np.ndarray):
    found = whiten(sample, *soft_whitening(sample[:3]))

    assert np.isfinite(found).all()
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)
