"""A model of new weights: a configuration as published files have it, and the tokenizer of another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.weights import NewTensors
from cairn.pipeline.model.folders.checkpoint import Checkpoint


def new_checkpoint(config: Mapping[str, Any], tokenizer_of: Checkpoint, *, seed: int = 0) -> Checkpoint:
    """Return weights drawn from ``seed`` for a configuration, behind the tokenizer of another model.

    ``vocab_size`` may be left out. A configuration that no family reads raises :class:`ModelError`, a
    vocabulary smaller than the tokenizer's :class:`ConfigError`.
    """
    num_tokens = tokenizer_of.tokenizer.get_vocab_size()
    config = {"vocab_size": num_tokens, "pad_token_id": tokenizer_of.pad_id, **config}
    tensors = NewTensors(_num_layers(config), torch.Generator().manual_seed(seed))
    checkpoint = replace(
        tokenizer_of,
        config=config,
        tensors=tensors,
        steps=(),
        extra_path=None,
        fingerprint=fingerprint(
            kind="new weights",
            config=dict(sorted(config.items())),
            seed=seed,
            tokenizer=tokenizer_of.fingerprint,
        ),
    )
    reader_of(config.get("model_type"))(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    if checkpoint.integer("vocab_size") < num_tokens:
        raise ConfigError(
            f"vocab_size of a new model must be at least the tokenizer's {num_tokens}, got "
            f"{config['vocab_size']}; leave it out"
        )
    return replace(checkpoint, tensors=dict(tensors))


def _num_layers(config: Mapping[str, Any]) -> int:
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    if type(num_layers) is not int or num_layers < 1:
        raise ModelError(
            f"num_hidden_layers of a new model must be a whole number of at least 1, got {num_layers!r}"
        )
    return num_layers
