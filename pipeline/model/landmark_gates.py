"""The gates of landmark attention: how far each head of each layer opens to other chunks and to the context.

A gate is added to the logits of what stands behind it: 0 shows another chunk's landmark as if it stood in the
own chunk, -inf hides it. A checkpoint may hold gates among its weights or among the tensors of ours beside
them, two tensors of layers by heads; one that holds none was not trained to look past its chunk, and its
gates stand at the value training starts from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.own_tensors import CONTEXT_SIZE, GATE_NAMES
from jaxtyping import Float32

INITIAL_GATE: Final = -3.0
"""A key behind it weighs e⁻³, a twentieth, of an equal one in the own chunk.

Little changes, and gradients still flow.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LandmarkGates:
    """One bias for each layer and head, towards landmarks and towards context.

    ``context_size`` is how many context vectors those towards context were trained for, None where the model
    does not say.
    """

    landmarks_LH: Float32[torch.Tensor, "layers H"]
    context_LH: Float32[torch.Tensor, "layers H"]
    context_size: float | None = None

    def context_for(self, num_context: int) -> Float32[torch.Tensor, "layers H"]:
        """Return the gates towards so many context vectors: together they weigh as those of training did."""
        if self.context_size is None or not num_context:
            return self.context_LH
        return self.context_LH + math.log(self.context_size / num_context)

    def fingerprint(self, *, with_context: bool) -> str:
        """Identify the gates that are used."""
        used = [self.landmarks_LH, self.context_LH] if with_context else [self.landmarks_LH]
        digest = hashlib.sha256(b"".join(gates.cpu().numpy().tobytes() for gates in used))
        if with_context and self.context_size is not None:
            digest.update(str(self.context_size).encode())
        return digest.hexdigest()


def gates_of(model: Transformer) -> LandmarkGates:
    """Return a model's gates, else those training starts from.

    A wrong shape, NaN or +inf raises :class:`ModelError`.
    """
    landmarks_LH, context_LH = (
        _read(model.own_tensors, name, (model.num_layers, model.shape.num_heads)).to(model.device)
        for name in GATE_NAMES
    )
    return LandmarkGates(
        landmarks_LH=landmarks_LH, context_LH=context_LH, context_size=context_size_of(model.own_tensors)
    )


def context_size_of(tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Return how many context vectors a model's gates were trained for, None where it does not say."""
    if CONTEXT_SIZE not in tensors:
        return None
    size = tensors[CONTEXT_SIZE].float().flatten()
    if len(size) != 1 or not 1 <= float(size[0]) < float("inf"):
        raise ModelError(
            f"{CONTEXT_SIZE} must be one number of at least 1, got {size.tolist()}; train the model again"
        )
    return float(size[0])


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
