"""The engine with its layers run by OpenVINO: the fastest exact way on an x86 processor, an optional extra.

    ids, context ─▶ embedding ─▶ compiled graph of the layers ─▶ final norm ─▶ hidden states

Whatever family the engine reads runs here, with context, local layers and any τ. Batches are encoded one a
thread: each has a request of its own, and the runtime a stream for each. The graph is compiled in about a
second when the model is loaded; nothing is written to a cache.

Sizes of a batch stay open, and so does all that depends on it: who sees whom comes in as a bias, positions as
cosines and sines, τ as the scale of the logits. Weights are constants in float32, or in int8 with a scale for
each row; the format the graph computes in is chosen when it is compiled. Local layers attend in blocks.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from cairn.pipeline.model.engine.pattern import Pattern, Rectangle, Shape
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.engine.transformer import Activation, Layer, Transformer, run_layer
from cairn.pipeline.model.engine.weights import AnyLinear, Linear, Norm
from jaxtyping import Float, Float32

_REPORTER: Final = "openvino_telemetry"


def _import_silently() -> tuple[Any, Any]:
    """Return the runtime and its operations, imported without the usage statistics it would send.

    On import the package reports to its maker through ``openvino_telemetry``, from a forked process, unless
    that package cannot be imported. Another's earlier import of the reporter is left as it is.
    """
    found: ModuleType | None = sys.modules.get(_REPORTER)
    if found is None:
        sys.modules[_REPORTER] = None  # type: ignore[assignment] - how Python marks a module that must not be imported
    try:
        return importlib.import_module("openvino"), importlib.import_module("openvino.opset13")
    finally:
        if found is None:
            del sys.modules[_REPORTER]


ov, op = _import_silently()

_HIDDEN: Final = -1e30
"""The bias of what is not seen, in place of -inf: finite in bf16 too, and 0 after any softmax."""

_MAX_GROUP: Final = 128
"""Numbers of a token that share a scale in int8, at most: more are faster, fewer are more exact."""

_PRECISIONS: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}


class OpenVinoTransformer(Transformer):
    """A float32 engine with compiled layers."""

    def __init__(self, engine: Transformer, precision: torch.dtype) -> None:
        vars(self).update(vars(engine))
        self.precision = precision
        self.pattern_type = _GraphRectangle
        rotary_dims = {kind: table.rotary_dim for kind, table in self.rotary.items()}
        is_int8 = precision == torch.int8
        graph = build_graph(
            self.layers,
            self.shape,
            model_dim=self.model_dim,
            rotary_dims=rotary_dims,
            biased_heads=1 if self.relative_bias is None else self.shape.num_heads,
            is_int8=is_int8,
        )
        others = resolve_precision("auto", self.device) if is_int8 else precision
        self._compiled = _compile(graph, others, group_size=_group_size(self.layers) if is_int8 else 0)
        # The compiled graph has the weights now, in its own layout.
        self.layers = []
        self._requests = threading.local()

    def encode_embedded(
        self, x_BSD: Float32[torch.Tensor, "B S D"], pattern: Pattern
    ) -> Float[torch.Tensor, "B T D"]:
        """See :class:`Transformer`."""
        assert isinstance(pattern, _GraphRectangle), "the engine's own pattern"
        if not hasattr(self._requests, "own"):
            self._requests.own = self._compiled.create_infer_request()
        request = self._requests.own
        x_ND = pattern.pack(self.norm_embeddings(x_BSD))
        inputs = pattern.inputs(x_ND, {port.get_any_name() for port in self._compiled.inputs})
        request.infer(inputs, share_inputs=True)
        # A copy, because the request overwrites its output the next time.
        x_ND = torch.from_numpy(request.get_output_tensor(0).data.reshape(x_ND.shape).copy())
        if pattern.drop_lead_at is not None:
            x_ND = pattern.text(x_ND)
        return pattern.unpack(x_ND if self.final_norm is None else self.final_norm(x_ND))


class _GraphRectangle(Rectangle):
    """A batch as the compiled graph takes it."""

    def inputs(self, x_ND: Float[torch.Tensor, "N D"], wanted: set[str]) -> dict[str, np.ndarray]:
        """Return the graph's inputs by name."""
        width, scale = self._batch.width, self._settings.shape.head_dim**-0.5 / self._settings.temperature
        found = {
            "x": x_ND.view(-1, width, x_ND.shape[1]),
            "scale": torch.tensor([scale], dtype=torch.float32),
        }
        bias = torch.zeros(1, 1, 1, 1) if self._bias is None else self._bias
        found["bias_global"] = bias.clamp(min=_HIDDEN)
        for is_local, (cos_SE, sin_SE) in self._angles.items():
            found |= {f"cos_{KINDS[is_local]}": cos_SE, f"sin_{KINDS[is_local]}": sin_SE}
        if self._window is not None:
            tokens_BS = torch.arange(len(x_ND)).view(-1, width)
            found["bias_local"] = self._window.bias.clamp(min=_HIDDEN)
            found |= {"queries": tokens_BS, "keys": tokens_BS, "places": tokens_BS}
            if self._window.is_blocked:
                first_G1 = torch.arange(self._window.num_blocks)[:, None] * self._window.block
                last = len(x_ND) - 1
                found["queries"] = (first_G1 + torch.arange(self._window.block)).clamp(max=last)
                # What lies outside the text is hidden by the bias, so any token may stand there.
                found["keys"] = (first_G1 - self._window.lead + torch.arange(self._window.num_keys)).clamp(
                    0, last
                )
        return {name: tensor.contiguous().numpy() for name, tensor in found.items() if name in wanted}


