from __future__ import annotations

import pytest
import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.losses import over_widths


def test_over_widths_is_the_weighted_mean():
    found = over_widths(lambda dim: torch.tensor(float(dim)), [2, 4, 8], [1.0, 2.0, 1.0])
    assert float(found) == pytest.approx((2 + 2 * 4 + 8) / 4)
    assert float(over_widths(lambda dim: torch.tensor(float(dim)), [2, 4])) == pytest.approx(3.0)


def test_over_widths_a_width_of_weight_zero_is_not_computed():
    asked: list[int] = []

    def loss(dim: int) -> torch.Tensor:
        asked.append(dim)
        return torch.tensor(1.0)

    over_widths(loss, [4, 8], [0.0, 1.0])
    assert asked == [8]


@pytest.mark.parametrize("weights", [[1.0], [-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0]])
def test_over_widths_weights_that_do_not_fit_are_refused(weights: list[float]):
    with pytest.raises(ConfigError, match="Matryoshka weights"):
        over_widths(lambda dim: torch.tensor(1.0), [2, 4], weights)
