"""What a checkpoint has between pooling and the vector: dense layers and norms, in its folder's order.

    pooled chunk embedding ─▶ Dense (linear, activation) ─▶ LayerNorm ─▶ … ─▶ embedding, not normalised yet

Reads the modules of a Sentence-Transformers folder. Always float32: there is one row a chunk, which is
nothing beside the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.checkpoint import read_tensors
from cairn.pipeline.model.folders.sentence_transformers_folder import (
    QUANTIZER,
    WEIGHTLESS,
    Step,
    module_weights,
)
from jaxtyping import Float32
from torch.nn import functional

NORM_EPS: Final = 1e-5
LARGEST_CODE: Final = 127
"""What a quantiser makes of infinity, in the eight bits that it was made for."""

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}
_DEFAULT_ACTIVATION: Final = "Tanh"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionLayer:
    """One module: a dense layer, named by its activation, a LayerNorm, or one that has no weight."""

    kind: str
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    adds_input: bool = False

    def __call__(self, x_MD: torch.Tensor) -> torch.Tensor:
        """Apply it to rows."""
        if self.kind == "Normalize":
            return functional.normalize(x_MD, dim=-1)
        if self.kind == QUANTIZER:
            return (torch.tanh(x_MD) * LARGEST_CODE).round()
        if self.kind == "LayerNorm":
            return functional.layer_norm(x_MD, x_MD.shape[-1:], self.weight, self.bias, NORM_EPS)
        out_ME = _ACTIVATIONS[self.kind](functional.linear(x_MD, self.weight, self.bias))
        if not self.adds_input:
            return out_ME
        return out_ME + (x_MD if self.residual is None else functional.linear(x_MD, self.residual))


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A map of pooled embeddings to ``output_dim`` numbers, row by row."""

    layers: tuple[ProjectionLayer, ...]
    output_dim: int

    def __call__(self, pooled_MD: Float32[torch.Tensor, "*M D"]) -> Float32[torch.Tensor, "*M E"]:
        """Project pooled embeddings, or states."""
        for layer in self.layers:
            pooled_MD = layer(pooled_MD)
        return pooled_MD


def read_projection(steps: Sequence[Step], input_dim: int, device: torch.device) -> Projection | None:
    """Read the modules behind a pooling of ``input_dim`` numbers, None for none."""
    if not steps:
        return None
    layers: list[ProjectionLayer] = []
    dim = input_dim
    for step in steps:
        tensors = {} if step.kind in WEIGHTLESS else read_tensors(module_weights(step.folder))
        layers.append(_layer(step, {name: each.to(device) for name, each in tensors.items()}, dim))
        dim = layers[-1].weight.shape[0] if step.kind == "Dense" else dim
    return Projection(layers=tuple(layers), output_dim=dim)


def _layer(step: Step, tensors: Mapping[str, torch.Tensor], dim: int) -> ProjectionLayer:
    if step.kind in WEIGHTLESS:
        return ProjectionLayer(kind=step.kind, weight=torch.zeros(0))
    if step.kind == "LayerNorm":
        return ProjectionLayer(
            kind=step.kind,
            weight=_tensor(step, tensors, "norm.weight", dim),
            bias=_tensor(step, tensors, "norm.bias", dim),
        )
    shape = tensors["linear.weight"].shape if "linear.weight" in tensors else (0, dim)
    out_dim = shape[0]
    adds_input = bool(step.config.get("use_residual", False))
    return ProjectionLayer(
        kind=_activation(step),
        weight=_tensor(step, tensors, "linear.weight", out_dim, dim),
        bias=_tensor(step, tensors, "linear.bias", out_dim) if step.config.get("bias", True) else None,
        adds_input=adds_input,
        residual=_tensor(step, tensors, "residual.weight", out_dim, dim)
        if adds_input and out_dim != dim
        else None,
    )


def _activation(step: Step) -> str:
    named = str(step.config.get("activation_function", _DEFAULT_ACTIVATION)).rpartition(".")[2]
    if named not in _ACTIVATIONS:
        raise ModelError(
            f"activation_function of the model's Dense module must be one of {', '.join(_ACTIVATIONS)}, "
            f"got {named!r}; choose another model"
        )
    return named


def _tensor(step: Step, tensors: Mapping[str, torch.Tensor], name: str, *shape: int) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        got = "none" if tensor is None else str(tuple(tensor.shape))
        raise ModelError(
            f"{name} of the model's {step.folder.name} must have the shape {shape}, got {got}; fetch the "
            "model again"
        )
    return require_floats(f"{name} of {step.folder.name}", tensor).float()
