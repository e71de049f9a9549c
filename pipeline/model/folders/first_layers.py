"""Models inside a checkpoint: its first layers, and the first stage that it may hold beside the second.

The first layers are a model of their own (m³BERT §2.1, the truncated embedding h^l). Whatever follows the
last layer, such as a final norm, follows the last one kept. A first stage of its own stays whole.

    first_stage.<published name>        a layer, or an embedding, of the first stage (CDE §4.2)

Its tensors lie in ``cairn_extra.safetensors``. It has as many layers as there are here, and the second
stage's configuration and tokenizer; what lies outside layers and is not here, such as frozen embeddings, is
the second stage's. CDE's own folders hold both stages otherwise: see ``pipeline/model/cde.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE

LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers")
"""What configurations call the number of layers: nearly all of them, NomicBERT's, DistilBERT's."""

OF_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
"""The number of the layer a tensor belongs to."""


def first_layers(checkpoint: Checkpoint, num_layers: int | None) -> Checkpoint:
    """Return the checkpoint of the first ``num_layers`` layers, with its own fingerprint; None takes all."""
    if num_layers is None:
        return checkpoint
    available = checkpoint.integer(*LAYER_COUNTS)
    if not 1 <= num_layers <= available:
        raise ConfigError(
            f"layers must lie between 1 and the model's {available}, got {num_layers}; "
            "leave it out to run all"
        )
    config = of_so_many_layers(checkpoint.config, num_layers)
    if isinstance(kinds := checkpoint.config.get("layer_types"), list):
        # A first stage of its own may have more layers; each stage reads as many kinds as it has layers.
        own = [layer_of(name) + 1 for name in checkpoint.tensors if name.startswith(FIRST_STAGE)]
        config["layer_types"] = kinds[: max([num_layers, *own])]
    return replace(
        checkpoint,
        config=config,
        tensors={
            name: tensor
            for name, tensor in checkpoint.tensors.items()
            if layer_of(name) < num_layers or name.startswith(FIRST_STAGE)
        },
        fingerprint=fingerprint(
            kind="first-layers", checkpoint=checkpoint.fingerprint, num_layers=num_layers
        ),
    )


def of_so_many_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the configuration of a model's first layers."""
    cut = {name: num_layers if name in LAYER_COUNTS else value for name, value in config.items()}
    if isinstance(kinds := cut.get("layer_types"), list):
        cut["layer_types"] = kinds[:num_layers]
    return cut


def layer_of(tensor_name: str) -> int:
    """Return the number of the layer a tensor belongs to, -1 for one outside layers."""
    found = OF_LAYER.search(tensor_name)
    return int(found[1]) if found else -1


def split_stages(checkpoint: Checkpoint) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the second stage, with the fingerprint of both, and the first, None where there is none."""
    own = {
        name.removeprefix(FIRST_STAGE): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(FIRST_STAGE)
    }
    if not own:
        return checkpoint, None
    num_layers = 1 + max(map(layer_of, own))
    if not num_layers:
        raise ModelError(
            f"{FIRST_STAGE}* of the model must hold at least one layer, got none; train the model again"
        )
    tensors = {name: each for name, each in checkpoint.tensors.items() if not name.startswith(FIRST_STAGE)}
    shared = {name: tensor for name, tensor in tensors.items() if layer_of(name) < 0}
    first = replace(
        checkpoint,
        config=of_so_many_layers(checkpoint.config, num_layers),
        tensors={**shared, **own},
        steps=(),
        fingerprint=fingerprint(kind="first-stage", checkpoint=checkpoint.fingerprint),
    )
    return replace(checkpoint, tensors=tensors), first
