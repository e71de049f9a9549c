"""`cairn train` from end to end: data, batches, steps, log, checkpoints.

    pairs ─▶ without judged texts ─▶ without held-out pairs ─▶ units ─▶ surrogate ─▶ clusters ─▶ batches ─▶ steps ─▶ RUN/model, RUN/best

A run killed at any moment goes on from its newest checkpoint, and on one thread ends with the same bytes as if nothing had happened. A
folder belongs to one run: other settings, data or base are refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int64

from pipeline import durable
from pipeline.config import EncoderConfig
from pipeline.errors import FingerprintMismatchError, ModelError
from pipeline.model.backbone import load_backbone
from pipeline.model.checkpoint import Checkpoint, read_checkpoint
from pipeline.model.names import model_folder
from pipeline.model.precision import default_device, resolve_precision
from pipeline.model.sentence_transformers_folder import read_json
from pipeline.train.batch_plan import BatchPlan
from pipeline.train.checkpoints import RunFolder, RunState
from pipeline.train.heldout import choose_heldout, score_heldout
from pipeline.train.landmark_encoder import LandmarkEncoder
from pipeline.train.leakage import drop_judged, read_judged_texts
from pipeline.train.log import TrainingLog, write_plot
from pipeline.train.low_rank import add_low_rank
from pipeline.train.mining import mine_hard_negatives
from pipeline.train.optimizer import lr_factor, make_optimizer, set_lr
from pipeline.train.pairs import TrainingPairs, read_pairs, text_numbers
from pipeline.train.sequences import SequenceMaker
from pipeline.train.settings import TrainConfig, require_within
from pipeline.train.step import StepReport, TrainingData, train_step
from pipeline.train.surrogate import kept_vectors, pairs_fingerprint, vectors_key
from pipeline.types import ProgressListener, silent_progress

SERVED_INTERVAL: Final = 64
"""Landmark interval that held-out pairs are scored with and the saved folder brings along: ingest's own default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a run did; ``pairs_per_second`` and ``seconds`` count the steps of this process alone."""

    folder: str
    pairs: int
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    heldout_pairs: int
    steps: int
    resumed_at: int
    first_loss: float
    last_loss: float
    best_score: float
    best_step: int
    seconds: float
    pairs_per_second: float
    tokens_per_second: float


def train(
    sources: Sequence[Path],
    folder: Path,
    config: TrainConfig,
    *,
    base: str,
    judged: Sequence[Path] = (),
    progress: ProgressListener = silent_progress,
) -> TrainReport:
    """Train ``base`` on the pairs of ``sources`` and leave the run in ``folder``; ``judged`` evaluation sets are kept out of the data."""
    device = default_device()
    checkpoint = read_checkpoint(model_folder(base))
    model = LandmarkEncoder(checkpoint, initial_gate=config.initial_gate)
    model.embeddings.requires_grad_(not config.freeze_embeddings)
    if config.lora_rank:
        add_low_rank(model, config)
    # Resolved before it is written down: a run must not go on in another arithmetic.
    config = replace(config, precision="bf16" if resolve_precision(config.precision, device) == torch.bfloat16 else "fp32")
    _check_fit(config, checkpoint, model)
    pairs = read_pairs(sources)
    if judged:
        progress("leakage", 0, len(pairs), "pairs")
        pairs = drop_judged(pairs, read_judged_texts(judged))
    heldout = choose_heldout(pairs, config.heldout_pairs)
    _claim_folder(folder, config, checkpoint, pairs)
    data = _prepare(pairs, heldout, folder, config, base, checkpoint, progress)
    teacher = LandmarkEncoder(checkpoint).to(device).requires_grad_(False) if config.distillation_weight else None
    run = _Run(
        files=RunFolder(folder, checkpoint, _served_settings(config)),
        model=model.to(device),
        teacher=teacher,
        data=data,
        heldout=heldout,
        pairs=pairs,
        plan=BatchPlan(pairs, heldout, data.vectors, config),
        config=config,
        progress=progress,
    )
    return run.run()


