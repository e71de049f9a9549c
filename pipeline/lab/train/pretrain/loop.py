"""`cairn pretrain` from end to end: texts, tokens, rows, steps, log, checkpoints.

    texts ─▶ tokens ─▶ rows, some held out ─▶ steps of the one trainer ─▶ model/ and best/

A run killed at any moment goes on from its newest checkpoint, and on one thread ends with the same bytes as
if nothing had happened. A folder belongs to one run: other settings, texts or base are refused.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.checkpoints import RunFolder, held_folder
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, LandmarkEncoder
from cairn.pipeline.lab.train.new_weights import new_checkpoint
from cairn.pipeline.lab.train.pretrain.decoder import EnhancedDecoder
from cairn.pipeline.lab.train.pretrain.masking import vocabulary_of
from cairn.pipeline.lab.train.pretrain.objectives import PretrainHeads
from cairn.pipeline.lab.train.pretrain.settings import PretrainConfig
from cairn.pipeline.lab.train.pretrain.stream import TokenStream
from cairn.pipeline.lab.train.pretrain.task import PretrainTask
from cairn.pipeline.lab.train.pretrain.texts import Texts, read_texts
from cairn.pipeline.lab.train.processes import ALONE, Processes, first_before_others
from cairn.pipeline.lab.train.run_claim import claim_folder
from cairn.pipeline.lab.train.settings import require_within
from cairn.pipeline.lab.train.trainer import Steps, Trainer
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER, OWN_PREFIXES
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.types import ProgressListener, silent_progress

SERVED_INTERVAL = 64
"""Landmark interval of the saved folder, ingest's own default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainReport:
    """What a run did; rates and ``seconds`` count the steps of this process alone.

    ``best_loss`` is of held-out rows; losses are None where nothing was held out, or no step was left to
    make.
    """

    folder: str
    texts: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens: int
    rows: int
    parameters: int
    steps: int
    resumed_at: int
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    best_step: int
    seconds: float
    tokens_per_second: float


def pretrain(
    sources: Sequence[Path],
    folder: Path,
    config: PretrainConfig,
    *,
    base: str,
    from_config: Path | None = None,
    stop_after_seconds: float | None = None,
    processes: Processes = ALONE,
    progress: ProgressListener = silent_progress,
) -> PretrainReport:
    """Pretrain ``base`` on the texts of ``sources``, or new weights that ``from_config`` describes.

    That is a config.json; new weights have the base's tokenizer. After ``stop_after_seconds`` a checkpoint is
    written and :class:`TryAgainError` raised: the same call goes on.
    """
    device, started = processes.device, time.monotonic()
    if not sources:
        raise SourceError("pretraining must have texts, got none; name Parquet or JSON-lines files")
    # Resolved before it is written down: a run must not go on in another arithmetic.
    config = replace(
        config, precision="bf16" if resolve_precision(config.precision, device) == torch.bfloat16 else "fp32"
    )
    checkpoint = _base(base, from_config, config)
    model = LandmarkEncoder(checkpoint)
    for name in OWN_NAMES:
        model.get_parameter(name).requires_grad_(False)
    _check_fit(config, checkpoint, model)
    vocabulary = vocabulary_of(checkpoint)
    texts = read_texts(sources)
    stream = TokenStream(texts, checkpoint, config, progress)
    model.objective = heads = _heads(model, stream, config)
    made_of = {"base": checkpoint.fingerprint, "texts": texts.fingerprint}
    with contextlib.nullcontext() if processes.rank else held_folder(folder):
        with first_before_others(processes):
            claim_folder(folder, config, made_of, texts.skipped)
        files = RunFolder(folder, checkpoint, _served_settings(config))
        task = PretrainTask(
            files=files,
            model=model.to(device),
            heads=heads,
            stream=stream,
            vocabulary=vocabulary,
            config=config,
            processes=processes,
        )
        trainer = Trainer(
            files=files,
            model=model,
            task=task,
            config=config,
            stops_at_seconds=math.inf if stop_after_seconds is None else started + stop_after_seconds,
            processes=processes,
            progress=progress,
            saves_changes=False,
        )
        return _report(task, texts, trainer.run())


def _report(task: PretrainTask, texts: Texts, steps: Steps) -> PretrainReport:
    return PretrainReport(
        folder=str(task.files.folder),
        texts=len(texts.texts),
        skipped=texts.skipped,
        tokens=task.stream.num_tokens,
        rows=task.stream.num_rows,
        parameters=sum(tensor.numel() for tensor in task.model.published_tensors().values()),
        steps=task.config.steps,
        resumed_at=steps.resumed_at,
        first_loss=steps.first_loss,
        last_loss=steps.last_loss,
        best_loss=-steps.state.best_score if task.stream.heldout else None,
        best_step=steps.state.best_step,
        seconds=steps.seconds,
        tokens_per_second=steps.counts["num_tokens"] / steps.seconds,
    )


def _base(base: str, from_config: Path | None, config: PretrainConfig) -> Checkpoint:
    """Return what training begins with; its configuration says which exits are trained."""
    checkpoint = read_checkpoint(model_folder(base))
    if from_config is not None:
        checkpoint = new_checkpoint(read_json(from_config), checkpoint, seed=config.seed)
    own: dict[str, Any] = {
        name: list(getattr(config, name))
        for name in ("matryoshka_layers", "matryoshka_dims")
        if getattr(config, name)
    }
    return replace(checkpoint, config={**checkpoint.config, **own})


def _check_fit(config: PretrainConfig, checkpoint: Checkpoint, model: LandmarkEncoder) -> None:
    require_within("matryoshka_dims", config.matryoshka_dims, model.model_dim)
    require_within("matryoshka_layers", config.matryoshka_layers, model.num_layers)
    if config.matryoshka_layers and config.matryoshka_layers[-1] != model.num_layers:
        raise ConfigError(
            f"matryoshka_layers must end with the model's last layer {model.num_layers}, got "
            f"{list(config.matryoshka_layers)}"
        )
    if config.max_tokens > model.max_positions:
        raise ConfigError(
            f"max_tokens must be at most the model's {model.max_positions} positions, got {config.max_tokens}"
        )
    if checkpoint.steps or any(
        name.startswith((LANDMARK_MIXER, *OWN_PREFIXES)) for name in checkpoint.tensors
    ):
        raise ModelError(
            "pretraining must start from a transformer without dense layers, gates, a latent attention and a "
            "landmark mixer, whose parts would no longer fit; choose another base"
        )


def _heads(model: LandmarkEncoder, stream: TokenStream, config: PretrainConfig) -> PretrainHeads:
    """Return the bias, begun at the logarithm of the words' frequency, and RetroMAE's decoder."""
    counts_V = stream.word_counts(len(model.token_table)) + 1.0
    bias_V = torch.from_numpy(np.log(counts_V / counts_V.sum()).astype(np.float32))
    decoder = None
    if config.objective == "retromae":
        generator = torch.Generator().manual_seed(config.seed)
        decoder = EnhancedDecoder(
            model.model_dim, model.num_heads, config.max_tokens, generator, model.position_table
        )
    return PretrainHeads(bias_V, decoder)


def _served_settings(config: PretrainConfig) -> EncoderConfig:
    """Return the encoder settings that the saved folder brings to an ingest: as its rows were read."""
    if not config.landmark_intervals:
        return EncoderConfig(pooling="mean", attention="chunk")
    return EncoderConfig(pooling="lmk", attention="full", landmark_interval=SERVED_INTERVAL)
