"""Which tensors of a checkpoint are the matrices of its layers, and what each of them multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import OF_LAYER
from cairn.pipeline.model.folders.own_tensors import OWN_PREFIXES

LayerInput = Literal["attention", "mixed", "feed-forward", "inner"]
"""A layer's normed input, the mixed values of its heads, the feed-forward's input, its neurons."""

_INPUTS: Final[Mapping[LayerInput, tuple[str, ...]]] = {
    "attention": (
        *("attention.self.query", "attention.self.key", "attention.self.value"),
        *("attn.Wqkv", "attention.qkv_proj"),
        *("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "mixed": ("attention.output.dense", "attn.Wo", "attn.out_proj", "attention.o_proj", "self_attn.o_proj"),
    "feed-forward": (
        *("intermediate.dense", "mlp.Wi", "mlp.fc11", "mlp.fc12"),
        *("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj"),
    ),
    "inner": ("output.dense", "mlp.Wo", "mlp.fc2", "mlp.down_proj"),
}
"""By the published names of every family, behind the layer's number."""

_INPUT_OF: Final[Mapping[str, LayerInput]] = {name: kind for kind, names in _INPUTS.items() for name in names}


def layer_matrices(checkpoint: Checkpoint) -> dict[int, dict[str, LayerInput]]:
    """Return the names of each layer's matrices with what they multiply."""
    found: dict[int, dict[str, LayerInput]] = {}
    for name in checkpoint.tensors:
        layer = None if name.startswith(OWN_PREFIXES) else OF_LAYER.search(name)
        path, _, leaf = name[layer.end() :].rpartition(".") if layer else ("", "", "")
        if layer is not None and leaf == "weight" and path in _INPUT_OF:
            found.setdefault(int(layer[1]), {})[name] = _INPUT_OF[path]
    return dict(sorted(found.items()))
