"""The feed-forward of a layer: plain ``down(act(up))`` as in BERT, gated ``down(act(gate) · up)`` as GeGLU and SwiGLU.

A plain activation is part of the first product where oneDNN multiplies, in place elsewhere; the result is
added to the residual by the last product itself. Gate and up are one product whose first half is the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents

from pipeline.errors import ModelError
from pipeline.model.engine.weights import Activation, Linear
from pipeline.model.engine.workspace import Workspace

_EXACT_GELU: Final = Activation(in_place=torch.ops.aten.gelu_.default, in_product=("gelu", "none"))
_TANH_GELU: Final = Activation(
    in_place=partial(torch.ops.aten.gelu_.default, approximate="tanh"), in_product=("gelu", "tanh")
)

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": _EXACT_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": Activation(in_place=F.relu_, in_product=("relu", "")),
    "silu": Activation(in_place=partial(F.silu, inplace=True), in_product=("swish", "")),
}
"""By the names configurations use."""


def activation_named(setting: str, name: str) -> Activation:
    """Return an activation; one that is not known raises :class:`ModelError`."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{setting} must be one of {', '.join(ACTIVATIONS)}, got {name!r}; choose another model"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainMlp:
    """``down(act(up(x)))``."""

    up: Linear
    down: Linear
    activation: Activation

    def packed(self) -> PlainMlp:
        """Return it with its projections laid out for this processor."""
        return replace(self, up=self.up.packed(), down=self.down.packed())

    def add_to(self, residual_ND: torch.Tensor, x_ND: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Return the feed-forward of ``x`` added to ``residual``, which may be overwritten.

        They may be one tensor.
        """
        return self.down.add_projection(
            self.up.project(x_ND, workspace, "inner", self.activation), residual_ND
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """``down(act(gate(x)) · up(x))``; ``gate_up`` holds the rows of the gate, then those of the factor."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def packed(self) -> GatedMlp:
        """Return it with its projections laid out for this processor."""
        return replace(self, gate_up=self.gate_up.packed(), down=self.down.packed())

    def add_to(self, residual_ND: torch.Tensor, x_ND: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Return the feed-forward of ``x`` added to ``residual``, which may be overwritten.

        They may be one tensor.
        """
        gate_NI, up_NI = self.gate_up.project(x_ND, workspace, "inner").chunk(2, dim=1)
        return self.down.add_projection(self.activation.in_place(gate_NI).mul_(up_NI), residual_ND)
