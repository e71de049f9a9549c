"""The one engine that runs every backbone: layers of attention and feed-forward, for inference.

    ids ─▶ embedding ─▶ [lead][text] ─▶ norm ─▶ layer ─▶ … ─▶ layer ─▶ (norm) ─▶ hidden states of the text
                           ▲                      ▲
                 context, soft prompt         pattern: who sees whom

What differs between families is data here: where norms stand, which norm, rotary, absolute or relative
positions, local layers, shared key and value heads, plain or gated feed-forward. Same mathematics as the
published models, exact to 1e-5 in fp32. No dropout, no token types but 0. What a checkpoint holds beside its
transformer is read above the engine, from ``own_tensors``.

A layer is its weights and its steps, written once for everything that runs it:

    post-norm (BERT)     x ─▶ attention ─▶ + x ─▶ norm ─▶ feed-forward ─▶ + ─▶ norm
    pre-norm             x ─▶ norm ─▶ attention ─▶ + x ─▶ norm ─▶ feed-forward ─▶ +

:func:`run_layer` calls a small set of operations. They are implemented here for inference, by
``openvino_backbone`` for OpenVINO, and by ``pipeline/lab/train/landmark_encoder`` for training. How tokens
are laid out and which of them see one another is the operations' matter. The feed-forward is plain,
``down(act(up(x)))`` as in BERT, or gated, ``down(act(gate(x)) · up(x))`` as GeGLU and SwiGLU.

    B rows   S vectors of a row, lead and text   T text tokens   N vectors of a batch   M of its texts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.attention import RelativeBias, Workspace
from cairn.pipeline.model.engine.backbone import Backbone, ContextRows, Ids, Lengths
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Batch, PassSettings, Pattern, Rectangle, Shape
from cairn.pipeline.model.engine.rotary import RotaryTable
from cairn.pipeline.model.engine.weights import AnyLinear, Norm
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Float, Float32, Int64

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


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbedding:
    """The input tables in float32.

    ``token_type`` is added to every vector, ``positions`` to text only, ``norm`` is applied to all.
    """

    tokens_VD: torch.Tensor
    positions_PD: torch.Tensor | None = None
    token_type_D: torch.Tensor | None = None
    norm: Norm | None = None

    def look_up(
        self, ids: Int64[torch.Tensor, "*B T"], places: slice | Int64[torch.Tensor, " T"]
    ) -> Float[torch.Tensor, "*B T D"]:
        """Return the vectors of tokens at these positions, with token type 0, before the norm."""
        x = F.embedding(ids, self.tokens_VD)
        if self.positions_PD is not None:
            is_range = isinstance(places, slice)
            x += self.positions_PD[places] if is_range else F.embedding(places, self.positions_PD)
        if self.token_type_D is not None:
            x += self.token_type_D
        return x


class Transformer(Backbone):
    """A backbone of layers, read from a checkpoint by its family's reader."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        embedding: InputEmbedding,
        layers: Sequence[Layer],
        final_norm: Norm | None,
        shape: Shape,
        rotary: Mapping[bool, RotaryTable],
        relative_bias: RelativeBias | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(checkpoint, dtype, device)
        self.model_dim = self.context_dim = int(embedding.tokens_VD.shape[1])
        self.max_positions = shape.max_positions
        self.embedding = embedding
        self.layers = list(layers)
        self.num_layers = len(layers)
        self.final_norm = final_norm
        self.shape = shape
        self.rotary = rotary
        self.relative_bias = relative_bias
        self.workspace = Workspace(device)
        # The flash kernels know half precision only, and no bias.
        is_half = dtype in (torch.bfloat16, torch.float16)
        is_packed = device.type == "cuda" and is_half and relative_bias is None
        self.pattern_type: type[Pattern] = Packed if is_packed else Rectangle
        self._last_global = max(
            (index for index, layer in enumerate(layers) if not layer.is_local), default=-1
        )

    def pack(self) -> None:
        """Lay the layers' weights out as this processor multiplies them; the plain ones go one by one."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = layer.packed()

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        return self.embedding.tokens_VD.cpu().numpy()

    def hidden_states(
        self, ids_BT: Ids, lengths_B: Lengths, context_CD: ContextRows = None, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B T D"]:
        num_lead = 0 if context_CD is None else context_CD.shape[-2]
        batch = Batch(
            lengths_B=lengths_B, num_tokens=ids_BT.shape[1], num_lead=num_lead, num_unplaced=num_lead
        )
        with torch.inference_mode():
            x_BSD = self.embed_tokens(ids_BT)
            if context_CD is not None:
                x_BSD = torch.cat([self.embed_context(context_CD).expand(len(x_BSD), -1, -1), x_BSD], dim=1)
            return self.encode_embedded(x_BSD, self.pattern_of(batch, temperature))

    def embed_tokens(self, ids_BT: Int64[np.ndarray, "B T"]) -> Float32[torch.Tensor, "B T D"]:
        """Look tokens up, with position and type, before the embedding norm."""
        num_tokens = ids_BT.shape[1]
        self.require_room(num_tokens)
        return self.embedding.look_up(torch.from_numpy(ids_BT).to(self.device), slice(num_tokens))

    def embed_context(
        self, context_CD: Float32[np.ndarray, "*B C D"] | Float[torch.Tensor, "*B C D"]
    ) -> Float[torch.Tensor, "*B C D"]:
        """Return context vectors as input embeddings, with token type 0, no position, before the norm."""
        x_CD = torch.as_tensor(context_CD, device=self.device)
        return x_CD if self.embedding.token_type_D is None else x_CD + self.embedding.token_type_D

    def norm_embeddings(self, x_BSD: Float[torch.Tensor, "*B S D"]) -> Float[torch.Tensor, "*B S D"]:
        """Apply the embedding norm, where the family has one."""
        return x_BSD if self.embedding.norm is None else self.embedding.norm(x_BSD)

    def pattern_of(self, batch: Batch, temperature: float = 1.0) -> Pattern:
        """Return how a batch is laid out and who sees whom in it.

        After the last layer that can show the lead to the text, only the text goes on. Raise
        :class:`ModelError` for rows that are too long, or a lead that no layer could show.
        """
        if batch.num_unplaced and self._last_global < 0:
            raise ModelError(
                "a model that reads context must have a global layer, got local ones only; go on without "
                "context"
            )
        num_positions = batch.first_position + batch.num_placed + batch.num_tokens
        if num_positions > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} positions, got {num_positions}; choose a "
                "smaller window"
            )
        pattern = self.pattern_type(batch, self.pass_settings(temperature))
        if batch.num_lead:
            # A lead with positions is in the windows of local layers too.
            pattern.drop_lead_at = self.num_layers - 1 if batch.num_placed else self._last_global
        return pattern

    def pass_settings(self, temperature: float) -> PassSettings:
        """Return what every pattern of this model needs to know."""
        return PassSettings(
            shape=self.shape,
            rotary=self.rotary,
            temperature=temperature,
            workspace=self.workspace,
            device=self.device,
            relative_bias=self.relative_bias,
        )

    def encode_embedded(
        self, x_BSD: Float32[torch.Tensor, "B S D"], pattern: Pattern
    ) -> Float[torch.Tensor, "B T D"]:
        """Run embeddings, which may be overwritten, through norms and layers; return the text's states."""
        x_ND = pattern.pack(self.norm_embeddings(x_BSD).to(self.dtype))
        for index, layer in enumerate(self.layers):
            drop_lead = index == pattern.drop_lead_at
            operations = InPlaceOperations(layer, pattern, self.shape, self.workspace, drop_lead=drop_lead)
            x_ND = run_layer(layer, x_ND, operations, norm_first=self.shape.norm_first)
            if drop_lead:
                pattern = pattern.without_lead()
        return pattern.unpack(x_ND if self.final_norm is None else self.final_norm(x_ND))


