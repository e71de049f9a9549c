"""`cairn train-mixer` from end to end: a landmark mixer for a base model, trained on its vectors alone.

    pairs ─▶ without judged texts ─▶ a sample of pages ─▶ vectors, embedded once
      ─▶ steps ─▶ the best step ─▶ the rotation ─▶ folder

The mixer is small and its inputs are embedded already, so that steps cost a fraction of a second on one core.
The model's folder is written at the end, whole; the log stands beside it from the beginning, as
``FOLDER.jsonl``, and tells why a run failed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from cairn.pipeline.config import Backend, EncoderConfig, Precision
from cairn.pipeline.encode.encoder_fit import require_fit
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.log import TrainingLog
from cairn.pipeline.lab.train.mixer.batches import BatchMaker
from cairn.pipeline.lab.train.mixer.folder import save_mixer
from cairn.pipeline.lab.train.mixer.heldout import score_mixer
from cairn.pipeline.lab.train.mixer.losses import judge, mix_batch, mixing_loss, passages_of
from cairn.pipeline.lab.train.mixer.rotation import RotationBatch, train_rotation
from cairn.pipeline.lab.train.mixer.settings import MixerConfig
from cairn.pipeline.lab.train.mixer.sources import MixerData, draw_pairs, embed_sources
from cairn.pipeline.lab.train.mixer.vectors import BaseVectors
from cairn.pipeline.lab.train.optimizer import cosine_lr_factor, set_lr
from cairn.pipeline.lab.train.output_folder import log_path_of, require_new
from cairn.pipeline.lab.train.pairs import read_pairs
from cairn.pipeline.lab.train.principal import principal_rotation
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import Base, base_of_folder, encoder_config
from cairn.pipeline.model.folders.model_types import is_cde
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32
from safetensors.torch import load_file
from torch import nn

BETAS: Final = (0.9, 0.98)
ROTATION_SAMPLE: Final = 16_384
"""Vectors of chunks, and as many of queries, whose principal directions the rotation begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerReport:
    """What a run did; scores are of held-out pages, None without any.

    ``cut_scores`` are those of vectors cut to their first dimensions.
    """

    folder: str
    pairs: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    sources: int
    embed_seconds: float
    train_seconds: float
    first_loss: float
    last_loss: float
    base_score: float | None
    best_score: float | None
    best_step: int
    cut_scores: Mapping[int, float] = field(default_factory=dict[int, float])


def train_mixer(
    files: Sequence[Path],
    folder: Path,
    config: MixerConfig,
    *,
    base: str,
    backend: Backend = "torch",
    precision: Precision = "auto",
    judged: Sequence[Path] = (),
    cache: Path | None = None,
    whole_text_tokens: int = 0,
    progress: ProgressListener = silent_progress,
) -> MixerReport:
    """Train a mixer for ``base`` on the pairs of ``files`` and leave it in ``folder``, new or empty.

    Texts of ``judged`` evaluation sets are kept out of the data; vectors are kept under ``cache`` for the
    next run. ``whole_text_tokens`` is a setting the folder brings to those who encode with it: the mixer
    learns from chunks.
    """
    require_new(folder)
    log_path = log_path_of(folder)
    named, settings, base_extra = _base(base, backend, precision)
    pairs = draw_pairs(without_judged(read_pairs(files), judged, progress), config)
    started = time.monotonic()
    vectors = BaseVectors(settings, cache, config.context)
    dims = _require_fit(vectors, config)
    brought = replace(settings, use_context=config.context is not None, whole_text_tokens=whole_text_tokens)
    require_fit(brought, vectors.encoder.backbone)
    data = embed_sources(pairs, vectors, config, progress)
    embedded = time.monotonic()
    run = _Run(log_path=log_path, config=config, data=data, progress=progress)
    run.train_mixing()
    cut_scores = run.train_rotation(dims)
    save_mixer(folder, run.mixer, named, brought, base_extra, config.context)
    return MixerReport(
        folder=str(folder),
        pairs=len(pairs),
        skipped=pairs.skipped,
        sources=len(data.sources),
        embed_seconds=embedded - started,
        train_seconds=time.monotonic() - embedded,
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        base_score=run.base_score,
        best_score=run.best_score,
        best_step=run.best_step,
        cut_scores=cut_scores,
    )


def _base(
    base: str, backend: Backend, precision: Precision
) -> tuple[Base, EncoderConfig, dict[str, torch.Tensor]]:
    """Return the base as the folder names it, the settings texts are embedded with, and its extra tensors.

    Raises :class:`ConfigError` for a model no mixer goes with.
    """
    folder = model_folder(base)
    checkpoint = None if base_of_folder(folder) else read_checkpoint(folder)
    if (
        checkpoint is None
        or is_cde(checkpoint.config)
        or any(name.startswith(LANDMARK_MIXER) for name in checkpoint.tensors)
    ):
        raise ConfigError(
            f"a mixer must be trained for one transformer that has no mixer yet, got {base!r}; choose "
            "another base"
        )
    # A folder must be found from elsewhere, too.
    is_path = folder == Path(base).expanduser()
    named = Base(model=str(folder.absolute()) if is_path else base, weights_sha256=checkpoint.weights_sha256)
    settings = encoder_config({"model": named.model, "backend": backend, "precision": precision})
    extra = {} if checkpoint.extra_path is None else load_file(checkpoint.extra_path)
    return named, replace(settings, use_context=False, dims=None), extra


