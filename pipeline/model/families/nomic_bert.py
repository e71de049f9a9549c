"""NomicBERT (nomic-bert-2048, nomic-embed-text v1 and v1.5, CDE v1's backbones): RoPE, SwiGLU, post-norm.

Reads the published layout (``n_embd``, ``emb_ln``, ``Wqkv``, ``fc11``) and the one transformers uses itself
(``hidden_size``, ``q_proj``, ``gate_proj``). Same mathematics as both, exact to 1e-5 in fp32. Context stands
before the text as input embeddings with token type 0 and the embedding norm, without position and not
rotated; the text's positions start at 0 (CDE eq. 5 and 6, §10.4). Every layer is global.

Source: Nussbaum et al., "Nomic Embed". No mixture of experts; a file that stretches RoPE beyond the length it
was trained on is read up to that length, where nothing is stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.layer import GatedMlp, Layer
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.rotary import RotaryTable, even_head_dim
from cairn.pipeline.model.engine.transformer import Embedding, Transformer
from cairn.pipeline.model.engine.weights import WeightReader
from cairn.pipeline.model.families.gte import native_layer, read_token_type
from cairn.pipeline.model.folders.checkpoint import Checkpoint

_TOKENS: Final = "embeddings.word_embeddings.weight"
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


def read_nomic_bert(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a checkpoint in either layout; another variant or a misfit raises :class:`ModelError`."""
    _require_plain(checkpoint.config)
    width, num_heads = (
        checkpoint.integer("n_embd", "hidden_size"),
        checkpoint.integer("n_head", "num_attention_heads"),
    )
    head_dim, max_positions = even_head_dim(width, num_heads), _max_positions(checkpoint)
    epsilon = checkpoint.number("layer_norm_epsilon", "layer_norm_eps", default=1e-12)
    inner = checkpoint.integer("n_inner", "intermediate_size", default=4 * width)
    rotary = RotaryTable(
        rotary_dim=int(head_dim * checkpoint.number("rotary_emb_fraction", default=1.0)),
        theta=_theta(checkpoint),
        num_positions=max_positions,
        device=device,
    )
    reader = WeightReader(checkpoint.tensors, _TOKENS, device, dtype, epsilon=epsilon)
    embedding_norm, read_layer = "embeddings.LayerNorm", partial(native_layer, activation="silu", bias=False)
    if "emb_ln.weight" in reader:
        embedding_norm, read_layer = "emb_ln", _read_published_layer
    return Transformer(
        checkpoint,
        embedding=Embedding(
            tokens_VD=reader.read(_TOKENS, (checkpoint.integer("vocab_size"), width)),
            token_type_D=read_token_type(checkpoint, reader, width, default=2),
            norm=reader.norm(embedding_norm, width, torch.float32),
        ),
        layers=[
            read_layer(reader, index, width, inner)
            for index in range(checkpoint.integer("n_layer", "num_hidden_layers"))
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


def _require_plain(config: Mapping[str, Any]) -> None:
    for name in _OTHER_VARIANTS:
        if config.get(name):
            raise ModelError(f"{name} of a NomicBERT must be off, got {config[name]!r}; choose another model")
    activation = config.get("activation_function") or config.get("hidden_act", "silu")
    if activation not in ("swiglu", "silu"):
        raise ModelError(
            f"the activation of a NomicBERT must be swiglu or silu, got {activation!r}; choose another model"
        )
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ModelError(
            f"rotary positions must be the plain ones (rope_type default), got {parameters!r}; choose "
            "another model"
        )


def _max_positions(checkpoint: Checkpoint) -> int:
    stretched = checkpoint.config.get("rotary_scaling_factor") and checkpoint.config.get(
        "max_trained_positions"
    )
    names = ("max_trained_positions",) if stretched else ("n_positions", "max_position_embeddings")
    return checkpoint.integer(*names, default=2048)


def _theta(checkpoint: Checkpoint) -> float:
    parameters: Mapping[str, Any] = checkpoint.config.get("rope_parameters") or {}
    return float(
        parameters.get("rope_theta") or checkpoint.number("rotary_emb_base", "rope_theta", default=1000.0)
    )


def _read_published_layer(reader: WeightReader, index: int, width: int, inner: int) -> Layer:
    prefix = f"encoder.layers.{index}"
    # fc12 is the gate, fc11 what it multiplies.
    gate_and_up = [f"{prefix}.mlp.fc12", f"{prefix}.mlp.fc11"]
    return Layer(
        qkv=reader.linear(f"{prefix}.attn.Wqkv", (3 * width, width), bias=False),
        attention_output=reader.linear(f"{prefix}.attn.out_proj", (width, width), bias=False),
        attention_norm=reader.norm(f"{prefix}.norm1", width),
        mlp=GatedMlp(
            gate_up=reader.stacked(gate_and_up, [inner] * 2, width, bias=False),
            down=reader.linear(f"{prefix}.mlp.fc2", (width, inner), bias=False),
            activation="silu",
        ),
        mlp_norm=reader.norm(f"{prefix}.norm2", width),
    )
