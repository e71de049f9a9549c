"""`cairn train` from end to end: data, batches, steps, log, checkpoints.

    pairs, sections of documents ─▶ without judged texts ─▶ without held-out pairs
      ─▶ units ─▶ surrogate ─▶ clusters ─▶ batches ─▶ steps

A run killed at any moment goes on from its newest checkpoint, and on one thread ends with the same bytes as
if nothing had happened. A folder belongs to one run: other settings, data, base or dev sets are refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64

from pipeline.config import BASE_MODEL, ContextConfig, EncoderConfig
from pipeline.encode.cross_encoder import CrossEncoderReranker
from pipeline.errors import (
    ConfigError,
    ModelError,
    SourceError,
)
from pipeline.manifest import fingerprint
from pipeline.model.backbone_loader import load_backbone
from pipeline.model.engine.backbone import Backbone
from pipeline.model.engine.precision import resolve_precision
from pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from pipeline.model.folders.model_defaults import encoder_config
from pipeline.model.folders.names import model_folder
from pipeline.model.folders.own_tensors import LANDMARK_MIXER as MIXER_PREFIX
from pipeline.poolings import PREFIX_POOLINGS
from pipeline.train.batch_plan import BatchPlan, require_batch
from pipeline.train.candidate_scores import candidate_scores
from pipeline.train.checkpoints import RunFolder, held_folder
from pipeline.train.documents import Ask, like_headed, read_document_pairs
from pipeline.train.heldout import choose_heldout
from pipeline.train.joint_late import begin_head
from pipeline.train.landmark_encoder import LandmarkEncoder
from pipeline.train.latent_block import add_latent_block
from pipeline.train.leakage import without_judged
from pipeline.train.low_rank import add_low_rank
from pipeline.train.mining import NONE_FOUND, mine_hard_negatives
from pipeline.train.pair_task import SERVED_INTERVAL, PairTask, TrainReport
from pipeline.train.pairs import Candidates, TrainingPairs, join_pairs, read_pairs, text_numbers
from pipeline.train.processes import ALONE, Processes, first_before_others
from pipeline.train.query_writer import QueryWriter, QueryWriterConfig
from pipeline.train.run_claim import claim_folder
from pipeline.train.sequences import SequenceMaker
from pipeline.train.settings import TrainConfig, require_within
from pipeline.train.step import TrainingData
from pipeline.train.surrogate import (
    PairVectors,
    embed_pairs,
    kept_vectors,
    pairs_fingerprint,
    vectors_key,
)
from pipeline.train.teacher import Teacher, fitted_positions, laid_onto
from pipeline.train.trainer import Trainer
from pipeline.types import ModelScorer, ProgressListener, silent_progress

logger = logging.getLogger(__name__)


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
    device, started = processes.device, time.monotonic()
    checkpoint = read_checkpoint(model_folder(base))
    model, base_teacher = _models(checkpoint, config)
    if config.late_weight and config.late_dims > model.model_dim:
        raise ConfigError(
            f"late_dims must be at most the base model's {model.model_dim}, got {config.late_dims}"
        )
    # Resolved before it is written down: a run must not go on in another arithmetic.
    config = replace(
        config, precision="bf16" if resolve_precision(config.precision, device) == torch.bfloat16 else "fp32"
    )
    served = _served_settings(config, encoder_config({"model": base}))
    _check_fit(config, checkpoint, model)
    with first_before_others(processes):
        writer = _writer(query_writer, documents, folder)
        read = _read(sources, documents, config, None if writer is None else writer.write)
        if writer is not None:
            writer.finish()
    pairs = without_judged(read, judged, progress)
    heldout = choose_heldout(pairs, config.heldout_pairs)
    require_batch(len(pairs) - len(heldout), config)
    dev_sets = None if scorer is None else scorer.fingerprint
    teacher = None if config.teacher is None else Teacher.named(config.teacher)
    score_teacher = None if config.score_teacher is None else CrossEncoderReranker(config.score_teacher)
    made_of = {
        "base": checkpoint.fingerprint,
        "pairs": pairs_fingerprint(pairs),
        "dev sets": dev_sets,
        "teacher": None if teacher is None else teacher.encoder.fingerprint,
        "score teacher": None if score_teacher is None else score_teacher.fingerprint,
    }
    with contextlib.nullcontext() if processes.rank else held_folder(folder):
        with first_before_others(processes):
            claim_folder(folder, config, made_of, pairs.skipped)
            data = _prepare(pairs, heldout, folder, config, served, checkpoint, teacher, progress)
            if score_teacher is not None:
                data = replace(data, scores_NK=_scored(score_teacher, pairs, heldout, folder, data, progress))
            if config.late_weight:
                model.head, idf_X = begin_head(pairs, heldout, base, config)
                data = replace(data, idf_X=idf_X)
        files = RunFolder(
            folder,
            checkpoint,
            served,
            late_bits=config.late_bits,
            context=_served_context(config),
        )
        task = PairTask(
            files=files,
            model=model.to(device),
            teacher=None if base_teacher is None else base_teacher.to(device),
            data=data,
            heldout=heldout,
            pairs=pairs,
            plan=BatchPlan(pairs, heldout, data.vectors, config),
            config=config,
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
    sources: Sequence[Path], documents: Sequence[Path], config: TrainConfig, writer: Ask | None
) -> TrainingPairs:
    if not sources and not documents:
        raise SourceError(
            "training must have pairs or documents, got neither; name files of pairs, or give --documents"
        )
    parts = (
        [
            read_pairs(
                sources,
                class_negatives=config.class_negatives,
                min_score=config.min_score,
                seed=config.seed,
            )
        ]
        if sources
        else []
    )
    if documents:
        parts.append(read_document_pairs(documents, config.max_document_tokens, writer))
    return join_pairs(parts)


def _check_fit(config: TrainConfig, checkpoint: Checkpoint, model: LandmarkEncoder) -> None:
    require_within("matryoshka_dims", config.matryoshka_dims, model.model_dim)
    require_within("matryoshka_layers", config.matryoshka_layers, model.num_layers)
    if config.matryoshka_layers and config.matryoshka_layers[-1] != model.num_layers:
        raise ModelError(
            f"matryoshka_layers must end with the base model's last layer {model.num_layers}, got "
            f"{list(config.matryoshka_layers)}"
        )
    has_mixer = any(name.startswith(MIXER_PREFIX) for name in checkpoint.tensors)
    if checkpoint.steps or checkpoint.cls_id is None or has_mixer:
        raise ModelError(
            "training must start from a transformer with [CLS], and without dense layers and a landmark "
            f"mixer, got another; choose another base, such as {BASE_MODEL}"
        )


def _served_settings(config: TrainConfig, base: EncoderConfig) -> EncoderConfig:
    """Return the encoder settings that the saved folder brings to an ingest; prefixes are the base's or set.

    As in training, and with the name of the base.
    """
    return EncoderConfig(
        model=base.model,
        query_prefix=base.query_prefix if config.query_prefix is None else config.query_prefix,
        document_prefix=base.document_prefix if config.document_prefix is None else config.document_prefix,
        pool_prefix=base.pool_prefix and config.pooling in PREFIX_POOLINGS,
        pooling=config.pooling,
        attention=config.attention,
        landmark_interval=SERVED_INTERVAL,
        use_context=config.reads_context,
    )


def _served_context(config: TrainConfig) -> ContextConfig | None:
    if not config.reads_context:
        return None
    return ContextConfig(
        context_documents=config.context_documents, max_document_tokens=config.max_context_tokens
    )


def _prepare(
    pairs: TrainingPairs,
    heldout: Int64[np.ndarray, " n"],
    folder: Path,
    config: TrainConfig,
    served: EncoderConfig,
    checkpoint: Checkpoint,
    teacher: Teacher | None,
    progress: ProgressListener,
) -> TrainingData:
    """Embed the pairs with the surrogate, whose vectors stay in the folder, and find hard negatives."""
    maker = SequenceMaker(
        checkpoint,
        pairs,
        pooling=config.pooling,
        max_query_tokens=config.max_query_tokens,
        max_document_tokens=config.max_document_tokens,
        query_prefix=served.query_prefix,
        document_prefix=served.document_prefix,
        pool_prefix=served.pool_prefix,
    )
    backbone = load_backbone(EncoderConfig(model=served.model))
    maker.require_room(backbone.max_positions)
    key = vectors_key(config.surrogate, checkpoint.fingerprint, pairs)

    def embed() -> PairVectors:
        return embed_pairs(pairs, backbone, config.surrogate, progress)

    vectors = kept_vectors(folder / "surrogate.safetensors", key, len(pairs), embed)
    candidates = Candidates.of(pairs)
    document_number_N = text_numbers(candidates.texts)
    return TrainingData(
        maker=maker,
        vectors=vectors,
        document_number_N=document_number_N,
        hard_negatives_Nk=_negatives(
            pairs, heldout, vectors, candidates, document_number_N, config, progress
        ),
        taught=None if teacher is None else _taught(pairs, folder, teacher, backbone, progress),
        pool_of_pair=_pools(pairs, heldout) if config.context_from == "source" else None,
    )


def _scored(
    teacher: CrossEncoderReranker,
    pairs: TrainingPairs,
    heldout: Int64[np.ndarray, " n"],
    folder: Path,
    data: TrainingData,
    progress: ProgressListener,
) -> Float32[np.ndarray, "N K"]:
    """Score each query's candidates with a cross-encoder; no pair with a negative raises."""
    own_Nk = data.hard_negatives_Nk
    if not (np.delete(own_Nk, heldout, axis=0) != NONE_FOUND).any():
        raise SourceError(
            "pairs must have negatives that score_teacher ranks with their documents, got none; mine some "
            "with --hard-negatives, or give a column negatives"
        )
    texts = Candidates.of(pairs).texts
    return candidate_scores(
        folder / "scores.safetensors", teacher, pairs.queries, texts, own_Nk, heldout, progress
    )


