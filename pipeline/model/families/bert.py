"""BERT and its kin (RoBERTa, XLM-R, CamemBERT): post-norm layers, learned positions, a plain feed-forward.

Context stands before the text with token type 0 and the embedding norm, without a position embedding, so its
order does not matter and the text's positions start at 0 (CDE eq. 5 and 6, §10.4). Reads the published names,
with or without ``bert.`` or ``roberta.`` before them.
"""

from __future__ import annotations

from typing import Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.layer import Layer, PlainMlp, activation_named
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.transformer import Embedding, Transformer
from cairn.pipeline.model.engine.weights import WeightReader
from cairn.pipeline.model.folders.checkpoint import Checkpoint

WORD_EMBEDDINGS: Final = "embeddings.word_embeddings.weight"
"""The first tensor that is read, by which any prefix of the names is found."""

_COUNT_FROM_PADDING: Final = ("roberta", "xlm-roberta", "camembert")
"""Model types whose first position stands after the padding id."""


def read_bert(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a checkpoint of one of the families; another variant or a misfit raises :class:`ModelError`."""
    config = checkpoint.config
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder", False):
        raise ModelError(
            "the model must be an encoder with absolute positions, got another variant; choose another model"
        )
    width, epsilon = checkpoint.integer("hidden_size"), checkpoint.number("layer_norm_eps", default=1e-12)
    num_heads = checkpoint.integer("num_attention_heads")
    if width % num_heads:
        raise ModelError(
            f"hidden_size must be a multiple of the {num_heads} heads, got {width}; config.json does not "
            "fit the model"
        )
    num_positions = checkpoint.integer("max_position_embeddings")
    num_types = checkpoint.integer("type_vocab_size", default=2)
    reader = WeightReader(checkpoint.tensors, WORD_EMBEDDINGS, device, dtype, epsilon=epsilon)
    # Tables are kept in float32 where layers are in less, and in their own precision where they are in more.
    wide = torch.promote_types(dtype, torch.float32)
    tokens_VD = reader.read(WORD_EMBEDDINGS, (checkpoint.integer("vocab_size"), width), wide)
    positions_PD = reader.read("embeddings.position_embeddings.weight", (num_positions, width), wide)
    if config["model_type"] in _COUNT_FROM_PADDING:
        positions_PD = positions_PD[int(config.get("pad_token_id") or 0) + 1 :]
    types_D = reader.read("embeddings.token_type_embeddings.weight", (num_types, width), wide)[0].clone()
    return Transformer(
        checkpoint,
        embedding=Embedding(
            tokens_VD=tokens_VD,
            positions_PD=positions_PD,
            token_type_D=types_D,
            norm=reader.norm("embeddings.LayerNorm", width, wide),
        ),
        layers=[
            _read_layer(reader, checkpoint, index) for index in range(checkpoint.integer("num_hidden_layers"))
        ],
        final_norm=None,
        shape=Shape(
            num_heads=num_heads,
            num_key_value_heads=num_heads,
            head_dim=width // num_heads,
            max_positions=len(positions_PD),
            norm_first=False,
        ),
        rotary={},
        dtype=dtype,
        device=device,
    )


def _read_layer(reader: WeightReader, checkpoint: Checkpoint, index: int) -> Layer:
    width, inner = checkpoint.integer("hidden_size"), checkpoint.integer("intermediate_size")
    prefix = f"encoder.layer.{index}"
    attention = f"{prefix}.attention"
    parts = [f"{attention}.self.{name}" for name in ("query", "key", "value")]
    return Layer(
        qkv=reader.stacked(parts, [width] * 3, width, bias=True),
        attention_output=reader.linear(f"{attention}.output.dense", (width, width), bias=True),
        attention_norm=reader.norm(f"{attention}.output.LayerNorm", width),
        mlp=PlainMlp(
            up=reader.linear(f"{prefix}.intermediate.dense", (inner, width), bias=True),
            down=reader.linear(f"{prefix}.output.dense", (width, inner), bias=True),
            activation=activation_named("hidden_act", str(checkpoint.config.get("hidden_act", "gelu"))),
        ),
        mlp_norm=reader.norm(f"{prefix}.output.LayerNorm", width),
    )
