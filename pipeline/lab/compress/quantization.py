"""Quantise the matrices of a model's layers, in order, each on the inputs that the layers before it leave.

Embeddings, norms and biases stay as they are. The texts run through one layer at a time, each by itself: its
inputs are those of a model whose earlier layers are already quantised, so that later ones make up for them,
and memory holds the second moments of one layer alone.

A matrix becomes codes one column after another, with the error passed on (GPTQ):

    H = mean x xᵀ of the product's inputs, plus a share of its mean diagonal
    U upper triangular, Uᵀ U = H⁻¹
    for each column i: e = (w_i - ŵ_i) / U_ii, and w_j ← w_j - e U_ij for all later columns j

A scale is fitted when its group begins, to weights that have taken over the errors before it. int8 is
symmetric, int4 has a zero for each group.

Source: Frantar et al. 2022 (GPTQ), algorithm 1 and its 1 % of damping. Differs: columns keep their order, and
errors reach later blocks at once rather than lazily.

    E rows    D columns    g columns of a group    T tokens of a text
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.compress.settings import CompressConfig, WeightFormat
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.pattern import Batch
from cairn.pipeline.model.engine.transformer import (
    Activation,
    InPlaceOperations,
    Layer,
    Transformer,
    run_layer,
)
from cairn.pipeline.model.engine.weights import AnyLinear, Linear
from cairn.pipeline.model.families import language_model
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import OF_LAYER
from cairn.pipeline.model.folders.own_tensors import OWN_PREFIXES
from cairn.pipeline.quantized_matrix import QuantizedMatrix, QuantizedTensors, two_codes_a_byte
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float, Float32, Int64
from typing_extensions import override

Rows = Sequence[Int64[np.ndarray, " _"]]

LayerInput = Literal["attention", "mixed", "feed-forward", "inner"]
"""A layer's normed input, the mixed values of its heads, the feed-forward's input, its neurons."""

INPUTS: Final[Mapping[LayerInput, tuple[str, ...]]] = {
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

_LARGEST: Final = 127.0
_LEVELS: Final = 15
_DAMPING: Final = 0.01
_SMALLEST_SCALE: Final = 1e-7
"""Of a group of zeros; half precision still holds it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """The values that the weights of one group may have."""

    kind: WeightFormat
    scale_E: Float32[torch.Tensor, " E"]
    zero_E: Float32[torch.Tensor, " E"]

    @classmethod
    def fitted(cls, kind: WeightFormat, weight_Eg: Float32[torch.Tensor, "E g"]) -> _Grid:
        if kind != "int4":
            scale_E = weight_Eg.abs().amax(1).div(_LARGEST).clamp(min=_SMALLEST_SCALE)
            return cls(kind, scale_E, torch.zeros_like(scale_E))
        low_E, high_E = weight_Eg.amin(1).clamp(max=0), weight_Eg.amax(1).clamp(min=0)
        # As it is stored: codes are chosen for the scale that a reader sees.
        scale_E = ((high_E - low_E) / _LEVELS).clamp(min=_SMALLEST_SCALE).half().float()
        return cls(kind, scale_E, (-low_E / scale_E).round().clamp(0, _LEVELS))

    def codes(self, weight_Eg: Float32[torch.Tensor, "E g"]) -> torch.Tensor:
        scaled = weight_Eg / self.scale_E[:, None]
        if self.kind == "int8":
            return scaled.round().clamp(-127, 127).to(torch.int8)
        return (scaled.round() + self.zero_E[:, None]).clamp(0, _LEVELS).to(torch.uint8)

    def weights(self, codes: torch.Tensor) -> Float32[torch.Tensor, "E g"]:
        return (codes.float() - self.zero_E[:, None]) * self.scale_E[:, None]


