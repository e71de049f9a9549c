"""A layer's operations for training: nothing is overwritten, so gradients reach weights and states.

The same mathematics as inference, to 1e-5 in float32. Products run in autocast's precision where the caller
switches it on. States may have any number of dimensions before the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.model.engine.layer import Activation
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.weights import AnyLinear, Norm
from jaxtyping import Float, Float32

_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries ``… H d`` over keys and values ``… G d``, giving ``… H d``."""

Angles = tuple[Float32[torch.Tensor, "T E"], Float32[torch.Tensor, "T E"]]
"""Cosines and sines of T positions, for the first 2 E dimensions of a head."""

_ACTIVATE: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "tanh_gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class DifferentiableOperations:
    """Implements :class:`LayerOperations`; ``angles`` = None leaves queries and keys as they are."""

    def __init__(self, shape: Shape, attend: Attend, angles: Angles | None = None) -> None:
        self._shape = shape
        self._attend = attend
        self._angles = angles

    def norm(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return norm(x)

    def heads(self, qkv: AnyLinear, x: torch.Tensor) -> _Heads:
        heads = _project(qkv, x).unflatten(-1, (-1, self._shape.head_dim))
        query, key, value = heads.split(self._shape.heads_by_kind, dim=-2)
        return query, key, value

    def norm_heads(self, query_norm: Norm, key_norm: Norm, heads: _Heads) -> _Heads:
        query, key, value = heads
        return query_norm(query), key_norm(key), value

    def rotate(self, heads: _Heads) -> _Heads:
        if self._angles is None:
            return heads
        query, key, value = heads
        return _rotated(query, self._angles), _rotated(key, self._angles), value

    def attend(self, heads: _Heads) -> torch.Tensor:
        return self._attend(*heads).flatten(-2)

    def continuing(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def inner(self, up: AnyLinear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
        return _ACTIVATE[activation](_project(up, x))

    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
        gate, up = _project(gate_up, x).chunk(2, dim=-1)
        return _ACTIVATE[activation](gate) * up

    def add_projection(self, linear: AnyLinear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + _project(linear, x)


def _project(linear: AnyLinear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _rotated(x_TPd: Float[torch.Tensor, "*B T P d"], angles: Angles) -> Float[torch.Tensor, "*B T P d"]:
    """Turn dimension i with i + E, in float32 whatever autocast computes in."""
    cos, sin = (table[:, None] for table in angles)
    width = 2 * cos.shape[-1]
    first, second = x_TPd[..., :width].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x_TPd.dtype), x_TPd[..., width:]], dim=-1)
