"""`cairn compress` from end to end: read, prune, quantise, save.

Each step is measured: size, memory and scores.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError, SourceError
from cairn.pipeline.lab.compress.pruning import pruned
from cairn.pipeline.lab.compress.quantization import quantized, read_engine
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.lab.train.distill import text_row
from cairn.pipeline.lab.train.pairs import read_texts
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import QuantizedLinear
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import encoder_config, trained_context
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.types import ModelScorer, ProgressListener, silent_progress
from jaxtyping import Int64

BEFORE: Final = "before"
"""The first row, of the model as it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """A model after a step of compression.

    ``disk_bytes`` are those of its weights' files, ``matrix_bytes`` those of its layers' matrices in memory.
    ``scores`` are by set and measure, empty without judged sets.
    """

    step: str
    layers: int
    parameters: int
    disk_bytes: int
    matrix_bytes: int
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


def measure_model(step: str, folder: Path, scorer: ModelScorer | None) -> MeasuredModel:
    """Measure a model's folder."""
    checkpoint = read_checkpoint(folder)
    dtype = resolve_precision("auto", torch.device("cpu"))
    plain = read_engine(checkpoint, is_causal=False, dtype=dtype)
    return MeasuredModel(
        step=step,
        layers=plain.num_layers,
        parameters=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        disk_bytes=sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors")),
        matrix_bytes=matrix_bytes(plain),
        scores={} if scorer is None else scorer.score(folder).by_measure,
    )


def matrix_bytes(engine: Transformer) -> int:
    """Return the bytes that the matrices of a model's layers take in memory."""
    return sum(
        linear.matrix.nbytes if isinstance(linear, QuantizedLinear) else linear.weight.nbytes
        for layer in engine.layers
        for linear in (layer.qkv, layer.attention_output, layer.mlp.up, layer.mlp.down)
    )


MIN_TOKENS: Final = 8
"""A shorter text says nothing of how tokens read one another."""
MIN_TEXTS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressReport:
    """The folder written, and what the model was like before and after each step."""

    folder: str
    calibration_texts: int
    steps: tuple[MeasuredModel, ...]


def compress(
    model: str,
    texts: Sequence[Path],
    output: Path,
    config: CompressConfig,
    *,
    scorer: ModelScorer | None = None,
    progress: ProgressListener = silent_progress,
) -> CompressReport:
    """Write a smaller ``model`` to ``output``, new or empty, which a failure leaves as it was."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            f"the output of compression must be new or empty, got {str(output)!r}; choose another"
        )
    source = model_folder(model)
    checkpoint, settings = read_checkpoint(source), encoder_config({"model": model})
    rows = _read_calibration(
        texts,
        checkpoint,
        num_texts=config.calibration_texts,
        max_tokens=config.max_tokens,
        prefix=settings.document_prefix,
    )
    most = read_engine(checkpoint, is_causal=settings.causal).max_positions
    longest = max(map(len, rows))
    if longest > most:
        raise ConfigError(
            f"max_tokens must be at most the model's {most} positions, got a text of {longest} tokens; lower "
            "it"
        )
    with _scratch_beside(output) as scratch:
        measured = [measure_model(BEFORE, source, scorer)]
        folder = source
        for step, smaller in _steps(checkpoint, rows, config, is_causal=settings.causal, progress=progress):
            folder = scratch / step
            save_encoder_folder(folder, smaller, settings, context=trained_context(model))
            measured.append(measure_model(step, folder, scorer))
        with durable.storage_errors(f"saving the model to {output}"):
            durable.put_in_place(folder, output)
    return CompressReport(folder=str(output), calibration_texts=len(rows), steps=tuple(measured))


def _read_calibration(
    paths: Sequence[Path], checkpoint: Checkpoint, *, num_texts: int, max_tokens: int, prefix: str = ""
) -> list[Int64[np.ndarray, " _"]]:
    """Return the first tokens of evenly spread texts; too few raise :class:`SourceError`."""
    texts = read_texts(paths).texts
    spread = np.linspace(0, max(0, len(texts) - 1), min(num_texts, len(texts))).astype(int)
    rows = [text_row(texts[place], checkpoint, max_tokens=max_tokens, prefix=prefix) for place in spread]
    long_enough = [ids_T for ids_T in rows if len(ids_T) >= MIN_TOKENS]
    if len(long_enough) < MIN_TEXTS:
        raise SourceError(
            f"calibration must have at least {MIN_TEXTS} different texts of {MIN_TOKENS} tokens, got "
            f"{len(long_enough)}; give more or longer ones with --texts"
        )
    return long_enough


@contextlib.contextmanager
def _scratch_beside(output: Path) -> Generator[Path]:
    """Make a folder beside the output, which is found out not to be possible before anything is computed."""
    with durable.storage_errors(f"making a folder beside {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.")
    with scratch as folder:
        yield Path(folder)


def _steps(
    checkpoint: Checkpoint,
    rows: Sequence[np.ndarray],
    config: CompressConfig,
    *,
    is_causal: bool,
    progress: ProgressListener,
) -> Iterator[tuple[str, Checkpoint]]:
    if config.layers is not None:
        checkpoint = pruned(checkpoint, rows, config.layers, is_causal=is_causal, progress=progress)
        yield "pruned", checkpoint
    if config.weights is not None:
        yield config.weights, quantized(checkpoint, rows, config, is_causal=is_causal, progress=progress)
