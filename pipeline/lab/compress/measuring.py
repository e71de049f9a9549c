"""What a compressed model costs and is worth: size, memory, speed and scores, one row a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from cairn.pipeline.config import Backend, Precision
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.compress.importance import Rows
from cairn.pipeline.lab.compress.plain_pass import read_engine
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import QuantizedLinear
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.types import ModelScorer

_ROWS_TOGETHER: Final = 32
BEFORE: Final = "before"
"""The first row, of the model as it came."""
_REPEATS: Final = 3
"""The fastest one counts: others were disturbed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """A model after a step of compression.

    ``disk_bytes`` are those of its weights' files, ``matrix_bytes`` those of its layers' matrices in memory.
    ``tokens_per_second`` is the encoder's speed on the calibration texts, by processor time: other work on
    the machine does not count. ``scores`` are by set and measure, empty without judged sets.
    """

    step: str
    layers: int
    parameters: int
    disk_bytes: int
    matrix_bytes: int
    tokens_per_second: float
    score: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


def measure_model(
    step: str, folder: Path, rows: Rows, scorer: ModelScorer | None, *, backend: Backend, precision: Precision
) -> MeasuredModel:
    """Measure a model's folder as an ingest would run it.

    States that are NaN raise :class:`ModelError`.
    """
    config = encoder_config(
        {"model": str(folder), "backend": backend, "precision": precision, "use_context": False}
    )
    checkpoint = read_checkpoint(folder)
    dtype = resolve_precision("auto", torch.device("cpu"))
    plain = read_engine(checkpoint, is_causal=False, dtype=dtype)
    scores = None if scorer is None else scorer.score(folder)
    return MeasuredModel(
        step=step,
        layers=plain.num_layers,
        parameters=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        disk_bytes=sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors")),
        matrix_bytes=matrix_bytes(plain),
        tokens_per_second=_tokens_per_second(step, load_backbone(config), rows),
        score=None if scores is None else scores.mean,
        scores={} if scores is None else scores.by_measure,
    )


def matrix_bytes(engine: Transformer) -> int:
    """Return the bytes that the matrices of a model's layers take in memory."""
    return sum(
        linear.matrix.nbytes if isinstance(linear, QuantizedLinear) else linear.weight.nbytes
        for layer in engine.layers
        for linear in (layer.qkv, layer.attention_output, *layer.mlp.linears)
    )


def _tokens_per_second(step: str, backbone: Backbone, rows: Rows) -> float:
    ordered = sorted(rows, key=len)
    batches = [ordered[start : start + _ROWS_TOGETHER] for start in range(0, len(ordered), _ROWS_TOGETHER)]
    padded = [(_padded(batch), np.array([len(row) for row in batch])) for batch in batches]
    fastest, is_finite = np.inf, True
    for _ in range(_REPEATS):
        started = time.process_time()
        for ids_BT, lengths_B in padded:
            states_BTD = backbone.hidden_states(ids_BT, lengths_B)
            is_finite &= bool(states_BTD[:, 0].isfinite().all())
        fastest = min(fastest, time.process_time() - started)
    if not is_finite:
        raise ModelError(
            f"the states of the calibration texts must be finite, got NaN or infinity from the model {step}; "
            + ("fetch the model again" if step == BEFORE else "take less away, or choose other weights")
        )
    return float(sum(map(len, rows)) / fastest)


def _padded(rows: Rows) -> np.ndarray:
    ids_BT = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = row
    return ids_BT