def _negatives(
    pairs: TrainingPairs,
    heldout: Int64[np.ndarray, " n"],
    vectors: PairVectors,
    candidates: Candidates,
    document_number_N: Int64[np.ndarray, " NM"],
    config: TrainConfig,
    progress: ProgressListener,
) -> Int64[np.ndarray, "N k"]:
    """Return the places of each pair's own negatives: those that it brings, else mined ones; none held out.

    Raise :class:`SourceError` where queries are ranked against them alone and no pair has any.
    """
    given_Nk = candidates.given_Nk.copy()
    is_held_out = np.isin(document_number_N, document_number_N[heldout])
    given_Nk[is_held_out[given_Nk] & (given_Nk != NONE_FOUND)] = NONE_FOUND
    mined_Nk = np.zeros((len(pairs), 0), np.int64)
    if config.hard_negatives:
        progress("mining", 0, len(pairs), "pairs")
        mined_Nk = mine_hard_negatives(
            vectors.query_NV,
            vectors.document_NV[: len(pairs)],
            pairs.documents,
            pairs.sources,
            num_negatives=config.hard_negatives,
            max_share=config.hard_negative_share,
            margin=config.hard_negative_margin,
            left_out=heldout,
        )
        mined_Nk[(given_Nk != NONE_FOUND).any(1)] = NONE_FOUND
    own_Nk = np.concatenate([mined_Nk, given_Nk, like_headed(pairs, heldout)], axis=1)
    num_without = int((own_Nk == NONE_FOUND).all(1).sum())
    if config.only_own_negatives and num_without == len(pairs):
        raise SourceError(
            "pairs must have negatives where a query is ranked against its own alone, got none; give a "
            "column negatives or hard_negatives, or leave negatives at batch"
        )
    if config.only_own_negatives and num_without:
        logger.warning("%d of %d pairs have no negatives and teach nothing", num_without, len(pairs))
    return own_Nk


