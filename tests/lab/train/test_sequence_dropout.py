from __future__ import annotations

import math

import pytest
import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.sequence_dropout import draw_dropped, null_bias


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_draw_dropped_share_of_null_tokens_is_the_probability():
    share = draw_dropped(4, 500, 0.3, drawn()).float().mean()
    assert abs(float(share) - 0.3) < 0.04  # four standard deviations of 2,000 draws


def test_draw_dropped_examples_are_drawn_apart_and_from_the_seed():
    dropped = draw_dropped(2, 50, 0.5, drawn(7))
    assert (dropped[0] != dropped[1]).any()
    assert torch.equal(dropped, draw_dropped(2, 50, 0.5, drawn(7)))
    assert not torch.equal(dropped, draw_dropped(2, 50, 0.5, drawn(8)))


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_draw_dropped_at_the_ends_drops_nothing_or_everything(probability: float):
    assert (draw_dropped(3, 9, probability, drawn()) == bool(probability)).all()


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_draw_dropped_probability_outside_zero_and_one_is_refused(probability: float):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        draw_dropped(1, 1, probability, drawn())


def test_null_bias_weighs_one_null_token_as_all_that_fell():
    bias = null_bias(torch.tensor([[True, False, True], [False, False, False]]))
    assert bias.tolist() == [
        [-math.inf, 0.0, -math.inf, pytest.approx(math.log(2))],
        [0.0, 0.0, 0.0, -math.inf],
    ]
