"""One step: a batch's rows and context through both stages, its loss, its gradient.

    units ─▶ rows ─▶ M2 ─▶ chunk embeddings ─▶ text vectors at each width and layer ─▶ InfoNCE ─┐
    context ─▶ M1 ───┘ (wholly or partly the null token)                                        ├─▶ loss
                    vectors of the base, or of another teacher ─▶ distillation ─────────────────┤
                    token vectors of the same pass ─▶ late interaction, where it is asked for ──┘

Everything drawn at random is drawn from the seed and the number of the step, so that a step is the same
after a kill, in micro-batches of any size and in any number of processes. Which context vectors give way to
the null token is drawn for each query and each sequence of documents.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.grad_cache import (
    Embedded,
    FirstStage,
    SecondStage,
    cached_backward,
    gather_each,
)
from cairn.pipeline.lab.train.heldout import mean_by_text
from cairn.pipeline.lab.train.joint_late import batch_late_loss, own_states, project_tokens
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.late.head import TokenHead
from cairn.pipeline.lab.train.low_rank import dropped_inputs
from cairn.pipeline.lab.train.mining import NONE_FOUND
from cairn.pipeline.lab.train.objectives.candidate_ranking import candidate_ranking_loss
from cairn.pipeline.lab.train.objectives.contrastive import FalseNegatives, contrastive_loss
from cairn.pipeline.lab.train.objectives.distillation import distillation_loss
from cairn.pipeline.lab.train.objectives.matryoshka import over_widths
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.processes import ALONE, Processes
from cairn.pipeline.lab.train.sequence_dropout import draw_dropped
from cairn.pipeline.lab.train.sequences import SequenceBatch, SequenceMaker, split_rows
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.surrogate import PairVectors
from cairn.pipeline.lab.train.trainer import Report
from cairn.pipeline.model.landmarks import draw_intervals
from jaxtyping import Bool, Float32, Int64

DISTILLED_TOGETHER = 512
"""Vectors whose similarity matrix is one block of the distillation: 1 MiB, whatever the batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """What steps draw on: texts by position of their pair, surrogate vectors, mined negatives.

    Equal documents share a number. ``taught`` are the vectors of a teacher other than the base, of the width
    of the model's; ``scores_NK`` are a cross-encoder's of each pair's document and hard negatives. ``idf_X``
    weighs token ids in the teacher's late interaction, None without any.
    ``pool_of_pair`` are the documents of each pair's source, where contexts are drawn from sources.
    """

    maker: SequenceMaker
    vectors: PairVectors
    document_number_N: Int64[np.ndarray, " NM"]
    hard_negatives_Nk: Int64[np.ndarray, "N k"]
    taught: PairVectors | None = None
    scores_NK: Float32[np.ndarray, "N K"] | None = None
    idf_X: Float32[torch.Tensor, " X"] | None = None
    pool_of_pair: Sequence[Int64[np.ndarray, " _"]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport(Report):
    """What a step made of its batch; ``late_loss`` is the part of token vectors, without its weight."""

    num_queries: int
    num_documents: int
    num_chunks: int
    num_tokens: int
    num_context: int
    late_loss: float | None = None


def train_step(
    model: LandmarkEncoder,
    teacher: LandmarkEncoder | None,
    data: TrainingData,
    units: Sequence[Sequence[int]],
    step: int,
    config: TrainConfig,
    processes: Processes = ALONE,
) -> StepReport:
    """Add a batch's gradient to the model, clipped.

    The optimiser's step is the caller's, once it has seen that the loss is finite. Several ``processes``
    share the batch's micro-batches and end with the same gradient.
    """
    generator = np.random.default_rng([config.seed, 1, step])
    batch, context = draw_batch(data, units, generator, config, model.max_positions)
    processes.require_same(_digest(batch, context), f"batch of step {step + 1}")
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
    teacher_BD = teacher_TD1 = None
    if teacher is not None:
        teacher_BD, teacher_TD1 = _teach(teacher, parts, config, processes)
    late_losses: list[float] = []

    def loss_of(embedded: Embedded) -> torch.Tensor:
        loss = batch_loss(embedded[0], batch, data, teacher_BD, config, model.model_dim)
        if model.head is None:
            return loss
        late = _late_loss(model.head, embedded[1], teacher_TD1, batch, data, config)
        late_losses.append(late.item())
        return loss + config.late_weight * late

    with dropped_inputs(model, config.lora_dropout, seed):
        loss = cached_backward(first, second, loss_of, processes, 1 if model.head is None else 2)
    processes.add_up_gradients(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
    return StepReport(
        loss=float(loss),
        gradient_norm=float(norm),
        num_queries=len(batch.pair_Q),
        num_documents=len(batch.pair_D),
        num_chunks=len(batch.rows),
        num_tokens=len(batch.rows.ids_N),
        num_context=0 if context is None else len(context),
        late_loss=late_losses[0] if late_losses else None,
    )


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

    loss = over_widths(loss_of_width, config.matryoshka_dims or (model_dim,))
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


def _autocast(model: LandmarkEncoder, config: TrainConfig) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16, enabled=config.precision == "bf16")


def _first_stage(model: LandmarkEncoder, rows: PackedRows, config: TrainConfig) -> FirstStage:
    def embed() -> torch.Tensor:
        with _autocast(model, config):
            return model.embed_documents(rows).float()

    return embed


def _second_stage(
    model: LandmarkEncoder,
    rows: PackedRows,
    dropped_WC: Bool[torch.Tensor, "W C"] | None,
    config: TrainConfig,
) -> SecondStage:
    def embed(context_CD: torch.Tensor | None) -> Embedded:
        with _autocast(model, config):
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
    teacher: LandmarkEncoder, parts: Sequence[PackedRows], config: TrainConfig, processes: Processes
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the base's embeddings of a batch's rows and, for late interaction, the states of its tokens."""
    taught: dict[int, Embedded] = {}
    for number in processes.share(len(parts)):
        with _autocast(teacher, config):
            embeddings_BD, states_ND = teacher.read_alone(parts[number])
        embedded = F.normalize(embeddings_BD.float(), dim=1)
        taught[number] = (
            (embedded, own_states(states_ND, parts[number])) if config.late_weight else (embedded,)
        )
    gathered = gather_each(taught, len(parts), 2 if config.late_weight else 1, processes)
    embedded_BD, *states = map(torch.cat, gathered)
    return embedded_BD, states[0] if states else None
