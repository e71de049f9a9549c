"""The one training loop: what an objective makes of a step becomes a gradient, a log, checkpoints, models.

    batch(step) ─▶ gradient ─▶ clipped ─▶ optimiser ─▶ log ─▶ (score ─▶ best/) ─▶ (checkpoint) ─▶ … ─▶ model/

    RUN/run.json                    settings and fingerprints of the data: a folder belongs to one run
    RUN/log.jsonl                   one JSON object a step or score
    RUN/checkpoints/00000150.*      what is trained, the optimiser's state, where the run stands; a hash
    RUN/best/                       the best score's model; RUN/candidate/ while one is scored on dev sets
    RUN/model/                      the last step's model

To add an objective, write a class with the four members of :class:`Objective`. Its :meth:`~Objective.batch`
draws from the seed and the step's number alone and returns a :class:`Batch`; its ``backward`` is
:func:`~cairn.pipeline.lab.train.grad_cache.summed_backward` for losses that add up over micro-batches, and
:func:`~cairn.pipeline.lab.train.grad_cache.cached_backward` for one over the whole batch. The trainer does
the rest: rates, clipping, several processes, NaN, scores, time limits.

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
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch
from cairn.pipeline import durable
from cairn.pipeline.errors import (
    ConfigError,
    FingerprintMismatchError,
    IntegrityError,
    ModelError,
    TryAgainError,
)
from cairn.pipeline.lab.train.processes import ALONE, Processes, first_before_others
from cairn.pipeline.lab.train.settings import EncoderRunConfig, RunConfig
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.types import ModelScorer, ProgressListener, silent_progress
from jaxtyping import Float32
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

logger = logging.getLogger(__name__)

CHECKPOINTS_KEPT: Final = 2
WEIGHTS_NAME: Final = "weights.safetensors"
_WEIGHT, _OPTIMIZER = "weight/", "optimizer/"
_Config = TypeVar("_Config", bound=EncoderRunConfig)


class NotFiniteError(ModelError):
    """A run came upon NaN or infinity."""


def require_finite(numbers: Mapping[str, float]) -> None:
    """Raise :class:`NotFiniteError` that names the numbers which are NaN or infinite."""
    others = {name: value for name, value in numbers.items() if not math.isfinite(value)}
    if others:
        values = " and ".join(str(value) for value in others.values())
        raise NotFiniteError(f"{' and '.join(others)} must be finite, got {values}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A step's work.

    ``backward`` adds the gradients of this process's micro-batches and returns the whole batch's loss.
    ``report`` says what the log keeps, after the optimiser's step; numbers named ``num_…`` are counted over
    the run. All processes must have the same ``digest``.
    """

    backward: Callable[[Processes], Float32[torch.Tensor, ""]]
    report: Callable[[], Mapping[str, Any]] = dict
    digest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How good the model is on what was held out: for the log, and the number that the best has most of."""

    measures: Mapping[str, Any]
    value: float


@runtime_checkable
class Objective(Protocol):
    """What a run trains, and on what."""

    @property
    def model(self) -> nn.Module:
        """Return what is trained: its parameters that require a gradient, and its buffers."""
        ...

    def batch(self, step: int) -> Batch:
        """Make the batch of a step, counted from 0, drawn from the seed and the step alone."""
        ...

    def score(self) -> Score | None:
        """Score the model, None where nothing is held out."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model; a reader of the folder sees the one before or this one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: steps done, bytes of the log they wrote, the best score and its step."""

    step: int = 0
    log_bytes: int = 0
    best_score: float | None = None
    best_step: int = 0


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
    """One run in memory; its files are in ``folder``, but for a log elsewhere.

    A ``scorer`` says every ``dev_every`` steps which model is the best, in the place of the objective. A log
    that another run of the same folder began is kept up to ``log_begins``.
    """

    objective: Objective
    config: RunConfig
    folder: Path
    log_path: Path | None = None
    log_begins: int = 0
    scorer: ModelScorer | None = None
    dev_every: int = 1
    deadline: float = math.inf
    """When it stops at a checkpoint, on the clock of :func:`time.monotonic`."""
    processes: Processes = ALONE
    progress: ProgressListener = silent_progress
    stage: str = "train"
    """What progress calls the steps."""
    _newest: Path | None = field(default=None, init=False)

    def run(self) -> Steps:
        """Make the steps that are left, from the newest checkpoint on."""
        optimizer = make_optimizer(self.objective.model, self.config)
        state = RunState(log_bytes=self.log_begins)
        self._newest = newest_checkpoint(self.folder)
        if self._newest is not None:
            state = restore(self._newest, self.objective.model, optimizer)
        self.processes.require_same(state.step, "newest checkpoint")
        writes, log = self.processes.rank == 0, None
        if writes and state.step < self.config.steps:
            log = TrainingLog(self.log_path or self.folder / "log.jsonl", state.log_bytes)
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
            if writes and (is_late or self._is_due(state.step, self.config.checkpoint_every)):
                self._newest = save(self.folder, state, self.objective.model, optimizer)
            self.progress(self.stage, state.step, self.config.steps, "steps")
            if is_late:
                raise TryAgainError(
                    f"training must make {self.config.steps} steps, got to {state.step} in the time it was "
                    "given; run the same command again to go on"
                )
        seconds = max(time.monotonic() - started, 1e-9)
        if writes:
            self.objective.save(self.folder / "model")
        self.processes.wait()
        first_loss, last_loss = (losses[0], losses[-1]) if losses else (None, None)
        return Steps(
            state=state,
            resumed_at=resumed_at,
            first_loss=first_loss,
            last_loss=last_loss,
            counts=counts,
            seconds=seconds,
        )

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _is_late(self, step: int) -> bool:
        """Say whether the time is up before the last step, in all processes alike."""
        if step == self.config.steps or math.isinf(self.deadline):
            return False
        late = torch.tensor([float(time.monotonic() >= self.deadline)], device=self.processes.device)
        self.processes.add_up(late)
        return bool(late.item())

    def _step(
        self, step: int, optimizer: torch.optim.Optimizer, log: TrainingLog | None
    ) -> tuple[float, Mapping[str, Any]]:
        started = time.monotonic()
        factor = self.config.lr_factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.zero_grad(set_to_none=True)
        batch = self.objective.batch(step)
        self.processes.require_same(batch.digest, f"batch of step {step + 1}")
        loss, norm = add_gradient(batch, self.objective.model, self.config, self.processes)
        try:
            require_finite({"loss": loss, "gradient": norm})
        except NotFiniteError as error:
            raise self._ended(f"{error} in step {step + 1}", step) from error
        optimizer.step()
        report = batch.report()
        if log is not None:
            log.append(
                {
                    "step": step + 1,
                    "loss": loss,
                    "gradient_norm": norm,
                    **report,
                    "lr": self.config.peak_lr * factor,
                    "seconds": round(time.monotonic() - started, 3),
                }
            )
        return loss, report

    def _scored(self, state: RunState, log: TrainingLog | None) -> RunState:
        """Score the model where a score is due; without a log another process does."""
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
        self.objective.save(self.folder / "best")
        return replace(state, best_score=score.value, best_step=state.step)

    def _dev_scored(self, scorer: ModelScorer, state: RunState, log: TrainingLog) -> RunState:
        started, candidate = time.monotonic(), self.folder / "candidate"
        self.objective.save(candidate)
        scores = scorer.score(candidate)
        log.append(
            {
                "step": state.step,
                "dev_score": scores.mean,
                **{f"dev/{name}": value for name, value in scores.by_measure.items()},
                "seconds": round(time.monotonic() - started, 3),
            }
        )
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
    batch: Batch, model: nn.Module, config: RunConfig, processes: Processes = ALONE
) -> tuple[float, float]:
    """Add a batch's gradient to the model, clipped; return the loss and the gradient's norm before.

    Several ``processes`` share the batch's micro-batches and end with the same gradient.
    """
    loss = batch.backward(processes)
    processes.add_up_gradients(model.parameters())
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
    return float(loss), float(norm)


