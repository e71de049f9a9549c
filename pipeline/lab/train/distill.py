"""`cairn distill`: a student follows a teacher's hidden states and vectors on plain texts.

    texts ─▶ rows, some held out ─┬─▶ teacher ─▶ states of some layers, vectors ─┐
                                  └─▶ student ─▶ states of its layers, vectors ──┴─▶ loss ─▶ steps

Of a teacher whose states do not compare the vectors alone are followed; they are made once.

    N tokens    B texts    D width of the student
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.grad_cache import summed_backward
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, EncoderFolder, LandmarkEncoder, autocast
from cairn.pipeline.lab.train.losses import spread_layers, state_loss
from cairn.pipeline.lab.train.packed_rows import PackedRows, pooled
from cairn.pipeline.lab.train.pair_vectors import (
    PairVectors,
    Teacher,
    embed_texts,
    fitted_positions,
    kept_vectors,
    laid_onto,
)
from cairn.pipeline.lab.train.processes import ALONE, Processes, first_before_others
from cairn.pipeline.lab.train.sequences import split_rows
from cairn.pipeline.lab.train.settings import DistillConfig
from cairn.pipeline.lab.train.trainer import Batch, Score, Trainer, claimed_folder, deadline_in, resolved
from cairn.pipeline.lab.train.training_files import read_texts
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config, trained_context
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float, Float32, Int64


def text_row(
    text: str, checkpoint: Checkpoint, *, max_tokens: int, prefix: str = ""
) -> Int64[np.ndarray, " T"]:
    """Return prefix and first tokens of a text between the special ones, ``max_tokens`` in all."""
    read = Prefix.of(prefix, checkpoint.tokenizer)
    opening = [*([] if checkpoint.cls_id is None else [checkpoint.cls_id]), *read.ids.tolist()]
    # No token of a text worth reading has more characters than this on the mean.
    ids = checkpoint.tokenizer.encode(read.continued(text[: 16 * max_tokens]), add_special_tokens=False).ids
    return np.array([*[*opening, *ids][: max_tokens - 1], checkpoint.landmark_id], np.int64)


def num_left_out(checkpoint: Checkpoint, settings: EncoderConfig) -> int:
    """Return how many first tokens of a row its vector leaves out: [CLS] and a prefix that is not pooled."""
    num_prefix = len(Prefix.of(settings.document_prefix, checkpoint.tokenizer).ids)
    return 0 if settings.pool_prefix or not num_prefix else num_prefix + (checkpoint.cls_id is not None)


def packed_rows(rows: Sequence[Int64[np.ndarray, " _"]], first_pooled: int = 0) -> PackedRows:
    """Lay rows end to end, each pooled from its token ``first_pooled`` on."""
    lengths_B = np.array([len(ids_T) for ids_T in rows], np.int64)
    return PackedRows(
        ids_N=np.concatenate(rows).astype(np.int32),
        lengths_B=lengths_B,
        windows_B=np.arange(len(rows)),
        pooled_start_B=np.full(len(rows), first_pooled, np.int64),
        pooled_end_B=lengths_B,
    )


_BATCHES: Final = 23
"""What is drawn, as part of its seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedTexts:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Objective` for texts.

    ``rows`` are token ids by text, the last ``num_heldout`` of which are kept out, and a text's vector is the
    mean of their states from ``first_pooled`` on. ``teacher`` is None where its vectors of the texts,
    ``taught_ND``, are all that is followed.
    """

    model: LandmarkEncoder
    teacher: LandmarkEncoder | None
    taught_ND: Float32[np.ndarray, "texts D"] | None
    layers: tuple[int, ...]
    state_weight: float
    rows: Sequence[Int64[np.ndarray, " _"]]
    first_pooled: int
    num_heldout: int
    config: DistillConfig
    folder: EncoderFolder
    processes: Processes = ALONE

    def batch(self, step: int) -> Batch:
        """See :class:`Objective`."""
        texts = self._batch(step)
        packed = self._packed(texts)
        most = min(self.config.micro_batch_tokens, -(-len(packed.ids_N) // self.processes.size))
        parts = split_rows(packed, most)
        starts = np.cumsum([0, *map(len, parts)])
        losses = [
            partial(self._loss, part, texts[start : start + len(part)], packed)
            for part, start in zip(parts, starts.tolist(), strict=False)
        ]
        return Batch(
            backward=partial(summed_backward, losses),
            report=lambda: {"num_texts": len(texts), "num_tokens": len(packed.ids_N)},
        )

    def score(self) -> Score | None:
        """See :class:`Objective`: the mean cosine of held-out texts with the teacher's vectors."""
        if not self.num_heldout:
            return None
        texts = np.arange(len(self.rows) - self.num_heldout, len(self.rows))
        cosines: list[torch.Tensor] = []
        start = 0
        with torch.no_grad(), autocast(self.model, self.config):
            for part in split_rows(self._packed(texts), self.config.micro_batch_tokens):
                vectors_BD = pooled(self.model.states(part, landmarks=False)[self.model.num_layers], part)
                taught_BD = self._taught(part, texts[start : start + len(part)])
                cosines.append(_cosines(vectors_BD, taught_BD))
                start += len(part)
        score = float(torch.cat(cosines).mean())
        return Score(measures={"heldout_cosine": score}, value=score)

    def save(self, folder: Path) -> None:
        """See :class:`Objective`."""
        self.folder.save(folder, self.model)

    def _batch(self, step: int) -> Int64[np.ndarray, " B"]:
        """Return the texts of a step, each once before any comes again."""
        num_trained = len(self.rows) - self.num_heldout
        places = np.arange(step * self.config.batch_texts, (step + 1) * self.config.batch_texts)
        rounds = [
            np.random.default_rng([self.config.seed, _BATCHES, number]).permutation(num_trained)
            for number in range(places[0] // num_trained, places[-1] // num_trained + 1)
        ]
        return np.concatenate(rounds)[places - places[0] // num_trained * num_trained]

    def _packed(self, texts: Int64[np.ndarray, " B"]) -> PackedRows:
        return packed_rows([self.rows[text] for text in texts.tolist()], self.first_pooled)

    def _loss(self, part: PackedRows, texts: Int64[np.ndarray, " B"], whole: PackedRows) -> torch.Tensor:
        """Return what a micro-batch adds to the loss of the ``whole`` batch.

        Hidden states weigh by its tokens, vectors by its texts.
        """
        with autocast(self.model, self.config):
            own_layers = range(1, self.model.num_layers + 1)
            states = self.model.states(part, layers=list(own_layers), landmarks=False)
            loss = torch.zeros((), device=self.model.device)
            taught_layers: Mapping[int, torch.Tensor] = {}
            if self.teacher is not None:
                with torch.no_grad():
                    taught_layers = self.teacher.states(
                        part, layers=sorted({*self.layers, self.teacher.num_layers}), landmarks=False
                    )
        if self.state_weight:
            pairs = [
                (states[own], taught_layers[layer])
                for own, layer in zip(own_layers, self.layers, strict=True)
            ]
            student, teacher = zip(*pairs, strict=True)
            token_share = len(part.ids_N) / len(whole.ids_N)
            distance = state_loss(student, teacher, self.config.state_loss)
            loss = loss + self.state_weight * token_share * distance
        if self.config.vector_weight:
            if self.teacher is not None:
                taught_BD = pooled(taught_layers[self.teacher.num_layers], part)
            else:
                taught_BD = self._taught(part, texts)
            vectors_BD = pooled(states[self.model.num_layers], part)
            distance = (1.0 - _cosines(vectors_BD, taught_BD)).sum() / len(whole)
            loss = loss + self.config.vector_weight * distance
        return loss

    def _taught(self, part: PackedRows, texts: Int64[np.ndarray, " B"]) -> torch.Tensor:
        """Return the teacher's vectors of texts."""
        if self.teacher is not None:
            return pooled(self.teacher.states(part, landmarks=False)[self.teacher.num_layers], part)
        assert self.taught_ND is not None, "a teacher is there, or its vectors are"
        return torch.from_numpy(self.taught_ND[texts]).to(self.model.device)


def _cosines(
    vectors_BD: Float[torch.Tensor, "B D"], taught_BV: Float[torch.Tensor, "B V"]
) -> Float[torch.Tensor, " B"]:
    """Compare the first dimensions, as many as the student is served with."""
    return F.cosine_similarity(vectors_BD[:, : taught_BV.shape[1]], taught_BV, dim=1)


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
    deadline = deadline_in(stop_after_seconds)
    config = resolved(config, processes)
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
    with claimed_folder(folder, config, made_of, read.skipped, processes):
        taught_ND = None
        if guide is None:
            with first_before_others(processes):
                taught_ND = _taught(texts, teacher, student, folder, made_of, progress)
        prefix = settings.document_prefix
        objective = FollowedTexts(
            model=model.to(processes.device),
            teacher=None if guide is None else guide.to(processes.device),
            taught_ND=taught_ND,
            layers=layers,
            state_weight=state_weight,
            rows=[text_row(text, checkpoint, max_tokens=config.max_tokens, prefix=prefix) for text in texts],
            first_pooled=num_left_out(checkpoint, settings),
            num_heldout=num_heldout,
            config=config,
            folder=EncoderFolder(base=checkpoint, settings=settings, context=trained_context(student)),
            processes=processes,
        )
        steps = Trainer(
            objective=objective,
            config=config,
            folder=folder,
            deadline=deadline,
            processes=processes,
            progress=progress,
        ).run()
        if not processes.rank:
            objective.folder.save_changes(folder, model)
    follows = "both" if config.vector_weight else "hidden states"
    return DistillReport(
        folder=str(folder),
        texts=len(texts),
        heldout_texts=num_heldout,
        follows=follows if state_weight else "vectors",
        steps=config.steps,
        resumed_at=steps.resumed_at,
        first_loss=steps.first_loss,
        last_loss=steps.last_loss,
        best_cosine=steps.state.best_score,
        best_step=steps.state.best_step,
        seconds=steps.seconds,
        tokens_per_second=steps.counts["num_tokens"] / steps.seconds,
    )


def _models(
    student: Checkpoint, teacher: Checkpoint | None
) -> tuple[LandmarkEncoder, LandmarkEncoder | None]:
    """Return the student, whose gates and null token stay as they are, and the teacher."""
    model = LandmarkEncoder(student)
    for name in OWN_NAMES:
        model.get_parameter(name).requires_grad_(False)
    return model, None if teacher is None else LandmarkEncoder(teacher).requires_grad_(False)


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

    return kept_vectors(folder / "teacher.safetensors", fingerprint(**made_of), embed).document_NV
