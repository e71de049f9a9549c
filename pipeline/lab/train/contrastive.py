"""`cairn train`: fine-tune an encoder on pairs, for landmarks and for the corpus's context.

    pairs, sections of documents ─▶ without judged texts ─▶ without held-out pairs
      ─▶ units ─▶ surrogate ─▶ clusters ─▶ batches ─▶ steps of the one trainer

    units ─▶ rows ─▶ M2 ─▶ chunk embeddings ─▶ text vectors at each width and layer ─▶ InfoNCE ─┐
    context ─▶ M1 ───┘ (wholly or partly the null token)                                        ├─▶ loss
                    vectors of the base, or of another teacher ─▶ distillation ─────────────────┤
                    token vectors of the same pass ─▶ late interaction, where it is asked for ──┘

A step is the same after a kill, in micro-batches of any size and in any number of processes. Which context
vectors give way to the null token is drawn for each query and each sequence of documents. Which model is the
best is said by the dev sets where there are any, else by the held-out pairs.

Widths and layers are Matryoshka's: Kusupati et al. 2022, and m³BERT §2.1 for layers; all weigh alike.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import BASE_MODEL, ContextConfig, EncoderConfig
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.adapters import add_latent_block, add_low_rank, dropped_inputs
from cairn.pipeline.lab.train.batches import BatchPlan, require_batch
from cairn.pipeline.lab.train.documents import read_document_pairs
from cairn.pipeline.lab.train.grad_cache import (
    Embedded,
    FirstStage,
    SecondStage,
    cached_backward,
    gather_each,
)
from cairn.pipeline.lab.train.heldout import choose_heldout, mean_by_text, score_heldout
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder, autocast
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.losses import (
    FalseNegatives,
    candidate_ranking_loss,
    contrastive_loss,
    distillation_loss,
)
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pair_data import PairData, TrainingData
from cairn.pipeline.lab.train.pair_vectors import NONE_FOUND, Teacher
from cairn.pipeline.lab.train.pairs import TrainingPairs, join_pairs, read_pairs
from cairn.pipeline.lab.train.processes import ALONE, Processes, first_before_others
from cairn.pipeline.lab.train.query_writer import QueryWriter
from cairn.pipeline.lab.train.sequence_dropout import draw_dropped
from cairn.pipeline.lab.train.sequences import SequenceBatch, split_rows
from cairn.pipeline.lab.train.settings import QueryWriterConfig, TrainConfig, require_within
from cairn.pipeline.lab.train.token_head import (
    TokenHead,
    batch_late_loss,
    begin_head,
    own_states,
    project_tokens,
)
from cairn.pipeline.lab.train.trainer import Batch, Score, Trainer, claimed_folder, deadline_in, resolved
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import GATE_NAMES
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER as MIXER_PREFIX
from cairn.pipeline.model.landmarks import draw_intervals
from cairn.pipeline.poolings import PREFIX_POOLINGS, pooling_rule
from cairn.pipeline.types import ModelScorer, ProgressListener, silent_progress
from jaxtyping import Bool, Float32, Int64

DISTILLED_TOGETHER = 512
"""Vectors whose similarity matrix is one block of the distillation: 1 MiB, whatever the batch."""


def pair_batch(
    model: LandmarkEncoder,
    teacher: LandmarkEncoder | None,
    data: TrainingData,
    units: Sequence[Sequence[int]],
    step: int,
    config: TrainConfig,
    processes: Processes = ALONE,
) -> Batch:
    """Lay out the units of a step.

    The report says how far the gates are open, and the loss of token vectors without its weight.
    """
    generator = np.random.default_rng([config.seed, 1, step])
    batch, context = draw_batch(data, units, generator, config, model.max_positions)
    seed = int(generator.integers(2**62))
    parts = _micro_batches(batch.rows, config, processes)
    first = [
        _first_stage(model, part, config)
        for part in (() if context is None else _micro_batches(context, config, processes))
    ]
    dropped_WC = None
    if context is not None and config.context_dropout:
        num_windows, draws = int(batch.rows.windows_B.max()) + 1, torch.Generator().manual_seed(seed)
        dropped_WC = draw_dropped(num_windows, len(context), config.context_dropout, draws)
    second = [_second_stage(model, part, dropped_WC, config) for part in parts]
    report: dict[str, float | None] = {
        "num_queries": len(batch.pair_Q),
        "num_documents": len(batch.pair_D),
        "num_chunks": len(batch.rows),
        "num_tokens": len(batch.rows.ids_N),
        "num_context": 0 if context is None else len(context),
        "late_loss": None,
    }

    def backward(processes: Processes) -> torch.Tensor:
        teacher_BD, teacher_TD1 = _teach(teacher, parts, config, processes)

        def loss_of(embedded: Embedded) -> torch.Tensor:
            loss = batch_loss(embedded[0], batch, data, teacher_BD, config, model.model_dim)
            if model.head is None:
                return loss
            late = _late_loss(model.head, embedded[1], teacher_TD1, batch, data, config)
            report["late_loss"] = late.item()
            return loss + config.late_weight * late

        with dropped_inputs(model, config.lora_dropout, seed):
            return cached_backward(first, second, loss_of, processes, 1 if model.head is None else 2)

    def say() -> Mapping[str, float | None]:
        gates, context_gates = (float(model.get_parameter(name).detach().mean()) for name in GATE_NAMES)
        return {**report, "mean_gate": gates, "mean_context_gate": context_gates}

    return Batch(backward=backward, report=say, digest=_digest(batch, context))


def draw_batch(
    data: TrainingData,
    units: Sequence[Sequence[int]],
    generator: np.random.Generator,
    config: TrainConfig,
    max_positions: int,
) -> tuple[SequenceBatch, PackedRows | None]:
    """Lay out a batch with the intervals, titles, hard negatives and context that the generator draws.

    None without a context.
    """
    longest = max_positions - 2 - data.maker.prefix_tokens
    intervals_U = np.minimum(draw_intervals(len(units), generator, config.landmark_intervals), longest)
    has_title_U = generator.random(len(units)) < config.title_share
    has_context = config.reads_context and generator.random() >= config.context_absence
    positions = np.array([position for unit in units for position in unit])
    mined = data.hard_negatives_Nk[positions].ravel()
    negatives = list(dict.fromkeys(mined[mined != NONE_FOUND].tolist()))
    negative_interval = min(int(draw_intervals(1, generator, config.landmark_intervals)[0]), longest)
    batch = data.maker.make(units, intervals_U, has_title_U, negatives, negative_interval)
    context = None
    if has_context:
        candidates = _context_candidates(data, batch)
        drawn = generator.permutation(candidates)[: config.context_documents]
        if len(drawn):
            context = data.maker.context(drawn.tolist(), min(config.max_context_tokens, max_positions))
    return batch, context


def _context_candidates(data: TrainingData, batch: SequenceBatch) -> Int64[np.ndarray, " n"]:
    """Return pairs whose documents may be the context: those of the batch, or all of its one source.

    None for a batch of what several sources left over: it is of no corpus.
    """
    if data.pool_of_pair is None:
        return batch.pair_D[np.unique(data.document_number_N[batch.pair_D], return_index=True)[1]]
    pools = {id(data.pool_of_pair[pair]): data.pool_of_pair[pair] for pair in batch.pair_Q.tolist()}
    return next(iter(pools.values())) if len(pools) == 1 else np.zeros(0, np.int64)


def _micro_batches(rows: PackedRows, config: TrainConfig, processes: Processes) -> tuple[PackedRows, ...]:
    """Cut rows so that they fit the memory, and that every process has some of them."""
    return split_rows(rows, min(config.micro_batch_tokens, -(-len(rows.ids_N) // processes.size)))


def _digest(batch: SequenceBatch, context: PackedRows | None) -> int:
    """Identify what a step computes with."""
    digest = zlib.crc32(batch.rows.ids_N.tobytes(), zlib.crc32(batch.positive_Q.tobytes()))
    return digest if context is None else zlib.crc32(context.ids_N.tobytes(), digest)


def batch_loss(
    embeddings_BE: Float32[torch.Tensor, "B E"],
    batch: SequenceBatch,
    data: TrainingData,
    teacher_BD: Float32[torch.Tensor, "B D"] | None,
    config: TrainConfig,
    model_dim: int,
) -> Float32[torch.Tensor, ""]:
    """Return the loss of a batch's chunk embeddings.

    InfoNCE over layers and widths, and the distillation of the last layer: its chunks towards the base's, or
    its texts towards another teacher's.
    """
    device, num_queries = embeddings_BE.device, len(batch.pair_Q)
    positive_Q = torch.from_numpy(batch.positive_Q).to(device)
    false_negatives = _false_negatives(batch, data, config, device)
    layers = embeddings_BE.split(model_dim, dim=1)

    def loss_of_width(dim: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for layer_BD in layers:
            texts = mean_by_text(layer_BD[:, :dim], batch.text_B, num_queries + len(batch.pair_D))
            losses.append(
                contrastive_loss(
                    texts[:num_queries],
                    texts[num_queries:],
                    positive_Q,
                    false_negatives,
                    temperature=config.temperature,
                )
            )
        return torch.stack(losses).mean()

    loss = torch.stack([loss_of_width(dim) for dim in config.matryoshka_dims or (model_dim,)]).mean()
    if teacher_BD is not None and data.taught is None and config.distillation_weight:
        loss = loss + config.distillation_weight * _distillation(layers[-1], teacher_BD, config)
    if data.scores_NK is None and data.taught is None:
        return loss
    texts = mean_by_text(layers[-1], batch.text_B, num_queries + len(batch.pair_D))
    if data.scores_NK is not None:
        own_Qk = own_negatives(batch, data.hard_negatives_Nk[batch.pair_Q])
        places_QK = np.concatenate([batch.positive_Q[:, None], own_Qk], axis=1)
        loss = loss + config.score_weight * candidate_ranking_loss(
            texts[:num_queries],
            texts[num_queries:],
            torch.from_numpy(places_QK).to(device),
            torch.from_numpy(data.scores_NK[batch.pair_Q]).to(device),
            temperature=config.temperature,
        )
    if data.taught is not None:
        taught = np.concatenate([data.taught.query_NV[batch.pair_Q], data.taught.document_NV[batch.pair_D]])
        taught_ND = torch.from_numpy(taught).to(device)
        loss = loss + config.distillation_weight * _distillation(texts, taught_ND, config)
    return loss


def own_negatives(batch: SequenceBatch, mined_Qk: Int64[np.ndarray, "Q k"]) -> Int64[np.ndarray, "Q k"]:
    """Return where in the batch the negatives chosen for each query stand, :data:`NONE_FOUND` for none."""
    place_of = {pair: place for place, pair in enumerate(batch.pair_D.tolist())} | {NONE_FOUND: NONE_FOUND}
    places = [place_of[pair] for pair in mined_Qk.ravel().tolist()]
    return np.array(places, np.int64).reshape(mined_Qk.shape)


def _false_negatives(
    batch: SequenceBatch, data: TrainingData, config: TrainConfig, device: torch.device
) -> FalseNegatives:
    own_Qk = None
    if config.only_own_negatives:
        own_Qk = torch.from_numpy(own_negatives(batch, data.hard_negatives_Nk[batch.pair_Q])).to(device)
    return FalseNegatives(
        query_QS=torch.from_numpy(data.vectors.query_NV[batch.pair_Q]).to(device),
        document_NS=torch.from_numpy(data.vectors.document_NV[batch.pair_D]).to(device),
        text_number_N=torch.from_numpy(data.document_number_N[batch.pair_D]).to(device),
        margin=-math.inf if config.only_own_negatives else config.margin,
        own_Qk=own_Qk,
    )


def _late_loss(
    head: TokenHead,
    token_TV1: torch.Tensor,
    teacher_TD1: torch.Tensor | None,
    batch: SequenceBatch,
    data: TrainingData,
    config: TrainConfig,
) -> Float32[torch.Tensor, ""]:
    assert teacher_TD1 is not None, "late interaction follows the base's token states"
    assert data.idf_X is not None, "and weighs them by the idf of their tokens"
    loss, document_tV = batch_late_loss(
        token_TV1,
        teacher_TD1,
        data.idf_X,
        batch,
        data.hard_negatives_Nk[batch.pair_Q],
        _false_negatives(batch, data, config, token_TV1.device),
        config.late_distillation_weight,
    )
    head.observe(document_tV)
    return loss


def _distillation(student_ND: torch.Tensor, teacher_ND: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    """Return the loss of distillation, block by block, whatever the batch."""
    pieces = zip(student_ND.split(DISTILLED_TOGETHER), teacher_ND.split(DISTILLED_TOGETHER), strict=True)
    distilled = [
        len(student)
        / len(teacher_ND)
        * distillation_loss(student, teacher, temperature=config.distillation_temperature)
        for student, teacher in pieces
    ]
    return torch.stack(distilled).sum()


def _first_stage(model: LandmarkEncoder, rows: PackedRows, config: TrainConfig) -> FirstStage:
    def embed() -> torch.Tensor:
        with autocast(model, config):
            return model.embed_documents(rows).float()

    return embed


def _second_stage(
    model: LandmarkEncoder,
    rows: PackedRows,
    dropped_WC: Bool[torch.Tensor, "W C"] | None,
    config: TrainConfig,
) -> SecondStage:
    def embed(context_CD: torch.Tensor | None) -> Embedded:
        with autocast(model, config):
            embeddings_BE, states_ND = model.read(
                rows,
                context_CD,
                config.matryoshka_layers or None,
                landmarks=config.attention == "landmark",
                dropped_BC=None if dropped_WC is None else dropped_WC[torch.from_numpy(rows.windows_B)],
            )
        if model.head is None:
            return (embeddings_BE.float(),)
        return embeddings_BE.float(), project_tokens(model.head, states_ND, rows)

    return embed


@torch.no_grad()
def _teach(
    teacher: LandmarkEncoder | None, parts: Sequence[PackedRows], config: TrainConfig, processes: Processes
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the base's embeddings of a batch's rows and, for late interaction, the states of its tokens."""
    if teacher is None:
        return None, None
    taught: dict[int, Embedded] = {}
    for number in processes.share(len(parts)):
        with autocast(teacher, config):
            embeddings_BD, states_ND = teacher.read_alone(parts[number])
        embedded = F.normalize(embeddings_BD.float(), dim=1)
        taught[number] = (
            (embedded, own_states(states_ND, parts[number])) if config.late_weight else (embedded,)
        )
    gathered = gather_each(taught, len(parts), 2 if config.late_weight else 1, processes)
    embedded_BD, *states = map(torch.cat, gathered)
    return embedded_BD, states[0] if states else None


