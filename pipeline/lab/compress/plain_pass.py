"""One text through the layers of any family, differentiable, with a gate before every head and neuron.

Importance is the gradient by these gates, and calibration reads the inputs of products. Rows run one at a
time, without padding, so each has a gradient of its own. Not fast: some hundred short rows are enough.

    T tokens    D width    L layers    H heads    I neurons of a feed-forward
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.differentiable import DifferentiableOperations
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.layer import Activation, run_layer
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import AnyLinear
from cairn.pipeline.model.families.decoder import language_model
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Bool, Float32, Int64
from typing_extensions import override


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gates:
    """What the output of each head and each neuron is multiplied by."""

    heads_LH: Float32[torch.Tensor, "L H"]
    inner_LI: Float32[torch.Tensor, "L I"]


def read_engine(
    checkpoint: Checkpoint, *, is_causal: bool, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return a checkpoint as float32 on the CPU, weights as they lie; a misfit raises :class:`ModelError`."""
    read = reader_of(checkpoint.config.get("model_type"))
    settings = {"is_causal": True} if is_causal else {}
    return read(language_model(checkpoint), dtype=dtype, device=torch.device("cpu"), **settings)


Seen = Callable[[AnyLinear, torch.Tensor], None]
"""Is told each projection and its input."""


class _GatedOperations(DifferentiableOperations):
    """A layer's operations with gates, which tell what goes into each projection."""

    def __init__(
        self, engine: Transformer, index: int, num_tokens: int, gates: Gates | None, seen: Seen | None
    ) -> None:
        layer = engine.layers[index]
        table = engine.rotary.get(layer.is_local)
        mask_TT = _visible(engine.shape, num_tokens, is_local=layer.is_local)
        attend = partial(_attend, mask_TT=mask_TT, gates_H=None if gates is None else gates.heads_LH[index])
        super().__init__(engine.shape, attend, None if table is None else table.at(torch.arange(num_tokens)))
        self._gates_I = None if gates is None else gates.inner_LI[index]
        self._seen = seen

    @override
    def heads(self, qkv: AnyLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._tell(qkv, x)
        return super().heads(qkv, x)

    @override
    def inner(self, up: AnyLinear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
        self._tell(up, x)
        return self._gated(super().inner(up, activation, x))

    @override
    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
        self._tell(gate_up, x)
        return self._gated(super().gated_inner(gate_up, activation, x))

    @override
    def add_projection(self, linear: AnyLinear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._tell(linear, x)
        return super().add_projection(linear, x, residual)

    def _gated(self, inner_TI: torch.Tensor) -> torch.Tensor:
        return inner_TI if self._gates_I is None else inner_TI * self._gates_I

    def _tell(self, linear: AnyLinear, x: torch.Tensor) -> None:
        if self._seen is not None:
            self._seen(linear, x)


def embed_row(
    engine: Transformer,
    ids_T: Int64[np.ndarray, " T"],
    *,
    gates: Gates | None = None,
    layers: tuple[int, ...] | None = None,
) -> Float32[torch.Tensor, " D"]:
    """Return the mean of a text's last hidden states at unit length; ``layers`` = None runs all of them."""
    states_TD = last_states(engine, ids_T, gates=gates, layers=layers)
    return F.normalize(states_TD.mean(0), dim=0)


def last_states(
    engine: Transformer,
    ids_T: Int64[np.ndarray, " T"],
    *,
    gates: Gates | None = None,
    layers: tuple[int, ...] | None = None,
) -> Float32[torch.Tensor, "T D"]:
    """Return a text's last hidden states, after the final norm."""
    x_TD = engine.norm_embeddings(engine.embed_tokens(ids_T[None])[0])
    for index in range(engine.num_layers) if layers is None else layers:
        x_TD = run_one_layer(engine, index, x_TD, gates=gates)
    return x_TD if engine.final_norm is None else engine.final_norm(x_TD)


def run_one_layer(
    engine: Transformer,
    index: int,
    x_TD: Float32[torch.Tensor, "T D"],
    *,
    gates: Gates | None = None,
    seen: Seen | None = None,
) -> Float32[torch.Tensor, "T D"]:
    """Return a text's states after a layer; ``seen`` is told each projection and its input."""
    operations = _GatedOperations(engine, index, len(x_TD), gates, seen)
    return run_layer(engine.layers[index], x_TD, operations, norm_first=engine.shape.norm_first)


def open_gates(engine: Transformer) -> Gates:
    """Return gates at 1 that gather gradients."""
    inner = engine.layers[0].mlp.linears[1].weight.shape[1]
    return Gates(
        heads_LH=torch.ones(engine.num_layers, engine.shape.num_heads, requires_grad=True),
        inner_LI=torch.ones(engine.num_layers, inner, requires_grad=True),
    )


def _visible(shape: Shape, num_tokens: int, *, is_local: bool) -> Bool[torch.Tensor, "T T"] | None:
    places_T = torch.arange(num_tokens)
    distance_TT = places_T[:, None] - places_T
    if shape.is_causal:
        return distance_TT >= 0
    if is_local and shape.local_radius is not None:
        return distance_TT.abs() <= shape.local_radius
    return None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask_TT: torch.Tensor | None,
    gates_H: torch.Tensor | None,
) -> torch.Tensor:
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    is_shared = query.shape[1] != key.shape[1]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_TT, enable_gqa=is_shared)
    mixed_THd = mixed[0].transpose(0, 1)
    return mixed_THd if gates_H is None else mixed_THd * gates_H[:, None]
