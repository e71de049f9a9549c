from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.analysis.low_pass import (
    filter_rate,
    high_frequency_norm,
    layer_filters,
    theorem_3_bound,
)
from cairn.pipeline.lab.analysis.traced_pass import trace_row, value_weights

from tests.lab.analysis.numpy_bert import run_bert


def centred(x: np.ndarray) -> np.ndarray:
    return (np.eye(len(x)) - np.full((len(x), len(x)), 1 / len(x))) @ x


def sigma(attention: np.ndarray) -> float:
    return float(np.linalg.svd(centred(attention), compute_uv=False)[0])


def measured(backbone, rows):
    norms = [torch.linalg.matrix_norm(each, ord=2) for each in value_weights(backbone)]
    return layer_filters([trace_row(backbone, row) for row in rows], norms, len(rows[0]))


def test_layer_filters_equal_theorem_2_in_numpy(backbone, rows, tiny_model_folder):
    expected = np.zeros((2, 5))
    for row in rows:
        states, layers = run_bert(tiny_model_folder, row)
        for index, layer in enumerate(layers):
            before = np.linalg.norm(centred(layer.read))
            sigmas = [sigma(head) for head in layer.weights]
            spectral = [np.linalg.svd(w, compute_uv=False)[0] for w in layer.value_weight]
            left = [np.linalg.norm(centred(a @ v)) for a, v in zip(layer.weights, layer.values, strict=True)]
            expected[index] += [
                math.log(np.linalg.norm(centred(states[index + 1])) / np.linalg.norm(centred(states[index]))),
                math.log(math.hypot(*left) / before),
                math.log(max(sigmas) * max(spectral) * len(sigmas)),
                np.mean(np.log(left)) - math.log(before),
                np.mean(np.log(np.multiply(sigmas, spectral))),
            ]
    expected /= len(rows)

    own = [
        [row.whole_layer, row.heads, row.heads_bound, row.head, row.head_bound]
        for row in measured(backbone, rows)
    ]
    np.testing.assert_allclose(own, expected, atol=1e-4)


def test_theorem_2_holds_in_every_layer(backbone, rows):
    for row in measured(backbone, rows):
        assert row.heads <= row.heads_bound
        assert row.head <= row.head_bound


@pytest.mark.parametrize("sigma_s", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("n", [2, 16, 500])
def test_bound_of_theorem_3_is_the_quotient_of_equation_21(n, sigma_s):
    def variance(spread: float, count: int) -> float:
        return math.log((math.exp(spread) - 1) / count)

    s = sigma_s**2
    squares = math.exp(math.log(n) + 2 * s - variance(4 * s, n) / 2)
    products = math.exp(math.log(n * (n - 1)) + s - variance(2 * s, n * (n - 1)) / 2)

    expected = math.sqrt(n * squares / (2 * products + squares))
    assert theorem_3_bound(n, sigma_s) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_filter_rate_equals_numpy(backbone, rows, tiny_model_folder, temperature):
    attentions = [trace_row(backbone, row, temperature).attentions[-1] for row in rows]
    values = [float(high_frequency_norm(each.weights()).mean()) for each in attentions]
    own = filter_rate(attentions, values, 24)
    layers = [run_bert(tiny_model_folder, row, temperature)[1][-1] for row in rows]
    per_text = [np.mean([sigma(head) for head in layer.weights]) for layer in layers]
    deviations = np.array([[head.std() / temperature for head in layer.logits] for layer in layers])

    assert own.values == pytest.approx(per_text, abs=1e-4)
    assert own.sigma_a == pytest.approx(np.mean(per_text), abs=1e-4)
    assert own.high - own.sigma_a == pytest.approx(
        1.96 * np.std(per_text, ddof=1) / math.sqrt(len(rows)), abs=1e-4
    )
    assert own.sigma_s == pytest.approx(deviations.mean(), rel=1e-4)
    assert own.tau_s == pytest.approx((1 / deviations).mean(), rel=1e-4)
    assert own.bound == pytest.approx(
        np.mean([theorem_3_bound(24, each) for each in deviations.ravel()]), rel=1e-4
    )


def test_gaussian_queries_and_keys_have_the_deviation_of_equation_4():
    from cairn.pipeline.lab.analysis.traced_pass import Attention

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 400, 64, generator=generator) * scale for scale in (0.7, 1.6))
    attention = Attention(
        read_TD=query[0], query_HTd=query, key_HTd=key, value_HTd=key, visible_TT=None, temperature=1.0
    )
    rate = filter_rate([attention], [1.0], 400)

    assert rate.gaussian_sigma_s == pytest.approx(0.7 * 1.6, rel=0.02)
    assert rate.sigma_s == pytest.approx(rate.gaussian_sigma_s, rel=0.02)


def test_high_frequency_norm_equals_the_spectrum_of_the_projected_matrix():
    attention = torch.softmax(torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0)), dim=-1)

    assert high_frequency_norm(attention).tolist() == pytest.approx(
        [sigma(each) for each in attention.double().numpy()], abs=1e-6
    )
