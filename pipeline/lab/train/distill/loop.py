"""`cairn distill` from end to end: texts, rows, the teacher's vectors, steps, log, checkpoints.

    texts ─▶ rows, some held out ─▶ (vectors of a teacher that differs) ─▶ steps ─▶ model/, best/

A run killed at any moment goes on from its newest checkpoint, and on one thread ends with the same bytes as
if nothing had happened. A folder belongs to one run: other settings, texts, teacher or student are refused.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.checkpoints import RunFolder, held_folder
from cairn.pipeline.lab.train.distill.rows import num_left_out, text_row
from cairn.pipeline.lab.train.distill.settings import DistillConfig
from cairn.pipeline.lab.train.distill.task import DistillTask
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, LandmarkEncoder
from cairn.pipeline.lab.train.objectives.hidden_states import spread_layers
from cairn.pipeline.lab.train.pretrain.texts import read_texts
from cairn.pipeline.lab.train.processes import ALONE, Processes, first_before_others
from cairn.pipeline.lab.train.run_claim import claim_folder
from cairn.pipeline.lab.train.surrogate import PairVectors, embed_texts, kept_vectors
from cairn.pipeline.lab.train.teacher import Teacher, fitted_positions, laid_onto
from cairn.pipeline.lab.train.trainer import Steps, Trainer
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config, trained_context
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32, Int64

MIN_TEXTS = 10
HELDOUT_PART = 10
"""Of few texts no more than one in so many is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillReport:
    """What a run did; ``best_cosine`` is of held-out texts.

    Losses are None where no step was left to make.
    """

    folder: str
    texts: int
    heldout_texts: int
    follows: str
    steps: int
    resumed_at: int
    first_loss: float | None
    last_loss: float | None
    best_cosine: float | None
    best_step: int
    seconds: float
    tokens_per_second: float


def distill(
    teacher: str,
    student: str,
    sources: Sequence[Path],
    folder: Path,
    config: DistillConfig,
    *,
    stop_after_seconds: float | None = None,
    processes: Processes = ALONE,
    progress: ProgressListener = silent_progress,
) -> DistillReport:
    """Train ``student`` to follow ``teacher`` on the texts of ``sources``; leave the run in ``folder``.

    After ``stop_after_seconds`` a checkpoint is written and :class:`TryAgainError` raised: the same call goes
    on.
    """
    device, started = processes.device, time.monotonic()
    # Resolved before it is written down: a run must not go on in another arithmetic.
    config = replace(
        config, precision="bf16" if resolve_precision(config.precision, device) == torch.bfloat16 else "fp32"
    )
    checkpoint, settings = read_checkpoint(model_folder(student)), encoder_config({"model": student})
    taught_by, taught_as = read_checkpoint(model_folder(teacher)), encoder_config({"model": teacher})
    _require_student(checkpoint, settings)
    compares = _compare(taught_by, taught_as, checkpoint, settings)
    model, guide = _models(checkpoint, taught_by if compares else None)
    state_weight = _state_weight(config, guide)
    layers = _layers(config, model, guide if state_weight else None)
    read = read_texts(sources)
    texts = read.texts
    num_heldout = _num_heldout(texts, config)
    _require_positions(config, model, guide)
    _require_room(config, checkpoint, settings)
    made_of = {
        "student": _served(checkpoint, settings),
        "teacher": _served(taught_by, taught_as),
        "texts": read.fingerprint,
    }
    with contextlib.nullcontext() if processes.rank else held_folder(folder):
        taught_ND = None
        with first_before_others(processes):
            claim_folder(folder, config, made_of, read.skipped)
            if guide is None:
                taught_ND = _taught(texts, teacher, student, folder, made_of, progress)
        task = DistillTask(
            files=RunFolder(folder, checkpoint, settings, context=trained_context(student)),
            model=model.to(device),
            teacher=None if guide is None else guide.to(device),
            taught_ND=taught_ND,
            layers=layers,
            state_weight=state_weight,
            rows=_rows(texts, checkpoint, settings, config),
            first_pooled=num_left_out(checkpoint, settings),
            num_heldout=num_heldout,
            config=config,
            processes=processes,
        )
        stops_at = math.inf if stop_after_seconds is None else started + stop_after_seconds
        steps = _run(task, stops_at, progress)
    return _report(folder, config, task, steps)