def read_engine(
    checkpoint: Checkpoint, *, is_causal: bool, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return a checkpoint as float32 on the CPU, weights as they lie; a misfit raises :class:`ModelError`."""
    checkpoint.require_alone()
    read = reader_of(checkpoint.config.get("model_type"))
    settings = {"is_causal": True} if is_causal else {}
    return read(language_model(checkpoint), dtype=dtype, device=torch.device("cpu"), **settings)


Seen = Callable[[AnyLinear, torch.Tensor], None]
"""Is told each projection and its input."""


class _TellingOperations(InPlaceOperations):
    """A layer's operations on one text, which tell what goes into each projection."""

    def __init__(self, engine: Transformer, index: int, num_tokens: int, seen: Seen) -> None:
        pattern = engine.pattern_of(Batch(lengths_B=np.array([num_tokens]), num_tokens=num_tokens))
        super().__init__(engine.layers[index], pattern, engine.shape, engine.workspace)
        self._tell = seen

    @override
    def heads(self, qkv: AnyLinear, x_ND: torch.Tensor) -> torch.Tensor:
        self._tell(qkv, x_ND)
        return super().heads(qkv, x_ND)

    @override
    def inner(self, up: AnyLinear, activation: Activation, x_ND: torch.Tensor) -> torch.Tensor:
        self._tell(up, x_ND)
        return super().inner(up, activation, x_ND)

    @override
    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x_ND: torch.Tensor) -> torch.Tensor:
        self._tell(gate_up, x_ND)
        return super().gated_inner(gate_up, activation, x_ND)

    @override
    def add_projection(
        self, linear: AnyLinear, x_NE: torch.Tensor, residual_ND: torch.Tensor
    ) -> torch.Tensor:
        self._tell(linear, x_NE)
        return super().add_projection(linear, x_NE, residual_ND)


@torch.inference_mode()
def run_one_layer(
    engine: Transformer, index: int, x_TD: Float32[torch.Tensor, "T D"], seen: Seen = lambda *_: None
) -> Float32[torch.Tensor, "T D"]:
    """Return a text's states after a layer; ``seen`` is told each projection and its input."""
    operations = _TellingOperations(engine, index, len(x_TD), seen)
    return run_layer(engine.layers[index], x_TD.clone(), operations, norm_first=engine.shape.norm_first)


def rounded_with_feedback(
    weight_ED: Float[torch.Tensor, "E D"],
    second_moment_DD: Float32[torch.Tensor, "D D"],
    kind: WeightFormat,
    group_size: int,
) -> QuantizedMatrix:
    """Round column by column, so that products with such inputs change least; ``group_size`` divides D."""
    weight_ED = weight_ED.float().clone()
    upper_DD = _upper_of_inverse(second_moment_DD)
    codes: list[torch.Tensor] = []
    grids: list[_Grid] = []
    for column in range(weight_ED.shape[1]):
        if column % group_size == 0:
            grids.append(_Grid.fitted(kind, weight_ED[:, column : column + group_size]))
        codes.append(grids[-1].codes(weight_ED[:, column, None]))
        error_E = (weight_ED[:, column] - grids[-1].weights(codes[-1])[:, 0]) / upper_DD[column, column]
        weight_ED[:, column + 1 :].addr_(error_E, upper_DD[column, column + 1 :], alpha=-1.0)
    return _matrix(codes, grids)


def _upper_of_inverse(second_moment_DD: Float32[torch.Tensor, "D D"]) -> Float32[torch.Tensor, "D D"]:
    if not bool(second_moment_DD.isfinite().all()):
        raise ModelError(
            "the states of a model to quantise must be finite on the calibration texts, got NaN or infinity; "
            "fetch the model again"
        )
    moment_DD = second_moment_DD.double()
    mean = float(moment_DD.diagonal().mean()) or 1.0  # of inputs that are all zero, any will do
    moment_DD = moment_DD + torch.eye(len(moment_DD), dtype=torch.float64) * _DAMPING * mean
    inverse_DD = torch.cholesky_inverse(torch.linalg.cholesky(moment_DD))
    return torch.linalg.cholesky(inverse_DD, upper=True).float()


