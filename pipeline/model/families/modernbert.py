"""ModernBERT and its kin (mmBERT, CDE v2's backbones): RoPE, global layers among local ones, GeGLU, pre-norm.

Local layers run in blocks, so their cost is linear in the length. Context stands before the text as input
embeddings (CDE eq. 5 and 6): the embedding norm is applied to it once, it has no position and is not rotated,
and the text's positions still start at 0 (CDE §10.4). Only global layers attend to it: a context vector has
no position, so it is in no local layer's window. The public CDE code norms text tokens twice and gives
context positions; ``families/cde.py`` reproduces that.

Source: Warner et al., "Smarter, Better, Faster, Longer" (ModernBERT). No scaled RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.layer import GatedMlp, Layer, activation_named
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.rotary import RotaryTable, even_head_dim
from cairn.pipeline.model.engine.transformer import Embedding, Transformer
from cairn.pipeline.model.engine.weights import WeightReader
from cairn.pipeline.model.folders.checkpoint import Checkpoint

_TOKENS: Final = "embeddings.tok_embeddings.weight"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def read_modernbert(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a checkpoint; another variant or a misfit raises :class:`ModelError`."""
    width, num_heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    head_dim = even_head_dim(width, num_heads)
    epsilon = checkpoint.number("norm_eps", default=1e-5)
    max_positions = checkpoint.integer("max_position_embeddings", default=8192)
    norm_bias = bool(checkpoint.config.get("norm_bias", False))
    reader = WeightReader(checkpoint.tensors, _TOKENS, device, dtype, epsilon=epsilon)
    return Transformer(
        checkpoint,
        embedding=Embedding(
            tokens_VD=reader.read(_TOKENS, (checkpoint.integer("vocab_size"), width)),
            norm=reader.norm("embeddings.norm", width, torch.float32, bias=norm_bias),
        ),
        layers=[
            _read_layer(reader, checkpoint, index, kind)
            for index, kind in enumerate(_layer_kinds(checkpoint))
        ],
        final_norm=reader.norm("final_norm", width, bias=norm_bias),
        shape=Shape(
            num_heads=num_heads,
            num_key_value_heads=num_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            norm_first=True,
            local_radius=checkpoint.integer("local_attention", default=128) // 2,
        ),
        rotary={
            kind == _LOCAL: RotaryTable(
                rotary_dim=head_dim, theta=theta, num_positions=max_positions, device=device
            )
            for kind, theta in _thetas(checkpoint.config).items()
        },
        dtype=dtype,
        device=device,
    )


def _layer_kinds(checkpoint: Checkpoint) -> list[str]:
    num_layers = checkpoint.integer("num_hidden_layers")
    kinds: Any = checkpoint.config.get("layer_types")
    if kinds is None:
        step = checkpoint.integer("global_attn_every_n_layers", default=3)
        return [_LOCAL if index % step else _GLOBAL for index in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) < num_layers
        or not all(kind in (_GLOBAL, _LOCAL) for kind in kinds)
    ):
        raise ModelError(
            f"layer_types must name {num_layers} layers as {_GLOBAL} or {_LOCAL}, got {kinds!r}; choose "
            "another model"
        )
    return [str(kind) for kind in kinds[:num_layers]]


def _thetas(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the RoPE base of both kinds of layer, in today's or the older published names."""
    named: Mapping[str, Any] = config.get("rope_parameters") or {}
    kinds = {kind: named.get(kind) or {} for kind in (_GLOBAL, _LOCAL)}
    variant = config.get("rope_scaling") or next(
        (item for item in kinds.values() if item.get("rope_type", "default") != "default"), None
    )
    if variant is not None:
        raise ModelError(
            f"rotary positions must be the plain ones (rope_type default), got {variant!r}; choose "
            "another model"
        )
    of_global = kinds[_GLOBAL].get("rope_theta") or config.get("global_rope_theta") or 160_000.0
    # An older file whose local base is null means the global one.
    of_local = kinds[_LOCAL].get("rope_theta") or config.get("local_rope_theta", 10_000.0) or of_global
    return {_GLOBAL: float(of_global), _LOCAL: float(of_local)}


def _read_layer(reader: WeightReader, checkpoint: Checkpoint, index: int, kind: str) -> Layer:
    config, prefix = checkpoint.config, f"layers.{index}"
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    norm_bias, attention_bias, mlp_bias = (
        bool(config.get(name, False)) for name in ("norm_bias", "attention_bias", "mlp_bias")
    )
    return Layer(
        is_local=kind == _LOCAL,
        # The embedding norm has just been applied when the first layer begins.
        attention_norm=reader.norm(f"{prefix}.attn_norm", width, bias=norm_bias) if index else None,
        qkv=reader.linear(f"{prefix}.attn.Wqkv", (3 * width, width), bias=attention_bias),
        attention_output=reader.linear(f"{prefix}.attn.Wo", (width, width), bias=attention_bias),
        mlp_norm=reader.norm(f"{prefix}.mlp_norm", width, bias=norm_bias),
        mlp=GatedMlp(
            gate_up=reader.linear(f"{prefix}.mlp.Wi", (2 * inner, width), bias=mlp_bias),
            down=reader.linear(f"{prefix}.mlp.Wo", (width, inner), bias=mlp_bias),
            activation=activation_named("hidden_activation", str(config.get("hidden_activation", "gelu"))),
        ),
    )
