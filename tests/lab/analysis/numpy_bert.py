"""BERT in NumPy, from the published tensors: the independent reference of the analyses. One row, float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

HEADS = 4


@dataclass(frozen=True)
class NumpyLayer:
    """What one layer computes: logits and weights ``H T T``, values ``H T d``, W_V ``H D d``."""

    read: np.ndarray
    logits: np.ndarray
    weights: np.ndarray
    values: np.ndarray
    value_weight: np.ndarray


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def run_bert(
    folder: Path, ids: list[int], temperature: float = 1.0
) -> tuple[list[np.ndarray], list[NumpyLayer]]:
    """Return the states before the first layer and after each, and what each layer computes."""
    t = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), HEADS, -1).transpose(1, 0, 2)

    e = "embeddings"
    x = t[f"{e}.word_embeddings.weight"][ids] + t[f"{e}.position_embeddings.weight"][: len(ids)]
    x = norm(f"{e}.LayerNorm", x + t[f"{e}.token_type_embeddings.weight"][0])
    states, layers = [x], list[NumpyLayer]()
    while f"encoder.layer.{len(layers)}.output.dense.weight" in t:
        name = f"encoder.layer.{len(layers)}"
        q, k, v = (split(linear(f"{name}.attention.self.{part}", x)) for part in ("query", "key", "value"))
        logits = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[2])
        weights = softmax(logits / temperature)
        value_weight = split(t[f"{name}.attention.self.value.weight"].T)
        layers.append(NumpyLayer(x, logits, weights, v, value_weight))
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
        x = norm(f"{name}.attention.output.LayerNorm", x + linear(f"{name}.attention.output.dense", mixed))
        inner = linear(f"{name}.intermediate.dense", x)
        inner = inner * 0.5 * (1.0 + np.vectorize(erf)(inner / np.sqrt(2.0)))
        x = norm(f"{name}.output.LayerNorm", x + linear(f"{name}.output.dense", inner))
        states.append(x)
    return states, layers
