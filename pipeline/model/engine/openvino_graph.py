"""The engine's layers as an OpenVINO graph: one writer for every family, since a family is data.

Sizes of a batch stay open, and so does all that depends on it: who sees whom comes in as a bias, positions as
cosines and sines, τ as the scale of the logits. Weights are constants in float32, or in int8 with a scale for
each row; the format the graph computes in is chosen when it is compiled. Nothing is traced or exported. Local
layers attend in blocks, at a cost linear in the length, as
:mod:`cairn.pipeline.model.engine.block_local_attention` does.

    x_BSD, scale, bias, cos, sin ─▶ layer ─▶ … ─▶ layer ─▶ states of all S vectors, before the final norm
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from cairn.pipeline.model.engine.layer import Activation, Layer, run_layer
from cairn.pipeline.model.engine.openvino_runtime import op, ov
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.weights import AnyLinear, Linear, Norm

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
    is_int8: bool = False,
) -> Any:
    """Return the graph of all layers; with ``is_int8`` their weights are rounded to int8.

    ``rotary_dims`` says for each kind of layer how much of a head is turned; it is empty without RoPE.

    Inputs by name, numbers in float32 and indices in int64:

    - ``x`` (B, S, D), ``scale`` (1,): the logits' factor
    - with RoPE ``cos_<kind>`` and ``sin_<kind>`` (S, E), one of each kind of layer
    - ``bias_global`` (B or 1, 1, S or 1, S), where there are global layers
    - where there are local ones, their G blocks of b queries and K keys, by place among all N tokens:
      ``queries`` (G, b), ``keys`` (G, K), ``bias_local`` (G or 1, 1, b, K), and the way back ``places``
      (B, S) among the G b queries
    """
    inputs = {"x": _input("x", [-1, -1, model_dim]), "scale": _input("scale", [1])}
    for is_local in sorted({layer.is_local for layer in layers}):
        kind = KINDS[is_local]
        inputs[f"bias_{kind}"] = _input(f"bias_{kind}", [-1, 1, -1, -1])
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
        """See :class:`LayerOperations`."""
        return _norm(norm, x)

    def heads(self, qkv: AnyLinear, x: Any) -> tuple[Any, Any, Any]:
        """See :class:`LayerOperations`."""
        num_heads, num_kv, head_dim = (
            self._shape.num_heads,
            self._shape.num_key_value_heads,
            self._shape.head_dim,
        )
        bounds = (np.cumsum([0, num_heads, num_kv, num_kv]) * head_dim).tolist()
        query, key, value = (
            _heads(self._project(_rows(qkv, *part), x), head_dim) for part in pairwise(bounds)
        )
        return query, key, value

    def norm_heads(
        self, query_norm: Norm, key_norm: Norm, heads: tuple[Any, Any, Any]
    ) -> tuple[Any, Any, Any]:
        """See :class:`LayerOperations`."""
        query, key, value = heads
        return _norm(query_norm, query), _norm(key_norm, key), value

    def rotate(self, heads: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """See :class:`LayerOperations`."""
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
        """See :class:`LayerOperations`: all of them."""
        return x

    def inner(self, up: AnyLinear, activation: Activation, x: Any) -> Any:
        """See :class:`LayerOperations`."""
        return _ACTIVATE[activation](self._project(up, x))

    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x: Any) -> Any:
        """See :class:`LayerOperations`."""
        inner = len(gate_up.weight) // 2
        gate, up = (self._project(_rows(gate_up, *part), x) for part in ((0, inner), (inner, 2 * inner)))
        return op.multiply(_ACTIVATE[activation](gate), up)

    def add_projection(self, linear: AnyLinear, x: Any, residual: Any) -> Any:
        """See :class:`LayerOperations`."""
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
