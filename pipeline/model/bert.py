"""BERT and its kin with absolute positions (RoBERTa, XLM-R, CamemBERT), forward only, made for throughput.

Same mathematics as the published models: post-norm layers, learned positions, exact to 1e-5 in fp32. What differs is the shape of the
work: one product for query, key and value; no mask when the rows of a batch are equally long; residuals added in place; the last layer
computed for text only when context stands before it. On a CPU in bf16 attention is two plain batched products, which there beat the fused
kernel up to 512 keys. No dropout, no gradients, no token types but 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Bool, Float, Float32, Int64
from tokenizers import Tokenizer

from pipeline.errors import ModelError
from pipeline.model.attention_temperature import scale_queries
from pipeline.model.checkpoint import Checkpoint
from pipeline.model.workspace import Workspace

FAMILIES: Final = {"bert": False, "roberta": True, "xlm-roberta": True, "camembert": True}
"""Model type: whether its first position stands after the padding id, as RoBERTa's do."""

PLAIN_ATTENTION_MAX_KEYS: Final = 512
"""Up to this many keys two batched products beat the fused kernel on a CPU in bf16; beyond, their score matrix costs too much memory."""

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_new": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
    "relu": F.relu_,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    qkv: _Linear
    attention_output: _Linear
    attention_norm: _Linear
    up: _Linear
    down: _Linear
    output_norm: _Linear


class BertBackbone:
    """Implements :class:`pipeline.model.backbone.Backbone`."""

    def __init__(self, checkpoint: Checkpoint, *, temperature: float, dtype: torch.dtype, device: torch.device) -> None:
        config = checkpoint.config
        model_type = config.get("model_type")
        if model_type not in FAMILIES:
            raise ModelError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}; choose a model of these families")
        if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder", False):
            raise ModelError("the model must be an encoder with absolute positions, got another variant; choose another model")
        if config.get("hidden_act", "gelu") not in _ACTIVATIONS:
            raise ModelError(f"hidden_act must be one of {', '.join(_ACTIVATIONS)}, got {config['hidden_act']!r}; choose another model")
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.cls_id = checkpoint.cls_id
        self.landmark_id = checkpoint.landmark_id
        self.pad_id = checkpoint.pad_id
        self.temperature = temperature
        self.weights_fingerprint = checkpoint.fingerprint
        self.device = device
        self.dtype = dtype
        self._activate = _ACTIVATIONS[config.get("hidden_act", "gelu")]
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._workspace = Workspace(device)
        self._num_heads = int(config["num_attention_heads"])
        reader = _TensorReader(checkpoint.tensors, device)
        self._tokens = reader.read("embeddings.word_embeddings.weight", torch.float32)
        positions = reader.read("embeddings.position_embeddings.weight", torch.float32)
        first_position = int(config.get("pad_token_id") or 0) + 1 if FAMILIES[model_type] else 0
        self._token_type = reader.read("embeddings.token_type_embeddings.weight", torch.float32)[0].clone()
        # Token type and position are the same for every token of a column: added once, here.
        self._positions = positions[first_position:] + self._token_type
        self._embedding_norm = reader.linear("embeddings.LayerNorm", torch.float32)
        self._layers = [_read_layer(reader, index, temperature, dtype) for index in range(int(config["num_hidden_layers"]))]
        self.model_dim = int(self._tokens.shape[1])
        self.max_positions = int(self._positions.shape[0])

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
        x_BTD = F.embedding(torch.from_numpy(ids_BT).to(self.device), self._tokens)
        x_BTD += self._positions[:num_tokens]
        num_context = 0
        if context_CD is not None:
            num_context = context_CD.shape[0]
            context = torch.from_numpy(context_CD).to(self.device) + self._token_type
            x_BTD = torch.cat([context.expand(num_rows, -1, -1), x_BTD], dim=1)
        x_BTD = self._norm(x_BTD, self._embedding_norm).to(self.dtype)
        visible_BS = self._visible(lengths_B, num_tokens, num_context)
        for index, layer in enumerate(self._layers):
            # Nothing reads the context after the last layer's keys and values, so only the text passes through the rest of it.
            x_BTD = self._layer(layer, x_BTD, visible_BS, num_context if index == len(self._layers) - 1 else 0)
        return x_BTD

    def _visible(self, lengths_B: Int64[np.ndarray, " B"], num_tokens: int, num_context: int) -> Bool[torch.Tensor, "B S"] | None:
        if int(lengths_B.min(initial=num_tokens)) == num_tokens:
            return None
        lengths = torch.from_numpy(lengths_B).to(self.device)
        return torch.arange(num_context + num_tokens, device=self.device)[None] < (lengths + num_context)[:, None]

    def _norm(self, x: torch.Tensor, norm: _Linear) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._epsilon)

    def _layer(self, layer: _Layer, x_BTD: torch.Tensor, visible_BS: torch.Tensor | None, skip: int) -> torch.Tensor:
        """Apply one layer; the first ``skip`` tokens are attended to and then dropped."""
        num_rows, num_tokens, width = x_BTD.shape
        qkv = self._project(layer.qkv, x_BTD.view(-1, width), "qkv").view(num_rows, num_tokens, 3, self._num_heads, -1)
        mixed_ND = self._attend(qkv, visible_BS, skip).reshape(-1, width)
        x_BTD = self._norm(self._add_projection(layer.attention_output, mixed_ND, x_BTD[:, skip:]), layer.attention_norm)
        inner_NI = self._activate(self._project(layer.up, x_BTD.view(-1, width), "inner"))
        return self._norm(self._add_projection(layer.down, inner_NI, x_BTD), layer.output_norm)

    def _project(self, linear: _Linear, x_ND: torch.Tensor, purpose: str) -> torch.Tensor:
        out = self._workspace.take(purpose, (x_ND.shape[0], linear.weight.shape[0]), self.dtype)
        return torch.addmm(linear.bias, x_ND, linear.weight.t(), out=out)

    def _add_projection(self, linear: _Linear, x_ND: torch.Tensor, residual_BTD: torch.Tensor) -> torch.Tensor:
        out = self._workspace.take("sum", tuple(residual_BTD.shape), self.dtype)
        torch.add(residual_BTD, linear.bias, out=out).view(x_ND.shape[0], -1).addmm_(x_ND, linear.weight.t())
        return out

    def _attend(self, qkv_BS3Hd: torch.Tensor, visible_BS: torch.Tensor | None, skip: int) -> torch.Tensor:
        """Mix values by softmax(q·k / √d); the first ``skip`` tokens are keys and values but ask nothing."""
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and qkv_BS3Hd.shape[1] <= PLAIN_ATTENTION_MAX_KEYS:
            return self._plain_attention(qkv_BS3Hd, visible_BS, skip)
        query, key, value = qkv_BS3Hd.permute(2, 0, 3, 1, 4)
        mask = None if visible_BS is None else visible_BS[:, None, None, :]
        return F.scaled_dot_product_attention(query[:, :, skip:], key, value, attn_mask=mask).transpose(1, 2)

    def _plain_attention(self, qkv_BS3Hd: torch.Tensor, visible_BS: torch.Tensor | None, skip: int) -> torch.Tensor:
        num_rows, num_keys, _, num_heads, head_dim = qkv_BS3Hd.shape
        num_products, num_queries = num_rows * num_heads, num_keys - skip
        by_head = self._workspace.take("heads", (3, num_rows, num_heads, num_keys, head_dim), self.dtype)
        query, key, value = by_head.copy_(qkv_BS3Hd.permute(2, 0, 3, 1, 4)).view(3, num_products, num_keys, head_dim)
        shape = (num_products, num_queries, num_keys)
        scores = self._workspace.take("scores", shape, self.dtype)
        bias = qkv_BS3Hd.new_zeros(1)
        if visible_BS is not None:
            bias = torch.where(visible_BS, 0.0, float("-inf")).to(self.dtype).repeat_interleave(num_heads, dim=0)[:, None]
        beta = 0 if visible_BS is None else 1
        torch.baddbmm(bias, query[:, skip:], key.transpose(1, 2), beta=beta, alpha=head_dim**-0.5, out=scores)
        # The bf16 softmax is up to three times slower than the float32 one where rows are not a multiple of 32 long, and less exact.
        exact = self._workspace.take("exact scores", shape, torch.float32).copy_(scores)
        weights = torch.softmax(exact, dim=-1, out=self._workspace.take("weights", shape, torch.float32))
        mixed = self._workspace.take("mixed", (num_products, num_queries, head_dim), self.dtype)
        torch.bmm(scores.copy_(weights), value, out=mixed)
        return mixed.view(num_rows, num_heads, num_queries, head_dim).transpose(1, 2)


