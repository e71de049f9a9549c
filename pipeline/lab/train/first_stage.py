"""The parameters of a first stage of its own: those of the base, else copies of the base's first layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.folders.first_layers import layer_of
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE


def first_stage_parameters(
    stored: Mapping[str, torch.Tensor],
    second: Mapping[str, torch.Tensor],
    *,
    num_layers: int,
    base_prefix: str,
    base_layers: int,
) -> dict[str, torch.Tensor]:
    """Return new tensors by name, without ``base_prefix``; none for ``num_layers`` 0.

    ``stored`` are a checkpoint's tensors; a first stage among them goes on. ``second`` are what is copied
    where there is none. More layers than the base has, or others than its first stage has, raise
    :class:`ConfigError`.
    """
    own = {
        name.removeprefix(FIRST_STAGE).removeprefix(base_prefix): tensor
        for name, tensor in stored.items()
        if name.startswith(FIRST_STAGE)
    }
    own_layers = 1 + max(map(layer_of, own), default=-1)
    if own and num_layers not in (0, own_layers):
        raise ConfigError(
            f"first_stage_layers must be the {own_layers} of the base's own first stage, got {num_layers}; "
            "leave it out to go on with those"
        )
    if max(num_layers, own_layers) > base_layers:
        raise ConfigError(
            f"first_stage_layers must be at most the base model's {base_layers}, got "
            f"{max(num_layers, own_layers)}"
        )
    copied = {name: tensor for name, tensor in second.items() if num_layers and layer_of(name) < num_layers}
    return {FIRST_STAGE + name: tensor.detach().float().clone() for name, tensor in (own or copied).items()}
