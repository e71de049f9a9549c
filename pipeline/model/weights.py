"""Tensors of a checkpoint by name, each checked against the shape its configuration promises.

Published files name the same tensors with or without a prefix (``model.``, ``nomic_bert.``); the prefix is found by one tensor that every
file of the family holds. Biases are optional here: the rotary families are published without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.errors import ModelError
from pipeline.model.attention_temperature import scale_queries


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A projection or a norm; ``bias`` = None has none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def project(self, x_ND: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the projection into ``out``."""
        if self.bias is None:
            return torch.mm(x_ND, self.weight.t(), out=out)
        return torch.addmm(self.bias, x_ND, self.weight.t(), out=out)

    def add_projection(self, x_NE: torch.Tensor, residual_ND: torch.Tensor) -> None:
        """Add the projection to ``residual`` in place."""
        residual_ND.addmm_(x_NE, self.weight.t())
        if self.bias is not None:
            residual_ND.add_(self.bias)


class WeightReader:
    """Finds tensors below whatever prefix the file gives ``anchor``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], anchor: str, device: torch.device) -> None:
        names = [name for name in tensors if name == anchor or name.endswith(f".{anchor}")]
        if len(names) != 1:
            raise ModelError(f"the model's weights must hold one {anchor}, got {len(names)}; the file does not fit its config.json")
        self._prefix = names[0].removesuffix(anchor)
        self._tensors = tensors
        self._device = device

    def __contains__(self, name: str) -> bool:
        """Say whether the file holds a tensor."""
        return self._prefix + name in self._tensors

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of exactly this shape; a missing one or another shape raises :class:`ModelError`."""
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(f"the model's weights must hold {name}, got none; the file does not fit its config.json")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}; the file does not fit its config.json")
        return tensor.to(device=self._device, dtype=dtype)

    def linear(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool) -> Linear:
        """Return ``name.weight``, and ``name.bias`` when there is one; a norm's shape is one number."""
        weight = self.read(f"{name}.weight", shape, dtype)
        return Linear(weight=weight, bias=self.read(f"{name}.bias", shape[:1], dtype) if bias else None)


def with_temperature(qkv: Linear, temperature: float, dtype: torch.dtype) -> Linear:
    """Divide the query third of a joint projection by τ (TempScale); a rotation is linear, so this is exact under RoPE too."""
    width = qkv.weight.shape[0] // 3
    bias = qkv.weight.new_zeros(3 * width) if qkv.bias is None else qkv.bias
    query, query_bias = scale_queries(qkv.weight[:width], bias[:width], temperature)
    return Linear(
        weight=torch.cat([query, qkv.weight[width:]]).to(dtype),
        bias=None if qkv.bias is None else torch.cat([query_bias, bias[width:]]).to(dtype),
    )