def _is_better(score: float, state: RunState) -> bool:
    return state.best_score is None or score > state.best_score


class TrainingLog:
    """A log of one JSON object a line; ``size`` is what a checkpoint remembers.

    A resumed run cuts the log back to where its checkpoint stood, so that no step is logged twice.
    """

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


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """Return AdamW; each group keeps its peak rate under ``peak``.

    Weight decay is for matrices alone. Gates have a rate of their own, as a bias on logits has far to go and
    only a few hundred steps to do it.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    own: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in config.own_lrs:
            own.setdefault(config.own_lrs[name], []).append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": matrices, "peak": config.peak_lr, "weight_decay": config.weight_decay},
            {"params": vectors, "peak": config.peak_lr, "weight_decay": 0.0},
            *({"params": params, "peak": peak, "weight_decay": 0.0} for peak, params in own.items()),
        ],
        lr=config.peak_lr,
        betas=config.betas,
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


def save_weights(folder: Path, model: nn.Module) -> None:
    """Write what is trained of a small model, for :meth:`Objective.save`."""
    exactly = {name: tensor.detach().contiguous() for name, tensor in _trained(model).items()}
    with durable.storage_errors(f"saving {folder.name}"), durable.replacing_folder(folder) as temporary:
        save_file(exactly, temporary / WEIGHTS_NAME)


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
    processes: Processes = ALONE,
) -> Generator[None]:
    """Hold the folder of a run against other trainings, and hold the run to what it was begun with.

    Other settings, and data of another kind in ``made_of``, raise :class:`FingerprintMismatchError`.
    """
    with contextlib.nullcontext() if processes.rank else _held_folder(folder):
        with first_before_others(processes):
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
    before = stored.get("settings", {})
    others = [
        f"{name} {before.get(name)}"
        for name, value in made_of["settings"].items()
        if before.get(name) != value
    ]
    others += [
        f"another {name}"
        for name, value in made_of.items()
        if name != "settings" and stored.get(name) != value
    ]
    if others:
        raise FingerprintMismatchError(
            "a run must go on with what it was started with, got a folder of a run with "
            f"{', '.join(others)}; give the same settings and data, or another folder"
        )


def _as_json(config: RunConfig) -> dict[str, Any]:
    return {
        name: list(value)
        if isinstance(value, tuple)
        else str(value)
        if value in (math.inf, -math.inf)
        else value
        for name, value in asdict(config).items()
    }


def resolved(config: _Config, processes: Processes) -> _Config:
    """Say which precision auto is before it is written down: a run must not go on in another arithmetic."""
    dtype = resolve_precision(config.precision, processes.device)
    return replace(config, precision="bf16" if dtype == torch.bfloat16 else "fp32")


def deadline_in(seconds: float | None) -> float:
    """Return when so many seconds from now will be over; None: never."""
    return math.inf if seconds is None else time.monotonic() + seconds


@dataclass(frozen=True, slots=True)
class FrozenBaseRun:
    """Where a training beside a base that stays as it is leaves things: ``folder``, new or empty.

    The log stands beside it as FOLDER.jsonl. The files of the run are in a hidden folder beside it, which
    goes away when the run has ended; a killed one goes on from there.
    """

    folder: Path

    @property
    def files(self) -> Path:
        """Return where checkpoints lie."""
        return self.folder.with_name(f".{self.folder.name}.run")

    @property
    def log_path(self) -> Path:
        """Return where the log lies."""
        return self.folder.with_name(f"{self.folder.name}.jsonl")

    def require_new(self) -> None:
        """Raise :class:`ConfigError` for a place that is taken, or below a file."""
        folder = self.folder
        parent = next(parent for parent in folder.absolute().parents if parent.exists())
        if not parent.is_dir():
            raise ConfigError(
                f"the output folder of a training must lie in a folder, got {str(folder)!r} below a file; "
                "choose another"
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"the output folder of a training must be new or empty, got {str(folder)!r}; choose another"
            )
        if self.log_path.exists() and not self.files.is_dir():
            raise ConfigError(
                f"the log of a run must not replace a file, got {str(self.log_path)!r}; move it away, or "
                "choose another folder"
            )

    def train(
        self,
        objective: Objective,
        config: RunConfig,
        progress: ProgressListener,
        *,
        stage: str = "train",
        log_begins: int = 0,
    ) -> RunState:
        """Train, and leave the model as it was at the best step: the last where nothing is held out."""
        trainer = Trainer(
            objective=objective,
            config=config,
            folder=self.files / stage,
            log_path=self.log_path,
            log_begins=log_begins,
            progress=progress,
            stage=stage,
        )
        state = trainer.run().state
        if state.best_score is None:
            return replace(state, best_step=state.step)
        best = load_file(self.files / stage / "best" / WEIGHTS_NAME)
        with torch.no_grad():
            for name, tensor in _trained(objective.model).items():
                tensor.copy_(best[name])
        return state

    def finish(self) -> None:
        """Remove the files of a run that has ended."""
        with durable.storage_errors("clearing the run"):
            shutil.rmtree(self.files)