def _group_size(layers: Sequence[Layer]) -> int:
    """Return the largest group of 16 to 128 numbers that divides all products; 0 rounds weights alone."""
    widths = {
        linear.weight.shape[1]
        for layer in layers
        for linear in (layer.qkv, layer.attention_output, layer.mlp.up, layer.mlp.down)
    }
    common = math.gcd(*widths)
    return next((size for size in range(_MAX_GROUP, 15, -16) if common % size == 0), 0)


def _compile(graph: Any, precision: torch.dtype, *, group_size: int) -> Any:
    num_threads = torch.get_num_threads()
    settings = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[precision],
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": num_threads,
        # Pinned threads of several processes would crowd the same cores.
        "ENABLE_CPU_PINNING": False,
        # Tokens are rounded by themselves, so that no vector depends on what is encoded beside it.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size,
    }
    return ov.Core().compile_model(graph, "CPU", settings)


KINDS: Final = {False: "global", True: "local"}
"""By ``is_local``: how the inputs of a kind of layer are named."""

_ACTIVATE: Final[Mapping[Activation, Callable[[Any], Any]]] = {
    "gelu": lambda x: op.gelu(x, "erf"),
    "tanh_gelu": lambda x: op.gelu(x, "tanh"),
    "relu": op.relu,
    "silu": op.swish,
}


