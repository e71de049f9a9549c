"""GPTQ against the update of optimal brain quantisation, written with explicit inverses in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.compress.quantization import rounded_with_feedback

ROWS, WIDTH, GROUP = 6, 16, 8


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator)
    x = torch.randn(200, WIDTH, generator=generator) @ mixing
    return torch.randn(ROWS, WIDTH, generator=generator), x


def naive(weight: np.ndarray, moment: np.ndarray, kind: str) -> np.ndarray:
    """Quantise a column, then move all later ones by the minimiser of the error that is left."""
    weight, moment = weight.astype(np.float64).copy(), moment.astype(np.float64)
    moment += 0.01 * np.diag(moment).mean() * np.eye(len(moment))
    group = GROUP if kind == "int4" else WIDTH
    found = np.zeros_like(weight)
    for column in range(weight.shape[1]):
        if column % group == 0:
            part = weight[:, column : column + group]
            scale, zero = np.abs(part).max(1) / 127, 0.0
            if kind == "int4":
                low = np.minimum(part.min(1), 0)
                scale = ((np.maximum(part.max(1), 0) - low) / 15).astype(np.float16).astype(np.float64)
                zero = np.clip(np.rint(-low / scale), 0, 15)
        least, most = (0, 15) if kind == "int4" else (-127, 127)
        code = np.clip(np.rint(weight[:, column] / scale) + zero, least, most)
        found[:, column] = (code - zero) * scale
        inverse = np.linalg.inv(moment[column:, column:])
        error = (weight[:, column] - found[:, column]) / inverse[0, 0]
        weight[:, column + 1 :] -= error[:, None] * inverse[0, 1:]
    return found


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_feedback_equals_the_naive_reference(kind):
    weight, x = inputs()
    moment = x.T @ x / len(x)
    ours = rounded_with_feedback(weight, moment, kind, GROUP if kind == "int4" else WIDTH).dequantized()
    np.testing.assert_allclose(ours.numpy(), naive(weight.numpy(), moment.numpy(), kind), atol=2e-3)


def test_rows_are_rounded_alike_wherever_they_are_stacked():
    weight, x = inputs(4)
    moment = x.T @ x / len(x)
    whole = rounded_with_feedback(weight, moment, "int4", GROUP).dequantized()
    assert torch.equal(whole[2:4], rounded_with_feedback(weight[2:4], moment, "int4", GROUP).dequantized())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_moments_that_are_no_numbers_raise(value):
    weight, _ = inputs()
    with pytest.raises(ModelError, match="must be finite on the calibration texts, got NaN or infinity"):
        rounded_with_feedback(weight, torch.full((WIDTH, WIDTH), value), "int4", GROUP)
