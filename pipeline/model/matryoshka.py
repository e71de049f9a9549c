"""One model at several sizes: its first layers, and the first dimensions of its vectors.

    layers   h^1 … h^l | … h^N      a checkpoint that ends after layer l: whatever follows the last layer (a final norm) follows l
    dims     v[:d] | … v_M          a vector's head, to be normalised again

Inside the model everything keeps its full width, the context's embeddings too. Vectors of a model that was
trained for it lose little; of another one, what is left over.

Source: m³BERT §2.1, the truncated embedding h^l[:d]; training for it is not built here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float32

from pipeline.errors import ConfigError
from pipeline.manifest import fingerprint
from pipeline.model.engine.landmark_gates import GATE_NAMES
from pipeline.model.folders.checkpoint import Checkpoint

_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer")
"""What configurations call the number of layers: nearly all of them, and NomicBERT's."""

_OF_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
"""The number of the layer a tensor belongs to."""


def first_layers(checkpoint: Checkpoint, num_layers: int | None) -> Checkpoint:
    """Return the checkpoint of the first ``num_layers`` layers, a model of its own with its own fingerprint; None takes all.

    Raises :class:`ConfigError` for a number the model does not have.
    """
    if num_layers is None:
        return checkpoint
    available = checkpoint.integer(*_LAYER_COUNTS)
    if not 1 <= num_layers <= available:
        raise ConfigError(
            f"layers (num_layers) must lie between 1 and the model's {available}, got {num_layers}; "
            "leave it out to run all"
        )
    config = {
        name: num_layers if name in _LAYER_COUNTS else value for name, value in checkpoint.config.items()
    }
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = kinds[:num_layers]
    return replace(
        checkpoint,
        config=config,
        tensors={
            name: tensor[:num_layers] if name in GATE_NAMES else tensor
            for name, tensor in checkpoint.tensors.items()
            if _layer_of(name) < num_layers
        },
        fingerprint=fingerprint(
            kind="first-layers", checkpoint=checkpoint.fingerprint, num_layers=num_layers
        ),
    )


def _layer_of(tensor_name: str) -> int:
    found = _OF_LAYER.search(tensor_name)
    return int(found[1]) if found else -1


def require_dims(truncate_dim: int | None, model_dim: int) -> int:
    """Return the width of the vectors; raise :class:`ConfigError` for more dimensions than the model has."""
    if truncate_dim is None:
        return model_dim
    if not 1 <= truncate_dim <= model_dim:
        raise ConfigError(
            f"dims (truncate_dim) must lie between 1 and the model's {model_dim}, got {truncate_dim}; "
            "leave it out to keep all"
        )
    return truncate_dim


def first_dims(embeddings_ND: Float32[np.ndarray, "N D"], vector_dim: int) -> Float32[np.ndarray, "N V"]:
    """Keep the first dimensions of every row and divide it by its length.

    A row of zeros becomes NaN, which no caller lets pass.
    """
    vectors_NV = embeddings_ND[:, :vector_dim]
    with np.errstate(invalid="ignore", over="ignore"):
        return vectors_NV / np.linalg.norm(vectors_NV, axis=1, keepdims=True)
