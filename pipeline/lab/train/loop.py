"""`cairn train` from end to end: data, batches, steps, log, checkpoints.

    pairs, sections of documents ─▶ without judged texts ─▶ without held-out pairs
      ─▶ units ─▶ surrogate ─▶ clusters ─▶ batches ─▶ steps

A run killed at any moment goes on from its newest checkpoint, and on one thread ends with the same bytes as
if nothing had happened. A folder belongs to one run: other settings, data, base or dev sets are refused.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cairn.pipeline.config import BASE_MODEL, ContextConfig, EncoderConfig
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.batch_plan import BatchPlan, require_batch
from cairn.pipeline.lab.train.checkpoints import RunFolder, held_folder
from cairn.pipeline.lab.train.documents import read_document_pairs
from cairn.pipeline.lab.train.heldout import choose_heldout
from cairn.pipeline.lab.train.joint_late import begin_head
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.latent_block import add_latent_block
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.low_rank import add_low_rank
from cairn.pipeline.lab.train.pair_data import PairData
from cairn.pipeline.lab.train.pair_task import PairTask, TrainReport, served_interval
from cairn.pipeline.lab.train.pairs import TrainingPairs, join_pairs, read_pairs
from cairn.pipeline.lab.train.processes import ALONE, Processes, first_before_others
from cairn.pipeline.lab.train.query_writer import QueryWriter, QueryWriterConfig
from cairn.pipeline.lab.train.run_claim import claim_folder
from cairn.pipeline.lab.train.settings import TrainConfig, require_within
from cairn.pipeline.lab.train.teacher import Teacher
from cairn.pipeline.lab.train.trainer import Trainer
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER as MIXER_PREFIX
from cairn.pipeline.poolings import PREFIX_POOLINGS, pooling_rule
from cairn.pipeline.types import ModelScorer, ProgressListener, silent_progress


def train(
    sources: Sequence[Path],
    folder: Path,
    config: TrainConfig,
    *,
    base: str,
    documents: Sequence[Path] = (),
    query_writer: QueryWriterConfig | None = None,
    judged: Sequence[Path] = (),
    scorer: ModelScorer | None = None,
    stop_after_seconds: float | None = None,
    processes: Processes = ALONE,
    progress: ProgressListener = silent_progress,
) -> TrainReport:
    """Train ``base`` on pairs of ``sources`` and pairs made of ``documents``; leave the run in ``folder``.

    A ``query_writer`` with an address writes the queries of ``documents``.
    ``judged`` evaluation sets are kept out of the data. A ``scorer`` says which of the models that are saved
    on the way is the best; without one the held-out pairs do. Several ``processes`` make the steps of one;
    they see the same files, and the first of them writes. After ``stop_after_seconds`` a checkpoint is
    written and :class:`TryAgainError` raised: the same call goes on.
    """
    started = time.monotonic()
    checkpoint = read_checkpoint(model_folder(base))
    config = _resolved(config, processes)
    model, base_teacher = _models(checkpoint, config)
    served = _served_settings(config, encoder_config({"model": base}))
    _check_fit(config, checkpoint, model)
    with first_before_others(processes):
        read = _read(sources, documents, config, query_writer, folder)
    pairs = without_judged(read, judged, progress)
    heldout = choose_heldout(pairs, config.heldout_pairs)
    require_batch(len(pairs) - len(heldout), config)
    made_of = PairData(
        pairs=pairs,
        heldout=heldout,
        checkpoint=checkpoint,
        served=served,
        config=config,
        teacher=None if config.teacher is None else Teacher.named(config.teacher),
        score_teacher=None if config.score_teacher is None else CrossEncoderReranker(config.score_teacher),
    )
    made_of.require_negatives()
    dev_sets = {"dev sets": None if scorer is None else scorer.fingerprint}
    with contextlib.nullcontext() if processes.rank else held_folder(folder):
        with first_before_others(processes):
            claim_folder(folder, config, {**made_of.fingerprints, **dev_sets}, pairs.skipped)
            data = made_of.prepare(folder, progress)
            if config.late_weight:
                model.head, idf_X = begin_head(pairs, heldout, base, config)
                data = replace(data, idf_X=idf_X)
        longest = model.max_positions - 2 - data.maker.prefix_tokens
        interval = served_interval(config.landmark_intervals, longest)
        files = RunFolder(
            folder,
            checkpoint,
            replace(served, landmark_interval=interval),
            late_bits=config.late_bits,
            context=_served_context(config),
        )
        task = PairTask(
            files=files,
            model=model.to(processes.device),
            teacher=None if base_teacher is None else base_teacher.to(processes.device),
            data=data,
            heldout=heldout,
            pairs=pairs,
            plan=BatchPlan(pairs, heldout, data.vectors, config),
            config=config,
            interval=interval,
            scorer=scorer,
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
        )
        return task.report(trainer.run())


def _resolved(config: TrainConfig, processes: Processes) -> TrainConfig:
    """Say which precision auto is before it is written down: a run must not go on in another arithmetic."""
    dtype = resolve_precision(config.precision, processes.device)
    return replace(config, precision="bf16" if dtype == torch.bfloat16 else "fp32")


def _models(checkpoint: Checkpoint, config: TrainConfig) -> tuple[LandmarkEncoder, LandmarkEncoder | None]:
    """Return the model that is trained, and the base as its teacher where it follows that one."""
    model = LandmarkEncoder(
        checkpoint,
        initial_gate=config.initial_gate,
        context_size=config.context_documents if config.reads_context else None,
        first_stage_layers=config.first_stage_layers,
        shares_embeddings=config.freeze_embeddings or config.lora_rank > 0,
        null_token=config.reads_context and config.context_dropout > 0,
    )
    follows_base = bool(config.late_weight) or (config.distillation_weight > 0 and config.teacher is None)
    teacher = LandmarkEncoder(checkpoint) if follows_base else None
    if config.pooling == "latent":
        for each in (model, teacher):
            if each is not None:
                add_latent_block(each, checkpoint, num_latents=config.latents, seed=config.seed)
    if config.freeze_embeddings:
        model.freeze_embeddings()
    if config.lora_rank:
        add_low_rank(model, config)
    return model, None if teacher is None else teacher.requires_grad_(False)


def _writer(config: QueryWriterConfig | None, documents: Sequence[Path], folder: Path) -> QueryWriter | None:
    if config is None or config.query_writer is None:
        return None
    if not documents:
        raise ConfigError("query_writer must go with documents, got none; name them with --documents")
    return QueryWriter(config, folder)


def _read(
    sources: Sequence[Path],
    documents: Sequence[Path],
    config: TrainConfig,
    query_writer: QueryWriterConfig | None,
    folder: Path,
) -> TrainingPairs:
    writer = _writer(query_writer, documents, folder)
    if not sources and not documents:
        raise SourceError(
            "training must have pairs or documents, got neither; name files of pairs, or give --documents"
        )
    parts: list[TrainingPairs] = []
    if sources:
        parts.append(
            read_pairs(
                sources,
                class_negatives=config.class_negatives,
                min_score=config.min_score,
                seed=config.seed,
            )
        )
    if documents:
        write = None if writer is None else writer.write
        parts.append(read_document_pairs(documents, config.max_document_tokens, write))
    if writer is not None:
        writer.finish()
    return join_pairs(parts)


def _check_fit(config: TrainConfig, checkpoint: Checkpoint, model: LandmarkEncoder) -> None:
    if config.late_weight and config.late_dims > model.model_dim:
        raise ConfigError(
            f"late_dims must be at most the base model's {model.model_dim}, got {config.late_dims}"
        )
    require_within("matryoshka_dims", config.matryoshka_dims, model.model_dim)
    require_within("matryoshka_layers", config.matryoshka_layers, model.num_layers)
    if config.matryoshka_layers and config.matryoshka_layers[-1] != model.num_layers:
        raise ModelError(
            f"matryoshka_layers must end with the base model's last layer {model.num_layers}, got "
            f"{list(config.matryoshka_layers)}"
        )
    if pooling_rule(config.pooling).needs_cls and checkpoint.cls_id is None:
        raise ConfigError(
            f"pooling {config.pooling} must go with a base model that has [CLS] or BOS, got one without; "
            "choose mean or lmk"
        )
    has_mixer = any(name.startswith(MIXER_PREFIX) for name in checkpoint.tensors)
    if checkpoint.steps or has_mixer:
        raise ModelError(
            "training must start from a transformer without dense layers and a landmark mixer, got another; "
            f"choose another base, such as {BASE_MODEL}"
        )


def _served_settings(config: TrainConfig, base: EncoderConfig) -> EncoderConfig:
    """Return the encoder settings that the saved folder brings to an ingest; prefixes are the base's or set.

    As in training, and with the name of the base.
    """
    return EncoderConfig(
        model=base.model,
        query_prefix=base.query_prefix if config.query_prefix is None else config.query_prefix,
        document_prefix=base.document_prefix if config.document_prefix is None else config.document_prefix,
        pool_prefix=base.pool_prefix and config.attention != "full" and config.pooling in PREFIX_POOLINGS,
        pooling=config.pooling,
        attention=config.attention,
        use_context=config.reads_context,
    )


def _served_context(config: TrainConfig) -> ContextConfig | None:
    if not config.reads_context:
        return None
    return ContextConfig(
        context_documents=config.context_documents, max_document_tokens=config.max_context_tokens
    )
