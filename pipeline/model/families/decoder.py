"""Decoder LLMs as encoders (Mistral, Qwen2, Qwen3, Llama): pre-norm, RMSNorm, RoPE, SwiGLU.

m³BERT's weights have their names, so it is read here as well.

Without the causal mask every token sees the whole row (NV-Embed §3.1): that is the default, and how NV-Embed,
gte-Qwen2 and their kin were trained. ``is_causal`` keeps the mask for checkpoints trained with it and pooled
at their last token (Qwen3-Embedding, e5-mistral).

Fewer heads of keys and values than of queries, Qwen2's biases on the three projections, Qwen3's norms of
queries and keys and a head width of its own are read as published. A sliding window belongs to causal text:
without the mask it is left out, as NV-Embed leaves it; with the mask rows must fit the window, where it hides
nothing. Context stands before the text without position, not rotated; the text's positions start at 0; with
the mask every token of the text sees all of it. NV-Embed's checkpoint holds a Mistral, described by
``text_config``.

No language-model head, no quantised weights, no mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.layer import GatedMlp, Layer, activation_named
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.rotary import RotaryTable
from cairn.pipeline.model.engine.transformer import Embedding, Transformer
from cairn.pipeline.model.engine.weights import WeightReader
from cairn.pipeline.model.families.rope_settings import read_rope
from cairn.pipeline.model.folders.checkpoint import Checkpoint


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of the language model inside an NV-Embed's, any other as it is."""
    if checkpoint.config.get("model_type") != "nvembed":
        return checkpoint
    inner: Any = checkpoint.config.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type") != "bidir_mistral":
        raise ModelError(
            "text_config of an NV-Embed must describe a model of type bidir_mistral, got another; fetch "
            "config.json again"
        )
    # The latent attention behind it keeps its own part of the configuration.
    kept = {name: value for name, value in checkpoint.config.items() if name == "latent_attention_config"}
    return replace(checkpoint, config={**inner, **kept, "model_type": "mistral"})


def read_decoder(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, is_causal: bool = False
) -> Transformer:
    """Read a checkpoint; another variant or a misfit raises :class:`ModelError`.

    Causal, it is a model with a fingerprint of its own.
    """
    if is_causal:
        checkpoint = replace(
            checkpoint, fingerprint=fingerprint(kind="causal", checkpoint=checkpoint.fingerprint)
        )
    shape = _read_shape(checkpoint, is_causal=is_causal)
    width, epsilon = checkpoint.integer("hidden_size"), checkpoint.number("rms_norm_eps", default=1e-6)
    rope = read_rope(checkpoint)
    rotary = RotaryTable(
        rotary_dim=shape.head_dim,
        theta=rope.theta,
        num_positions=shape.max_positions,
        device=device,
        stretch=rope.stretch,
    )
    reader = WeightReader(
        checkpoint.tensors, "embed_tokens.weight", device, dtype, epsilon=epsilon, kind="rms"
    )
    return Transformer(
        checkpoint,
        embedding=Embedding(
            tokens_VD=reader.read("embed_tokens.weight", (checkpoint.integer("vocab_size"), width))
        ),
        layers=[
            _read_layer(reader, checkpoint, index, shape)
            for index in range(checkpoint.integer("num_hidden_layers"))
        ],
        final_norm=reader.norm("norm", width),
        shape=shape,
        rotary={False: rotary},
        dtype=dtype,
        device=device,
    )


def _read_shape(checkpoint: Checkpoint, *, is_causal: bool) -> Shape:
    width, num_heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    num_shared_heads = checkpoint.integer("num_key_value_heads", default=num_heads)
    head_dim = checkpoint.integer("head_dim", default=max(1, width // num_heads))
    if num_heads % num_shared_heads or head_dim % 2:
        raise ModelError(
            "a decoder must have a multiple of num_key_value_heads as heads and an even head_dim, got "
            f"{num_heads} heads for "
            f"{num_shared_heads} and {head_dim} dimensions; config.json does not fit the model"
        )
    max_positions = checkpoint.integer("max_position_embeddings")
    if is_causal and _has_window(checkpoint):
        max_positions = min(max_positions, checkpoint.integer("sliding_window"))
    return Shape(
        num_heads=num_heads,
        num_key_value_heads=num_shared_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_first=True,
        is_causal=is_causal,
    )


def _has_window(checkpoint: Checkpoint) -> bool:
    """Say whether some layer slides a window.

    Mistral's do where one is given, Qwen's where it is switched on besides.
    """
    config = checkpoint.config
    return config.get("sliding_window") is not None and bool(
        config.get("use_sliding_window", config.get("model_type") == "mistral")
    )


def _read_layer(reader: WeightReader, checkpoint: Checkpoint, index: int, shape: Shape) -> Layer:
    config, prefix = checkpoint.config, f"layers.{index}"
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    output_bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    input_bias = output_bias or config.get("model_type") == "qwen2"
    rows = [num_heads * shape.head_dim for num_heads in shape.heads_by_kind]
    query_norm, key_norm = (
        reader.norm(f"{attention}.{name}_norm", shape.head_dim)
        if config.get("model_type") == "qwen3"
        else None
        for name in "qk"
    )
    gate_and_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    layer = Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm", width),
        qkv=reader.stacked([f"{attention}.{name}_proj" for name in "qkv"], rows, width, bias=input_bias),
        query_norm=query_norm,
        key_norm=key_norm,
        attention_output=reader.linear(f"{attention}.o_proj", (width, rows[0]), bias=output_bias),
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm", width),
        mlp=GatedMlp(
            gate_up=reader.stacked(gate_and_up, [inner] * 2, width, bias=mlp_bias),
            down=reader.linear(f"{mlp}.down_proj", (width, inner), bias=mlp_bias),
            activation=activation_named("hidden_act", str(config.get("hidden_act", "silu"))),
        ),
    )
    reader.require_all_read(prefix)
    return layer
