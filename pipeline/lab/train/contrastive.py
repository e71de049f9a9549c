"""`cairn train`: fine-tune an encoder on pairs, for landmarks and for the corpus's context.

    pairs, sections of documents ─▶ without judged texts ─▶ without held-out pairs
      ─▶ units ─▶ vectors of the base ─▶ clusters ─▶ batches ─▶ steps of the one trainer

    units ─▶ rows ─▶ M2 ─▶ chunk embeddings ─▶ text vectors at each width and layer ─▶ InfoNCE ─┐
    context ─▶ M1 ───┘ (wholly or partly the null token)                                        ├─▶ loss
                    the base's embeddings of the same chunks ─▶ distillation ───────────────────┘

A step is the same after a kill and in micro-batches of any size. Which context vectors give way to the null
token is drawn for each query and each sequence of documents. Which model is the best is said by the dev sets
where there are any, else by the held-out pairs.

Widths and layers are Matryoshka's: Kusupati et al. 2022, and m³BERT §2.1 for layers; all weigh alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import BASE_MODEL, EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.batches import BatchPlan, mean_cosine, require_batch
from cairn.pipeline.lab.train.distill import is_plain
from cairn.pipeline.lab.train.documents import read_document_pairs
from cairn.pipeline.lab.train.gradients import Embedded, FirstStage, cached_backward
from cairn.pipeline.lab.train.heldout import choose_heldout, mean_by_text, score_heldout
from cairn.pipeline.lab.train.landmark_encoder import (
    EncoderFolder,
    LandmarkEncoder,
    add_latent_block,
    autocast,
    resolved,
)
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.losses import FalseNegatives, contrastive_loss, distillation_loss
from cairn.pipeline.lab.train.packed_rows import alone, split
from cairn.pipeline.lab.train.pair_data import (
    NONE_FOUND,
    TrainingData,
    pairs_fingerprint,
    prepared,
    require_negatives,
)
from cairn.pipeline.lab.train.pairs import TrainingPairs, join_pairs, read_pairs
from cairn.pipeline.lab.train.sequences import SequenceBatch, in_order_of_content
from cairn.pipeline.lab.train.settings import TrainConfig, require_exits
from cairn.pipeline.lab.train.trainer import RunReport, Score, Trainer, TrainingBatch, claimed_folder
from cairn.pipeline.model.engine.precision import default_device
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.landmarks import Rows, draw_intervals
from cairn.pipeline.poolings import PREFIX_POOLINGS, pooling_rule
from cairn.pipeline.types import ModelScorer, ProgressListener, silent_progress
from jaxtyping import Float32, Int64

RANKING_TEMPERATURE: Final = 0.05
"""Of a chunk's ranking of the others, by which the student follows the base."""

DISTILLED_TOGETHER = 512
"""Vectors whose similarity matrix is one block of the distillation: 1 MiB, whatever the batch."""


