"""Structured pruning: the least important layers, then heads and neurons of those that stay, are taken out.

How much the embeddings of calibration texts change without a part says how important it is:

    layers          measured: the one whose absence moves embeddings least goes first, then the next (greedy)
    heads, neurons  estimated: E ‖∂e/∂m‖², m the gate of the part, from one backward pass a text

The first-order term of a loss that compares a model with itself is zero, so the estimate is the leading,
second-order one: by Gauss-Newton, the cosine of the embedding e falls by ½ ‖∂e/∂mᵢ‖² without part i.
An embedding is the mean of all tokens here, whatever the model pools. ‖∂e/∂m‖² is estimated without bias by
(∂⟨e, r⟩/∂m)², r a random direction.

Source: Kwon et al. 2022 (a fast post-training pruning framework for Transformers), diagonal Fisher
information of mask variables; Michel et al. 2019 for gates of heads. Differs: the loss is the change of
embeddings, not that of labels, and interactions between parts are left out. Layers: Kim et al. 2024
(Shortened LLaMA), by the change of embeddings instead of perplexity, measured again after each removal.

Source of the whole: NV-Embed, appendix A.1, which prunes before quantising and distilling. Differs: whole
parts go and not single weights, so that the result is a plain smaller model on any hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.compress.plain_pass import Gates, embed_row, open_gates, read_engine
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.smaller_layers import (
    KeptParts,
    must_keep_first_layer,
    require_prunable,
    smaller_checkpoint,
)
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

Rows = Sequence[Int64[np.ndarray, " _"]]


def pruned(
    checkpoint: Checkpoint, rows: Rows, config: CompressConfig, *, is_causal: bool, progress: ProgressListener
) -> Checkpoint:
    """Return the checkpoint without its least important parts.

    Sizes that the model does not have raise :class:`ConfigError`.
    """
    require_prunable(checkpoint, with_heads=config.heads is not None)
    engine = read_engine(checkpoint, is_causal=is_causal)
    num_groups, num_inner = _require_sizes(engine, checkpoint, config)
    if config.layers is not None and config.layers < engine.num_layers:
        kept = most_important_layers(
            engine,
            rows,
            config.layers,
            keeps_first=must_keep_first_layer(checkpoint),
            progress=progress,
        )
        checkpoint = smaller_checkpoint(checkpoint, KeptParts(layers=kept))
        engine = read_engine(checkpoint, is_causal=is_causal)
    if num_groups is None and num_inner is None:
        return checkpoint
    importance = gate_importance(engine, rows, config.seed, progress)
    groups_LG = importance.heads_LH.unflatten(1, (engine.shape.num_key_value_heads, -1)).sum(2)
    parts = KeptParts(
        layers=tuple(range(engine.num_layers)),
        groups=None if num_groups is None else _largest(groups_LG, num_groups),
        inner=None if num_inner is None else _largest(importance.inner_LI, num_inner),
    )
    return smaller_checkpoint(checkpoint, parts)


def _require_sizes(
    engine: Transformer, checkpoint: Checkpoint, config: CompressConfig
) -> tuple[int | None, int | None]:
    """Return how many head groups and neurons are to stay, None for all."""
    shape = engine.shape
    num_inner = engine.layers[0].mlp.linears[1].weight.shape[1]
    available = {"layers": engine.num_layers, "heads": shape.num_heads, "feed_forward": num_inner}
    for name, most in available.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(
                f"{name} must be at most the model's {most}, got {value}; leave it out to keep all"
            )
    shared = shape.num_heads // shape.num_key_value_heads
    if config.heads is not None and config.heads % shared:
        raise ConfigError(
            f"heads must be a multiple of the {shared} that share keys and values, got {config.heads}; give "
            f"{max(shared, config.heads // shared * shared)}"
        )
    if config.heads is not None and checkpoint.config.get("model_type") == "llama":
        width = engine.model_dim
        if width % config.heads:
            raise ConfigError(
                f"heads of a Llama must divide its hidden size {width}, as transformers asks, got "
                f"{config.heads}; give another number"
            )
    return (
        None if config.heads in (None, shape.num_heads) else config.heads // shared,
        None if config.feed_forward in (None, num_inner) else config.feed_forward,
    )


def _largest(importance_LX: Float32[torch.Tensor, "L X"], num_kept: int) -> list[Int64[torch.Tensor, " k"]]:
    """Return each layer's most important parts, ascending; of equal ones the first."""
    order_LX = importance_LX.argsort(dim=1, descending=True, stable=True)
    return [order_X[:num_kept].sort().values for order_X in order_LX]


def gate_importance(engine: Transformer, rows: Rows, seed: int, progress: ProgressListener) -> Gates:
    """Return the mean squared change of embeddings by head and by neuron.

    NaN raises :class:`ModelError`.
    """
    gates = open_gates(engine)
    squares = Gates(heads_LH=torch.zeros_like(gates.heads_LH), inner_LI=torch.zeros_like(gates.inner_LI))
    generator = torch.Generator().manual_seed(seed)
    for number, ids_T in enumerate(rows):
        embedding_D = embed_row(engine, ids_T, gates=gates)
        direction_D = torch.randn(embedding_D.shape, generator=generator)
        of_heads, of_inner = torch.autograd.grad(embedding_D @ direction_D, (gates.heads_LH, gates.inner_LI))
        squares.heads_LH.add_(of_heads.square() / len(rows))
        squares.inner_LI.add_(of_inner.square() / len(rows))
        progress("importance", number + 1, len(rows), "texts")
    if not bool(squares.heads_LH.isfinite().all() and squares.inner_LI.isfinite().all()):
        raise _not_finite()
    return squares


@torch.no_grad()
def most_important_layers(
    engine: Transformer, rows: Rows, num_kept: int, *, keeps_first: bool, progress: ProgressListener
) -> tuple[int, ...]:
    """Return the layers that stay, ascending, after the least important ones were taken out one by one.

    Of two that change the embeddings alike the later one goes.
    """
    whole_ND = torch.stack([embed_row(engine, ids_T) for ids_T in rows])
    kept = tuple(range(engine.num_layers))
    num_trials, done = sum(range(num_kept + 1, len(kept) + 1)), 0
    while len(kept) > num_kept:
        changes: dict[int, float] = {}
        for layer in kept[1:] if keeps_first else kept:
            others = tuple(other for other in kept if other != layer)
            changes[layer] = _change(engine, rows, others, whole_ND)
            done += 1
            progress("layers", done, num_trials, "trials")
        least = min(changes, key=lambda layer: (changes[layer], -layer))
        kept = tuple(other for other in kept if other != least)
    return kept


def _change(
    engine: Transformer, rows: Rows, layers: tuple[int, ...], whole_ND: Float32[torch.Tensor, "N D"]
) -> float:
    """Return the mean of 1 - cosine between embeddings of these layers and those of all."""
    change = 0.0
    for ids_T, whole_D in zip(rows, whole_ND, strict=True):
        change += 1.0 - float(embed_row(engine, ids_T, layers=layers) @ whole_D)
    if not np.isfinite(change):
        raise _not_finite()
    return change / len(rows)


def _not_finite() -> ModelError:
    return ModelError(
        "embeddings of the calibration texts must be finite, got NaN or infinity; fetch the model again"
    )