def build_graph(
    layers: Sequence[Layer],
    shape: Shape,
    *,
    model_dim: int,
    rotary_dims: Mapping[bool, int],
    biased_heads: int = 1,
    is_int8: bool = False,
) -> Any:
    """Return the graph of all layers; with ``is_int8`` their weights are rounded to int8.

    ``rotary_dims`` says for each kind of layer how much of a head is turned; it is empty without RoPE.
    ``biased_heads`` are those that have a bias each.

    Inputs by name, numbers in float32 and indices in int64:

    - ``x`` (B, S, D), ``scale`` (1,): the logits' factor
    - with RoPE ``cos_<kind>`` and ``sin_<kind>`` (S, E), one of each kind of layer
    - ``bias_global`` (B or 1, ``biased_heads``, S or 1, S), where there are global layers
    - where there are local ones, their G blocks of b queries and K keys, by place among all N tokens:
      ``queries`` (G, b), ``keys`` (G, K), ``bias_local`` (G or 1, 1, b, K), and the way back ``places``
      (B, S) among the G b queries
    """
    inputs = {"x": _input("x", [-1, -1, model_dim]), "scale": _input("scale", [1])}
    for is_local in sorted({layer.is_local for layer in layers}):
        kind = KINDS[is_local]
        inputs[f"bias_{kind}"] = _input(f"bias_{kind}", [-1, biased_heads, -1, -1])
        for name in ("cos", "sin") if rotary_dims else ():
            inputs[f"{name}_{kind}"] = _input(f"{name}_{kind}", [-1, rotary_dims[is_local] // 2])
        for name in ("queries", "keys", "places") if is_local else ():
            inputs[name] = _input(name, [-1, -1], np.int64)
    x = inputs["x"]
    for layer in layers:
        operations = GraphOperations(layer, inputs, shape, is_int8=is_int8)
        x = run_layer(layer, x, operations, norm_first=shape.norm_first)
    return ov.Model([op.result(x)], list(inputs.values()), "layers")


class GraphOperations:
    """Implements :class:`LayerOperations` for nodes ``B S D``; heads are three nodes."""

    def __init__(self, layer: Layer, inputs: Mapping[str, Any], shape: Shape, *, is_int8: bool) -> None:
        self._is_local = layer.is_local
        self._weights = _int8_constant if is_int8 else _constant
        self._kind = KINDS[layer.is_local]
        self._inputs = inputs
        self._shape = shape

    def norm(self, norm: Norm, x: Any) -> Any:
        return _norm(norm, x)

    def heads(self, qkv: AnyLinear, x: Any) -> tuple[Any, Any, Any]:
        head_dim = self._shape.head_dim
        bounds = (np.cumsum([0, *self._shape.heads_by_kind]) * head_dim).tolist()
        query, key, value = (
            _heads(self._project(_rows(qkv, *part), x), head_dim) for part in pairwise(bounds)
        )
        return query, key, value

    def norm_heads(
        self, query_norm: Norm, key_norm: Norm, heads: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        query, key, value = heads
        return _norm(query_norm, query), _norm(key_norm, key), value

    def rotate(self, heads: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        if f"cos_{self._kind}" not in self._inputs:
            return heads
        cos, sin = (self._inputs[f"{name}_{self._kind}"] for name in ("cos", "sin"))
        query, key, value = heads
        return *(_rotate(x, cos, sin, self._shape.head_dim) for x in (query, key)), value

    def attend(self, heads: tuple[Any, Any, Any]) -> Any:
        """Mix values by softmax(scale q·k + bias), in the plain operations that the runtime knows to fuse."""
        num_heads, num_kv, head_dim = (
            self._shape.num_heads,
            self._shape.num_key_value_heads,
            self._shape.head_dim,
        )
        inputs = self._inputs
        query, key, value = heads
        if num_heads > num_kv:
            key, value = (_shared(x, num_heads // num_kv, num_heads, head_dim) for x in (key, value))
        query = op.multiply(query, inputs["scale"])
        if self._is_local:
            query = _take(query, inputs["queries"], num_heads, head_dim)
            key, value = (_take(x, inputs["keys"], num_heads, head_dim) for x in (key, value))
        query, value = (op.transpose(x, _ints(0, 2, 1, 3)) for x in (query, value))
        logits = op.matmul(query, op.transpose(key, _ints(0, 2, 3, 1)), False, False)
        weights = op.softmax(op.add(logits, inputs[f"bias_{self._kind}"]), -1)
        mixed = op.transpose(op.matmul(weights, value, False, False), _ints(0, 2, 1, 3))
        if self._is_local:
            rows = op.reshape(mixed, _ints(-1, num_heads * head_dim), False)
            return op.gather(rows, inputs["places"], _ints(0))
        return op.reshape(mixed, _ints(0, 0, num_heads * head_dim), True)

    def continuing(self, x: Any) -> Any:
        return x

    def inner(self, up: AnyLinear, activation: Activation, x: Any) -> Any:
        return _ACTIVATE[activation](self._project(up, x))

    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x: Any) -> Any:
        inner = len(gate_up.weight) // 2
        gate, up = (self._project(_rows(gate_up, *part), x) for part in ((0, inner), (inner, 2 * inner)))
        return op.multiply(_ACTIVATE[activation](gate), up)

    def add_projection(self, linear: AnyLinear, x: Any, residual: Any) -> Any:
        return op.add(residual, self._project(linear, x))

    def _project(self, linear: AnyLinear, x: Any) -> Any:
        product = op.matmul(x, self._weights(linear.weight), False, True)
        return product if linear.bias is None else op.add(product, _constant(linear.bias))


def _take(x: Any, places: Any, num_heads: int, head_dim: int) -> Any:
    """Gather tokens by their place among those of all rows."""
    return op.gather(op.reshape(x, _ints(-1, num_heads, head_dim), False), places, _ints(0))


def _heads(x: Any, head_dim: int) -> Any:
    return op.reshape(x, _ints(0, 0, -1, head_dim), True)


def _shared(x: Any, num_shared: int, num_heads: int, head_dim: int) -> Any:
    """Give each of several neighbouring heads of queries the head they share."""
    tiled = op.tile(op.unsqueeze(x, _ints(3)), _ints(1, 1, 1, num_shared, 1))
    return op.reshape(tiled, _ints(0, 0, num_heads, head_dim), True)


def _rotate(x: Any, cos: Any, sin: Any, head_dim: int) -> Any:
    """Turn the first dimensions of every head, the first half of them against the second."""
    half = cos.get_partial_shape()[1].get_length()
    first, second, rest = op.variadic_split(x, _ints(-1), _ints(half, half, head_dim - 2 * half)).outputs()
    cos, sin = (op.unsqueeze(table, _ints(1)) for table in (cos, sin))
    turned = [
        op.subtract(op.multiply(first, cos), op.multiply(second, sin)),
        op.add(op.multiply(second, cos), op.multiply(first, sin)),
    ]
    return op.concat([*turned, rest] if head_dim > 2 * half else turned, -1)


def _rows(linear: AnyLinear, start: int, end: int) -> Linear:
    return Linear(
        weight=linear.weight[start:end], bias=None if linear.bias is None else linear.bias[start:end]
    )


def _norm(norm: Norm, x: Any) -> Any:
    last, epsilon = _ints(-1), norm.epsilon
    if norm.kind == "rms":
        mean_square = op.reduce_mean(op.multiply(x, x), last, True)
        normed = op.divide(x, op.sqrt(op.add(mean_square, np.float32(epsilon))))
    else:
        normed = op.mvn(x, last, True, epsilon, "INSIDE_SQRT")
    scaled = op.multiply(normed, _constant(norm.weight))
    return scaled if norm.bias is None else op.add(scaled, _constant(norm.bias))


def _input(name: str, shape: Sequence[int], dtype: type[np.generic] = np.float32) -> Any:
    node = op.parameter(list(shape), dtype, name=name)
    node.get_output_tensor(0).set_names({name})
    return node


def _constant(tensor: torch.Tensor) -> Any:
    return op.constant(np.ascontiguousarray(tensor.float().cpu().numpy()), np.float32)


def _int8_constant(weight_ED: torch.Tensor) -> Any:
    """Return a weight as int8 times a scale for each of its rows, the form the runtime multiplies in int8."""
    weight_ED = weight_ED.float().cpu()
    scale_E1 = weight_ED.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    rounded = op.constant((weight_ED / scale_E1).round().to(torch.int8).numpy())
    return op.multiply(op.convert(rounded, "f32"), _constant(scale_E1))


def _ints(*numbers: int) -> Any:
    return op.constant(np.array(numbers, np.int64))