def _models(
    student: Checkpoint, teacher: Checkpoint | None
) -> tuple[LandmarkEncoder, LandmarkEncoder | None]:
    """Return the student, whose gates and null token stay as they are, and the teacher."""
    model = LandmarkEncoder(student)
    for name in OWN_NAMES:
        model.get_parameter(name).requires_grad_(False)
    return model, None if teacher is None else LandmarkEncoder(teacher).requires_grad_(False)


def _rows(
    texts: Sequence[str], checkpoint: Checkpoint, settings: EncoderConfig, config: DistillConfig
) -> list[Int64[np.ndarray, " _"]]:
    prefix = settings.document_prefix
    return [text_row(text, checkpoint, max_tokens=config.max_tokens, prefix=prefix) for text in texts]


def _run(task: DistillTask, stops_at_seconds: float, progress: ProgressListener) -> Steps:
    trainer = Trainer(
        files=task.files,
        model=task.model,
        task=task,
        config=task.config,
        stops_at_seconds=stops_at_seconds,
        processes=task.processes,
        progress=progress,
    )
    return trainer.run()


def _report(folder: Path, config: DistillConfig, task: DistillTask, steps: Steps) -> DistillReport:
    follows = "both" if config.vector_weight else "hidden states"
    return DistillReport(
        folder=str(folder),
        texts=len(task.rows),
        heldout_texts=task.num_heldout,
        follows=follows if task.state_weight else "vectors",
        steps=config.steps,
        resumed_at=steps.resumed_at,
        first_loss=steps.first_loss,
        last_loss=steps.last_loss,
        best_cosine=steps.state.best_score if task.num_heldout else None,
        best_step=steps.state.best_step,
        seconds=steps.seconds,
        tokens_per_second=steps.counts["num_tokens"] / steps.seconds,
    )


def _compare(
    teacher: Checkpoint, teacher_settings: EncoderConfig, student: Checkpoint, student_settings: EncoderConfig
) -> bool:
    """Say whether both read the same tokens, with states of one width and vectors that are their mean."""
    prefixes = [
        (each.document_prefix, bool(each.document_prefix) and each.pool_prefix)
        for each in (teacher_settings, student_settings)
    ]
    is_mean = teacher_settings.pooling == "mean" and not teacher_settings.causal
    if not is_mean or not _is_plain(teacher) or prefixes[0] != prefixes[1]:
        return False
    special = [(each.cls_id, each.landmark_id) for each in (teacher, student)]
    vocabularies = [each.tokenizer.get_vocab(with_added_tokens=True) for each in (teacher, student)]
    widths = [each.integer("hidden_size", "n_embd") for each in (teacher, student)]
    return special[0] == special[1] and vocabularies[0] == vocabularies[1] and widths[0] == widths[1]


def _require_student(checkpoint: Checkpoint, settings: EncoderConfig) -> None:
    if not _is_plain(checkpoint):
        raise ModelError(
            "a student must be a transformer of one stage without dense layers and a landmark mixer, got "
            "another; distill its base"
        )
    if settings.pooling != "mean" or settings.causal:
        raise ModelError(
            "a student must pool the mean of all tokens without a causal mask, got pooling "
            f"{settings.pooling}{' with a causal mask' if settings.causal else ''}; choose another"
        )


def _is_plain(checkpoint: Checkpoint) -> bool:
    """Say whether nothing comes before, behind or beside the transformer: no CDE, dense layers or mixer."""
    has_mixer = any(name.startswith(LANDMARK_MIXER) for name in checkpoint.tensors)
    return not (checkpoint.steps or has_mixer or is_cde(checkpoint.config))


