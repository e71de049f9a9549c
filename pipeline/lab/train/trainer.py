"""The steps of a run, and what they leave: checkpoints, a log, scores, the best model so far.

    step ─▶ log ─▶ (score ─▶ best/) ─▶ (checkpoint) ─▶ next step … ─▶ model/, changes.safetensors

What a step computes and which model is the best is the task's matter. A loss that is not finite stops the run
before the optimiser has seen it, a score that is not before the model is saved.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from cairn.pipeline.errors import ModelError, TryAgainError
from cairn.pipeline.lab.train.checkpoints import RunFolder, RunState
from cairn.pipeline.lab.train.finite import NotFiniteError, require_finite
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.log import TrainingLog
from cairn.pipeline.lab.train.optimizer import lr_factor, make_optimizer, set_lr
from cairn.pipeline.lab.train.processes import Processes
from cairn.pipeline.lab.train.schedules import RunSettings
from cairn.pipeline.types import ProgressListener


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What every step says of itself; numbers whose names begin with ``num_`` are counted over the run."""

    loss: float
    gradient_norm: float


@runtime_checkable
class Task(Protocol):
    """What a run trains the model for."""

    def step(self, step: int) -> Report:
        """Add a batch's gradient, clipped, to the model; draw from the seed and the step alone."""
        ...

    def observed(self) -> Mapping[str, float]:
        """Return what the log says of the model beside the step's report."""
        ...

    def evaluate(self, state: RunState, log: TrainingLog) -> RunState:
        """Score the model where a score is due, and keep it when it is the best so far."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What a run did; ``seconds`` and ``counts`` are of this process alone.

    Losses are None where no step was left to make.
    """

    state: RunState
    resumed_at: int
    first_loss: float | None
    last_loss: float | None
    counts: Counter[str]
    seconds: float


@dataclass(kw_only=True, slots=True)
class Trainer:
    """One run in memory."""

    files: RunFolder
    model: LandmarkEncoder
    task: Task
    config: RunSettings
    stops_at_seconds: float
    processes: Processes
    progress: ProgressListener
    saves_changes: bool = True
    """Whether what differs from the base is written by itself; after pretraining all of it does."""

    def run(self) -> Steps:
        """Make the steps that are left, from the newest checkpoint on."""
        optimizer = make_optimizer(self.model, self.config)
        newest = self.files.newest()
        state = RunState(step=0, log_bytes=0, best_score=-1.0, best_step=0)
        if newest is not None:
            state = self.files.restore(newest, self.model, optimizer)
        self.processes.require_same(state.step, "newest checkpoint")
        log = TrainingLog(self.files.log_path, state.log_bytes) if self._writes else None
        resumed_at, losses, counts = state.step, list[float](), Counter[str]()
        if not resumed_at:
            state = self._evaluate(state, log, newest)
        started = time.monotonic()
        for step in range(resumed_at, self.config.steps):
            report = self._step(step, optimizer, newest, log)
            losses.append(report.loss)
            counts.update({name: number for name, number in asdict(report).items() if name[:4] == "num_"})
            state = self._evaluate(replace(state, step=step + 1), log, newest)
            is_late, is_last = self._is_late(state.step), state.step == self.config.steps
            is_due = is_last or state.step % self.config.checkpoint_every == 0
            if self._writes and (is_late or is_due):
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
            if self.saves_changes:
                self.files.save_changes(self.model)
        self.processes.wait()
        return Steps(
            state=state,
            resumed_at=resumed_at,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            counts=counts,
            seconds=seconds,
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

    def _step(
        self, step: int, optimizer: torch.optim.Optimizer, newest: Path | None, log: TrainingLog | None
    ) -> Report:
        started = time.monotonic()
        set_lr(optimizer, lr_factor(step, self.config))
        optimizer.zero_grad(set_to_none=True)
        report = self.task.step(step)
        try:
            require_finite({"loss": report.loss, "gradient": report.gradient_norm})
        except NotFiniteError as error:
            raise _ended(f"{error} in step {step + 1}", step, newest) from error
        optimizer.step()
        if log is not None:
            self._log_step(step, report, time.monotonic() - started, log)
        return report

    def _log_step(self, step: int, report: Report, seconds: float, log: TrainingLog) -> None:
        log.append(
            {
                "step": step + 1,
                **asdict(report),
                "lr": self.config.peak_lr * lr_factor(step, self.config),
                **self.task.observed(),
                "seconds": round(seconds, 3),
            }
        )

    def _evaluate(self, state: RunState, log: TrainingLog | None, newest: Path | None) -> RunState:
        """Let the task score the model; without a log another process does."""
        if log is None:
            return state
        try:
            state = self.task.evaluate(state, log)
        except NotFiniteError as error:
            raise _ended(f"{error} after step {state.step}", state.step, newest) from error
        return replace(state, log_bytes=log.size)


def _ended(sentence: str, steps_made: int, newest: Path | None) -> ModelError:
    """Say what a run ended in, what is kept, and what to do."""
    if not steps_made:
        return ModelError(
            f"{sentence}, before anything was trained; fetch the models again, or choose another base"
        )
    good = "there is no checkpoint yet" if newest is None else f"{newest} is the last good checkpoint"
    return ModelError(f"{sentence}; {good}: train in another folder with a lower peak_lr")