def _pools(pairs: TrainingPairs, heldout: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " _"]]:
    """Return for each pair the pairs of its source with different documents, held-out ones left out."""
    left_out = set(heldout.tolist())
    first: dict[str, dict[str, int]] = {source: {} for source in pairs.sources}
    for position, (source, document) in enumerate(zip(pairs.sources, pairs.documents, strict=True)):
        if position not in left_out:
            first[source].setdefault(document, position)
    pools = {source: np.array(list(own.values()), np.int64) for source, own in first.items()}
    return [pools[source] for source in pairs.sources]


def _taught(
    pairs: TrainingPairs, folder: Path, teacher: Teacher, backbone: Backbone, progress: ProgressListener
) -> PairVectors:
    """Embed the pairs with the teacher; its vectors stay in the run's folder."""

    def embed() -> PairVectors:
        fitted = pairs.take(fitted_positions(len(pairs)).tolist(), "not fitted")
        return laid_onto(teacher.embed(pairs, progress), embed_pairs(fitted, backbone, "encoder", progress))

    key = fingerprint(
        teacher=teacher.encoder.fingerprint,
        base=backbone.weights_fingerprint,
        pairs=pairs_fingerprint(pairs),
    )
    return kept_vectors(folder / "teacher.safetensors", key, len(pairs), embed)