def _check_fit(config: TrainConfig, checkpoint: Checkpoint, model: LandmarkEncoder) -> None:
    require_within("matryoshka_dims", config.matryoshka_dims, model.model_dim)
    require_within("matryoshka_layers", config.matryoshka_layers, model.num_layers)
    if config.matryoshka_layers and config.matryoshka_layers[-1] != model.num_layers:
        raise ModelError(
            f"matryoshka_layers must end with the base model's last layer {model.num_layers}, got {list(config.matryoshka_layers)}"
        )
    if checkpoint.steps or checkpoint.cls_id is None:
        raise ModelError("training must start from a transformer without dense layers and with [CLS], got another; choose another base")


def _served_settings(config: TrainConfig) -> EncoderConfig:
    """Return the encoder settings that the saved folder brings to an ingest."""
    return EncoderConfig(
        pooling=config.pooling, attention=config.attention, landmark_interval=SERVED_INTERVAL, use_context=config.reads_context
    )


def _claim_folder(folder: Path, config: TrainConfig, checkpoint: Checkpoint, pairs: TrainingPairs) -> None:
    """Write what this run is made of, or compare it with what a run in the folder was made of."""
    settings, made_of = _as_json(config), {"base": checkpoint.fingerprint, "pairs": pairs_fingerprint(pairs)}
    path = folder / "run.json"
    if path.is_file():
        stored = read_json(path)
        # A setting younger than the run stood at its default.
        before: dict[str, Any] = _as_json(TrainConfig(steps=config.steps)) | stored.get("settings", {})
        others = [f"{name} {before.get(name)}" for name, value in settings.items() if before.get(name) != value]
        others += [f"another {name}" for name, value in made_of.items() if stored.get(name) != value]
        if others:
            raise FingerprintMismatchError(
                f"a run must go on with what it was started with, got a folder of a run with {', '.join(others)}; "
                "give the same settings and data, or another folder"
            )
        return
    with durable.storage_errors("starting the run"):
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_json(path, {"settings": settings, **made_of, "skipped": dict(pairs.skipped)})


def _as_json(config: TrainConfig) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else str(value) if value in (math.inf, -math.inf) else value
        for name, value in asdict(config).items()
    }


def _prepare(
    pairs: TrainingPairs,
    heldout: Int64[np.ndarray, " n"],
    folder: Path,
    config: TrainConfig,
    base: str,
    checkpoint: Checkpoint,
    progress: ProgressListener,
) -> TrainingData:
    """Embed the pairs with the surrogate and mine hard negatives; both stay in the folder."""
    backbone = load_backbone(EncoderConfig(model=base))
    key = vectors_key(config.surrogate, checkpoint.fingerprint, pairs)
    vectors = kept_vectors(folder / "surrogate.safetensors", key, pairs, backbone, config.surrogate, progress)
    mined_Nk = np.zeros((len(pairs), 0), np.int64)
    if config.hard_negatives:
        progress("mining", 0, len(pairs), "pairs")
        mined_Nk = mine_hard_negatives(
            vectors.query_NV,
            vectors.document_NV,
            pairs.documents,
            pairs.sources,
            num_negatives=config.hard_negatives,
            max_share=config.hard_negative_share,
            left_out=heldout,
        )
    maker = SequenceMaker(
        checkpoint,
        pairs,
        pooling=config.pooling,
        max_query_tokens=config.max_query_tokens,
        max_document_tokens=config.max_document_tokens,
    )
    return TrainingData(maker=maker, vectors=vectors, document_number_N=text_numbers(pairs.documents), hard_negatives_Nk=mined_Nk)


