"""The steps of a run, and what they leave: checkpoints, a log, scores, the best model so far.

    step ─▶ log ─▶ (held-out score, dev score ─▶ best/) ─▶ (checkpoint) ─▶ next step …
      ─▶ model/, changes.safetensors

Which model is the best is said by the dev sets where there are any, else by the held-out pairs; a resumed run
remembers it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64

from pipeline.errors import ModelError, TryAgainError
from pipeline.model.folders.own_tensors import GATE_NAMES
from pipeline.train.batch_plan import BatchPlan
from pipeline.train.checkpoints import RunFolder, RunState
from pipeline.train.heldout import score_heldout
from pipeline.train.landmark_encoder import LandmarkEncoder
from pipeline.train.log import TrainingLog
from pipeline.train.optimizer import lr_factor, make_optimizer, set_lr
from pipeline.train.pairs import TrainingPairs
from pipeline.train.processes import Processes
from pipeline.train.settings import TrainConfig
from pipeline.train.step import StepReport, TrainingData, train_step
from pipeline.types import ModelScorer, ProgressListener

SERVED_INTERVAL: Final = 64
"""Landmark interval that held-out pairs are scored with and the saved folder brings along.

Ingest's own default.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a run did; rates and ``seconds`` count the steps of this process alone.

    ``judged_by`` says what the best score is of; losses are None where no step was left to make.
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
    best_score: float
    best_step: int
    seconds: float
    pairs_per_second: float
    tokens_per_second: float


@dataclass(kw_only=True, slots=True)
class Trainer:
    """One run in memory."""

    files: RunFolder
    model: LandmarkEncoder
    teacher: LandmarkEncoder | None
    data: TrainingData
    heldout: Int64[np.ndarray, " n"]
    pairs: TrainingPairs
    plan: BatchPlan
    config: TrainConfig
    scorer: ModelScorer | None
    stops_at_seconds: float
    processes: Processes
    progress: ProgressListener

    def run(self) -> TrainReport:
        """Make the steps that are left, from the newest checkpoint on."""
        optimizer = make_optimizer(self.model, self.config)
        newest = self.files.newest()
        state = RunState(step=0, log_bytes=0, best_score=-1.0, best_step=0)
        if newest is not None:
            state = self.files.restore(newest, self.model, optimizer)
        self.processes.require_same(state.step, "newest checkpoint")
        log = TrainingLog(self.files.log_path, state.log_bytes) if self._writes else None
        resumed_at, losses, num_queries, num_tokens = state.step, list[float](), 0, 0
        if not resumed_at:
            state = self._evaluate(state, log)
        started = time.monotonic()
        for step in range(resumed_at, self.config.steps):
            report = self._step(step, optimizer, newest, log)
            losses.append(report.loss)
            num_queries, num_tokens = num_queries + report.num_queries, num_tokens + report.num_tokens
            state = self._evaluate(replace(state, step=step + 1), log)
            is_late = self._is_late(state.step)
            if self._writes and (is_late or self._is_due(state.step, self.config.checkpoint_every)):
                newest = self.files.save(state, self.model, optimizer)
            self.progress("train", state.step, self.config.steps, "steps")
            if is_late:
                raise TryAgainError(
                    f"training must make {self.config.steps} steps, got to {state.step} in the time it was "
                    "given; run the same command again to go on"
                )
        seconds = max(time.monotonic() - started, 1e-9)
        if self._writes:
            self.files.save_model("model", self.model)
            self.files.save_changes(self.model)
        self.processes.wait()
        return TrainReport(
            folder=str(self.files.folder),
            pairs=len(self.pairs),
            skipped=self.pairs.skipped,
            heldout_pairs=len(self.heldout),
            steps=self.config.steps,
            resumed_at=resumed_at,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            judged_by="dev sets"
            if self.scorer is not None
            else "held-out pairs"
            if len(self.heldout)
            else "nothing",
            best_score=state.best_score,
            best_step=state.best_step,
            seconds=seconds,
            pairs_per_second=num_queries / seconds,
            tokens_per_second=num_tokens / seconds,
        )

    @property
    def _writes(self) -> bool:
        return self.processes.rank == 0

    def _is_late(self, step: int) -> bool:
        """Say whether the time is up before the last step, in all processes alike."""
        if step == self.config.steps or math.isinf(self.stops_at_seconds):
            return False
        late = torch.tensor([float(time.monotonic() >= self.stops_at_seconds)], device=self.processes.device)
        self.processes.add_up(late)
        return bool(late.item())

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _step(
        self, step: int, optimizer: torch.optim.Optimizer, newest: Path | None, log: TrainingLog | None
    ) -> StepReport:
        started = time.monotonic()
        set_lr(optimizer, lr_factor(step, self.config))
        optimizer.zero_grad(set_to_none=True)
        report = train_step(
            self.model, self.teacher, self.data, self.plan.at(step), step, self.config, self.processes
        )
        if not (math.isfinite(report.loss) and math.isfinite(report.gradient_norm)):
            good = "there is no checkpoint yet" if newest is None else f"{newest} is the last good checkpoint"
            raise ModelError(
                f"loss and gradient must be finite, got {report.loss} and {report.gradient_norm} in step "
                f"{step + 1}; {good}: "
                "train in another folder with a lower peak_lr"
            )
        optimizer.step()
        if log is not None:
            self._log_step(step, report, time.monotonic() - started, log)
        return report

    def _log_step(self, step: int, report: StepReport, seconds: float, log: TrainingLog) -> None:
        gates, context_gates = (self.model.get_parameter(name).detach() for name in GATE_NAMES)
        log.append(
            {
                "step": step + 1,
                **asdict(report),
                "lr": self.config.peak_lr * lr_factor(step, self.config),
                "mean_gate": float(gates.mean()),
                "mean_context_gate": float(context_gates.mean()),
                "seconds": round(seconds, 3),
            }
        )

    def _evaluate(self, state: RunState, log: TrainingLog | None) -> RunState:
        """Score the model where a score is due, and keep it when it is the best so far.

        Without a log another process does.
        """
        if log is None:
            return state
        if len(self.heldout) and self._is_due(state.step, self.config.evaluate_every):
            state = self._score_heldout(state, log)
        if self.scorer is not None and self._is_due(state.step, self.config.dev_every):
            state = self._score_on_dev(self.scorer, state, log)
        return replace(state, log_bytes=log.size)

    def _score_heldout(self, state: RunState, log: TrainingLog) -> RunState:
        scores = score_heldout(
            self.model,
            self.data.maker,
            self.heldout.tolist(),
            self.pairs.documents,
            interval=min(SERVED_INTERVAL, self.model.max_positions - 2),
            max_tokens=self.config.micro_batch_tokens,
        )
        log.append({"step": state.step, **scores})
        score = scores["heldout_ndcg_at_10"]
        if self.scorer is not None or score <= state.best_score:
            return state
        self.files.save_model("best", self.model)
        return replace(state, best_score=score, best_step=state.step)

    def _score_on_dev(self, scorer: ModelScorer, state: RunState, log: TrainingLog) -> RunState:
        started = time.monotonic()
        scores = scorer.score(self.files.save_model("candidate", self.model))
        measures = {f"dev/{name}": value for name, value in scores.by_measure.items()}
        log.append(
            {
                "step": state.step,
                "dev_score": scores.mean,
                **measures,
                "seconds": round(time.monotonic() - started, 3),
            }
        )
        if scores.mean <= state.best_score:
            self.files.drop_model("candidate")
            return state
        self.files.rename_model("candidate", "best")
        return replace(state, best_score=scores.mean, best_step=state.step)