SERVED_INTERVAL: Final = 64
"""Ingest's own default of tokens between landmarks."""


def served_interval(intervals: Sequence[int], longest: int) -> int:
    """Return the interval that held-out pairs are scored with and the saved folder brings along.

    Ingest's own default, or what was trained that is nearest to it, at most the ``longest`` a row has room
    for.
    """
    return min(max(SERVED_INTERVAL, min(intervals)), max(intervals), longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a run did; rates and ``seconds`` count the steps of this process alone.

    ``judged_by`` says what the best score is of, and nothing leaves that and its step None. Losses are None
    where no step was left to make.
    """

    folder: str
    pairs: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    heldout_pairs: int
    steps: int
    resumed_at: int
    first_loss: float | None
    last_loss: float | None
    judged_by: str
    best_score: float | None
    best_step: int | None
    seconds: float
    pairs_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PairObjective:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Objective` for pairs."""

    model: LandmarkEncoder
    teacher: LandmarkEncoder | None
    data: TrainingData
    heldout: Int64[np.ndarray, " n"]
    pairs: TrainingPairs
    plan: BatchPlan
    config: TrainConfig
    folder: EncoderFolder
    processes: Processes

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`."""
        units = self.plan.at(step)
        return pair_batch(self.model, self.teacher, self.data, units, step, self.config, self.processes)

    def score(self) -> Score | None:
        """See :class:`Objective`: queries of held-out pairs find their documents."""
        if not len(self.heldout):
            return None
        scores = score_heldout(
            self.model,
            self.data.maker,
            self.heldout.tolist(),
            self.pairs.documents,
            interval=self.folder.settings.landmark_interval,
            max_tokens=self.config.micro_batch_tokens,
            context=self._served_context(),
            landmarks=self.config.attention == "landmark",
        )
        return Score(measures=scores, value=scores["heldout_ndcg_at_10"])

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        self.folder.save(folder, self.model)

    def _served_context(self) -> PackedRows | None:
        """Lay out a context as a collection of all sources would draw it, the same one for every score."""
        config = self.config
        if not config.reads_context:
            return None
        _, first_n = np.unique(self.data.document_number_N, return_index=True)
        training = np.setdiff1d(first_n, self.heldout)
        drawn = np.random.default_rng([config.seed, 2]).permutation(training)[: config.context_documents]
        return self.data.maker.context(
            drawn.tolist(), min(config.max_context_tokens, self.model.max_positions)
        )


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
    deadline = deadline_in(stop_after_seconds)
    checkpoint = read_checkpoint(model_folder(base))
    config = resolved(config, processes)
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
    prints = {**made_of.fingerprints, "dev sets": None if scorer is None else scorer.fingerprint}
    with claimed_folder(folder, config, prints, pairs.skipped, processes):
        with first_before_others(processes):
            data = made_of.prepare(folder, progress)
            if config.late_weight:
                model.head, idf_X = begin_head(pairs, heldout, base, config)
                data = replace(data, idf_X=idf_X)
        longest = model.max_positions - 2 - data.maker.prefix_tokens
        interval = served_interval(config.landmark_intervals, longest)
        objective = PairObjective(
            model=model.to(processes.device),
            teacher=None if base_teacher is None else base_teacher.to(processes.device),
            data=data,
            heldout=heldout,
            pairs=pairs,
            plan=BatchPlan(pairs, heldout, data.vectors, config),
            config=config,
            folder=EncoderFolder(
                base=checkpoint,
                settings=replace(served, landmark_interval=interval),
                late_bits=config.late_bits,
                context=_served_context(config),
            ),
            processes=processes,
        )
        steps = Trainer(
            objective=objective,
            config=config,
            folder=folder,
            scorer=scorer,
            dev_every=config.dev_every,
            deadline=deadline,
            processes=processes,
            progress=progress,
        ).run()
        if not processes.rank:
            objective.folder.save_changes(folder, model)
    return TrainReport(
        folder=str(folder),
        pairs=len(pairs),
        skipped=pairs.skipped,
        heldout_pairs=len(heldout),
        steps=config.steps,
        resumed_at=steps.resumed_at,
        first_loss=steps.first_loss,
        last_loss=steps.last_loss,
        judged_by="dev sets" if scorer is not None else "held-out pairs" if len(heldout) else "nothing",
        best_score=steps.state.best_score,
        best_step=None if steps.state.best_score is None else steps.state.best_step,
        seconds=steps.seconds,
        pairs_per_second=steps.counts["num_queries"] / steps.seconds,
        tokens_per_second=steps.counts["num_tokens"] / steps.seconds,
    )


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


def _read(
    sources: Sequence[Path],
    documents: Sequence[Path],
    config: TrainConfig,
    query_writer: QueryWriterConfig | None,
    folder: Path,
) -> TrainingPairs:
    writer = None
    if query_writer is not None and query_writer.query_writer is not None:
        if not documents:
            raise ConfigError("query_writer must go with documents, got none; name them with --documents")
        writer = QueryWriter(query_writer, folder)
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
