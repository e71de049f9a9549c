"""One row through a model with everything its layers compute kept: what the analyses read.

    X_0 ─▶ layer 1 ─▶ X_1 ─▶ … ─▶ X_n        states before the first layer and after each
             └─▶ read, Q, K, V                what the attention reads, and its heads

The layers are those that encode (``engine.in_place``), so that the states are the served ones. Attention is
computed again from Q and K, as no kernel shows it.

    T tokens    H heads    D model dim    d head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.in_place import InPlaceOperations, project
from cairn.pipeline.model.engine.layer import run_layer
from cairn.pipeline.model.engine.pattern import Batch
from cairn.pipeline.model.engine.rectangle import Rectangle
from cairn.pipeline.model.engine.transformer import Transformer
from jaxtyping import Bool, Float
from typing_extensions import override


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attention:
    """The attention of one layer: what it reads, and queries, keys and values of every head, in float32.

    Keys and values shared by several heads are repeated. ``visible_TT`` is None where every token sees all.
    """

    read_TD: Float[torch.Tensor, "T D"]
    query_HTd: Float[torch.Tensor, "H T d"]
    key_HTd: Float[torch.Tensor, "H T d"]
    value_HTd: Float[torch.Tensor, "H T d"]
    visible_TT: Bool[torch.Tensor, "T T"] | None
    temperature: float

    def logits(self) -> Float[torch.Tensor, "H T T"]:
        """Return QKᵀ / √d, before τ."""
        return self.query_HTd @ self.key_HTd.mT * self.query_HTd.shape[2] ** -0.5

    def weights(self) -> Float[torch.Tensor, "H T T"]:
        """Return A = softmax(QKᵀ / (τ √d)) over what each token sees."""
        logits_HTT = self.logits() / self.temperature
        if self.visible_TT is not None:
            logits_HTT = logits_HTT.masked_fill(~self.visible_TT, -torch.inf)
        return torch.softmax(logits_HTT, dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """States before the first layer and after each, without the final norm, and each layer's attention."""

    states: Sequence[Float[torch.Tensor, "T D"]]
    attentions: Sequence[Attention]
    is_local: Sequence[bool]

    @property
    def last_global(self) -> Attention | None:
        """Return the last attention that shows every token, None in a model of local layers."""
        places = [index for index, is_local in enumerate(self.is_local) if not is_local]
        return self.attentions[places[-1]] if places else None


def require_attention(backbone: Backbone, name: str) -> Transformer:
    """Return a model whose layers can be run one by one; raise :class:`ConfigError` for another."""
    if type(backbone) is not Transformer:
        raise ConfigError(
            f"an analysis must have a model that shows its attention, got {name}, which runs as a graph of "
            "OpenVINO or in two stages (CDE); choose backend torch, or another model"
        )
    return backbone


@torch.inference_mode()
def trace_row(backbone: Transformer, ids: Sequence[int], temperature: float = 1.0) -> Trace:
    """Run one row of token ids, without context, and keep what its layers compute."""
    heads: list[tuple[torch.Tensor, ...]] = []
    batch = Batch(lengths_B=np.array([len(ids)], np.int64), num_tokens=len(ids))
    pattern = _recorder(heads)(batch, backbone.pass_settings(temperature))
    norm_first = backbone.shape.norm_first
    embedded_BTD = backbone.embed_tokens(np.array([ids], np.int64))
    x_TD = pattern.pack(backbone.norm_embeddings(embedded_BTD).to(backbone.dtype))
    states, attentions = [x_TD.float().clone()], list[Attention]()
    for index, layer in enumerate(backbone.layers):
        is_normed = norm_first and layer.attention_norm is not None
        read_TD = layer.attention_norm(x_TD) if is_normed and layer.attention_norm else x_TD.clone()
        operations = InPlaceOperations(layer, index, pattern, backbone.shape, backbone.workspace)
        x_TD = run_layer(layer, x_TD, operations, norm_first=norm_first)
        query_HTd, key_HTd, value_HTd = heads.pop()
        attentions.append(
            Attention(
                read_TD=read_TD.float(),
                query_HTd=query_HTd,
                key_HTd=key_HTd,
                value_HTd=value_HTd,
                visible_TT=_visible(backbone, len(ids), is_local=layer.is_local),
                temperature=temperature,
            )
        )
        states.append(x_TD.float().clone())
    if not all(bool(torch.isfinite(state).all()) for state in states):
        raise ModelError("the model's states must be finite numbers, got others; fetch the model again")
    return Trace(states=states, attentions=attentions, is_local=[layer.is_local for layer in backbone.layers])


@torch.inference_mode()
def value_weights(backbone: Transformer) -> list[Float[torch.Tensor, "H D d"]]:
    """Return W_V of every head of every layer, as XW_V reads it, in float32.

    Taken from the projection itself, whatever its layout in memory; its bias is left out.
    """
    num_heads, num_kv = backbone.shape.num_heads, backbone.shape.num_key_value_heads
    eye_DD = torch.eye(backbone.model_dim, dtype=backbone.dtype, device=backbone.device)
    weights: list[torch.Tensor] = []
    for layer in backbone.layers:
        rows_DE = project(layer.qkv, eye_DD, backbone.workspace, "qkv").float().clone()
        if layer.qkv.bias is not None:
            rows_DE -= layer.qkv.bias.float()
        values_GDd = rows_DE.view(len(rows_DE), -1, backbone.shape.head_dim)[:, -num_kv:].transpose(0, 1)
        weights.append(values_GDd.repeat_interleave(num_heads // num_kv, dim=0))
    return weights


def _recorder(kept: list[tuple[torch.Tensor, ...]]) -> type[Rectangle]:
    """Return a rectangle that leaves queries, keys and values of its one row in ``kept``, each ``H T d``."""

    class Recorder(Rectangle):
        @override
        def attend(
            self, padded_NPd: Float[torch.Tensor, "N P d"], layer: int, /, *, is_local: bool, drop_lead: bool
        ) -> torch.Tensor:
            lead, trail = self.margins(is_local=is_local)
            shape = self._settings.shape
            own_PTd = padded_NPd[lead : len(padded_NPd) - trail].transpose(0, 1).float()
            counts = [shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads]
            kept[:] = [
                tuple(
                    part.repeat_interleave(shape.num_heads // len(part), dim=0)
                    for part in own_PTd.split(counts)
                )
            ]
            return super().attend(padded_NPd, layer, is_local=is_local, drop_lead=drop_lead)

    return Recorder


def _visible(backbone: Transformer, num_tokens: int, *, is_local: bool) -> Bool[torch.Tensor, "T T"] | None:
    radius = backbone.shape.local_radius
    place_T = torch.arange(num_tokens, device=backbone.device)
    distance_TT = place_T[:, None] - place_T[None]
    if is_local and radius is not None:
        return distance_TT.abs() <= radius
    return distance_TT >= 0 if backbone.shape.is_causal else None
