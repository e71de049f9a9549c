"""GTE (gte-*-en-v1.5, gte-multilingual-base, gte-en-mlm): RoPE stretched by NTK, GeGLU, post-norm.

There are biases everywhere but in the gate.

Reads the published layout (model type ``new``: ``encoder.layer``, joint ``qkv_proj`` and ``up_gate_proj``,
whose first half is the factor and second half the gate) and the one transformers uses itself (model type
``gte``: ``layers``, single projections). Every layer is global. Context stands before the text as input
embeddings with token type 0 and the embedding norm, without position and not rotated.

Source: Zhang et al., "mGTE". No logarithmic attention scale, no absolute positions: no published model has
them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.layer import Activation, GatedMlp, Layer, activation_named
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.rotary import RotaryTable, even_head_dim
from cairn.pipeline.model.engine.transformer import Embedding, Transformer
from cairn.pipeline.model.engine.weights import Linear, WeightReader
from cairn.pipeline.model.families.rope_settings import read_rope
from cairn.pipeline.model.folders.checkpoint import Checkpoint

_TOKENS: Final = "embeddings.word_embeddings.weight"
_DEFAULT_THETA: Final = {"new": 10_000.0, "gte": 160_000.0}
_REQUIRED: Final = {
    "position_embedding_type": "rope",
    "logn_attention_scale": False,
    "layer_norm_type": "layer_norm",
}
"""Settings of the published code, with the one value that every published model gives them."""


def read_gte(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a checkpoint in either layout; another variant or a misfit raises :class:`ModelError`."""
    for name, value in _REQUIRED.items():
        if checkpoint.config.get(name, value) != value:
            raise ModelError(
                f"{name} of a GTE must be {value!r}, got {checkpoint.config[name]!r}; choose another model"
            )
    width, num_heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    head_dim, max_positions = even_head_dim(width, num_heads), checkpoint.integer("max_position_embeddings")
    epsilon = checkpoint.number("layer_norm_eps", default=1e-12)
    rope = read_rope(checkpoint, default_theta=_DEFAULT_THETA[str(checkpoint.config["model_type"])])
    rotary = RotaryTable(
        rotary_dim=head_dim,
        theta=rope.theta,
        num_positions=max_positions,
        device=device,
        stretch=rope.stretch,
    )
    reader = WeightReader(checkpoint.tensors, _TOKENS, device, dtype, epsilon=epsilon)
    read_layer = _read_published_layer if "encoder.layer.0.attn_ln.weight" in reader else _read_native_layer
    return Transformer(
        checkpoint,
        embedding=Embedding(
            tokens_VD=reader.read(_TOKENS, (checkpoint.integer("vocab_size"), width)),
            token_type_D=read_token_type(checkpoint, reader, width, default=1),
            norm=reader.norm("embeddings.LayerNorm", width, torch.float32),
        ),
        layers=[
            read_layer(reader, checkpoint, index) for index in range(checkpoint.integer("num_hidden_layers"))
        ],
        final_norm=None,
        shape=Shape(
            num_heads=num_heads,
            num_key_value_heads=num_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            norm_first=False,
        ),
        rotary={False: rotary},
        dtype=dtype,
        device=device,
    )


def read_token_type(
    checkpoint: Checkpoint, reader: WeightReader, width: int, *, default: int
) -> torch.Tensor | None:
    """Return the embedding of type 0, None of a model without types, such as gte-base-en-v1.5."""
    num_types: Any = checkpoint.config.get("type_vocab_size", default)
    if num_types == 0:
        return None
    num_types = checkpoint.integer("type_vocab_size", default=default)
    return reader.read("embeddings.token_type_embeddings.weight", (num_types, width))[0].clone()


def _read_published_layer(reader: WeightReader, checkpoint: Checkpoint, index: int) -> Layer:
    prefix = f"encoder.layer.{index}"
    attention, mlp = f"{prefix}.attention", f"{prefix}.mlp"
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    if checkpoint.config.get("pack_qkv", True):
        qkv = reader.linear(f"{attention}.qkv_proj", (3 * width, width), bias=True)
    else:
        qkv = reader.stacked([f"{attention}.{name}_proj" for name in "qkv"], [width] * 3, width, bias=True)
    up_gate = reader.linear(f"{mlp}.up_gate_proj", (2 * inner, width), bias=False)
    return Layer(
        qkv=qkv,
        attention_output=reader.linear(f"{attention}.o_proj", (width, width), bias=True),
        attention_norm=reader.norm(f"{prefix}.attn_ln", width),
        mlp_norm=reader.norm(f"{prefix}.mlp_ln", width),
        mlp=GatedMlp(
            gate_up=Linear(weight=torch.cat(up_gate.weight.chunk(2)[::-1])),
            down=reader.linear(f"{mlp}.down_proj", (width, inner), bias=True),
            activation=_activation(checkpoint),
        ),
    )


def _read_native_layer(reader: WeightReader, checkpoint: Checkpoint, index: int) -> Layer:
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    return native_layer(reader, index, width, inner, _activation(checkpoint), bias=True)


def native_layer(
    reader: WeightReader, index: int, width: int, inner: int, activation: Activation, *, bias: bool
) -> Layer:
    """Read a layer as transformers names its tensors; ``bias`` is that of all projections but the gate's."""
    attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
    return Layer(
        qkv=reader.stacked([f"{attention}.{name}_proj" for name in "qkv"], [width] * 3, width, bias=bias),
        attention_output=reader.linear(f"{attention}.o_proj", (width, width), bias=bias),
        attention_norm=reader.norm(f"layers.{index}.post_attention_layernorm", width),
        mlp_norm=reader.norm(f"layers.{index}.post_mlp_layernorm", width),
        mlp=GatedMlp(
            gate_up=reader.stacked([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner] * 2, width, bias=False),
            down=reader.linear(f"{mlp}.down_proj", (width, inner), bias=bias),
            activation=activation,
        ),
    )


def _activation(checkpoint: Checkpoint) -> Activation:
    return activation_named("hidden_act", str(checkpoint.config.get("hidden_act", "gelu")))
