"""One transformer layer: its weights, and its steps, written once for everything that runs it.

    post-norm (BERT)     x ─▶ attention ─▶ + x ─▶ norm ─▶ feed-forward ─▶ + ─▶ norm
    pre-norm             x ─▶ norm ─▶ attention ─▶ + x ─▶ norm ─▶ feed-forward ─▶ +

:func:`run_layer` calls a small set of operations. They are implemented by ``transformer`` for inference,
``openvino_backbone`` for OpenVINO, and ``pipeline/lab/train/landmark_encoder`` for training. How tokens are
laid out and which of them see one another is the operations' matter.

The feed-forward is plain, ``down(act(up(x)))`` as in BERT, or gated, ``down(act(gate(x)) · up(x))`` as GeGLU
and SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.weights import AnyLinear, Norm

Activation = Literal["gelu", "tanh_gelu", "relu", "silu"]

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "relu": "relu",
    "silu": "silu",
}
"""By the names configurations use."""

ACTIVATE: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "tanh_gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""What each does to a tensor, which stays as it is."""


def activation_named(setting: str, name: str) -> Activation:
    """Return an activation; one that is not known raises :class:`ModelError`."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{setting} must be one of {', '.join(ACTIVATIONS)}, got {name!r}; choose another model"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """A feed-forward; a gated one has in ``up`` the rows of the gate, then those of the factor."""

    up: AnyLinear
    down: AnyLinear
    activation: Activation
    is_gated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of H heads of queries and G heads of keys and values, d wide.

    ``qkv`` holds the rows of the queries of all heads, then the keys, then the values: ``(H + 2 G) d`` in
    all. With ``norm_first`` a norm stands before its part, else after it and its residual. No attention norm:
    the embedding norm has normed the first layer's input.
    """

    qkv: AnyLinear
    attention_output: AnyLinear
    attention_norm: Norm | None
    mlp: Mlp
    mlp_norm: Norm
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    is_local: bool = False

    def packed(self) -> Layer:
        """Return it with its projections laid out for this processor."""
        mlp = replace(self.mlp, up=self.mlp.up.packed(), down=self.mlp.down.packed())
        return replace(self, qkv=self.qkv.packed(), attention_output=self.attention_output.packed(), mlp=mlp)


State = TypeVar("State")
Heads = TypeVar("Heads")


@runtime_checkable
class LayerOperations(Protocol[State, Heads]):
    """What a layer is made of, for states of one kind: tensors, or the nodes of a graph.

    ``heads`` are those of queries, keys and values, which ``norm_heads`` norms each by itself and ``rotate``
    turns by their positions, where the model has rotary ones. ``continuing`` are the states of the tokens
    that go on after this layer's attention. ``inner`` is ``act(up(x))``, ``gated_inner`` ``act(gate(x)) ·
    up(x)``. ``add_projection`` may overwrite its residual.
    """

    def norm(self, norm: Norm, x: State, /) -> State: ...
    def heads(self, qkv: AnyLinear, x: State, /) -> Heads: ...
    def norm_heads(self, query_norm: Norm, key_norm: Norm, heads: Heads, /) -> Heads: ...
    def rotate(self, heads: Heads, /) -> Heads: ...
    def attend(self, heads: Heads, /) -> State: ...
    def continuing(self, x: State, /) -> State: ...
    def inner(self, up: AnyLinear, activation: Activation, x: State, /) -> State: ...
    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x: State, /) -> State: ...
    def add_projection(self, linear: AnyLinear, x: State, residual: State, /) -> State: ...


def run_layer(
    layer: Layer, x: State, operations: LayerOperations[State, Heads], *, norm_first: bool
) -> State:
    """Run the steps of a layer; ``x`` may be overwritten."""
    normed = operations.norm(layer.attention_norm, x) if norm_first and layer.attention_norm else x
    heads = operations.heads(layer.qkv, normed)
    if layer.query_norm is not None and layer.key_norm is not None:
        heads = operations.norm_heads(layer.query_norm, layer.key_norm, heads)
    mixed = operations.attend(operations.rotate(heads))
    x = operations.add_projection(layer.attention_output, mixed, operations.continuing(x))
    if norm_first:
        return _add_feed_forward(layer.mlp, operations.norm(layer.mlp_norm, x), x, operations)
    if layer.attention_norm is not None:
        x = operations.norm(layer.attention_norm, x)
    return operations.norm(layer.mlp_norm, _add_feed_forward(layer.mlp, x, x, operations))


def _add_feed_forward(
    mlp: Mlp, x: State, residual: State, operations: LayerOperations[State, Heads]
) -> State:
    inner = operations.gated_inner if mlp.is_gated else operations.inner
    return operations.add_projection(mlp.down, inner(mlp.up, mlp.activation, x), residual)