def _require_fit(vectors: BaseVectors, config: MixerConfig) -> tuple[int, ...]:
    """Return the dimensions the rotation is trained for.

    Raise for a base or dimensions that do not go with a mixer.
    """
    backbone = vectors.encoder.backbone
    if backbone.embedding_dim != backbone.context_dim:
        raise ModelError(
            "a mixer needs a base whose vectors are as wide as its hidden states, got "
            f"{backbone.embedding_dim} and "
            f"{backbone.context_dim}; choose another base"
        )
    return config.dims_of(backbone.embedding_dim)


class _Run:
    """A mixer on its way: its steps, its log, and the best of it so far."""

    def __init__(
        self,
        *,
        log_path: Path,
        config: MixerConfig,
        data: MixerData,
        progress: ProgressListener,
    ) -> None:
        self._config, self._progress = config, progress
        self._maker = BatchMaker(data, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.mixer = LandmarkMixer(data.width, config.num_heads, config.head_dim)
        # A rotation changes no whole vector: it is left out until the mixing is trained.
        self.mixer.turn.requires_grad_(False)
        self._log = TrainingLog(log_path)
        self.losses: list[float] = []
        self.base_score: float | None = None
        self.best_score: float | None = None
        self.best_step = 0

    def train_mixing(self) -> None:
        """Make the steps and leave the mixer as it was at the best of them."""
        optimizer = _optimizer(self.mixer, self._config)
        best: dict[str, torch.Tensor] = {}
        for step in range(self._config.steps + 1):
            if step:
                self._step(step, optimizer)
            if self._is_due(step) and self._is_best(step):
                best = {name: tensor.clone() for name, tensor in self.mixer.state_dict().items()}
        self.mixer.load_state_dict(best)
        self.mixer.eval()

    def train_rotation(self, dims: tuple[int, ...]) -> dict[int, float]:
        """Find the rotation, give it to the mixer, and return the scores of vectors cut to ``dims``.

        The principal rotation stays where the trained one scores less.
        """
        config, maker = self._config, self._maker
        rotation_DD = torch.from_numpy(principal_rotation(maker.sample_vectors(ROTATION_SAMPLE)))
        scores = self._score_cut(config.steps, rotation_DD, dims)
        if config.rotation_steps:
            trained_DD = train_rotation(
                rotation_DD,
                self._rotation_batch,
                steps=config.rotation_steps,
                dims=dims,
                lr=config.rotation_lr,
                temperature=config.temperature,
                ranking_temperature=config.distillation_temperature,
                on_step=self._on_rotation_step,
            )
            trained_scores = self._score_cut(config.steps + config.rotation_steps, trained_DD, dims)
            if sum(trained_scores.values()) >= sum(scores.values()):
                rotation_DD, scores = trained_DD, trained_scores
        with torch.no_grad():
            self.mixer.turn.copy_(rotation_DD)
        return scores

    def _step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        started = time.monotonic()
        config = self._config
        factor = cosine_lr_factor(step, steps=config.steps, warmup_steps=config.warmup_steps)
        set_lr(optimizer, factor)
        batch = self._maker.training_batch(step)
        total, terms = mixing_loss(self.mixer, batch, self._config)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = float(nn.utils.clip_grad_norm_(self.mixer.parameters(), self._config.max_gradient_norm))
        loss = total.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ModelError(
                f"loss and gradient must be finite, got {loss} and {norm} in step {step}; no model was "
                "written: train with a lower peak_lr"
            )
        optimizer.step()
        self.losses.append(loss)
        seconds = round(time.monotonic() - started, 3)
        self._log.append(
            {
                "step": step,
                "source": batch.source,
                "loss": loss,
                **terms,
                "gradient_norm": norm,
                "lr": config.peak_lr * factor,
                "seconds": seconds,
            }
        )
        self._progress("train", step, self._config.steps, "steps")

    def _is_due(self, step: int) -> bool:
        return step % self._config.evaluate_every == 0 or step == self._config.steps

    def _is_best(self, step: int) -> bool:
        """Score the mixer and say whether it is the best so far; where nothing is held out the last is."""
        width = self.mixer.width
        scores = score_mixer(self.mixer, self._maker, dims=(width,)).get(width)
        if scores is None:
            self.best_step = step
            return True
        self._log.append({"step": step, **scores})
        score = scores["heldout_score"]
        if not step:
            self.base_score = score
        if self.best_score is not None and score <= self.best_score:
            return False
        self.best_score, self.best_step = score, step
        return True

    @torch.no_grad()
    def _rotation_batch(self, step: int) -> RotationBatch:
        batch = self._maker.training_batch(self._config.steps + 1 + step)
        y_SLD, query_QD = mix_batch(self.mixer, batch)
        return query_QD, passages_of(y_SLD, batch), judge(batch)

    def _on_rotation_step(self, step: int, loss: float) -> None:
        self._log.append({"step": self._config.steps + 1 + step, "rotation_loss": loss})
        self._progress("rotation", step + 1, self._config.rotation_steps, "steps")

    def _score_cut(
        self, step: int, rotation_DD: Float32[torch.Tensor, "D D"], dims: tuple[int, ...]
    ) -> dict[int, float]:
        found = score_mixer(self.mixer, self._maker, dims=dims, rotation_DD=rotation_DD)
        scores = {dim: measures["heldout_score"] for dim, measures in found.items()}
        self._log.append(
            {"step": step, **{f"heldout_score_first_{dim}": score for dim, score in scores.items()}}
        )
        return scores


def _optimizer(mixer: LandmarkMixer, config: MixerConfig) -> torch.optim.AdamW:
    trained = [parameter for parameter in mixer.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "peak": config.peak_lr, "weight_decay": config.weight_decay},
        {"params": vectors, "peak": config.peak_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=BETAS)
