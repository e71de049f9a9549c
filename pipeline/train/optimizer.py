"""AdamW, and the learning rate of each step; its state is named tensors, without pickle.

Weight decay is for matrices alone; gates have a rate of their own, as a bias on logits has far to go and only
a few hundred steps to do it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from pipeline.errors import IntegrityError
from pipeline.model.folders.own_tensors import CONTEXT_GATES, LANDMARK_GATES
from pipeline.train.settings import TrainConfig

BETAS = (0.9, 0.999)
EPSILON = 1e-8
LOWEST_LR: Final = 0.05
"""Share of the peak rate that the last steps beside a frozen base are made with."""


_HEAD_PARAMETERS: Final = ("head.matrix", "head.log_weight")


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return the optimiser; each group keeps its peak rate under ``peak``."""
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "gates": []}
    groups |= {name: [] for name in _HEAD_PARAMETERS}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = (
            name
            if name in _HEAD_PARAMETERS
            else "gates"
            if name in (LANDMARK_GATES, CONTEXT_GATES)
            else "matrices"
            if parameter.ndim > 1
            else "vectors"
        )
        groups[kind].append(parameter)
    with_head = [
        {"params": groups["head.matrix"], "peak": config.late_lr, "weight_decay": 0.0},
        {"params": groups["head.log_weight"], "peak": config.late_term_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [
            {"params": groups["matrices"], "peak": config.peak_lr, "weight_decay": config.weight_decay},
            {"params": groups["vectors"], "peak": config.peak_lr, "weight_decay": 0.0},
            {"params": groups["gates"], "peak": config.gate_lr, "weight_decay": 0.0},
            *(with_head if config.late_weight else ()),
        ],
        lr=config.peak_lr,
        betas=BETAS,
        eps=EPSILON,
    )


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the share of the peak rate that step 0 … steps - 1 is made with.

    Up to 1 while warming up, then down to almost 0.
    """
    num_warming = round(config.warmup_share * config.steps)
    if step < num_warming:
        return (step + 1) / num_warming
    return (config.steps - step) / max(1, config.steps - num_warming)


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
