"""The one engine that runs every backbone: layers of attention and feed-forward, forward only, made for throughput.

    ids ─▶ embedding ─▶ [lead][text] ─▶ norm ─▶ layer ─▶ … ─▶ layer ─▶ (norm) ─▶ hidden states of the text
                           ▲                      ▲
                 context, soft prompt         pattern: who sees whom

A family module reads its published configuration and weights into ``Layer`` s and an ``Embedding``; what
differs between families is data here: where norms stand, which norm, rotary or absolute positions, local
layers, shared key and value heads, plain or gated feed-forward. Same mathematics as the published models,
exact to 1e-5 in fp32.

The shape of the work: one product for query, key and value; residuals added in place; after the last layer
that can show the lead to the text only the text goes on. No dropout, no gradients, no token types but 0.

    B rows   S vectors of a row, lead and text   T text tokens   N vectors of a batch   M those of its texts   D model dim
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer

from pipeline.errors import ModelError
from pipeline.model.engine.feed_forward import GatedMlp, PlainMlp
from pipeline.model.engine.landmark_gates import read_gates
from pipeline.model.engine.packed import Packed
from pipeline.model.engine.pattern import Batch, PassSettings, Pattern, Shape
from pipeline.model.engine.rectangle import Rectangle
from pipeline.model.engine.rotary import RotaryTable
from pipeline.model.engine.weights import Linear, Norm
from pipeline.model.engine.workspace import Workspace
from pipeline.model.folders.checkpoint import Checkpoint
from pipeline.model.landmark_mixer import read_landmark_mixer
from pipeline.model.latent_attention import read_latent_attention
from pipeline.model.projection import read_projection

_Layout = TypeVar("_Layout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of H heads of queries and G heads of keys and values, d wide.

    ``qkv`` holds the rows of the queries of all heads, then the keys, then the values: ``(H + 2 G) d`` in
    all. With ``norm_first`` in the shape a norm stands before its part (None: the input is normed already),
    else after it and its residual.
    """

    qkv: Linear
    attention_output: Linear
    attention_norm: Norm | None
    mlp: PlainMlp | GatedMlp
    mlp_norm: Norm
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    is_local: bool = False

    def packed(self) -> Layer:
        """Return it with its projections laid out for this processor."""
        return replace(
            self,
            qkv=self.qkv.packed(),
            attention_output=self.attention_output.packed(),
            mlp=self.mlp.packed(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The input tables in float32.

    ``token_type`` is added to every vector, ``positions`` to text only, ``norm`` is applied to all.
    """

    tokens_VD: torch.Tensor
    positions_PD: torch.Tensor | None = None
    token_type_D: torch.Tensor | None = None
    norm: Norm | None = None


class Transformer:
    """Implements :class:`pipeline.model.backbone.Backbone`."""

    rectangle_type: type[Rectangle] = Rectangle

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        final_norm: Norm | None,
        shape: Shape,
        rotary: Mapping[bool, RotaryTable] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.cls_id = checkpoint.cls_id
        self.landmark_id = checkpoint.landmark_id
        self.pad_id = checkpoint.pad_id
        self.weights_fingerprint = checkpoint.fingerprint
        self.device = device
        self.dtype = dtype
        self.model_dim = self.context_dim = int(embedding.tokens_VD.shape[1])
        self.latent_attention = read_latent_attention(
            checkpoint.tensors, checkpoint.config, model_dim=self.model_dim, dtype=dtype, device=device
        )
        self._projection = read_projection(checkpoint.steps, self.model_dim, device)
        self.embedding_dim = self.model_dim if self._projection is None else self._projection.output_dim
        self.landmark_mixer = read_landmark_mixer(checkpoint.tensors, self.embedding_dim, device)
        self.max_positions = shape.max_positions
        self.max_context: int | None = None
        self._embedding = embedding
        self._layers = list(layers)
        self._final_norm = final_norm
        self.shape = shape
        self.rotary = rotary
        self.workspace = Workspace(device)
        self.landmark_gates = read_gates(checkpoint.tensors, len(layers), shape.num_heads, device)
        # The flash kernels know half precision only.
        self.pattern_type = (
            Packed
            if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
            else self.rectangle_type
        )
        self._last_global = max(
            (index for index, layer in enumerate(layers) if not layer.is_local), default=-1
        )

    @property
    def first_stage(self) -> Transformer:
        """Return the backbone itself, which embeds its own context, without what projects its embeddings elsewhere."""
        if self._projection is None:
            return self
        unprojected = copy(self)
        unprojected._projection, unprojected.embedding_dim = None, self.model_dim
        return unprojected

    def pack(self) -> None:
        """Lay the layers' weights out as this processor multiplies them, one layer after another.

        The plain ones go.
        """
        for index, layer in enumerate(self._layers):
            self._layers[index] = layer.packed()

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        return self._embedding.tokens_VD.cpu().numpy()

    def project(self, pooled_MD: Float32[torch.Tensor, "M D"]) -> Float32[torch.Tensor, "M E"]:
        """Apply the modules that the checkpoint's folder lists behind its pooling; most list none."""
        return pooled_MD if self._projection is None else self._projection(pooled_MD)

    @torch.inference_mode()
    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        context_CD: Float32[np.ndarray, "C D"] | None = None,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; see the protocol."""
        x_BSD = self.embed_tokens(ids_BT)
        num_context = 0
        if context_CD is not None:
            num_context = len(context_CD)
            x_BSD = torch.cat([self.embed_context(context_CD).expand(len(x_BSD), -1, -1), x_BSD], dim=1)
        return self.encode_embedded(
            x_BSD, lengths_B, num_lead=num_context, num_unplaced=num_context, temperature=temperature
        )

    def embed_tokens(self, ids_BT: Int64[np.ndarray, "B T"]) -> Float32[torch.Tensor, "B T D"]:
        """Look tokens up, with position and type, before the embedding norm.

        Raise :class:`ModelError` for a row that is too long.
        """
        num_tokens = ids_BT.shape[1]
        if num_tokens > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} tokens, got {num_tokens}; choose a "
                "smaller window"
            )
        x_BTD = F.embedding(torch.from_numpy(ids_BT).to(self.device), self._embedding.tokens_VD)
        if self._embedding.positions_PD is not None:
            x_BTD += self._embedding.positions_PD[:num_tokens]
        if self._embedding.token_type_D is not None:
            x_BTD += self._embedding.token_type_D
        return x_BTD

    def embed_context(self, context_CD: Float32[np.ndarray, "C D"]) -> Float32[torch.Tensor, "C D"]:
        """Turn context vectors into input embeddings, with token type 0 and no position, before the embedding norm."""
        x_CD = torch.from_numpy(context_CD).to(self.device)
        return x_CD if self._embedding.token_type_D is None else x_CD + self._embedding.token_type_D

    def norm_embeddings(self, x_BSD: Float32[torch.Tensor, "*B S D"]) -> Float32[torch.Tensor, "*B S D"]:
        """Apply the embedding norm, where the family has one."""
        return x_BSD if self._embedding.norm is None else self._embedding.norm(x_BSD)

    @torch.inference_mode()
    def encode_embedded(
        self,
        x_BSD: Float32[torch.Tensor, "B S D"],
        lengths_B: Int64[np.ndarray, " B"],
        *,
        num_lead: int,
        num_unplaced: int,
        first_position: int = 0,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Run the layers over input embeddings and return the states of the text.

        ``num_lead`` vectors stand before every row's text; the first ``num_unplaced`` of them have no
        position, so their order does not matter and local layers do not show them to the text; positions of
        the others and the text count from ``first_position``.
        """
        num_tokens = x_BSD.shape[1] - num_lead
        batch = Batch(
            lengths_B=lengths_B,
            num_tokens=num_tokens,
            num_lead=num_lead,
            num_unplaced=num_unplaced,
            first_position=first_position,
        )
        pattern: Pattern = self._lay_out(batch, temperature, self.pattern_type)
        # A lead with positions is in the windows of local layers too.
        last_read = self._last_global if num_unplaced == num_lead else len(self._layers) - 1
        return self.encode_pattern(x_BSD, pattern, drop_lead_at=last_read if num_lead else None)

    @torch.inference_mode()
    def encode_with_lead(
        self, x_BSD: Float32[torch.Tensor, "B S D"], batch: Batch, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B S D"]:
        """Run the layers as ``encode_embedded`` does, and return the states of lead and text."""
        rectangle = self._lay_out(batch, temperature, self.rectangle_type)
        x_ND = self.run_layers(
            rectangle.pack(self.norm_embeddings(x_BSD).to(self.dtype)), rectangle, drop_lead_at=None
        )
        return rectangle.rows(x_ND if self._final_norm is None else self._final_norm(x_ND))

    def _lay_out(self, batch: Batch, temperature: float, pattern_type: Callable[..., _Layout]) -> _Layout:
        if batch.num_unplaced and self._last_global < 0:
            raise ModelError(
                "a model that reads context must have a global layer, got local ones only; go on without "
                "context"
            )
        num_positions = batch.first_position + batch.width - batch.num_unplaced
        if num_positions > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} positions, got {num_positions}; choose a "
                "smaller window"
            )
        return pattern_type(batch, self.pass_settings(temperature))

    def pass_settings(self, temperature: float) -> PassSettings:
        """Return what every pattern of this model needs to know."""
        return PassSettings(
            shape=self.shape,
            rotary=self.rotary,
            temperature=temperature,
            dtype=self.dtype,
            workspace=self.workspace,
            device=self.device,
        )

    def encode_pattern(
        self, x_BSD: Float32[torch.Tensor, "B S D"], pattern: Pattern, *, drop_lead_at: int | None = None
    ) -> Float[torch.Tensor, "B T D"]:
        """Run input embeddings through embedding norm, layers and final norm under a pattern of one's own."""
        x_ND = pattern.pack(self.norm_embeddings(x_BSD).to(self.dtype))
        x_ND = self.run_layers(x_ND, pattern, drop_lead_at=drop_lead_at)
        return pattern.unpack(x_ND if self._final_norm is None else self._final_norm(x_ND))

    def run_layers(
        self, x_ND: Float[torch.Tensor, "N D"], pattern: Pattern, *, drop_lead_at: int | None
    ) -> Float[torch.Tensor, "M D"]:
        """Pass tokens through all layers, without the final norm; ``x`` may be overwritten."""
        for index in range(len(self._layers)):
            x_ND = self._layer(index, x_ND, pattern, drop_lead=index == drop_lead_at)
            if index == drop_lead_at:
                pattern = pattern.without_lead()
        return x_ND

    def _pad(self, x_ND: torch.Tensor, lead: int, trail: int) -> torch.Tensor:
        """Copy tokens between rows of zeros."""
        padded_ND = self.workspace.take("padded", (lead + len(x_ND) + trail, x_ND.shape[1]), x_ND.dtype)
        padded_ND[:lead].zero_()
        padded_ND[lead : lead + len(x_ND)] = x_ND
        padded_ND[lead + len(x_ND) :].zero_()
        return padded_ND

    def _layer(self, index: int, x_ND: torch.Tensor, pattern: Pattern, *, drop_lead: bool) -> torch.Tensor:
        layer, norm_first = self._layers[index], self.shape.norm_first
        lead, trail = pattern.margins(is_local=layer.is_local)
        num_tokens, num_heads = len(x_ND), self.shape.num_heads
        normed_ND = x_ND if not norm_first or layer.attention_norm is None else layer.attention_norm(x_ND)
        padded_ND = layer.qkv.project(normed_ND, self.workspace, "qkv")
        if lead or trail:
            padded_ND = self._pad(padded_ND, lead, trail)
        padded_NPd = padded_ND.view(len(padded_ND), -1, self.shape.head_dim)
        heads_NPd = padded_NPd[lead : lead + num_tokens]
        num_turned = num_heads + self.shape.num_key_value_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            heads_NPd[:, :num_heads] = layer.query_norm(heads_NPd[:, :num_heads])
            heads_NPd[:, num_heads:num_turned] = layer.key_norm(heads_NPd[:, num_heads:num_turned])
        pattern.rotate_(heads_NPd[:, :num_turned], is_local=layer.is_local)
        mixed_MD = pattern.attend(padded_NPd, index, is_local=layer.is_local, drop_lead=drop_lead)
        x_MD = pattern.text(x_ND) if drop_lead else x_ND
        x_MD = layer.attention_output.add_projection(mixed_MD, x_MD)
        if norm_first:
            return layer.mlp.add_to(x_MD, layer.mlp_norm(x_MD), self.workspace)
        if layer.attention_norm is not None:
            x_MD = layer.attention_norm(x_MD)
        return layer.mlp_norm(layer.mlp.add_to(x_MD, x_MD, self.workspace))