_ACTIVATE: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "tanh_gelu": partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "relu": F.relu_,
    "silu": partial(F.silu, inplace=True),
}
_OF_ONEDNN: Final[Mapping[Activation | None, tuple[str, str]]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "tanh_gelu": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
"""The name and the variant that oneDNN knows an activation by."""


class InPlaceOperations:
    """A layer's operations for inference, in the workspace's memory, with what oneDNN fuses.

    One product makes query, key and value. A plain activation is part of its product where oneDNN multiplies,
    in place elsewhere. Residuals are added by the product itself. Tokens are ``N D``, heads ``N P d``, P of
    all three kinds. ``drop_lead`` lets only the text go on after this layer's attention.
    """

    def __init__(
        self,
        layer: Layer,
        pattern: Pattern,
        shape: Shape,
        workspace: Workspace,
        *,
        drop_lead: bool = False,
    ) -> None:
        self._is_local = layer.is_local
        self._pattern = pattern
        self._shape = shape
        self._workspace = workspace
        self._drop_lead = drop_lead

    def norm(self, norm: Norm, x_ND: torch.Tensor) -> torch.Tensor:
        return norm(x_ND)

    def heads(self, qkv: AnyLinear, x_ND: torch.Tensor) -> torch.Tensor:
        heads = project(qkv, x_ND, self._workspace, "qkv")
        return heads.view(len(heads), -1, self._shape.head_dim)

    def norm_heads(self, query_norm: Norm, key_norm: Norm, heads_NPd: torch.Tensor) -> torch.Tensor:
        query, key, _ = heads_NPd.split(self._shape.heads_by_kind, dim=1)
        query.copy_(query_norm(query))
        key.copy_(key_norm(key))
        return heads_NPd

    def rotate(self, heads_NPd: torch.Tensor) -> torch.Tensor:
        num_rotated = self._shape.num_heads + self._shape.num_key_value_heads
        self._pattern.rotate_(heads_NPd[:, :num_rotated], is_local=self._is_local)
        return heads_NPd

    def attend(self, heads_NPd: torch.Tensor) -> torch.Tensor:
        return self._pattern.attend(heads_NPd, is_local=self._is_local, drop_lead=self._drop_lead)

    def continuing(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self._pattern.text(x_ND) if self._drop_lead else x_ND

    def inner(self, up: AnyLinear, activation: Activation, x_ND: torch.Tensor) -> torch.Tensor:
        return project(up, x_ND, self._workspace, "inner", activation)

    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x_ND: torch.Tensor) -> torch.Tensor:
        gate_NI, up_NI = project(gate_up, x_ND, self._workspace, "inner").chunk(2, dim=1)
        return _ACTIVATE[activation](gate_NI).mul_(up_NI)

    def add_projection(
        self, linear: AnyLinear, x_NE: torch.Tensor, residual_ND: torch.Tensor
    ) -> torch.Tensor:
        return add_projection(linear, x_NE, residual_ND)


def project(
    linear: AnyLinear,
    x_ND: torch.Tensor,
    workspace: Workspace,
    purpose: str,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Return the activated projection, in the workspace's memory unless oneDNN brings its own."""
    weight = linear.weight
    if weight.is_mkldnn:
        name, variant = _OF_ONEDNN[activation]
        return torch.ops.mkldnn._linear_pointwise(x_ND, weight, linear.bias, name, [], variant)
    out = workspace.take(purpose, (x_ND.shape[0], weight.shape[0]), x_ND.dtype)
    if linear.bias is None:
        torch.mm(x_ND, weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x_ND, weight.t(), out=out)
    return out if activation is None else _ACTIVATE[activation](out)


def add_projection(linear: AnyLinear, x_NE: torch.Tensor, residual_ND: torch.Tensor) -> torch.Tensor:
    """Return the projection added to ``residual``, which may be overwritten."""
    weight = linear.weight
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.binary(x_NE, residual_ND, weight, linear.bias, "add")
    if linear.bias is not None:
        residual_ND.add_(linear.bias)
    return residual_ND.addmm_(x_NE, weight.t())