def pair_batch(
    model: LandmarkEncoder,
    teacher: LandmarkEncoder | None,
    data: TrainingData,
    units: Sequence[Sequence[int]],
    step: int,
    config: TrainConfig,
    *,
    teaches_rows: bool = False,
) -> TrainingBatch:
    """Lay out the units of a step; a teacher reads each chunk alone, or rows as the model does."""
    generator = np.random.default_rng([config.seed, 1, step])
    batch, context = draw_batch(data, units, generator, config, model.max_positions)
    seed = int(generator.integers(2**62))
    parts = split(batch.rows, config.micro_batch_tokens)

    def embed_context(rows: Rows) -> torch.Tensor:
        with autocast(model, config):
            return model.embed_documents(rows).float()

    def embed_texts(rows: Rows, own_BC: torch.Tensor | None, context_CD: torch.Tensor | None) -> Embedded:
        with autocast(model, config):
            return (model(rows, context_CD, config.matryoshka_layers or None, own_BC).float(),)

    first, dropped_BC = list[FirstStage](), None
    if context is not None:
        first = [partial(embed_context, part) for part in split(context, config.micro_batch_tokens)]
        if config.context_dropout:
            draws = torch.Generator().manual_seed(seed)
            drawn_BC = torch.rand(len(batch.rows), len(context), generator=draws)
            dropped_BC = drawn_BC < config.context_dropout
    dropped = [None] * len(parts) if dropped_BC is None else dropped_BC.split([len(part) for part in parts])
    second = [partial(embed_texts, part, own) for part, own in zip(parts, dropped, strict=True)]
    report = {
        "num_queries": len(batch.pair_Q),
        "num_documents": len(batch.pair_D),
        "num_chunks": len(batch.text_B),
        "num_tokens": len(batch.rows.ids),
        "num_context": 0 if context is None else len(context),
        "batch_cosine": mean_cosine(data.vectors.document_NV[batch.pair_D]),
    }

    def backward() -> torch.Tensor:
        read = parts if teaches_rows else [alone(part, has_cls=model.has_cls) for part in parts]
        teacher_BD = None
        if teacher is not None:
            with torch.no_grad(), autocast(teacher, config):
                teacher_BD = torch.cat([F.normalize(teacher(part).float(), dim=1) for part in read])

        def loss_of(embedded: Embedded) -> torch.Tensor:
            return batch_loss(embedded[0], batch, data, teacher_BD, config, model.model_dim)

        return cached_backward(first, second, loss_of)

    return TrainingBatch(backward=backward, report=lambda: report)


def draw_batch(
    data: TrainingData,
    units: Sequence[Sequence[int]],
    generator: np.random.Generator,
    config: TrainConfig,
    max_positions: int,
) -> tuple[SequenceBatch, Rows | None]:
    """Lay out a batch with the intervals, titles, hard negatives and context, if any, that are drawn."""
    longest = data.maker.longest_chunk(max_positions)
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
        most = min(config.context_documents, len(candidates))
        if most:
            drawn = generator.permutation(candidates)[: generator.integers(1, most + 1)]
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


def batch_loss(
    embeddings_BE: Float32[torch.Tensor, "B E"],
    batch: SequenceBatch,
    data: TrainingData,
    teacher_BD: Float32[torch.Tensor, "B D"] | None,
    config: TrainConfig,
    model_dim: int,
) -> Float32[torch.Tensor, ""]:
    """Return InfoNCE over layers and widths, and the distillation of the last layer's chunks."""
    device, num_queries = embeddings_BE.device, len(batch.pair_Q)
    positive_Q = torch.from_numpy(batch.positive_Q).to(device)
    false_negatives = _false_negatives(batch, data, config, device)
    layers = embeddings_BE.split(model_dim, dim=1)

    exits = [
        mean_by_text(layer_BD[:, :dim], batch.text_B, num_queries + len(batch.pair_D))
        for dim in config.matryoshka_dims or (model_dim,)
        for layer_BD in layers
    ]
    losses = [
        contrastive_loss(
            texts[:num_queries],
            texts[num_queries:],
            positive_Q,
            false_negatives,
            temperature=config.temperature,
        )
        for texts in exits
    ]
    loss = torch.stack(losses).mean()
    if teacher_BD is None:
        return loss
    return loss + config.distillation_weight * _distillation(layers[-1], teacher_BD)


def _false_negatives(
    batch: SequenceBatch, data: TrainingData, config: TrainConfig, device: torch.device
) -> FalseNegatives:
    own_Qk = None
    if config.negatives == "own":
        place_of = {pair: place for place, pair in enumerate(batch.pair_D.tolist())}
        places = [
            [place_of.get(pair, NONE_FOUND) for pair in pairs]
            for pairs in data.hard_negatives_Nk[batch.pair_Q].tolist()
        ]
        own_Qk = torch.tensor(places, dtype=torch.int64, device=device)
    return FalseNegatives(
        query_QS=torch.from_numpy(data.vectors.query_NV[batch.pair_Q]).to(device),
        document_NS=torch.from_numpy(data.vectors.document_NV[batch.pair_D]).to(device),
        text_number_N=torch.from_numpy(data.document_number_N[batch.pair_D]).to(device),
        margin=config.margin if own_Qk is None else -math.inf,
        own_Qk=own_Qk,
    )


