"""ModernBERT and its kin (mmBERT, CDE v2's backbones): rotary positions, global layers among local ones, GeGLU, pre-norm; forward only.

Same mathematics as the published models, exact to 1e-5 in fp32; local layers run in blocks, so their cost is linear in the length.

Context stands before the text as input embeddings (CDE eq. 5 and 6): the embedding norm is applied to it once, it has no position and is
not rotated, and the text's positions still start at 0 (CDE §10.4). Local layers do not show it to the text: a context vector has no
position, so it is in nobody's window; only global layers carry it. After the last global layer nothing reads it, and it is dropped. The
public CDE code norms text tokens twice before the first layer; that belongs to whoever loads a CDE checkpoint, not here.

Source: Warner et al., "Smarter, Better, Faster, Longer" (ModernBERT). No dropout, no gradients, no scaled RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer

from pipeline.errors import ModelError
from pipeline.model.attention import attend, bias_where, visible_keys
from pipeline.model.block_local_attention import LocalWindow
from pipeline.model.checkpoint import Checkpoint
from pipeline.model.gated_mlp import ACTIVATIONS, GatedMlp
from pipeline.model.rotary import RotaryTable, even_head_dim
from pipeline.model.weights import Linear, WeightReader, with_temperature
from pipeline.model.workspace import Workspace

FAMILIES: Final = ("modernbert",)

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    is_global: bool
    attention_norm: Linear | None
    qkv: Linear
    attention_output: Linear
    mlp_norm: Linear
    mlp: GatedMlp


class ModernBertBackbone:
    """Implements :class:`pipeline.model.backbone.Backbone`."""

    def __init__(self, checkpoint: Checkpoint, *, temperature: float, dtype: torch.dtype, device: torch.device) -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.cls_id = checkpoint.cls_id
        self.landmark_id = checkpoint.landmark_id
        self.pad_id = checkpoint.pad_id
        self.temperature = temperature
        self.weights_fingerprint = checkpoint.fingerprint
        self.device = device
        self.dtype = dtype
        self.model_dim = checkpoint.integer("hidden_size")
        self.max_positions = checkpoint.integer("max_position_embeddings", default=8192)
        self._num_heads = checkpoint.integer("num_attention_heads")
        self._epsilon = checkpoint.number("norm_eps", default=1e-5)
        self._radius = checkpoint.integer("local_attention", default=128) // 2
        self._workspace = Workspace(device)
        kinds = _layer_kinds(checkpoint)
        self._last_global = max((index for index, kind in enumerate(kinds) if kind == _GLOBAL), default=-1)
        head_dim = even_head_dim(self.model_dim, self._num_heads)
        self._rotary = {
            kind: RotaryTable(rotary_dim=head_dim, theta=theta, num_positions=self.max_positions, device=device)
            for kind, theta in _thetas(checkpoint.config).items()
        }
        reader = WeightReader(checkpoint.tensors, "embeddings.tok_embeddings.weight", device)
        norm_bias = bool(checkpoint.config.get("norm_bias", False))
        vocabulary = checkpoint.integer("vocab_size")
        self._tokens = reader.read("embeddings.tok_embeddings.weight", (vocabulary, self.model_dim), torch.float32)
        self._embedding_norm = reader.linear("embeddings.norm", (self.model_dim,), torch.float32, bias=norm_bias)
        self._final_norm = reader.linear("final_norm", (self.model_dim,), dtype, bias=norm_bias)
        self._layers = [
            _read_layer(reader, checkpoint, index, is_global=kind == _GLOBAL, temperature=temperature, dtype=dtype)
            for index, kind in enumerate(kinds)
        ]

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        return self._tokens.cpu().numpy()

    @torch.inference_mode()
    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        context_CD: Float32[np.ndarray, "C D"] | None = None,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; see the protocol."""
        num_rows, num_tokens = ids_BT.shape
        if num_tokens > self.max_positions:
            raise ModelError(f"a row must have at most {self.max_positions} tokens, got {num_tokens}; choose a smaller window")
        if context_CD is not None and self._last_global < 0:
            raise ModelError("a model that reads context must have a global layer, got local ones only; go on without context")
        x_BSD = F.embedding(torch.from_numpy(ids_BT).to(self.device), self._tokens)
        num_context = 0
        if context_CD is not None:
            num_context = len(context_CD)
            x_BSD = torch.cat([torch.from_numpy(context_CD).to(self.device).expand(num_rows, -1, -1), x_BSD], dim=1)
        x_BSD = self._norm(x_BSD, self._embedding_norm).to(self.dtype)
        batch = self._batch(lengths_B, num_tokens, num_context)
        for index, layer in enumerate(self._layers):
            skip = num_context if index == self._last_global else 0
            x_BSD = self._layer(layer, x_BSD, batch, skip)
            if skip:
                batch = self._batch(lengths_B, num_tokens, 0)
        return self._norm(x_BSD, self._final_norm)

    def _norm(self, x: torch.Tensor, norm: Linear) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._epsilon)

    def _layer(self, layer: _Layer, x_BSD: torch.Tensor, batch: _Batch, skip: int) -> torch.Tensor:
        """Apply one layer; the first ``skip`` tokens are attended to and then dropped."""
        num_rows, num_tokens, width = x_BSD.shape
        num_all, window = num_rows * num_tokens, batch.window
        lead, trail = (0, 0) if layer.is_global else (window.lead, window.trail)
        padded = self._workspace.take("qkv", (lead + num_all + trail, 3 * width), self.dtype)
        padded[:lead].zero_()
        padded[lead + num_all :].zero_()
        normed_BSD = x_BSD if layer.attention_norm is None else self._norm(x_BSD, layer.attention_norm)
        qkv = layer.qkv.project(normed_BSD.view(num_all, width), padded[lead : lead + num_all])
        qkv = qkv.view(num_rows, num_tokens, 3, self._num_heads, -1)
        kind = _GLOBAL if layer.is_global else _LOCAL
        self._rotary[kind].rotate_(qkv[:, :, :2], batch.angles[kind], self._workspace)
        if layer.is_global:
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            mixed_ND = attend(query[:, :, skip:], key, value, batch.global_bias, self._workspace).reshape(-1, width)
        else:
            mixed_ND = window.attend(padded.view(len(padded), 3, self._num_heads, -1), self._workspace)
        x_BTD = x_BSD[:, skip:].contiguous()
        residual_ND = x_BTD.view(-1, width)
        layer.attention_output.add_projection(mixed_ND, residual_ND)
        layer.mlp.add_to(residual_ND, self._norm(residual_ND, layer.mlp_norm), self._workspace)
        return x_BTD

    def _batch(self, lengths_B: Int64[np.ndarray, " B"], num_tokens: int, num_context: int) -> _Batch:
        visible_BS = visible_keys(lengths_B, num_tokens, num_context, self.device)
        return _Batch(
            angles={kind: table.angles(num_context, num_tokens) for kind, table in self._rotary.items()},
            global_bias=None if visible_BS is None else bias_where(visible_BS[:, None, None], self.dtype),
            window=LocalWindow(
                lengths_B,
                num_tokens=num_tokens,
                num_context=num_context,
                radius=self._radius,
                dtype=self.dtype,
                device=self.device,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """What all layers of one forward pass share: angles and masks, global and local."""

    angles: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    global_bias: torch.Tensor | None
    window: LocalWindow


def _layer_kinds(checkpoint: Checkpoint) -> list[str]:
    num_layers = checkpoint.integer("num_hidden_layers")
    kinds: Any = checkpoint.config.get("layer_types")
    if kinds is None:
        step = checkpoint.integer("global_attn_every_n_layers", default=3)
        return [_LOCAL if index % step else _GLOBAL for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers or not all(kind in (_GLOBAL, _LOCAL) for kind in kinds):
        raise ModelError(f"layer_types must name {num_layers} layers as {_GLOBAL} or {_LOCAL}, got {kinds!r}; choose another model")
    return [str(kind) for kind in kinds[:num_layers]]


def _thetas(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the RoPE base of both kinds of layer, in today's or the older published names."""
    named: Mapping[str, Any] = config.get("rope_parameters") or {}
    kinds = {kind: named.get(kind) or {} for kind in (_GLOBAL, _LOCAL)}
    variant = config.get("rope_scaling") or next((item for item in kinds.values() if item.get("rope_type", "default") != "default"), None)
    if variant is not None:
        raise ModelError(f"rotary positions must be the plain ones (rope_type default), got {variant!r}; choose another model")
    of_global = kinds[_GLOBAL].get("rope_theta") or config.get("global_rope_theta") or 160_000.0
    # An older file whose local base is null means the global one.
    of_local = kinds[_LOCAL].get("rope_theta") or config.get("local_rope_theta", 10_000.0) or of_global
    return {_GLOBAL: float(of_global), _LOCAL: float(of_local)}


def _read_layer(
    reader: WeightReader, checkpoint: Checkpoint, index: int, *, is_global: bool, temperature: float, dtype: torch.dtype
) -> _Layer:
    config = checkpoint.config
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    norm_bias, attention_bias, mlp_bias = (bool(config.get(name, False)) for name in ("norm_bias", "attention_bias", "mlp_bias"))
    activation = config.get("hidden_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"hidden_activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}; choose another model")
    prefix = f"layers.{index}"
    qkv = reader.linear(f"{prefix}.attn.Wqkv", (3 * width, width), torch.float32, bias=attention_bias)
    return _Layer(
        is_global=is_global,
        # The embedding norm has just been applied when the first layer begins.
        attention_norm=reader.linear(f"{prefix}.attn_norm", (width,), dtype, bias=norm_bias) if index else None,
        qkv=with_temperature(qkv, temperature, dtype),
        attention_output=reader.linear(f"{prefix}.attn.Wo", (width, width), dtype, bias=attention_bias),
        mlp_norm=reader.linear(f"{prefix}.mlp_norm", (width,), dtype, bias=norm_bias),
        mlp=GatedMlp(
            gate_up=reader.linear(f"{prefix}.mlp.Wi", (2 * inner, width), dtype, bias=mlp_bias),
            down=reader.linear(f"{prefix}.mlp.Wo", (width, inner), dtype, bias=mlp_bias),
            activate=ACTIVATIONS[activation],
        ),
    )