def _served(checkpoint: Checkpoint, settings: EncoderConfig) -> str:
    """Identify a model and how its folder has it pooled."""
    return fingerprint(
        model=checkpoint.fingerprint,
        pooling=settings.pooling,
        causal=settings.causal,
        document_prefix=settings.document_prefix,
        pool_prefix=settings.pool_prefix,
    )


def _state_weight(config: DistillConfig, guide: LandmarkEncoder | None) -> float:
    if guide is None and config.state_weight:
        raise ConfigError(
            "state_weight must be 0 with a teacher of another tokenizer, width, prefix or pooling, whose "
            f"hidden states do not compare, got {config.state_weight:g}; leave it out to follow its vectors "
            "alone"
        )
    if guide is None and not config.vector_weight:
        raise ConfigError(
            "vector_weight must be above 0 with a teacher of another tokenizer, width, prefix or pooling, "
            "got 0; leave it out"
        )
    return (0.0 if guide is None else 1.0) if config.state_weight is None else config.state_weight


def _layers(config: DistillConfig, model: LandmarkEncoder, guide: LandmarkEncoder | None) -> tuple[int, ...]:
    """Return the teacher's layer that each of the student's follows, () where only vectors are followed."""
    if guide is None and config.teacher_layers:
        raise ConfigError(
            "teacher_layers must go with hidden states that are followed, got a run that follows vectors "
            "alone; leave them out"
        )
    if guide is None:
        return ()
    layers = config.teacher_layers or spread_layers(model.num_layers, guide.num_layers)
    if len(layers) != model.num_layers or not all(1 <= layer <= guide.num_layers for layer in layers):
        raise ConfigError(
            f"teacher_layers must be one of the teacher's {guide.num_layers} layers for each of the "
            f"student's {model.num_layers}, got {list(layers)}"
        )
    return layers


def _num_heldout(texts: Sequence[str], config: DistillConfig) -> int:
    if len(texts) < MIN_TEXTS:
        raise SourceError(
            f"distillation must have at least {MIN_TEXTS} different texts, got {len(texts)}; give more"
        )
    return min(config.heldout_texts, len(texts) // HELDOUT_PART)


def _require_positions(config: DistillConfig, model: LandmarkEncoder, guide: LandmarkEncoder | None) -> None:
    most = min(each.max_positions for each in (model, guide) if each is not None)
    if config.max_tokens > most:
        raise ConfigError(f"max_tokens must be at most the models' {most} positions, got {config.max_tokens}")


def _require_room(config: DistillConfig, checkpoint: Checkpoint, settings: EncoderConfig) -> None:
    """Require one token of a text beside prefix, [CLS] and [LMK]."""
    least = 3 + len(Prefix.of(settings.document_prefix, checkpoint.tokenizer).ids)
    if config.max_tokens < least:
        raise ConfigError(
            f"max_tokens must be at least {least} with the student's document prefix, got "
            f"{config.max_tokens}; raise it"
        )


def _taught(
    texts: Sequence[str],
    teacher: str,
    student: str,
    folder: Path,
    made_of: dict[str, str],
    progress: ProgressListener,
) -> Float32[np.ndarray, "texts D"]:
    """Embed the texts with a teacher whose states do not compare; its vectors stay in the run's folder."""

    def embed() -> PairVectors:
        guide = Teacher.named(teacher)
        taught_NE = embed_texts(
            lambda some: guide.encoder.encode(some).document_vectors_NV, texts, "teacher", progress
        )
        base = Teacher.named(student)
        fitted = set(fitted_positions(len(texts)).tolist())
        own_ND = embed_texts(
            lambda some: base.encoder.encode(some).document_vectors_NV,
            [text for place, text in enumerate(texts) if place in fitted],
            "student",
            progress,
        )
        # Texts alone: both sides of a pair are the same.
        return laid_onto(
            PairVectors(document_NV=taught_NE, query_NV=taught_NE, fingerprint=made_of["teacher"]),
            PairVectors(document_NV=own_ND, query_NV=own_ND, fingerprint=made_of["student"]),
        )

    return kept_vectors(folder / "teacher.safetensors", fingerprint(**made_of), len(texts), embed).document_NV
