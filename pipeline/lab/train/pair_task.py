"""What ``cairn train`` makes of a step: a batch of pairs, its losses, held-out and dev scores.

Which model is the best is said by the dev sets where there are any, else by the held-out pairs; a resumed run
remembers it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from cairn.pipeline.lab.train.batch_plan import BatchPlan
from cairn.pipeline.lab.train.checkpoints import RunFolder, RunState
from cairn.pipeline.lab.train.heldout import score_heldout
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.log import TrainingLog
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.processes import Processes
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.step import StepReport, TrainingData, train_step
from cairn.pipeline.lab.train.trainer import Steps
from cairn.pipeline.model.folders.own_tensors import GATE_NAMES
from cairn.pipeline.types import ModelScorer
from jaxtyping import Int64

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
class PairTask:
    """Implements :class:`cairn.pipeline.lab.train.trainer.Task` for pairs."""

    files: RunFolder
    model: LandmarkEncoder
    teacher: LandmarkEncoder | None
    data: TrainingData
    heldout: Int64[np.ndarray, " n"]
    pairs: TrainingPairs
    plan: BatchPlan
    config: TrainConfig
    interval: int
    scorer: ModelScorer | None
    processes: Processes

    def step(self, step: int) -> StepReport:
        """See :class:`Task`."""
        return train_step(
            self.model, self.teacher, self.data, self.plan.at(step), step, self.config, self.processes
        )

    def observed(self) -> Mapping[str, float]:
        """See :class:`Task`: how far the gates are open."""
        gates, context_gates = (self.model.get_parameter(name).detach() for name in GATE_NAMES)
        return {"mean_gate": float(gates.mean()), "mean_context_gate": float(context_gates.mean())}

    def report(self, steps: Steps) -> TrainReport:
        """Say what the run did."""
        judged_by = "held-out pairs" if len(self.heldout) else "nothing"
        judged_by = judged_by if self.scorer is None else "dev sets"
        is_judged = judged_by != "nothing"
        return TrainReport(
            folder=str(self.files.folder),
            pairs=len(self.pairs),
            skipped=self.pairs.skipped,
            heldout_pairs=len(self.heldout),
            steps=self.config.steps,
            resumed_at=steps.resumed_at,
            first_loss=steps.first_loss,
            last_loss=steps.last_loss,
            judged_by=judged_by,
            best_score=steps.state.best_score if is_judged else None,
            best_step=steps.state.best_step if is_judged else None,
            seconds=steps.seconds,
            pairs_per_second=steps.counts["num_queries"] / steps.seconds,
            tokens_per_second=steps.counts["num_tokens"] / steps.seconds,
        )

    def evaluate(self, state: RunState, log: TrainingLog) -> RunState:
        """See :class:`Task`: held-out pairs and dev sets."""
        if len(self.heldout) and self._is_due(state.step, self.config.evaluate_every):
            state = self._score_heldout(state, log)
        if self.scorer is not None and self._is_due(state.step, self.config.dev_every):
            state = self._score_on_dev(self.scorer, state, log)
        return state

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _score_heldout(self, state: RunState, log: TrainingLog) -> RunState:
        scores = score_heldout(
            self.model,
            self.data.maker,
            self.heldout.tolist(),
            self.pairs.documents,
            interval=self.interval,
            max_tokens=self.config.micro_batch_tokens,
            context=self._served_context(),
            landmarks=self.config.attention == "landmark",
        )
        log.append({"step": state.step, **scores})
        score = scores["heldout_ndcg_at_10"]
        if self.scorer is not None or score <= state.best_score:
            return state
        self.files.save_model("best", self.model)
        return replace(state, best_score=score, best_step=state.step)

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
