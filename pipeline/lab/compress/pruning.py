"""Structured pruning: the least important layers, then heads and neurons of those that stay, are taken out.

Source: NV-Embed, appendix A.1, which prunes before quantising and distilling. Differs: whole parts go and not
single weights, so that the result is a plain smaller model on any hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.compress.importance import Rows, gate_importance, most_important_layers
from cairn.pipeline.lab.compress.plain_pass import read_engine
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import LAYER_COUNTS, OF_LAYER
from cairn.pipeline.model.folders.model_types import HEAD_DIM_TYPES, is_cde
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE, GATE_NAMES, LANDMARK_MIXER
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


_INNER_SIZES: Final = ("intermediate_size", "n_inner")
_NOT_PRUNED: Final = ("nvembed", "m3bert")
"""Of nested settings, and trained to be read after its first layers."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Where a matrix has its neurons: in its rows or columns, of ``num_blocks`` stacked matrices."""

    axis: int
    num_blocks: int = 1


_ROWS, _COLUMNS = _Part(0), _Part(1)
_INNER_PARTS: Final[Mapping[str, _Part]] = {
    "intermediate.dense": _ROWS,
    "output.dense": _COLUMNS,
    "mlp.Wi": _Part(0, num_blocks=2),
    "mlp.Wo": _COLUMNS,
    "mlp.fc11": _ROWS,
    "mlp.fc12": _ROWS,
    "mlp.fc2": _COLUMNS,
    "mlp.up_gate_proj": _Part(0, num_blocks=2),
    "mlp.gate_proj": _ROWS,
    "mlp.up_proj": _ROWS,
    "mlp.down_proj": _COLUMNS,
}
"""The feed-forward's matrices in the published names of every family."""

_HEAD_PARTS: Final[Mapping[str, _Part]] = {
    "self_attn.q_proj": _ROWS,
    "self_attn.k_proj": _ROWS,
    "self_attn.v_proj": _ROWS,
    "self_attn.o_proj": _COLUMNS,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptParts:
    """What stays, by number and ascending: layers, and in each of these head groups and neurons.

    A head group is a head of keys and values with all heads of queries that read it. None keeps all.
    """

    layers: tuple[int, ...]
    groups: Sequence[Int64[torch.Tensor, " G"]] | None = None
    inner: Sequence[Int64[torch.Tensor, " I"]] | None = None


def require_prunable(checkpoint: Checkpoint, *, with_heads: bool) -> None:
    """Raise :class:`ConfigError` for a model that cannot lose parts, or no heads where they are to go."""
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
    if with_heads and model_type not in HEAD_DIM_TYPES:
        raise ConfigError(
            f"heads must go with a family whose config.json gives head_dim ({', '.join(HEAD_DIM_TYPES)}), "
            f"got {model_type}; prune its layers or its feed-forward"
        )


def must_keep_first_layer(checkpoint: Checkpoint) -> bool:
    """Say whether the first layer differs from the others: ModernBERT's has no attention norm."""
    return checkpoint.config.get("model_type") == "modernbert"


def smaller_checkpoint(checkpoint: Checkpoint, kept: KeptParts) -> Checkpoint:
    """Return the checkpoint of the parts that are kept.

    All layers must keep equally many heads and neurons. Raises :class:`ModelError` for tensors that do not
    have the sizes config.json gives.
    """
    place_of = {layer: place for place, layer in enumerate(kept.layers)}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        found = OF_LAYER.search(name)
        if name in GATE_NAMES:
            tensors[name] = _smaller_gates(tensor, kept, checkpoint)
        elif found is None:
            tensors[name] = tensor
        elif (layer := int(found[1])) in place_of:
            start, end = found.span(1)
            renamed = f"{name[:start]}{place_of[layer]}{name[end:]}"
            tensors[renamed] = _smaller(name[end + 1 :], tensor, place_of[layer], kept, checkpoint)
    config = _smaller_config(checkpoint, kept)
    return replace(
        checkpoint,
        config=config,
        tensors=tensors,
        fingerprint=fingerprint(
            kind="smaller-layers",
            checkpoint=checkpoint.fingerprint,
            layers=list(kept.layers),
            groups=None if kept.groups is None else [each.tolist() for each in kept.groups],
            inner=None if kept.inner is None else [each.tolist() for each in kept.inner],
        ),
    )


def _smaller(
    name: str, tensor: torch.Tensor, place: int, kept: KeptParts, checkpoint: Checkpoint
) -> torch.Tensor:
    """Return what stays of a layer's tensor, whose name is that within the layer."""
    path, _, leaf = name.rpartition(".")
    if kept.inner is not None and path in _INNER_PARTS:
        return _cut(
            name, tensor, leaf, _INNER_PARTS[path], kept.inner[place], checkpoint.integer(*_INNER_SIZES)
        )
    if kept.groups is not None and path in _HEAD_PARTS:
        return _cut(name, tensor, leaf, _HEAD_PARTS[path], kept.groups[place], _num_groups(checkpoint))
    return tensor


def _cut(
    name: str, tensor: torch.Tensor, leaf: str, part: _Part, kept: torch.Tensor, num_units: int
) -> torch.Tensor:
    """Return the rows or columns of the units that are kept; a unit has as many as its share is long."""
    if leaf == "bias" and part.axis == 1:
        return tensor
    axis, size = part.axis, tensor.shape[part.axis]
    if size % (part.num_blocks * num_units):
        raise ModelError(
            f"{name} must have a multiple of {part.num_blocks * num_units} on axis {axis}, got {size}; the "
            "file does not fit its config.json"
        )
    units = tensor.unflatten(axis, (part.num_blocks, num_units, -1))
    return units.index_select(axis + 1, kept).flatten(axis, axis + 2)


def _smaller_gates(gates_LH: torch.Tensor, kept: KeptParts, checkpoint: Checkpoint) -> torch.Tensor:
    gates_LH = gates_LH[list(kept.layers)]
    if kept.groups is None:
        return gates_LH
    num_groups = _num_groups(checkpoint)
    return torch.stack(
        [
            row.view(num_groups, -1)[groups].flatten()
            for row, groups in zip(gates_LH, kept.groups, strict=True)
        ]
    )


def _num_groups(checkpoint: Checkpoint) -> int:
    return checkpoint.integer("num_key_value_heads", "num_attention_heads")


def _smaller_config(checkpoint: Checkpoint, kept: KeptParts) -> dict[str, Any]:
    config = dict(checkpoint.config)
    for name in LAYER_COUNTS:
        if name in config:
            config[name] = len(kept.layers)
    kinds: Any = config.get("layer_types")
    if kinds is None and config.get("model_type") == "modernbert":
        step = checkpoint.integer("global_attn_every_n_layers", default=3)
        kinds = [
            "sliding_attention" if layer % step else "full_attention" for layer in range(1 + kept.layers[-1])
        ]
    if isinstance(kinds, list):
        config["layer_types"] = [kinds[layer] for layer in kept.layers]
    if kept.inner is not None:
        sizes = [name for name in _INNER_SIZES if config.get(name) is not None]
        config |= dict.fromkeys(sizes, len(kept.inner[0]))
    if kept.groups is not None:
        num_heads, num_groups = checkpoint.integer("num_attention_heads"), _num_groups(checkpoint)
        config["head_dim"] = checkpoint.integer(
            "head_dim", default=checkpoint.integer("hidden_size") // num_heads
        )
        config["num_attention_heads"] = num_heads // num_groups * len(kept.groups[0])
        config["num_key_value_heads"] = len(kept.groups[0])
    return config
