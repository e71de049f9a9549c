"""NomicBERT (nomic-bert-2048, nomic-embed-text v1 and v1.5, CDE v1's backbones): rotary positions, SwiGLU, post-norm; forward only.

Reads the published layout (``n_embd``, ``emb_ln``, ``Wqkv``, ``fc11``) and the one transformers uses itself (``hidden_size``, ``q_proj``,
``gate_proj``). Same mathematics as both, exact to 1e-5 in fp32. Context stands before the text as input embeddings with token type 0 and
the embedding norm, without position and not rotated; the text's positions start at 0 (CDE eq. 5 and 6, §10.4). Every layer is global.

Source: Nussbaum et al., "Nomic Embed". No dropout, no gradients, no mixture of experts; a file that stretches RoPE beyond the length it was
trained on is read up to that length, where nothing is stretched.
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
from pipeline.model.checkpoint import Checkpoint
from pipeline.model.gated_mlp import ACTIVATIONS, GatedMlp
from pipeline.model.rotary import RotaryTable, even_head_dim
from pipeline.model.weights import Linear, WeightReader, with_temperature
from pipeline.model.workspace import Workspace

FAMILIES: Final = ("nomic_bert",)

_OTHER_VARIANTS: Final = (
    "prenorm",
    "causal",
    "parallel_block",
    "use_rms_norm",
    "rotary_emb_interleaved",
    "rotary_emb_scale_base",
    "qkv_proj_bias",
    "mlp_fc1_bias",
    "mlp_fc2_bias",
    "num_experts",
)
"""Settings of the published code that no supported model switches on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    qkv: Linear
    attention_output: Linear
    attention_norm: Linear
    mlp: GatedMlp
    output_norm: Linear


class NomicBertBackbone:
    """Implements :class:`pipeline.model.backbone.Backbone`."""

    def __init__(self, checkpoint: Checkpoint, *, temperature: float, dtype: torch.dtype, device: torch.device) -> None:
        _require_plain(checkpoint.config)
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.cls_id = checkpoint.cls_id
        self.landmark_id = checkpoint.landmark_id
        self.pad_id = checkpoint.pad_id
        self.temperature = temperature
        self.weights_fingerprint = checkpoint.fingerprint
        self.device = device
        self.dtype = dtype
        self.model_dim = checkpoint.integer("n_embd", "hidden_size")
        self.max_positions = _max_positions(checkpoint)
        self._num_heads = checkpoint.integer("n_head", "num_attention_heads")
        self._epsilon = checkpoint.number("layer_norm_epsilon", "layer_norm_eps", default=1e-12)
        self._workspace = Workspace(device)
        self._rotary = RotaryTable(
            rotary_dim=int(even_head_dim(self.model_dim, self._num_heads) * checkpoint.number("rotary_emb_fraction", default=1.0)),
            theta=_theta(checkpoint),
            num_positions=self.max_positions,
            device=device,
        )
        reader = WeightReader(checkpoint.tensors, "embeddings.word_embeddings.weight", device)
        vocabulary = checkpoint.integer("vocab_size")
        self._tokens = reader.read("embeddings.word_embeddings.weight", (vocabulary, self.model_dim), torch.float32)
        self._token_type = torch.zeros(self.model_dim, device=device)
        num_types = checkpoint.config.get("type_vocab_size", 2)
        if num_types:
            types = reader.read("embeddings.token_type_embeddings.weight", (num_types, self.model_dim), torch.float32)
            self._token_type = types[0].clone()
        read_layer = _read_published_layer if "emb_ln.weight" in reader else _read_native_layer
        embedding_norm = "emb_ln" if "emb_ln.weight" in reader else "embeddings.LayerNorm"
        self._embedding_norm = reader.linear(embedding_norm, (self.model_dim,), torch.float32, bias=True)
        inner = checkpoint.integer("n_inner", "intermediate_size", default=4 * self.model_dim)
        self._layers = [
            read_layer(reader, index, self.model_dim, inner, temperature, dtype)
            for index in range(checkpoint.integer("n_layer", "num_hidden_layers"))
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
        x_BSD = F.embedding(torch.from_numpy(ids_BT).to(self.device), self._tokens)
        num_context = 0
        if context_CD is not None:
            num_context = len(context_CD)
            x_BSD = torch.cat([torch.from_numpy(context_CD).to(self.device).expand(num_rows, -1, -1), x_BSD], dim=1)
        x_BSD = self._norm(x_BSD + self._token_type, self._embedding_norm).to(self.dtype)
        visible_BS = visible_keys(lengths_B, num_tokens, num_context, self.device)
        bias = None if visible_BS is None else bias_where(visible_BS[:, None, None], self.dtype)
        angles = self._rotary.angles(num_context, num_tokens)
        for index, layer in enumerate(self._layers):
            # Nothing reads the context after the last layer's keys and values, so only the text passes through the rest of it.
            x_BSD = self._layer(layer, x_BSD, bias, angles, num_context if index == len(self._layers) - 1 else 0)
        return x_BSD

    def _norm(self, x: torch.Tensor, norm: Linear) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._epsilon)

    def _layer(
        self,
        layer: _Layer,
        x_BSD: torch.Tensor,
        bias: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        skip: int,
    ) -> torch.Tensor:
        """Apply one layer; the first ``skip`` tokens are attended to and then dropped."""
        num_rows, num_tokens, width = x_BSD.shape
        out = self._workspace.take("qkv", (num_rows * num_tokens, 3 * width), self.dtype)
        qkv = layer.qkv.project(x_BSD.view(-1, width), out).view(num_rows, num_tokens, 3, self._num_heads, -1)
        self._rotary.rotate_(qkv[:, :, :2], angles, self._workspace)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed_ND = attend(query[:, :, skip:], key, value, bias, self._workspace).reshape(-1, width)
        x_ND = x_BSD[:, skip:].contiguous().view(-1, width)
        layer.attention_output.add_projection(mixed_ND, x_ND)
        x_ND = self._norm(x_ND, layer.attention_norm)
        layer.mlp.add_to(x_ND, x_ND, self._workspace)
        return self._norm(x_ND, layer.output_norm).view(num_rows, num_tokens - skip, width)