def _read_layer(reader: _TensorReader, index: int, temperature: float, dtype: torch.dtype) -> _Layer:
    prefix = f"encoder.layer.{index}"
    query, key, value = (reader.linear(f"{prefix}.attention.self.{name}", torch.float32) for name in ("query", "key", "value"))
    weight, bias = scale_queries(query.weight, query.bias, temperature)
    qkv = _Linear(weight=torch.cat([weight, key.weight, value.weight]).to(dtype), bias=torch.cat([bias, key.bias, value.bias]).to(dtype))
    return _Layer(
        qkv=qkv,
        attention_output=reader.linear(f"{prefix}.attention.output.dense", dtype),
        attention_norm=reader.linear(f"{prefix}.attention.output.LayerNorm", dtype),
        up=reader.linear(f"{prefix}.intermediate.dense", dtype),
        down=reader.linear(f"{prefix}.output.dense", dtype),
        output_norm=reader.linear(f"{prefix}.output.LayerNorm", dtype),
    )


class _TensorReader:
    """Finds tensors whether or not the file names them below ``bert.`` or ``roberta.``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        anchor = "embeddings.word_embeddings.weight"
        names = [name for name in tensors if name.endswith(anchor)]
        if len(names) != 1:
            raise ModelError(f"the model's weights must hold one {anchor}, got {len(names)}; choose a BERT-like model")
        self._prefix = names[0].removesuffix(anchor)
        self._tensors = tensors
        self._device = device

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(f"the model's weights must hold {name}, got none; the file does not fit its config.json")
        return tensor.to(device=self._device, dtype=dtype)

    def linear(self, name: str, dtype: torch.dtype) -> _Linear:
        return _Linear(weight=self.read(f"{name}.weight", dtype), bias=self.read(f"{name}.bias", dtype))
