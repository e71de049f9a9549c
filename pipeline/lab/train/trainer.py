"""The one training loop: what an objective makes of a step becomes a gradient, a log, checkpoints, models.

    batch(step) ─▶ gradient ─▶ clipped ─▶ optimiser ─▶ log ─▶ (score ─▶ best/) ─▶ (checkpoint) ─▶ … ─▶ model/

    RUN/run.json                    settings and fingerprints of the data: a folder belongs to one run
    RUN/log.jsonl                   one JSON object a step or score
    RUN/checkpoints/00000150.*      what is trained, the optimiser's state, where the run stands; a hash
    RUN/best/                       the best score's model; RUN/candidate/ while one is scored on dev sets
    RUN/model/                      the last step's model

To add an objective, write a class with the four members of :class:`Objective`. Its :meth:`~Objective.batch`
draws from the seed and the step's number alone and returns a :class:`TrainingBatch`; its ``backward`` is
:func:`~cairn.pipeline.lab.train.gradients.summed_backward` for losses that add up over micro-batches, and
:func:`~cairn.pipeline.lab.train.gradients.cached_backward` for one over the whole batch. The trainer does
the rest: rates, clipping, NaN, scores, time limits.

A run killed at any moment goes on from its newest checkpoint, and on one thread ends with the same bytes as
if nothing had happened: all that is drawn at random is drawn from the seed and the step, so nothing else has
to be stored. A checkpoint that is damaged is passed over with a warning. RUN/.lock keeps a second training
out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from cairn.pipeline import durable
from cairn.pipeline.errors import (
    FingerprintMismatchError,
    IntegrityError,
    ModelError,
    TryAgainError,
)
from cairn.pipeline.lab.train.landmark_encoder import EncoderFolder, LandmarkEncoder
from cairn.pipeline.lab.train.settings import RunConfig
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.types import ModelScorer, ProgressListener, silent_progress
from jaxtyping import Float32, Int64
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

logger = logging.getLogger(__name__)

CHECKPOINTS_KEPT: Final = 2
MAX_GRADIENT_NORM: Final = 1.0
"""Longer gradients are cut to it."""
_WEIGHT, _OPTIMIZER = "weight/", "optimizer/"


class NotFiniteError(ModelError):
    """A run came upon NaN or infinity."""


def require_finite(numbers: Mapping[str, float]) -> None:
    """Raise :class:`NotFiniteError` that names the numbers which are NaN or infinite."""
    others = {name: value for name, value in numbers.items() if not math.isfinite(value)}
    if others:
        values = " and ".join(str(value) for value in others.values())
        raise NotFiniteError(f"{' and '.join(others)} must be finite, got {values}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """A step's work.

    ``backward`` adds the gradient and returns the loss. ``report`` says what the log keeps, after the
    optimiser's step; numbers named ``num_…`` are counted over the run.
    """

    backward: Callable[[], Float32[torch.Tensor, ""]]
    report: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How good the model is on what was held out: for the log, and the number that the best has most of."""

    measures: Mapping[str, Any]
    value: float


