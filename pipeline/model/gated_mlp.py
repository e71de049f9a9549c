"""The gated feed-forward of the newer encoders: ``down(act(gate) · up)``, GeGLU in ModernBERT, SwiGLU in NomicBERT.

Gate and up are one product whose first half is the gate; activation and multiplication happen in place, and the result is added to the
residual by the last product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents

from pipeline.model.weights import Linear
from pipeline.model.workspace import Workspace

ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_pytorch_tanh": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """``gate_up`` holds the rows of the gate, then those of the factor."""

    gate_up: Linear
    down: Linear
    activate: Callable[[torch.Tensor], torch.Tensor]

    def add_to(self, residual_ND: torch.Tensor, x_ND: torch.Tensor, workspace: Workspace) -> None:
        """Add the feed-forward of ``x`` to ``residual`` in place; they may be one tensor, as ``x`` is read before anything is written."""
        out = workspace.take("inner", (x_ND.shape[0], self.gate_up.weight.shape[0]), x_ND.dtype)
        gate_NI, up_NI = self.gate_up.project(x_ND, out).chunk(2, dim=1)
        self.down.add_projection(self.activate(gate_NI).mul_(up_NI), residual_ND)
