"""Latent attention: each token rewritten by r trained latents, before the mean over tokens (NV-Embed eq. 1).

    x' = x + softmax(LN(x) Wq (LN(latents) Wk)ᵀ / √d) (LN(latents) Wv) Wo    tokens query, latents answer
    y  = x' + GEGLU(LN(x'))                                                   the layout's spans average y

A token's result depends on that token alone, so this is a map of hidden states that stands between a
backbone's last norm and the pooling; the layout leaves instruction tokens out of the spans. Keys and values
depend on no text: seen through the query's projection they are one matrix from width to all heads' latents,
through the output's another one back, which at the published sizes takes a ninth of the products (33.6
against 302 million a token). TempScale concerns attention between tokens, not this.

Source: NV-Embed §3.2 and NV-Embed-v2's published block, which differs from the paper's text: norms before
both parts, residuals, and a gated MLP (GEGLU). Its tensors are read under the published names,
``latent_attention_model.*``, wherever in the file they stand. Differentiable in its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.weights import AnyLinear, Norm, WeightReader
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION as PREFIX
from jaxtyping import Float
from torch.nn import functional

PUBLISHED_HEADS: Final = 8
"""Heads of NV-Embed's block, whose published configuration leaves them out."""

NORM_EPS: Final = 1e-5

_ATTENTION, _MLP = "cross_attend_blocks.0", "cross_attend_blocks.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """The block with its matrices multiplied out.

    ``scores`` and ``values`` hold the latents of head 0, then those of head 1, and so on.
    """

    num_heads: int
    norm: Norm
    scores_DR: torch.Tensor
    values_RD: torch.Tensor
    mlp_norm: Norm
    up: AnyLinear
    down: AnyLinear

    def __call__(self, hidden_BTD: Float[torch.Tensor, "B T D"]) -> Float[torch.Tensor, "B T D"]:
        """Rewrite hidden states, each position by itself."""
        scores_BTHr = (self.norm(hidden_BTD) @ self.scores_DR).unflatten(-1, (self.num_heads, -1))
        attended_BTD = hidden_BTD + scores_BTHr.softmax(-1).flatten(-2) @ self.values_RD
        inner = functional.linear(self.mlp_norm(attended_BTD), self.up.weight, self.up.bias)
        up_BTF, gate_BTF = inner.chunk(2, dim=-1)
        gated_BTF = up_BTF * functional.gelu(gate_BTF)
        return attended_BTD + functional.linear(gated_BTF, self.down.weight, self.down.bias)


def read_latent_attention(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    model_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LatentAttention | None:
    """Read the block of a checkpoint, None where it has none; weights are multiplied out in float32."""
    if not any(name.endswith(f"{PREFIX}latents") for name in tensors):
        return None
    reader = WeightReader(tensors, f"{PREFIX}latents", device, dtype, epsilon=NORM_EPS)

    def read(name: str, *shape: int) -> torch.Tensor:
        return reader.read(f"{PREFIX}{name}", shape, torch.float32)

    num_latents = _size(tensors, "latents", 0)
    inner = _size(tensors, f"{_ATTENTION}.fn.to_q.weight", 0)
    num_inner = _size(tensors, f"{_MLP}.fn.net.2.weight", 1)
    num_heads = _num_heads(config, inner)
    context_norm = reader.norm(f"{PREFIX}{_ATTENTION}.norm_context", model_dim, torch.float32)
    latents_rD = context_norm(read("latents", num_latents, model_dim))
    query_HdD = read(f"{_ATTENTION}.fn.to_q.weight", inner, model_dim).unflatten(0, (num_heads, -1))
    key_HdD, value_HdD = (
        part.unflatten(0, (num_heads, -1))
        for part in read(f"{_ATTENTION}.fn.to_kv.weight", 2 * inner, model_dim).chunk(2)
    )
    output_HdD = read(f"{_ATTENTION}.fn.to_out.weight", model_dim, inner).t().unflatten(0, (num_heads, -1))
    scale = (inner // num_heads) ** -0.5
    scores_HDr = query_HdD.transpose(1, 2) @ (key_HdD @ latents_rD.t()) * scale
    values_HrD = (latents_rD @ value_HdD.transpose(1, 2)) @ output_HdD
    return LatentAttention(
        num_heads=num_heads,
        norm=reader.norm(f"{PREFIX}{_ATTENTION}.norm", model_dim),
        scores_DR=scores_HDr.transpose(0, 1).flatten(1).to(dtype),
        values_RD=values_HrD.flatten(0, 1).to(dtype),
        mlp_norm=reader.norm(f"{PREFIX}{_MLP}.norm", model_dim),
        up=reader.linear(f"{PREFIX}{_MLP}.fn.net.0", (2 * num_inner, model_dim), bias=True),
        down=reader.linear(f"{PREFIX}{_MLP}.fn.net.2", (model_dim, num_inner), bias=True),
    )


def require_latent_attention(backbone: Backbone) -> None:
    """Raise :class:`ConfigError` for a backbone that was not trained with latent attention."""
    if not any(name.endswith(f"{PREFIX}latents") for name in backbone.own_tensors):
        raise ConfigError(
            f"pooling latent must go with a model that holds {PREFIX}latents, got one without; choose "
            "another pooling, such as mean"
        )


def latent_attention_of(backbone: Backbone) -> LatentAttention:
    """Return a backbone's block; raise :class:`ConfigError` for one that has none."""
    require_latent_attention(backbone)
    block = read_latent_attention(
        backbone.own_tensors,
        backbone.config,
        model_dim=backbone.model_dim,
        dtype=backbone.dtype,
        device=backbone.device,
    )
    assert block is not None
    return block


def _size(tensors: Mapping[str, torch.Tensor], name: str, axis: int) -> int:
    """Return a size that no configuration gives and only the tensor itself tells."""
    found = (tensor for full, tensor in tensors.items() if full.endswith(f"{PREFIX}{name}"))
    shape = next((tuple(tensor.shape) for tensor in found), None)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ModelError(
            f"the model's weights must hold {PREFIX}{name} as a matrix, got {shape or 'none'}; fetch the "
            "model again"
        )
    return shape[axis]


def _num_heads(config: Mapping[str, Any], inner: int) -> int:
    settings: Any = config.get("latent_attention_config") or {}
    num_heads: Any = settings.get("num_cross_heads", PUBLISHED_HEADS) if isinstance(settings, dict) else None
    if not isinstance(num_heads, int) or isinstance(num_heads, bool) or num_heads < 1 or inner % num_heads:
        raise ModelError(
            f"latent_attention_config of the model must give num_cross_heads as a divisor of the {inner} "
            f"rows of to_q, got {num_heads!r}; fetch the model again"
        )
    return num_heads
