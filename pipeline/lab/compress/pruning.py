"""Structured pruning: the least important layers, then heads and neurons of those that stay, are taken out.

Source: NV-Embed, appendix A.1, which prunes before quantising and distilling. Differs: whole parts go and not
single weights, so that the result is a plain smaller model on any hardware.
"""

from __future__ import annotations

import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.compress.importance import Rows, gate_importance, most_important_layers
from cairn.pipeline.lab.compress.reading import read_engine
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
