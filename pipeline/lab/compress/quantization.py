"""Quantise the matrices of a model's layers, in order, each on the inputs that the layers before it leave.

Embeddings, norms and biases stay as they are. With GPTQ the texts run through one layer at a time: its inputs
are those of a model whose earlier layers are already quantised, so that later ones make up for them, and
memory holds the second moments of one layer alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.compress.importance import Rows
from cairn.pipeline.lab.compress.plain_pass import read_engine, run_one_layer
from cairn.pipeline.lab.compress.rounding import rounded_to_nearest, rounded_with_feedback
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.layer import Layer, PlainMlp
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import AnyLinear, Linear
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import OF_LAYER
from cairn.pipeline.model.folders.own_tensors import OWN_PREFIXES
from cairn.pipeline.quantized_matrix import QuantizedMatrix, QuantizedTensors
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32

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

Moments = dict[LayerInput, Float32[torch.Tensor, "D D"]]


def quantized(
    checkpoint: Checkpoint, rows: Rows, config: CompressConfig, *, is_causal: bool, progress: ProgressListener
) -> Checkpoint:
    """Return the checkpoint with its layers' matrices as ``config`` says.

    A group size that does not divide a matrix's width raises :class:`ConfigError`.
    """
    named = layer_matrices(checkpoint)
    for names in named.values():
        for name in names:
            _require_groups(name, checkpoint.tensors[name].shape[1], config)
    matrices: dict[str, QuantizedMatrix] = {}
    if config.rounding == "nearest":
        for layer, names in named.items():
            matrices |= {name: _rounded(checkpoint.tensors[name], None, config) for name in names}
            progress("quantise", layer + 1, len(named), "layers")
    else:
        matrices = _calibrated(checkpoint, rows, config, named, is_causal=is_causal, progress=progress)
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in matrices}
    return replace(
        checkpoint,
        tensors=QuantizedTensors(plain, matrices),
        fingerprint=fingerprint(
            kind="quantized",
            checkpoint=checkpoint.fingerprint,
            weights=config.weights,
            rounding=config.rounding,
            group_size=config.group_size,
            texts=[ids_T.tolist() for ids_T in rows] if config.rounding == "gptq" else None,
        ),
    )


@torch.no_grad()
def _calibrated(
    checkpoint: Checkpoint,
    rows: Rows,
    config: CompressConfig,
    named: dict[int, dict[str, LayerInput]],
    *,
    is_causal: bool,
    progress: ProgressListener,
) -> dict[str, QuantizedMatrix]:
    engine = read_engine(checkpoint, is_causal=is_causal)
    states = [engine.norm_embeddings(engine.embed_tokens(ids_T[None])[0]) for ids_T in rows]
    matrices: dict[str, QuantizedMatrix] = {}
    for layer, names in named.items():
        moments = _second_moments(engine, layer, states)
        matrices |= {
            name: _rounded(checkpoint.tensors[name], moments[kind], config) for name, kind in names.items()
        }
        engine.layers[layer] = _quantized_layer(engine.layers[layer], moments, config)
        states = [run_one_layer(engine, layer, x_TD) for x_TD in states]
        progress("quantise", layer + 1, len(named), "layers")
    return matrices


def _second_moments(engine: Transformer, index: int, states: list[torch.Tensor]) -> Moments:
    layer, moments = engine.layers[index], Moments()
    kinds: dict[int, LayerInput] = {id(linear): kind for kind, linear in _products(layer).items()}

    def seen(linear: AnyLinear, x_TD: torch.Tensor) -> None:
        sums = moments.setdefault(kinds[id(linear)], x_TD.new_zeros(x_TD.shape[1], x_TD.shape[1]))
        sums.addmm_(x_TD.T, x_TD)

    for x_TD in states:
        run_one_layer(engine, index, x_TD, seen=seen)
    num_tokens = sum(map(len, states))
    return {kind: sums_DD / num_tokens for kind, sums_DD in moments.items()}


def _products(layer: Layer) -> dict[LayerInput, AnyLinear]:
    up, down = layer.mlp.linears
    return {"attention": layer.qkv, "mixed": layer.attention_output, "feed-forward": up, "inner": down}


def _quantized_layer(layer: Layer, moments: Moments, config: CompressConfig) -> Layer:
    """Return the layer with the weights it will have; rows are rounded alike wherever they are stacked."""
    new = {
        kind: Linear(weight=_rounded(linear.weight, moments[kind], config).dequantized(), bias=linear.bias)
        for kind, linear in _products(layer).items()
    }
    up_name = "up" if isinstance(layer.mlp, PlainMlp) else "gate_up"
    mlp = replace(layer.mlp, **{up_name: new["feed-forward"], "down": new["inner"]})
    return replace(layer, qkv=new["attention"], attention_output=new["mixed"], mlp=mlp)


def _rounded(
    weight_ED: torch.Tensor, moment_DD: torch.Tensor | None, config: CompressConfig
) -> QuantizedMatrix:
    assert config.weights is not None, "what is quantised has a format"
    group_size = weight_ED.shape[1] if config.weights != "int4" else config.group_size
    if moment_DD is None:
        return rounded_to_nearest(weight_ED, config.weights, group_size)
    return rounded_with_feedback(weight_ED, moment_DD, config.weights, group_size)


def _require_groups(name: str, width: int, config: CompressConfig) -> None:
    if config.weights == "int4" and (width % config.group_size or width % 2):
        raise ConfigError(
            f"group_size must divide the width of every matrix, got {config.group_size} for {width} of "
            f"{name}; give another"
        )


def layer_matrices(checkpoint: Checkpoint) -> dict[int, dict[str, LayerInput]]:
    """Return the names of each layer's matrices with what they multiply."""
    found: dict[int, dict[str, LayerInput]] = {}
    for name in checkpoint.tensors:
        layer = None if name.startswith(OWN_PREFIXES) else OF_LAYER.search(name)
        path, _, leaf = name[layer.end() :].rpartition(".") if layer else ("", "", "")
        if layer is not None and leaf == "weight" and path in _INPUT_OF:
            found.setdefault(int(layer[1]), {})[name] = _INPUT_OF[path]
    return dict(sorted(found.items()))
