"""AdamW, and the learning rate of each step; its state is named tensors, without pickle.

Weight decay is for matrices alone; gates have a rate of their own, as a bias on logits has far to go and only
a few hundred steps to do it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.lab.train.schedules import RunSettings
from torch import nn

BETAS = (0.9, 0.999)
EPSILON = 1e-8
LOWEST_LR: Final = 0.05
"""Share of the peak rate that the last steps beside a frozen base are made with."""


def make_optimizer(model: nn.Module, config: RunSettings) -> torch.optim.AdamW:
    """Return the optimiser; each group keeps its peak rate under ``peak``."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    own: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in config.own_lrs:
            own.setdefault(config.own_lrs[name], []).append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": matrices, "peak": config.peak_lr, "weight_decay": config.weight_decay},
            {"params": vectors, "peak": config.peak_lr, "weight_decay": 0.0},
            *({"params": params, "peak": peak, "weight_decay": 0.0} for peak, params in own.items()),
        ],
        lr=config.peak_lr,
        betas=BETAS,
        eps=EPSILON,
    )


def lr_factor(step: int, config: RunSettings) -> float:
    """Return the share of the peak rate that step 0 … steps - 1 is made with.

    Up to 1 while warming up, then down to almost 0, along a line or half a cosine.
    """
    num_warming = round(config.warmup_share * config.steps)
    if step < num_warming:
        return (step + 1) / num_warming
    left = (config.steps - step) / max(1, config.steps - num_warming)
    return left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def cosine_lr_factor(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak rate of step 1 … steps: a linear warm-up times a cosine to LOWEST_LR."""
    cosine = LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, step / max(1, warmup_steps)) * cosine


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its peak rate times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state by parameter and kind; empty before the first step."""
    return {
        f"{name}/{kind}": tensor.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put such a state back; tensors that do not fit the model raise :class:`IntegrityError`."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        if name not in parameters or (tensor.ndim and tensor.shape != parameters[name].shape):
            raise IntegrityError(
                f"the optimiser's state must be of this model, got {key} of shape {tuple(tensor.shape)}; "
                "delete the checkpoint"
            )
        states.setdefault(name, {})[kind] = (
            tensor.clone() if kind == "step" else tensor.to(parameters[name].device, copy=True)
        )
    for name, state in states.items():
        optimizer.state[parameters[name]] = state