def _distillation(student_ND: torch.Tensor, teacher_ND: torch.Tensor) -> torch.Tensor:
    """Return the loss of distillation, block by block, whatever the batch."""
    blocks = zip(student_ND.split(DISTILLED_TOGETHER), teacher_ND.split(DISTILLED_TOGETHER), strict=True)
    losses = [
        len(student) / len(teacher_ND) * distillation_loss(student, teacher, temperature=RANKING_TEMPERATURE)
        for student, teacher in blocks
    ]
    return torch.stack(losses).sum()


SERVED_INTERVAL: Final = 64
"""Ingest's own default of tokens between landmarks."""


def served_interval(intervals: Sequence[int], longest: int) -> int:
    """Return what is scored and saved: ingest's interval or the nearest trained, at most ``longest``."""
    return min(max(SERVED_INTERVAL, min(intervals)), max(intervals), longest)


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
    random_cosine: float
    teaches_rows: bool

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`Objective`."""
        units = self.plan.at(step)
        batch = pair_batch(
            self.model, self.teacher, self.data, units, step, self.config, teaches_rows=self.teaches_rows
        )
        return replace(batch, report=lambda: {**batch.report(), "random_cosine": self.random_cosine})

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
        )
        return Score(measures=scores, value=scores["heldout_ndcg_at_10"])

    def _served_context(self) -> Rows | None:
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
    judged: Sequence[Path] = (),
    scorer: ModelScorer | None = None,
    deadline: float = math.inf,
    say: Callable[[str], object] = lambda _: None,
    progress: ProgressListener = silent_progress,
) -> RunReport:
    """Train ``base`` on pairs of ``sources`` and pairs made of ``documents``; leave the run in ``folder``.

    ``judged`` evaluation sets are kept out of the data. A ``scorer`` says which of the models that are saved
    on the way is the best; without one the held-out pairs do. ``say`` is told before the first step how hard
    the batches are: the mean cosine of their documents beside that of random batches.
    """
    checkpoint = read_checkpoint(model_folder(base))
    config = resolved(config)
    model, base_teacher = _models(checkpoint, config)
    of_base = encoder_config({"model": base})
    served = _served_settings(config, of_base, model.max_positions)
    _check_fit(config, checkpoint, model)
    pairs = in_order_of_content(without_judged(_read(sources, documents, config), judged, progress))
    heldout = choose_heldout(pairs, config.heldout_pairs)
    require_batch(len(pairs) - len(heldout), config)
    require_negatives(pairs, config)
    made_of = {
        "base": checkpoint.fingerprint,
        "pairs": pairs_fingerprint(pairs),
        "dev sets": None if scorer is None else scorer.fingerprint,
    }
    device = default_device()
    with claimed_folder(folder, config, made_of, pairs.skipped):
        data = prepared(pairs, heldout, checkpoint, served, config, folder, progress)
        longest = data.maker.longest_chunk(model.max_positions)
        interval = served_interval(config.landmark_intervals, longest)
        plan = BatchPlan(pairs, heldout, data.vectors, config)
        batch_cosine, random_cosine = plan.cosines()
        say(f"mean cosine of a batch's documents {batch_cosine:.3f}, of random batches {random_cosine:.3f}")
        objective = PairObjective(
            model=model.to(device),
            teacher=None if base_teacher is None else base_teacher.to(device),
            data=data,
            heldout=heldout,
            pairs=pairs,
            plan=plan,
            config=config,
            folder=EncoderFolder(
                base=checkpoint,
                settings=replace(served, landmark_interval=interval),
                context=config.context,
            ),
            random_cosine=random_cosine,
            # What a base pools as it will be served says more of a chunk than its mean of the chunk alone.
            teaches_rows=(of_base.pooling, of_base.attention) == (config.pooling, config.attention),
        )
        report = Trainer(
            objective=objective,
            config=config,
            folder=folder,
            scorer=scorer,
            dev_every=config.dev_every,
            deadline=deadline,
            progress=progress,
        ).run()
        objective.folder.save_changes(folder, model)
    judged_by = "dev sets" if scorer is not None else "held-out pairs" if len(heldout) else "nothing"
    details: dict[str, float | str | None] = {
        "pairs": len(pairs),
        "heldout_pairs": len(heldout),
        "judged_by": judged_by,
        "batch_cosine": batch_cosine,
        "random_cosine": random_cosine,
        "pairs_per_second": report.rate("num_queries"),
        "tokens_per_second": report.rate("num_tokens"),
    }
    return replace(report, skipped=pairs.skipped, details=details)


def _models(checkpoint: Checkpoint, config: TrainConfig) -> tuple[LandmarkEncoder, LandmarkEncoder | None]:
    """Return the model that is trained, and the base as its teacher where it follows that one."""
    model = LandmarkEncoder(
        checkpoint,
        first_stage_layers=config.first_stage_layers,
        shares_embeddings=config.freeze_embeddings,
        null_token=config.reads_context and config.context_dropout > 0,
    )
    teacher = LandmarkEncoder(checkpoint) if config.distillation_weight else None
    if config.pooling == "latent":
        for each in (model, teacher):
            if each is not None:
                add_latent_block(each, checkpoint, num_latents=config.latents, seed=config.seed)
    if config.freeze_embeddings:
        model.freeze_embeddings()
    return model, None if teacher is None else teacher.requires_grad_(False)


def _read(sources: Sequence[Path], documents: Sequence[Path], config: TrainConfig) -> TrainingPairs:
    parts = [read_pairs(sources)] if sources else []
    if documents:
        parts.append(read_document_pairs(documents, config.max_document_tokens))
    if not parts:
        raise SourceError(
            "training must have pairs or documents, got neither; name files of pairs, or give --documents"
        )
    return join_pairs(parts)


def _check_fit(config: TrainConfig, checkpoint: Checkpoint, model: LandmarkEncoder) -> None:
    require_exits(config.matryoshka_layers, config.matryoshka_dims, model.num_layers, model.model_dim)
    if pooling_rule(config.pooling).needs_cls and checkpoint.cls_id is None:
        raise ConfigError(
            f"pooling {config.pooling} must go with a base model that has [CLS] or BOS, got one without; "
            "choose mean or lmk"
        )
    if not is_plain(checkpoint):
        raise ModelError(
            "training must start from a transformer without dense layers and a landmark mixer, got another; "
            f"choose another base, such as {BASE_MODEL}"
        )


def _served_settings(config: TrainConfig, base: EncoderConfig, max_positions: int) -> EncoderConfig:
    """Return the encoder settings of the saved folder: as in training, with the base's name and prefixes."""
    return EncoderConfig(
        model=base.model,
        query_prefix=base.query_prefix if config.query_prefix is None else config.query_prefix,
        document_prefix=base.document_prefix if config.document_prefix is None else config.document_prefix,
        pool_prefix=base.pool_prefix and config.attention != "full" and config.pooling in PREFIX_POOLINGS,
        pooling=config.pooling,
        attention=config.attention,
        landmark_interval=min(SERVED_INTERVAL, base.landmark_interval),
        window_tokens=min(base.window_tokens, max_positions),
        title_tokens=config.title_tokens if config.title_share else 0,
        use_context=config.reads_context,
    )