@dataclass(kw_only=True, slots=True)
class _Run:
    files: RunFolder
    model: LandmarkEncoder
    teacher: LandmarkEncoder | None
    data: TrainingData
    heldout: Int64[np.ndarray, " n"]
    pairs: TrainingPairs
    plan: BatchPlan
    config: TrainConfig
    progress: ProgressListener

    def run(self) -> TrainReport:
        optimizer = make_optimizer(self.model, self.config)
        newest = self.files.newest()
        state = RunState(step=0, log_bytes=0, best_score=-1.0, best_step=0)
        if newest is not None:
            state = self.files.restore(newest, self.model, optimizer)
        log = TrainingLog(self.files.log_path, state.log_bytes)
        resumed_at, losses, num_queries, num_tokens = state.step, [math.nan], 0, 0
        if not resumed_at:
            state = self._evaluate(state, log)
        started = time.monotonic()
        for step in range(resumed_at, self.config.steps):
            report = self._step(step, optimizer, newest, log)
            losses.append(report.loss)
            num_queries, num_tokens = num_queries + report.num_queries, num_tokens + report.num_tokens
            state = RunState(step=step + 1, log_bytes=log.size, best_score=state.best_score, best_step=state.best_step)
            is_last = state.step == self.config.steps
            if is_last or state.step % self.config.evaluate_every == 0:
                state = self._evaluate(state, log)
            if is_last or state.step % self.config.checkpoint_every == 0:
                newest = self.files.save(state, self.model, optimizer)
            self.progress("train", state.step, self.config.steps, "steps")
        seconds = max(time.monotonic() - started, 1e-9)
        self.files.save_model("model", self.model)
        self.files.save_changes(self.model)
        write_plot(self.files.log_path, self.files.folder / "log.svg")
        return TrainReport(
            folder=str(self.files.folder),
            pairs=len(self.pairs),
            skipped=self.pairs.skipped,
            heldout_pairs=len(self.heldout),
            steps=self.config.steps,
            resumed_at=resumed_at,
            first_loss=losses[min(1, len(losses) - 1)],
            last_loss=losses[-1],
            best_score=state.best_score,
            best_step=state.best_step,
            seconds=seconds,
            pairs_per_second=num_queries / seconds,
            tokens_per_second=num_tokens / seconds,
        )

    def _step(self, step: int, optimizer: torch.optim.Optimizer, newest: Path | None, log: TrainingLog) -> StepReport:
        started = time.monotonic()
        set_lr(optimizer, lr_factor(step, self.config))
        optimizer.zero_grad(set_to_none=True)
        report = train_step(self.model, self.teacher, self.data, self.plan.at(step), step, self.config)
        if not (math.isfinite(report.loss) and math.isfinite(report.gradient_norm)):
            good = "there is no checkpoint yet" if newest is None else f"{newest} is the last good checkpoint"
            raise ModelError(
                f"loss and gradient must be finite, got {report.loss} and {report.gradient_norm} in step {step + 1}; {good}: "
                "train in another folder with a lower peak_lr"
            )
        optimizer.step()
        gates = self.model.landmark_attention
        log.append(
            {
                "step": step + 1,
                **asdict(report),
                "lr": self.config.peak_lr * lr_factor(step, self.config),
                "mean_gate": float(gates["gates"].detach().mean()),
                "mean_context_gate": float(gates["context_gates"].detach().mean()),
                "seconds": round(time.monotonic() - started, 3),
            }
        )
        return report

    def _evaluate(self, state: RunState, log: TrainingLog) -> RunState:
        """Score the held-out pairs, and keep the model when it is the best so far."""
        if not len(self.heldout):
            return state
        scores = score_heldout(
            self.model,
            self.data.maker,
            self.heldout.tolist(),
            self.pairs.documents,
            interval=min(SERVED_INTERVAL, self.model.max_positions - 2),
            max_tokens=self.config.micro_batch_tokens,
        )
        log.append({"step": state.step, **scores})
        best = state
        if scores["heldout_ndcg_at_10"] > state.best_score:
            self.files.save_model("best", self.model)
            best = RunState(step=state.step, log_bytes=0, best_score=scores["heldout_ndcg_at_10"], best_step=state.step)
        return RunState(step=state.step, log_bytes=log.size, best_score=best.best_score, best_step=best.best_step)
