from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import (
    lr_factor,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_lr,
)
from cairn.pipeline.model.folders.own_tensors import LANDMARK_GATES
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.landmark_attention = nn.ParameterDict({"gates": torch.zeros(2, 2)})


def stepped(model: Model, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        (
            model.linear(torch.ones(3)).sum()
            + (model.get_parameter(LANDMARK_GATES) ** 2 + model.get_parameter(LANDMARK_GATES)).sum()
        ).backward()
        optimizer.step()


def test_lr_factor_rises_to_one_and_falls_to_almost_nothing():
    config = TrainConfig(steps=100, warmup_share=0.1)
    factors = [lr_factor(step, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[-1] == pytest.approx(1 / 90)
    assert all(before >= after for before, after in pairwise(factors[10:]))
    assert lr_factor(0, TrainConfig(steps=1, warmup_share=0.0)) == 1.0


def test_lr_factor_cosine_is_half_way_down_in_the_middle_of_what_is_left():
    config = TrainConfig(steps=110, warmup_share=10 / 110, schedule="cosine")
    factors = [lr_factor(step, config) for step in range(110)]
    assert factors[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert factors[60] == pytest.approx(0.5)
    assert factors[35] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert factors[10] == 1.0
    assert 0.0 < factors[-1] < 1e-3


def test_make_optimizer_gates_have_a_rate_of_their_own_and_only_matrices_decay():
    model = Model()
    optimizer = make_optimizer(model, TrainConfig(steps=1, peak_lr=1e-4, gate_lr=0.3, weight_decay=0.2))
    set_lr(optimizer, 0.5)
    matrices, vectors, gates = optimizer.param_groups
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1]
    assert (matrices["weight_decay"], vectors["weight_decay"], gates["weight_decay"]) == (0.2, 0.0, 0.0)
    assert (matrices["lr"], gates["lr"]) == (pytest.approx(5e-5), pytest.approx(0.15))


def test_restore_optimizer_goes_on_bit_for_bit():
    config = TrainConfig(steps=9, peak_lr=0.1)
    straight = Model()
    stepped(straight, make_optimizer(straight, config), 5)
    first, second = Model(), Model()
    optimizer = make_optimizer(first, config)
    stepped(first, optimizer, 3)
    stored = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, first).items()}
    second.load_state_dict(first.state_dict())
    resumed = make_optimizer(second, config)
    restore_optimizer(resumed, second, stored)
    stepped(second, resumed, 2)
    assert all(
        torch.equal(one, other) for one, other in zip(straight.parameters(), second.parameters(), strict=True)
    )


def test_restore_optimizer_of_another_model_is_refused():
    model = Model()
    optimizer = make_optimizer(model, TrainConfig(steps=1))
    for tensors in ({"linear.weight/exp_avg": torch.zeros(7, 7)}, {"other/exp_avg": torch.zeros(1)}):
        with pytest.raises(IntegrityError, match="must be of this model"):
            restore_optimizer(optimizer, model, tensors)
