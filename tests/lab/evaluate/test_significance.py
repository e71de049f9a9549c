from __future__ import annotations

import itertools

import numpy as np
import pytest
from cairn.pipeline.lab.evaluate.significance import Comparison, compare_paired, verdict_of


def exact_p_value(difference: np.ndarray) -> float:
    """Try every assignment of signs."""
    observed = abs(difference.mean())
    means = [
        abs((np.array(signs) * difference).mean())
        for signs in itertools.product((-1, 1), repeat=len(difference))
    ]
    return float(np.mean([mean >= observed - 1e-12 for mean in means]))


@pytest.mark.parametrize("seed", range(3))
def test_p_value_approaches_that_of_every_sign_assignment(seed):
    generator = np.random.default_rng(seed)
    a, b = generator.random(10), generator.random(10) + 0.1 * seed

    assert compare_paired(a, b).p_value == pytest.approx(exact_p_value(a - b), abs=0.02)


def test_interval_of_many_queries_is_that_of_the_normal_law():
    generator = np.random.default_rng(0)
    a, b = generator.random(2_000), generator.random(2_000)
    comparison = compare_paired(a, b)
    half_width = 1.96 * np.std(a - b) / np.sqrt(2_000)

    assert comparison.difference == pytest.approx(np.mean(a - b))
    assert comparison.low == pytest.approx(comparison.difference - half_width, abs=0.1 * half_width)
    assert comparison.high == pytest.approx(comparison.difference + half_width, abs=0.1 * half_width)


def test_queries_without_a_value_are_left_out():
    a, b = np.array([1.0, np.nan, 0.5]), np.array([0.0, 1.0, 0.5])

    assert compare_paired(a, b).num_queries == 2
    assert compare_paired(a, b).difference == 0.5


@pytest.mark.parametrize(
    ("low", "high", "p_value", "verdict"),
    [
        (0.01, 0.03, 0.01, "helps"),
        (0.01, 0.03, 0.13, "noise"),
        (-0.01, 0.03, 0.04, "noise"),
        (-0.03, -0.01, 0.01, "hurts"),
    ],
)
def test_verdict_is_helps_only_beyond_noise(low, high, p_value, verdict):
    comparison = Comparison(difference=0.0, low=low, high=high, p_value=p_value, num_queries=9)
    assert verdict_of(comparison) == verdict
