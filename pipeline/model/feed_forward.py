"""The feed-forward of a layer: plain ``down(act(up))`` as in BERT, gated ``down(act(gate) · up)`` as GeGLU and SwiGLU.

Activation and multiplication happen in place, and the result is added to the residual by the last product itself. Gate and up are one
product whose first half is the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents

from pipeline.errors import ModelError
from pipeline.model.weights import Linear
from pipeline.model.workspace import Workspace

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_new": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
    "relu": F.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
}
"""By the names configurations use; each works in place."""


def activation_named(setting: str, name: str) -> Activation:
    """Return an activation; one that is not known raises :class:`ModelError`."""
    if name not in ACTIVATIONS:
        raise ModelError(f"{setting} must be one of {', '.join(ACTIVATIONS)}, got {name!r}; choose another model")
    return ACTIVATIONS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainMlp:
    """``down(act(up(x)))``."""

    up: Linear
    down: Linear
    activate: Activation

    def packed(self) -> PlainMlp:
        """Return it with its projections laid out for this processor."""
        return replace(self, up=self.up.packed(), down=self.down.packed())

    def add_to(self, residual_ND: torch.Tensor, x_ND: torch.Tensor, workspace: Workspace) -> None:
        """Add the feed-forward of ``x`` to ``residual`` in place; they may be one tensor, as ``x`` is read before anything is written."""
        out = workspace.take("inner", (x_ND.shape[0], self.up.weight.shape[0]), x_ND.dtype)
        self.down.add_projection(self.activate(self.up.project(x_ND, out)), residual_ND)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """``down(act(gate(x)) · up(x))``; ``gate_up`` holds the rows of the gate, then those of the factor."""

    gate_up: Linear
    down: Linear
    activate: Activation

    def packed(self) -> GatedMlp:
        """Return it with its projections laid out for this processor."""
        return replace(self, gate_up=self.gate_up.packed(), down=self.down.packed())

    def add_to(self, residual_ND: torch.Tensor, x_ND: torch.Tensor, workspace: Workspace) -> None:
        """Add the feed-forward of ``x`` to ``residual`` in place; they may be one tensor, as ``x`` is read before anything is written."""
        out = workspace.take("inner", (x_ND.shape[0], self.gate_up.weight.shape[0]), x_ND.dtype)
        gate_NI, up_NI = self.gate_up.project(x_ND, out).chunk(2, dim=1)
        self.down.add_projection(self.activate(gate_NI).mul_(up_NI), residual_ND)