@runtime_checkable
class Objective(Protocol):
    """What a run trains, and on what."""

    @property
    def model(self) -> LandmarkEncoder:
        """Return what is trained: its parameters that require a gradient, and its buffers."""
        ...

    @property
    def folder(self) -> EncoderFolder:
        """Return what the model is saved with."""
        ...

    def batch(self, step: int) -> TrainingBatch:
        """Make the batch of a step, counted from 0, drawn from the seed and the step alone."""
        ...

    def score(self) -> Score | None:
        """Score the model, None where nothing is held out."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: steps done, bytes of the log they wrote, the best score and its step."""

    step: int = 0
    log_bytes: int = 0
    best_score: float | None = None
    best_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run did; ``details`` are those of its objective, ``counts`` those of its steps.

    Losses are None where no step was left to make, and the best score where nothing was held out.
    """

    folder: str
    counts: Counter[str]
    steps: int
    resumed_at: int
    first_loss: float | None
    last_loss: float | None
    best_score: float | None
    best_step: int
    seconds: float
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    details: Mapping[str, object] = field(default_factory=dict[str, object])

    def rate(self, name: str) -> float:
        """Return how many of a count the run made in a second."""
        return self.counts[name] / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        own = asdict(self)
        del own["counts"]
        return {"folder": own.pop("folder"), **own.pop("details"), **own}


@dataclass(kw_only=True, slots=True)
class Trainer:
    """One run in memory; its files are in ``folder``.

    A ``scorer`` says every ``dev_every`` steps which model is the best, in the place of the objective.
    """

    objective: Objective
    config: RunConfig
    folder: Path
    scorer: ModelScorer | None = None
    dev_every: int = 1
    deadline: float = math.inf
    """When it stops at a checkpoint, on the clock of :func:`time.monotonic`."""
    progress: ProgressListener = silent_progress
    _newest: Path | None = field(default=None, init=False)

    def run(self) -> RunReport:
        """Make the steps that are left, from the newest checkpoint on."""
        optimizer = make_optimizer(self.objective.model, self.config)
        state = RunState()
        self._newest = newest_checkpoint(self.folder)
        if self._newest is not None:
            state = restore(self._newest, self.objective.model, optimizer)
        log = None
        if state.step < self.config.steps:
            log = TrainingLog(self.folder / "log.jsonl", state.log_bytes)
        resumed_at, losses, counts = state.step, list[float](), Counter[str]()
        if not resumed_at:
            state = self._scored(state, log)
        started = time.monotonic()
        for step in range(resumed_at, self.config.steps):
            loss, report = self._step(step, optimizer, log)
            losses.append(loss)
            counts.update({name: number for name, number in report.items() if name.startswith("num_")})
            state = self._scored(replace(state, step=step + 1), log)
            is_late = self._is_late(state.step)
            if is_late or self._is_due(state.step, self.config.checkpoint_every):
                self._newest = save(self.folder, state, self.objective.model, optimizer)
            self.progress("train", state.step, self.config.steps, "steps")
            if is_late:
                raise TryAgainError(
                    f"training must make {self.config.steps} steps, got to {state.step} in the time it was "
                    "given; run the same command again to go on"
                )
        seconds = max(time.monotonic() - started, 1e-9)
        self.objective.folder.save(self.folder / "model", self.objective.model)
        return RunReport(
            folder=str(self.folder),
            counts=counts,
            steps=self.config.steps,
            resumed_at=resumed_at,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            best_score=state.best_score,
            best_step=state.best_step,
            seconds=seconds,
        )

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _is_late(self, step: int) -> bool:
        """Say whether the time is up before the last step."""
        return step < self.config.steps and time.monotonic() >= self.deadline

    def _step(
        self, step: int, optimizer: torch.optim.Optimizer, log: TrainingLog | None
    ) -> tuple[float, Mapping[str, Any]]:
        started = time.monotonic()
        factor = self.config.lr_factor(step)
        for group in optimizer.param_groups:
            group["lr"] = self.config.peak_lr * factor
        optimizer.zero_grad(set_to_none=True)
        batch = self.objective.batch(step)
        loss, norm = add_gradient(batch, self.objective.model)
        try:
            require_finite({"loss": loss, "gradient": norm})
        except NotFiniteError as error:
            raise self._ended(f"{error} in step {step + 1}", step) from error
        optimizer.step()
        report = batch.report()
        if log is not None:
            said = {"step": step + 1, "loss": loss, "gradient_norm": norm, **report}
            seconds = round(time.monotonic() - started, 3)
            log.append({**said, "lr": self.config.peak_lr * factor, "seconds": seconds})
        return loss, report

    def _scored(self, state: RunState, log: TrainingLog | None) -> RunState:
        """Score the model where a score is due; a run that is done has no log."""
        if log is None:
            return state
        try:
            if self._is_due(state.step, self.config.evaluate_every):
                state = self._held_out_scored(state, log)
            if self.scorer is not None and self._is_due(state.step, self.dev_every):
                state = self._dev_scored(self.scorer, state, log)
        except NotFiniteError as error:
            raise self._ended(f"{error} after step {state.step}", state.step) from error
        return replace(state, log_bytes=log.size)

    def _held_out_scored(self, state: RunState, log: TrainingLog) -> RunState:
        score = self.objective.score()
        if score is None:
            return state
        log.append({"step": state.step, **score.measures})
        if self.scorer is not None or not _is_better(score.value, state):
            return state
        self.objective.folder.save(self.folder / "best", self.objective.model)
        return replace(state, best_score=score.value, best_step=state.step)

    def _dev_scored(self, scorer: ModelScorer, state: RunState, log: TrainingLog) -> RunState:
        started, candidate = time.monotonic(), self.folder / "candidate"
        self.objective.folder.save(candidate, self.objective.model)
        scores = scorer.score(candidate)
        by_measure = {f"dev/{name}": value for name, value in scores.by_measure.items()}
        said = {"step": state.step, "dev_score": scores.mean, **by_measure}
        log.append({**said, "seconds": round(time.monotonic() - started, 3)})
        with durable.storage_errors("keeping the best model"):
            if not _is_better(scores.mean, state):
                shutil.rmtree(candidate)
                return state
            durable.put_in_place(candidate, self.folder / "best")
        return replace(state, best_score=scores.mean, best_step=state.step)

    def _ended(self, sentence: str, steps_made: int) -> ModelError:
        """Say what a run ended in, what is kept, and what to do."""
        if not steps_made:
            return ModelError(
                f"{sentence}, before anything was trained; fetch the models again, or choose another base"
            )
        newest = self._newest
        good = "there is no checkpoint yet" if newest is None else f"{newest} is the last good checkpoint"
        return ModelError(f"{sentence}; {good}: train in another folder with a lower learning rate")


def add_gradient(
    batch: TrainingBatch, model: nn.Module, max_norm: float = MAX_GRADIENT_NORM
) -> tuple[float, float]:
    """Add a batch's gradient to the model, clipped; return the loss and the gradient's norm before."""
    loss = batch.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(loss), float(norm)


def _is_better(score: float, state: RunState) -> bool:
    return state.best_score is None or score > state.best_score


class TrainingLog:
    """A log of a JSON object a line; a resumed run cuts it back to the ``size`` in its checkpoint."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._path = path
        with durable.storage_errors("writing the log"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as stream:
                stream.truncate(min(keep_bytes, path.stat().st_size))
        self.size = path.stat().st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; NaN or infinity raises :class:`NotFiniteError`."""
        require_finite({name: value for name, value in record.items() if isinstance(value, float)})
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with durable.storage_errors("writing the log"), self._path.open("ab") as stream:
            stream.write(line)
        self.size += len(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log; a last line that was being written when the process died is left out."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return [json.loads(line) for line in lines[:-1]]


def places_between(first: int, end: int, num_trained: int, *seed: int) -> Int64[np.ndarray, " B"]:
    """Return the ``first`` to ``end`` of an endless row of places, each once before any comes again."""
    done = first // num_trained
    rounds = [
        np.random.default_rng([*seed, number]).permutation(num_trained)
        for number in range(done, -(-end // num_trained))
    ]
    return np.concatenate(rounds)[first - done * num_trained :][: end - first]


def places_of_step(step: int, size: int, num_trained: int, *seed: int) -> Int64[np.ndarray, " B"]:
    """Return the ``size`` places of a step among ``num_trained``."""
    return places_between(step * size, (step + 1) * size, num_trained, *seed)


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """Return AdamW; weight decay is for matrices alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [each for each in trained if each.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=config.peak_lr,
    )


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, and the buffers, by name."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {**parameters, **dict(model.named_buffers())}


def save(folder: Path, state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint and drop all but the newest; a full disk leaves those there were."""
    path = folder / "checkpoints" / f"{state.step:08d}.safetensors"
    tensors = {_WEIGHT + name: tensor for name, tensor in _trained(model).items()}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}/{kind}"] = tensor
    exactly = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with durable.storage_errors(f"writing checkpoints/{path.name}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(path) as temporary:
            save_file(exactly, temporary, metadata={"state": json.dumps(asdict(state))})
        durable.write_json(path.with_suffix(".json"), {"sha256": durable.sha256_of_file(path)})
    durable.commit_point("train.checkpoint")
    for old in sorted(path.parent.glob("[0-9]*.safetensors"))[:-CHECKPOINTS_KEPT]:
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink()
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole."""
    for said in sorted((folder / "checkpoints").glob("[0-9]*.json"), reverse=True):
        path = said.with_suffix(".safetensors")
        with contextlib.suppress(ModelError, KeyError):
            if path.is_file() and read_json(said)["sha256"] == durable.sha256_of_file(path):
                return path
        logger.warning("checkpoint %s is damaged; going back to the one before", path.stem)
    return None


@torch.no_grad()
def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> RunState:
    """Put a checkpoint's weights and optimiser state into place, and return where it stands."""
    stored = load_file(path)
    for name, tensor in _trained(model).items():
        tensor.copy_(stored[_WEIGHT + name])
    parameters = dict(model.named_parameters())
    for key, tensor in stored.items():
        if key.startswith(_OPTIMIZER):
            name, _, kind = key.removeprefix(_OPTIMIZER).rpartition("/")
            # The count of steps stays on the CPU.
            put = tensor if kind == "step" else tensor.to(parameters[name].device)
            optimizer.state.setdefault(parameters[name], {})[kind] = put
    with safe_open(path, "pt") as opened:
        return RunState(**json.loads(opened.metadata()["state"]))


@contextlib.contextmanager
def claimed_folder(
    folder: Path,
    config: RunConfig,
    made_of: Mapping[str, str | None],
    skipped: Mapping[str, int],
) -> Generator[None]:
    """Hold a run's folder; other settings or data raise :class:`FingerprintMismatchError`."""
    with _held_folder(folder):
        _claim(folder / "run.json", {"settings": _as_json(config), **made_of}, skipped)
        yield


@contextlib.contextmanager
def _held_folder(folder: Path) -> Generator[None]:
    """Make the folder and lock it; what a killed run left half written goes away."""

    def busy(by_whom: str) -> TryAgainError:
        return TryAgainError(
            f"a folder must have one training at a time, got another at work{by_whom}; wait for it, or "
            "name another folder"
        )

    with durable.storage_errors("starting the run"):
        folder.mkdir(parents=True, exist_ok=True)
    with durable.exclusive_lock(folder / ".lock", "the lock of the run", busy):
        with durable.storage_errors("clearing what a killed run left"):
            for left in (*folder.glob(".*.tmp"), *folder.glob("checkpoints/.*.tmp")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


def _claim(path: Path, made_of: Mapping[str, Any], skipped: Mapping[str, int]) -> None:
    """Write what a run is made of, or compare it with what the run was made of before."""
    if not path.is_file():
        with durable.storage_errors("starting the run"):
            durable.write_json(path, {**made_of, "skipped": dict(skipped)})
        return
    try:
        stored = read_json(path)
    except ModelError as error:
        raise IntegrityError(
            f"{path.name} of the run must be JSON, got a damaged file; train in another folder"
        ) from error
    before, now = stored.get("settings", {}), made_of["settings"]
    others = [f"{name} {before.get(name)}" for name, value in now.items() if before.get(name) != value]
    names = (name for name in made_of if name != "settings")
    others += [f"another {name}" for name in names if stored.get(name) != made_of[name]]
    if others:
        raise FingerprintMismatchError(
            "a run must go on with what it was started with, got a folder of a run with "
            f"{', '.join(others)}; give the same settings and data, or another folder"
        )


def _as_json(config: RunConfig) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return list(value)
        return str(value) if value in (math.inf, -math.inf) else value

    return {name: plain(value) for name, value in asdict(config).items()}
