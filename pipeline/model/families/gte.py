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
from cairn.pipeline.model.engine.layer import GatedMlp, Layer, activation_named
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.rotary import RotaryTable, even_head_dim
from cairn.pipeline.model.engine.transformer import Embedding, Transformer
from cairn.pipeline.model.engine.weights import AnyLinear, Linear, Norm, WeightReader, stack_rows
from cairn.pipeline.model.families.rope_settings import read_rope
from cairn.pipeline.model.folders.checkpoint import Checkpoint

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
    reader = WeightReader(checkpoint.tensors, "embeddings.word_embeddings.weight", device)
    read_layer = _read_published_layer if "encoder.layer.0.attn_ln.weight" in reader else _read_native_layer
    return Transformer(
        checkpoint,
        embedding=Embedding(
            tokens_VD=reader.read(
                "embeddings.word_embeddings.weight", (checkpoint.integer("vocab_size"), width), torch.float32
            ),
            token_type_D=_read_token_type(checkpoint, reader, width),
            norm=reader.norm("embeddings.LayerNorm", width, torch.float32, epsilon=epsilon, bias=True),
        ),
        layers=[
            read_layer(reader, checkpoint, index, epsilon, dtype)
            for index in range(checkpoint.integer("num_hidden_layers"))
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


def _read_token_type(checkpoint: Checkpoint, reader: WeightReader, width: int) -> torch.Tensor | None:
    """Return the embedding of type 0; gte-base-en-v1.5 has no types."""
    name = "embeddings.token_type_embeddings.weight"
    num_types: Any = checkpoint.config.get("type_vocab_size", 1)
    if num_types == 0:
        return None
    return reader.read(name, (checkpoint.integer("type_vocab_size", default=1), width), torch.float32)[
        0
    ].clone()


def _read_published_layer(
    reader: WeightReader, checkpoint: Checkpoint, index: int, epsilon: float, dtype: torch.dtype
) -> Layer:
    prefix = f"encoder.layer.{index}"
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    if checkpoint.config.get("pack_qkv", True):
        qkv = reader.linear(f"{prefix}.attention.qkv_proj", (3 * width, width), dtype, bias=True)
    else:
        qkv = stack_rows(
            [
                reader.linear(f"{prefix}.attention.{name}_proj", (width, width), dtype, bias=True)
                for name in "qkv"
            ]
        )
    up, gate = reader.read(f"{prefix}.mlp.up_gate_proj.weight", (2 * inner, width), dtype).chunk(2)
    return _layer(
        checkpoint,
        qkv=qkv,
        output=reader.linear(f"{prefix}.attention.o_proj", (width, width), dtype, bias=True),
        norms=[
            reader.norm(f"{prefix}.{name}", width, dtype, epsilon=epsilon, bias=True)
            for name in ("attn_ln", "mlp_ln")
        ],
        gate_up=Linear(weight=torch.cat([gate, up])),
        down=reader.linear(f"{prefix}.mlp.down_proj", (width, inner), dtype, bias=True),
    )


def _read_native_layer(
    reader: WeightReader, checkpoint: Checkpoint, index: int, epsilon: float, dtype: torch.dtype
) -> Layer:
    prefix = f"layers.{index}"
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    return _layer(
        checkpoint,
        qkv=stack_rows(
            [
                reader.linear(f"{prefix}.self_attn.{name}_proj", (width, width), dtype, bias=True)
                for name in "qkv"
            ]
        ),
        output=reader.linear(f"{prefix}.self_attn.o_proj", (width, width), dtype, bias=True),
        norms=[
            reader.norm(f"{prefix}.post_{name}_layernorm", width, dtype, epsilon=epsilon, bias=True)
            for name in ("attention", "mlp")
        ],
        gate_up=stack_rows(
            [
                reader.linear(f"{prefix}.mlp.{name}_proj", (inner, width), dtype, bias=False)
                for name in ("gate", "up")
            ]
        ),
        down=reader.linear(f"{prefix}.mlp.down_proj", (width, inner), dtype, bias=True),
    )


def _layer(
    checkpoint: Checkpoint,
    *,
    qkv: AnyLinear,
    output: AnyLinear,
    norms: list[Norm],
    gate_up: AnyLinear,
    down: AnyLinear,
) -> Layer:
    activation = str(checkpoint.config.get("hidden_act", "gelu"))
    return Layer(
        qkv=qkv,
        attention_output=output,
        attention_norm=norms[0],
        mlp_norm=norms[1],
        mlp=GatedMlp(gate_up=gate_up, down=down, activation=activation_named("hidden_act", activation)),
    )
