"""A checkpoint with fewer layers, attention heads and feed-forward neurons: what structured pruning leaves.

Whole rows and columns are taken out of the published tensors, and config.json names the new sizes. The result
is an ordinary checkpoint of its family. What to keep is the caller's choice (``pipeline/lab/compress``).

A family can have fewer heads only where its configuration gives the width of a head by itself. The others
compute it as hidden_size / heads, so their heads stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.cde_settings import is_cde
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import LAYER_COUNTS, OF_LAYER
from cairn.pipeline.model.folders.model_types import HEAD_DIM_TYPES
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE, GATE_NAMES, LANDMARK_MIXER
from jaxtyping import Int64

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
