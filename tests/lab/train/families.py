"""Tiny models of new weights, one of each family that training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from cairn.pipeline.lab.train.pretrain import new_checkpoint
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "bert": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "mpnet": {},
    "modernbert": {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "nomic_bert": {},
    "new": {"rope_theta": 10_000.0, "type_vocab_size": 1},
    "m3bert": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
"""Settings beside the sizes, by model type."""


def tiny_new(family: str, tokenizer_folder: Path, *, seed: int = 0) -> Checkpoint:
    """Return a tiny model of new weights."""
    config = {"model_type": family, **SIZES, **FAMILIES[family]}
    return new_checkpoint(config, read_checkpoint(tokenizer_folder), seed=seed)
