"""The gates of landmark attention: how far each head of each layer opens to other chunks and to the context.

A gate is added to the logits of what stands behind it: 0 shows another chunk's landmark as if it stood in the
own chunk, -inf hides it. A checkpoint may hold gates among its weights or among the tensors of ours beside
them, two tensors of layers by heads; one that holds none was not trained to look past its chunk, and its
gates stand at the value training starts from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float32

from pipeline.errors import ModelError
from pipeline.model.engine.transformer import Transformer
from pipeline.model.engine.weights import require_floats
from pipeline.model.folders.own_tensors import GATE_NAMES

INITIAL_GATE: Final = -3.0
"""A key behind it weighs e⁻³, a twentieth, of an equal one in the own chunk.

Little changes, and gradients still flow.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LandmarkGates:
    """One bias for each layer and head, towards landmarks and towards context."""

    landmarks_LH: Float32[torch.Tensor, "layers H"]
    context_LH: Float32[torch.Tensor, "layers H"]

    def fingerprint(self, *, with_context: bool) -> str:
        """Identify the gates that are used."""
        used = [self.landmarks_LH, self.context_LH] if with_context else [self.landmarks_LH]
        return hashlib.sha256(b"".join(gates.cpu().numpy().tobytes() for gates in used)).hexdigest()


def gates_of(model: Transformer) -> LandmarkGates:
    """Return a model's gates, else those training starts from.

    A wrong shape, NaN or +inf raises :class:`ModelError`.
    """
    landmarks_LH, context_LH = (
        _read(model.own_tensors, name, (model.num_layers, model.shape.num_heads)).to(model.device)
        for name in GATE_NAMES
    )
    return LandmarkGates(landmarks_LH=landmarks_LH, context_LH=context_LH)


def _read(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int]
) -> Float32[torch.Tensor, "layers H"]:
    if name not in tensors:
        return torch.full(shape, INITIAL_GATE)
    gates = require_floats(name, tensors[name]).float()
    if tuple(gates.shape) != shape:
        raise ModelError(
            f"{name} must have the shape {shape}, one gate a layer and head, got {tuple(gates.shape)}; "
            "train them again"
        )
    if not bool((gates < float("inf")).all()):
        raise ModelError(
            f"{name} must be numbers or -inf, which closes a gate, got NaN or +inf; train them again"
        )
    return gates