def _require_plain(config: Mapping[str, Any]) -> None:
    for name in _OTHER_VARIANTS:
        if config.get(name):
            raise ModelError(f"{name} of a NomicBERT must be off, got {config[name]!r}; choose another model")
    activation = config.get("activation_function") or config.get("hidden_act", "silu")
    if activation not in ("swiglu", "silu"):
        raise ModelError(f"the activation of a NomicBERT must be swiglu or silu, got {activation!r}; choose another model")
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ModelError(f"rotary positions must be the plain ones (rope_type default), got {parameters!r}; choose another model")


def _max_positions(checkpoint: Checkpoint) -> int:
    stretched = checkpoint.config.get("rotary_scaling_factor") and checkpoint.config.get("max_trained_positions")
    names = ("max_trained_positions",) if stretched else ("n_positions", "max_position_embeddings")
    return checkpoint.integer(*names, default=2048)


def _theta(checkpoint: Checkpoint) -> float:
    parameters: Mapping[str, Any] = checkpoint.config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or checkpoint.number("rotary_emb_base", "rope_theta", default=1000.0))


def _read_published_layer(reader: WeightReader, index: int, width: int, inner: int, temperature: float, dtype: torch.dtype) -> _Layer:
    prefix = f"encoder.layers.{index}"
    qkv = reader.linear(f"{prefix}.attn.Wqkv", (3 * width, width), torch.float32, bias=False)
    # fc12 is the gate, fc11 what it multiplies.
    gate, up = (reader.read(f"{prefix}.mlp.{name}.weight", (inner, width), dtype) for name in ("fc12", "fc11"))
    return _Layer(
        qkv=with_temperature(qkv, temperature, dtype),
        attention_output=reader.linear(f"{prefix}.attn.out_proj", (width, width), dtype, bias=False),
        attention_norm=reader.linear(f"{prefix}.norm1", (width,), dtype, bias=True),
        mlp=_gated_mlp(gate, up, reader.linear(f"{prefix}.mlp.fc2", (width, inner), dtype, bias=False)),
        output_norm=reader.linear(f"{prefix}.norm2", (width,), dtype, bias=True),
    )


def _read_native_layer(reader: WeightReader, index: int, width: int, inner: int, temperature: float, dtype: torch.dtype) -> _Layer:
    prefix = f"layers.{index}"
    parts = [reader.read(f"{prefix}.self_attn.{name}_proj.weight", (width, width), torch.float32) for name in "qkv"]
    gate, up = (reader.read(f"{prefix}.mlp.{name}_proj.weight", (inner, width), dtype) for name in ("gate", "up"))
    return _Layer(
        qkv=with_temperature(Linear(weight=torch.cat(parts)), temperature, dtype),
        attention_output=reader.linear(f"{prefix}.self_attn.o_proj", (width, width), dtype, bias=False),
        attention_norm=reader.linear(f"{prefix}.post_attention_layernorm", (width,), dtype, bias=True),
        mlp=_gated_mlp(gate, up, reader.linear(f"{prefix}.mlp.down_proj", (width, inner), dtype, bias=False)),
        output_norm=reader.linear(f"{prefix}.post_mlp_layernorm", (width,), dtype, bias=True),
    )


def _gated_mlp(gate: torch.Tensor, up: torch.Tensor, down: Linear) -> GatedMlp:
    return GatedMlp(gate_up=Linear(weight=torch.cat([gate, up])), down=down, activate=ACTIVATIONS["silu"])