def _matrix(codes: list[torch.Tensor], grids: list[_Grid]) -> QuantizedMatrix:
    codes_ED, scales_EG = torch.cat(codes, dim=1), torch.stack([grid.scale_E for grid in grids], dim=1)
    if grids[0].kind != "int4":
        return QuantizedMatrix(codes=codes_ED, scales_EG=scales_EG)
    zeros_EG = torch.stack([grid.zero_E for grid in grids], dim=1).to(torch.uint8)
    return QuantizedMatrix(codes=two_codes_a_byte(codes_ED), scales_EG=scales_EG.half(), zeros_EG=zeros_EG)


_INPUT_OF: Final[Mapping[str, LayerInput]] = {name: kind for kind, names in INPUTS.items() for name in names}

Moments = dict[LayerInput, Float32[torch.Tensor, "D D"]]


def quantized(
    checkpoint: Checkpoint, rows: Rows, config: CompressConfig, *, is_causal: bool, progress: ProgressListener
) -> Checkpoint:
    """Return the checkpoint with its layers' matrices as ``config`` says."""
    named = layer_matrices(checkpoint)
    for name in (name for names in named.values() for name in names):
        width = checkpoint.tensors[name].shape[1]
        if config.weights == "int4" and (width % config.group_size or width % 2):
            raise ConfigError(
                f"group_size must divide the width of every matrix, got {config.group_size} for {width} of "
                f"{name}; give another"
            )
    matrices = _calibrated(checkpoint, rows, config, named, is_causal=is_causal, progress=progress)
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in matrices}
    return replace(
        checkpoint,
        tensors=QuantizedTensors(plain, matrices),
        fingerprint=fingerprint(
            kind="quantized",
            checkpoint=checkpoint.fingerprint,
            weights=config.weights,
            group_size=config.group_size,
            texts=[ids_T.tolist() for ids_T in rows],
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
        run_one_layer(engine, index, x_TD, seen)
    num_tokens = sum(map(len, states))
    return {kind: sums_DD / num_tokens for kind, sums_DD in moments.items()}


def _products(layer: Layer) -> dict[LayerInput, AnyLinear]:
    up, down = layer.mlp.up, layer.mlp.down
    return {"attention": layer.qkv, "mixed": layer.attention_output, "feed-forward": up, "inner": down}


def _quantized_layer(layer: Layer, moments: Moments, config: CompressConfig) -> Layer:
    """Return the layer with the weights it will have; rows are rounded alike wherever they are stacked."""
    new = {
        kind: Linear(weight=_rounded(linear.weight, moments[kind], config).dequantized(), bias=linear.bias)
        for kind, linear in _products(layer).items()
    }
    mlp = replace(layer.mlp, up=new["feed-forward"], down=new["inner"])
    return replace(layer, qkv=new["attention"], attention_output=new["mixed"], mlp=mlp)


def _rounded(weight_ED: torch.Tensor, moment_DD: torch.Tensor, config: CompressConfig) -> QuantizedMatrix:
    assert config.weights is not None, "what is quantised has a format"
    group_size = weight_ED.shape[1] if config.weights != "int4" else config.group_size
    return rounded_with_feedback(weight_ED, moment_DD, config.weights, group_size)


def layer_matrices(checkpoint: Checkpoint) -> dict[int, dict[str, LayerInput]]:
    """Return the names of each layer's matrices with what they multiply."""
    found: dict[int, dict[str, LayerInput]] = {}
    for name in checkpoint.tensors:
        layer = None if name.startswith(OWN_PREFIXES) else OF_LAYER.search(name)
        path, _, leaf = name[layer.end() :].rpartition(".") if layer else ("", "", "")
        if layer is not None and leaf == "weight" and path in _INPUT_OF:
            found.setdefault(int(layer[1]), {})[name] = _INPUT_OF[path]
    return dict(sorted(found.items()))
