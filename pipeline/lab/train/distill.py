"""`cairn distill`: a student follows a teacher's hidden states and vectors on plain texts.

    texts ─▶ rows, some held out ─┬─▶ teacher ─▶ states of some layers, vectors ─┐
                                  └─▶ student ─▶ states of its layers, vectors ──┴─▶ loss ─▶ steps

Each layer of the student follows one of the teacher's, evenly spread. Of a teacher whose states do not
compare the vectors alone are followed. They are made once and laid into the student's space:

    teacher's vectors ─▶ as many principal axes as the student has dimensions ─▶ the nearest rotation

A rotation changes no score between the teacher's vectors. It is found in closed form, so nothing is trained
beside the student, and a run repeats bit for bit. Source: NV-Embed, appendix A.2 for the states; vectors of
texts as the only target, as in LEAF; the rotation is the orthogonal Procrustes solution (Schönemann 1966).
Differs from LEAF: there a linear map behind the student is trained and kept.

    N tokens    B texts    D width of the student    E width of the teacher
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.tokenization import Prefix
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.kept_arrays import kept_arrays
from cairn.pipeline.lab.train.gradients import summed_backward
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder, autocast, resolved
from cairn.pipeline.lab.train.losses import spread_layers, state_loss
from cairn.pipeline.lab.train.packed_rows import apart, pooled, split
from cairn.pipeline.lab.train.pair_data import MAX_TOKENS, embed_texts
from cairn.pipeline.lab.train.pairs import read_texts
from cairn.pipeline.lab.train.settings import DistillConfig
from cairn.pipeline.lab.train.trainer import (
    RunReport,
    Score,
    Trainer,
    TrainingBatch,
    claimed_folder,
    places_of_step,
)
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.precision import default_device
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config, trained_context
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.token_vectors.projection import unit
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

    def batch(self, step: int) -> TrainingBatch:
        """See :class:`Objective`."""
        config, num_trained = self.config, len(self.rows) - self.num_heldout
        texts = places_of_step(step, config.batch_texts, num_trained, config.seed, _BATCHES)
        packed = self._packed(texts)
        parts = split(packed, self.config.micro_batch_tokens)
        losses = [partial(self._loss, part, own, packed) for part, own in _beside(parts, texts)]
        return TrainingBatch(
            backward=partial(summed_backward, losses),
            report=lambda: {"num_texts": len(texts), "num_tokens": len(packed.ids)},
        )

    @torch.no_grad()
    def score(self) -> Score | None:
        """See :class:`Objective`: the mean cosine of held-out texts with the teacher's vectors."""
        if not self.num_heldout:
            return None
        texts = np.arange(len(self.rows) - self.num_heldout, len(self.rows))
        cosines: list[torch.Tensor] = []
        with autocast(self.model, self.config):
            for part, own in _beside(split(self._packed(texts), self.config.micro_batch_tokens), texts):
                vectors_BD = pooled(self.model.states(part)[self.model.num_layers], part)
                cosines.append(_cosines(vectors_BD, self._taught(part, own)))
        score = float(torch.cat(cosines).mean())
        return Score(measures={"heldout_cosine": score}, value=score)

    def _packed(self, texts: Int64[np.ndarray, " B"]) -> Rows:
        rows = [self.rows[text] for text in texts.tolist()]
        lengths_B = np.array(list(map(len, rows)), np.int64)
        return apart(np.concatenate(rows).astype(np.int32), lengths_B, self.first_pooled)

    def _loss(self, part: Rows, texts: Int64[np.ndarray, " B"], whole: Rows) -> torch.Tensor:
        """Return a part's loss: hidden states weigh by its share of tokens, vectors by that of texts."""
        own_layers = range(1, self.model.num_layers + 1)
        taught: Mapping[int, torch.Tensor] = {}
        with autocast(self.model, self.config):
            states = self.model.states(part, layers=list(own_layers))
            if self.teacher is not None:
                followed = sorted({*self.layers, self.teacher.num_layers})
                with torch.no_grad():
                    taught = self.teacher.states(part, layers=followed)
        vectors_BD = pooled(states[self.model.num_layers], part)
        loss = (1.0 - _cosines(vectors_BD, self._taught(part, texts, taught))).sum() / len(whole)
        if self.state_weight:
            distance = state_loss(
                [states[layer] for layer in own_layers],
                [taught[layer] for layer in self.layers],
            )
            loss = loss + self.state_weight * len(part.ids) / len(whole.ids) * distance
        return loss

    def _taught(
        self,
        part: Rows,
        texts: Int64[np.ndarray, " B"],
        states: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the teacher's vectors of texts, of its ``states`` where they are there already."""
        if self.teacher is not None:
            states = states or self.teacher.states(part)
            return pooled(states[self.teacher.num_layers], part)
        assert self.taught_ND is not None, "a teacher is there, or its vectors are"
        return torch.from_numpy(self.taught_ND[texts]).to(self.model.device)


def _beside(
    parts: Sequence[Rows], texts: Int64[np.ndarray, " B"]
) -> Iterator[tuple[Rows, Int64[np.ndarray, " _"]]]:
    """Yield each part with its own texts."""
    yield from zip(parts, np.split(texts, np.cumsum(list(map(len, parts)))[:-1]), strict=True)


def _cosines(
    vectors_BD: Float[torch.Tensor, "B D"], taught_BV: Float[torch.Tensor, "B V"]
) -> Float[torch.Tensor, " B"]:
    """Compare the first dimensions, as many as the student is served with."""
    return F.cosine_similarity(vectors_BD[:, : taught_BV.shape[1]], taught_BV, dim=1)


MIN_TEXTS = 10
HELDOUT_PART = 10
"""Of few texts no more than one in so many is held out."""


def distill(
    teacher: str,
    student: str,
    sources: Sequence[Path],
    folder: Path,
    config: DistillConfig,
    *,
    deadline: float = math.inf,
    progress: ProgressListener = silent_progress,
) -> RunReport:
    """Train ``student`` to follow ``teacher`` on the texts of ``sources``; leave the run in ``folder``."""
    config = resolved(config)
    checkpoint, settings = read_checkpoint(model_folder(student)), encoder_config({"model": student})
    taught_by, taught_as = read_checkpoint(model_folder(teacher)), encoder_config({"model": teacher})
    _require_student(checkpoint, settings)
    model, guide = LandmarkEncoder(checkpoint), None
    if _compare(taught_by, taught_as, checkpoint, settings):
        guide = LandmarkEncoder(taught_by).requires_grad_(False)
    state_weight = _state_weight(config, guide)
    layers = () if guide is None else spread_layers(model.num_layers, guide.num_layers)
    read = read_texts(sources)
    texts = read.texts
    num_heldout = _num_heldout(texts, config)
    most = min(each.max_positions for each in (model, guide) if each is not None)
    _require_room(config, most, len(Prefix.of(settings.document_prefix, checkpoint.tokenizer).ids))
    made_of = {
        "student": _served(checkpoint, settings),
        "teacher": _served(taught_by, taught_as),
        "texts": read.fingerprint,
    }
    device = default_device()
    with claimed_folder(folder, config, made_of, read.skipped):
        taught_ND = None
        if guide is None:
            taught_ND = _taught(texts, teacher, student, folder, made_of, progress)
        prefix = settings.document_prefix
        objective = FollowedTexts(
            model=model.to(device),
            teacher=None if guide is None else guide.to(device),
            taught_ND=taught_ND,
            layers=layers,
            state_weight=state_weight,
            rows=[text_row(text, checkpoint, max_tokens=config.max_tokens, prefix=prefix) for text in texts],
            first_pooled=num_left_out(checkpoint, settings),
            num_heldout=num_heldout,
            config=config,
            folder=EncoderFolder(base=checkpoint, settings=settings, context=trained_context(student)),
        )
        report = Trainer(
            objective=objective, config=config, folder=folder, deadline=deadline, progress=progress
        ).run()
        objective.folder.save_changes(folder, model)
    details = {
        "texts": len(texts),
        "heldout_texts": num_heldout,
        "follows": "hidden states and vectors" if state_weight else "vectors",
        "tokens_per_second": report.rate("num_tokens"),
    }
    return replace(report, skipped=read.skipped, details=details)


def _compare(
    teacher: Checkpoint, teacher_settings: EncoderConfig, student: Checkpoint, student_settings: EncoderConfig
) -> bool:
    """Say whether both read the same tokens, with states of one width and vectors that are their mean."""
    prefixes = [
        (each.document_prefix, bool(each.document_prefix) and each.pool_prefix)
        for each in (teacher_settings, student_settings)
    ]
    is_mean = teacher_settings.pooling == "mean" and not teacher_settings.causal
    if not is_mean or not is_plain(teacher) or prefixes[0] != prefixes[1]:
        return False
    special = [(each.cls_id, each.landmark_id) for each in (teacher, student)]
    vocabularies = [each.tokenizer.get_vocab(with_added_tokens=True) for each in (teacher, student)]
    widths = [each.integer("hidden_size", "n_embd", "dim") for each in (teacher, student)]
    return special[0] == special[1] and vocabularies[0] == vocabularies[1] and widths[0] == widths[1]


def _require_student(checkpoint: Checkpoint, settings: EncoderConfig) -> None:
    if not is_plain(checkpoint):
        raise ModelError(
            "a student must be a transformer of one stage without dense layers and a landmark mixer, got "
            "another; distill its base"
        )
    if settings.pooling != "mean" or settings.causal:
        raise ModelError(
            "a student must pool the mean of all tokens without a causal mask, got pooling "
            f"{settings.pooling}{' with a causal mask' if settings.causal else ''}; choose another"
        )


def is_plain(checkpoint: Checkpoint) -> bool:
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
    return (0.0 if guide is None else 1.0) if config.state_weight is None else config.state_weight


def _num_heldout(texts: Sequence[str], config: DistillConfig) -> int:
    if len(texts) < MIN_TEXTS:
        raise SourceError(
            f"distillation must have at least {MIN_TEXTS} different texts, got {len(texts)}; give more"
        )
    return min(config.heldout_texts, len(texts) // HELDOUT_PART)


def _require_room(config: DistillConfig, most: int, num_prefix: int) -> None:
    """Require one token of a text beside prefix, [CLS] and [LMK], in rows that the models read."""
    if config.max_tokens > most:
        raise ConfigError(f"max_tokens must be at most the models' {most} positions, got {config.max_tokens}")
    least = 3 + num_prefix
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

    def embed() -> Mapping[str, np.ndarray]:
        guide, own = whole_text_encoder(teacher), whole_text_encoder(student)
        taught_NE = embed_texts(
            lambda some: guide.encode(some).document_vectors_NV, texts, "teacher", progress
        )
        fitted = [texts[int(place)] for place in fitted_positions(len(texts)).tolist()]
        own_FD = embed_texts(lambda some: own.encode(some).document_vectors_NV, fitted, "student", progress)
        return {"vectors": laid_onto(taught_NE, own_FD)}

    return kept_arrays(folder / "teacher.safetensors", fingerprint(**made_of), embed)["vectors"]


def whole_text_encoder(name: str) -> DocumentEncoder:
    """Load a model with its folder's settings, but without a context and in rows of 256."""
    try:
        config = encoder_config({"model": name, "use_context": False})
        backbone = load_backbone(config)
    except ConfigError as error:
        raise ConfigError(f"the teacher cannot be loaded: {error}") from error
    if config.attention == "chunk":
        prefix = backbone.tokenizer.encode(config.document_prefix, add_special_tokens=False).ids
        longest = min(MAX_TOKENS, backbone.max_positions - 2 - len(prefix))
        config = replace(config, landmark_interval=longest, whole_text_tokens=0)
    return DocumentEncoder(config, backbone=backbone)


FITTED_TEXTS = 8_192
"""Texts that axes and rotation are found from, at most."""


def fitted_positions(num_texts: int) -> Int64[np.ndarray, " F"]:
    """Return the texts, evenly spread, that axes and rotation are found from."""
    return np.arange(0, num_texts, max(1, -(-num_texts // FITTED_TEXTS)))


def laid_onto(
    taught_NE: Float32[np.ndarray, "N E"], own_FD: Float32[np.ndarray, "F D"]
) -> Float32[np.ndarray, "N D"]:
    """Return the teacher's vectors in the width and the orientation of the student's, at unit length.

    ``own_FD`` are the student's of :func:`fitted_positions`. A wider teacher keeps its first principal axes
    (not centred: scores are inner products).
    """
    teacher_FE = taught_NE[fitted_positions(len(taught_NE))].astype(np.float64)
    _, _, axes_EE = np.linalg.svd(teacher_FE.T @ teacher_FE)
    axes_AE = axes_EE[: own_FD.shape[1]]
    # Procrustes: the orthonormal rows that bring the teacher's coordinates nearest to the student's.
    left_AA, _, right_AD = np.linalg.svd((teacher_FE @ axes_AE.T).T @ own_FD, full_matrices=False)
    return unit(taught_NE @ (axes_AE.T @ (left_AA @ right_AD)).astype(np.float32))
