"""Pruning of whole layers: the one whose absence moves embeddings of texts least goes first, then the next.

An embedding is the mean of all tokens here, whatever the model pools.

Source: NV-Embed, appendix A.1, which prunes before quantising and distilling; Kim et al. 2024 (Shortened
LLaMA) for layers, measured again after each removal. Differs: by the change of embeddings instead of
perplexity, and whole layers go and not single weights, so that the result is a plain smaller model on any
hardware.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.compress.quantization import Rows, read_engine
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import LAYER_COUNTS, OF_LAYER
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE, LANDMARK_MIXER
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

_NOT_PRUNED: Final = ("nvembed", "m3bert")
"""Of nested settings, and trained to be read after its first layers."""


def pruned(
    checkpoint: Checkpoint, rows: Rows, num_kept: int, *, is_causal: bool, progress: ProgressListener
) -> Checkpoint:
    """Return the checkpoint with its ``num_kept`` most important layers."""
    _require_prunable(checkpoint)
    engine = read_engine(checkpoint, is_causal=is_causal)
    if num_kept > engine.num_layers:
        raise ConfigError(
            f"layers must be at most the model's {engine.num_layers}, got {num_kept}; leave it out"
        )
    # ModernBERT's first layer has no attention norm.
    keeps_first = checkpoint.config.get("model_type") == "modernbert"
    kept = most_important_layers(engine, rows, num_kept, keeps_first=keeps_first, progress=progress)
    return smaller_checkpoint(checkpoint, kept)


def _require_prunable(checkpoint: Checkpoint) -> None:
    model_type = checkpoint.config.get("model_type")
    if is_cde(checkpoint.config) or model_type in _NOT_PRUNED:
        name = "CDE" if is_cde(checkpoint.config) else model_type
        raise ConfigError(
            f"a model to prune must be a single published transformer, got a {name} model; choose another"
        )
    if any(name.startswith((LANDMARK_MIXER, FIRST_STAGE)) for name in checkpoint.tensors):
        raise ConfigError(
            "a model to prune must have no landmark mixer and no first stage, which were trained for its "
            "vectors, got one; prune the base model and train them for the result"
        )


def most_important_layers(
    engine: Transformer, rows: Rows, num_kept: int, *, keeps_first: bool, progress: ProgressListener
) -> tuple[int, ...]:
    """Return the layers that stay, after the least important ones went one by one; ties: the later goes."""
    kept = tuple(range(engine.num_layers))
    whole_ND = embed_rows(engine, rows, kept)
    num_trials, done = sum(range(num_kept + 1, len(kept) + 1)), 0
    while len(kept) > num_kept:
        changes: dict[int, float] = {}
        for layer in kept[1:] if keeps_first else kept:
            others = tuple(other for other in kept if other != layer)
            changes[layer] = float((1.0 - (embed_rows(engine, rows, others) * whole_ND).sum(1)).mean())
            done += 1
            progress("layers", done, num_trials, "trials")
        if not np.isfinite(list(changes.values())).all():
            raise ModelError(
                "embeddings of the calibration texts must be finite, got NaN or infinity; fetch the model "
                "again"
            )
        least = min(changes, key=lambda layer: (changes[layer], -layer))
        kept = tuple(other for other in kept if other != least)
    return kept


def embed_rows(engine: Transformer, rows: Rows, layers: tuple[int, ...]) -> Float32[torch.Tensor, "N D"]:
    """Return the mean of each text's last hidden states at unit length, by some of the layers."""
    shallow = copy(engine)
    shallow.layers = [engine.layers[layer] for layer in layers]

    def embed(ids_T: Int64[np.ndarray, " T"]) -> torch.Tensor:
        return shallow.hidden_states(ids_T[None], np.array([len(ids_T)]))[0].float().mean(0)

    return F.normalize(torch.stack([embed(ids_T) for ids_T in rows]), dim=1)


def smaller_checkpoint(checkpoint: Checkpoint, layers: tuple[int, ...]) -> Checkpoint:
    """Return the checkpoint of some layers, ascending."""
    place_of = {layer: place for place, layer in enumerate(layers)}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        found = OF_LAYER.search(name)
        if found is None:
            tensors[name] = tensor
        elif (layer := int(found[1])) in place_of:
            start, end = found.span(1)
            tensors[f"{name[:start]}{place_of[layer]}{name[end:]}"] = tensor
    return replace(
        checkpoint,
        config=_smaller_config(checkpoint, layers),
        tensors=tensors,
        fingerprint=fingerprint(
            kind="smaller-layers", checkpoint=checkpoint.fingerprint, layers=list(layers)
        ),
    )


def _smaller_config(checkpoint: Checkpoint, layers: tuple[int, ...]) -> dict[str, Any]:
    config = dict(checkpoint.config)
    config |= {name: len(layers) for name in LAYER_COUNTS if name in config}
    kinds: Any = config.get("layer_types")
    if kinds is None and config.get("model_type") == "modernbert":
        step = checkpoint.integer("global_attn_every_n_layers", default=3)
        kinds = ["sliding_attention" if layer % step else "full_attention" for layer in range(1 + layers[-1])]
    if isinstance(kinds, list):
        config["layer_types"] = [kinds[layer] for layer in layers]
    return config
