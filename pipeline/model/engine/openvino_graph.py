"""The engine's layers as an OpenVINO graph: one writer for every family, since a family is data (:mod:`pipeline.model.engine.transformer`).

Sizes of a batch stay open, and so does all that depends on it: who sees whom comes in as a bias, positions as
cosines and sines, τ as the scale of the logits. Weights are constants in float32; the format the graph
computes in is chosen when it is compiled. Nothing is traced or exported. Local layers attend in blocks, at a
cost linear in the length, as :mod:`pipeline.model.engine.block_local_attention` does.

    x_BSD, scale, bias, cos, sin ─▶ layer ─▶ … ─▶ layer ─▶ states of all S vectors, before the final norm
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from pipeline.model.engine.feed_forward import ACTIVATIONS, GatedMlp, PlainMlp
from pipeline.model.engine.openvino_runtime import op, ov
from pipeline.model.engine.pattern import Shape
from pipeline.model.engine.transformer import Layer
from pipeline.model.engine.weights import Linear, Norm

KINDS: Final = {False: "global", True: "local"}
"""By ``is_local``: how the inputs of a kind of layer are named."""

_ACTIVATIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "gelu": lambda x: op.gelu(x, "erf"),
    "gelu_new": lambda x: op.gelu(x, "tanh"),
    "gelu_pytorch_tanh": lambda x: op.gelu(x, "tanh"),
    "relu": op.relu,
    "silu": op.swish,
}


def build_graph(
    layers: Sequence[Layer], shape: Shape, *, model_dim: int, rotary_dims: Mapping[bool, int]
) -> Any:
    """Return the graph of all layers; ``rotary_dims`` says for each kind of layer how much of a head is turned, and is empty without RoPE.

    Inputs by name, numbers in float32 and indices in int64:

    - ``x`` (B, S, D), ``scale`` (1,): the logits' factor; with RoPE ``cos_<kind>`` and ``sin_<kind>`` (S, E), one of each kind of layer
    - ``bias_global`` (B or 1, 1, S or 1, S), where there are global layers
    - where there are local ones, their G blocks of b queries and K keys, by place among all N tokens: ``queries`` (G, b), ``keys`` (G, K),
      ``bias_local`` (G or 1, 1, b, K), and the way back ``places`` (B, S) among the G b queries
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
        x = _layer(layer, x, inputs, shape)
    return ov.Model([op.result(x)], list(inputs.values()), "layers")


def _layer(layer: Layer, x: Any, inputs: Mapping[str, Any], shape: Shape) -> Any:
    normed = _norm(layer.attention_norm, x) if shape.norm_first and layer.attention_norm is not None else x
    x = op.add(x, _project(layer.attention_output, _attend(layer, normed, inputs, shape)))
    if shape.norm_first:
        return op.add(x, _feed_forward(layer.mlp, _norm(layer.mlp_norm, x)))
    if layer.attention_norm is not None:
        x = _norm(layer.attention_norm, x)
    return _norm(layer.mlp_norm, op.add(x, _feed_forward(layer.mlp, x)))


def _attend(layer: Layer, x: Any, inputs: Mapping[str, Any], shape: Shape) -> Any:
    """Mix values by softmax(scale q·k + bias), written in the plain operations that the runtime knows to fuse."""
    kind = KINDS[layer.is_local]
    num_heads, num_kv, head_dim = shape.num_heads, shape.num_key_value_heads, shape.head_dim
    bounds = (np.cumsum([0, num_heads, num_kv, num_kv]) * head_dim).tolist()
    query, key, value = (_heads(_project(_rows(layer.qkv, *part), x), head_dim) for part in pairwise(bounds))
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = _norm(layer.query_norm, query), _norm(layer.key_norm, key)
    if f"cos_{kind}" in inputs:
        query, key = (
            _rotate(x, inputs[f"cos_{kind}"], inputs[f"sin_{kind}"], head_dim) for x in (query, key)
        )
    if num_heads > num_kv:
        key, value = (_shared(x, num_heads // num_kv, num_heads, head_dim) for x in (key, value))
    query = op.multiply(query, inputs["scale"])
    if layer.is_local:
        query = _take(query, inputs["queries"], num_heads, head_dim)
        key, value = (_take(x, inputs["keys"], num_heads, head_dim) for x in (key, value))
    query, value = (op.transpose(x, _ints(0, 2, 1, 3)) for x in (query, value))
    scores = op.add(
        op.matmul(query, op.transpose(key, _ints(0, 2, 3, 1)), False, False), inputs[f"bias_{kind}"]
    )
    mixed = op.transpose(op.matmul(op.softmax(scores, -1), value, False, False), _ints(0, 2, 1, 3))
    if layer.is_local:
        return op.gather(
            op.reshape(mixed, _ints(-1, num_heads * head_dim), False), inputs["places"], _ints(0)
        )
    return op.reshape(mixed, _ints(0, 0, num_heads * head_dim), True)


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


def _feed_forward(mlp: PlainMlp | GatedMlp, x: Any) -> Any:
    activate = _ACTIVATIONS[
        next(name for name, activation in ACTIVATIONS.items() if activation is mlp.activation)
    ]
    if isinstance(mlp, PlainMlp):
        return _project(mlp.down, activate(_project(mlp.up, x)))
    inner = len(mlp.gate_up.weight) // 2
    gate, up = (_project(_rows(mlp.gate_up, *part), x) for part in ((0, inner), (inner, 2 * inner)))
    return _project(mlp.down, op.multiply(activate(gate), up))


def _rows(linear: Linear, start: int, end: int) -> Linear:
    return Linear(
        weight=linear.weight[start:end], bias=None if linear.bias is None else linear.bias[start:end]
    )


def _project(linear: Linear, x: Any) -> Any:
    product = op.matmul(x, _constant(linear.weight), False, True)
    return product if linear.bias is None else op.add(product, _constant(linear.bias))


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


def _ints(*numbers: int) -> Any:
    return op.constant(np.array(numbers, np.int64))
