"""What a run computes must be finite: losses, gradients, scores, vectors.

The log of a training run: one JSON object a line.

A resumed run cuts the log back to where its checkpoint stood, so that no step is logged twice.

Where a training beside a base that stays as it is leaves what it trained, and its log beside that.

AdamW, and the learning rate of each step; its state is named tensors, without pickle.

Weight decay is for matrices alone; gates have a rate of their own, as a bias on logits has far to go and only
a few hundred steps to do it.

The folder of a run belongs to one set of settings and data: what a run is made of stands in run.json.

Checkpoints of a run: whole or absent, and enough to go on bit for bit.

    RUN/checkpoints/00000150/   a model folder, optimizer.safetensors, state.json with the hashes,
                                low_rank.safetensors where there are low-rank updates,
                                token_head.safetensors where a token projection is trained along,
                                objective.safetensors where an objective has weights of its own
    RUN/best/                   the model folder of the best score; RUN/candidate/ while one is being scored
    RUN/model/                  the model folder of the last step
    RUN/changes.safetensors     what of it differs from the base, in bf16

A checkpoint is written under another name and renamed; the two newest are kept. All that is drawn at random
is drawn from the seed and the step, so nothing else has to be stored. One that is damaged is passed over with
a warning. RUN/.lock keeps a second training out.

The steps of a run, and what they leave: checkpoints, a log, scores, the best model so far.

    step ─▶ log ─▶ (score ─▶ best/) ─▶ (checkpoint) ─▶ next step … ─▶ model/, changes.safetensors

What a step computes and which model is the best is the task's matter. A loss that is not finite stops the run
before the optimiser has seen it, a score that is not before the model is saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import (
    ConfigError,
    FingerprintMismatchError,
    IntegrityError,
    ModelError,
    TryAgainError,
)
from cairn.pipeline.lab.train.adapters import low_rank_parameters
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, LandmarkEncoder
from cairn.pipeline.lab.train.processes import Processes
from cairn.pipeline.lab.train.settings import RunSettings
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import WEIGHTS_NAME, Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder, write_encoder_folder
from cairn.pipeline.model.folders.own_tensors import CONTEXT_SIZE, FIRST_STAGE
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import ProgressListener
from safetensors.torch import load_file, save_file
from torch import nn


class NotFiniteError(ModelError):
    """A run came upon NaN or infinity."""


def require_finite(numbers: Mapping[str, float]) -> None:
    """Raise :class:`NotFiniteError` that names the numbers which are NaN or infinite."""
    others = {name: value for name, value in numbers.items() if not math.isfinite(value)}
    if others:
        values = " and ".join(str(value) for value in others.values())
        raise NotFiniteError(f"{' and '.join(others)} must be finite, got {values}")


class TrainingLog:
    """Appends lines; ``size`` is what a checkpoint remembers."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._path = path
        with durable.storage_errors("writing the log"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as stream:
                stream.truncate(min(keep_bytes, path.stat().st_size))
        self.size = path.stat().st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; NaN or infinity raises :class:`cairn.pipeline.lab.train.finite.NotFiniteError`."""
        require_finite({name: value for name, value in record.items() if isinstance(value, float)})
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with durable.storage_errors("writing the log"), self._path.open("ab") as stream:
            stream.write(line)
        self.size += len(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log; a last line that was being written when the process died is left out."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return [json.loads(line) for line in lines[:-1]]


def require_new(folder: Path) -> None:
    """Raise :class:`ConfigError` for a place that is taken, or below a file."""
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


def log_path_of(folder: Path) -> Path:
    """Return where a run's log lies, beside its folder.

    Raise :class:`ConfigError` where something lies there already.
    """
    path = folder.with_name(f"{folder.name}.jsonl")
    if path.exists():
        raise ConfigError(
            f"the log of a run must not replace a file, got {str(path)!r}; move it away, or "
            "choose another folder"
        )
    return path


BETAS = (0.9, 0.999)
EPSILON = 1e-8
LOWEST_LR: Final = 0.05
"""Share of the peak rate that the last steps beside a frozen base are made with."""


def make_optimizer(model: nn.Module, config: RunSettings) -> torch.optim.AdamW:
    """Return the optimiser; each group keeps its peak rate under ``peak``."""
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
        betas=BETAS,
        eps=EPSILON,
    )


def lr_factor(step: int, config: RunSettings) -> float:
    """Return the share of the peak rate that step 0 … steps - 1 is made with.

    Up to 1 while warming up, then down to almost 0, along a line or half a cosine.
    """
    num_warming = round(config.warmup_share * config.steps)
    if step < num_warming:
        return (step + 1) / num_warming
    left = (config.steps - step) / max(1, config.steps - num_warming)
    return left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def cosine_lr_factor(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak rate of step 1 … steps: a linear warm-up times a cosine to LOWEST_LR."""
    cosine = LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, step / max(1, warmup_steps)) * cosine


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its peak rate times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state by parameter and kind; empty before the first step."""
    return {
        f"{name}/{kind}": tensor.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put such a state back; tensors that do not fit the model raise :class:`IntegrityError`."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        if name not in parameters or (tensor.ndim and tensor.shape != parameters[name].shape):
            raise IntegrityError(
                f"the optimiser's state must be of this model, got {key} of shape {tuple(tensor.shape)}; "
                "delete the checkpoint"
            )
        states.setdefault(name, {})[kind] = (
            tensor.clone() if kind == "step" else tensor.to(parameters[name].device, copy=True)
        )
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def claim_folder(
    folder: Path, config: Any, made_of: Mapping[str, str | None], skipped: Mapping[str, int]
) -> None:
    """Write what this run is made of, or compare it with what a run in the folder was made of.

    ``config`` is a dataclass of settings that needs no more than its ``steps``. Another one, and data of
    another kind in ``made_of``, raise :class:`FingerprintMismatchError`.
    """
    settings = _as_json(config)
    path = folder / "run.json"
    if path.is_file():
        stored = _read_claim(path)
        # A setting younger than the run stood at its default.
        before: dict[str, Any] = _as_json(type(config)(steps=config.steps)) | stored.get("settings", {})
        others = [
            f"{name} {before.get(name)}" for name, value in settings.items() if before.get(name) != value
        ]
        others += [f"another {name}" for name, value in made_of.items() if stored.get(name) != value]
        if others:
            raise FingerprintMismatchError(
                "a run must go on with what it was started with, got a folder of a run with "
                f"{', '.join(others)}; "
                "give the same settings and data, or another folder"
            )
        return
    with durable.storage_errors("starting the run"):
        durable.write_json(path, {"settings": settings, **made_of, "skipped": dict(skipped)})


def _read_claim(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ModelError as error:
        raise IntegrityError(
            f"{path.name} of the run must be JSON, got a damaged file; train in another folder"
        ) from error


def _as_json(config: Any) -> dict[str, Any]:
    return {
        name: list(value)
        if isinstance(value, tuple)
        else str(value)
        if value in (math.inf, -math.inf)
        else value
        for name, value in asdict(config).items()
    }


logger = logging.getLogger(__name__)

OPTIMIZER_NAME: Final = "optimizer.safetensors"
LOW_RANK_NAME: Final = "low_rank.safetensors"
HEAD_NAME: Final = "token_head.safetensors"
OBJECTIVE_NAME: Final = "objective.safetensors"
STATE_NAME: Final = "state.json"
KEPT: Final = 2
_HASHED: Final = (WEIGHTS_NAME, OPTIMIZER_NAME)
"""What every checkpoint has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: steps done, bytes of the log they wrote, the best score and its step."""

    step: int
    log_bytes: int
    best_score: float
    best_step: int


@contextlib.contextmanager
def held_folder(folder: Path) -> Generator[None]:
    """Make the folder of a run and hold it against other trainings.

    What a killed one left half written goes away.
    """

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


class RunFolder:
    """The files of one run."""

    def __init__(
        self,
        folder: Path,
        base: Checkpoint,
        encoder: EncoderConfig,
        *,
        late_bits: int = 2,
        context: ContextConfig | None = None,
    ) -> None:
        self.folder = folder
        self._base = base
        self._encoder = encoder
        self._late_bits = late_bits
        self._context = context

    @property
    def log_path(self) -> Path:
        """Return where the log is."""
        return self.folder / "log.jsonl"

    def newest(self) -> Path | None:
        """Return the newest checkpoint that is whole."""
        for folder in sorted((self.folder / "checkpoints").glob("[0-9]*"), reverse=True):
            if _is_whole(folder):
                return folder
            logger.warning("checkpoint %s is damaged; going back to the one before", folder.name)
        return None

    @torch.no_grad()
    def restore(self, folder: Path, model: LandmarkEncoder, optimizer: torch.optim.Optimizer) -> RunState:
        """Put a checkpoint's weights and optimiser state into place, and return where it stands."""
        stored = dict(read_checkpoint(folder).tensors)
        if (folder / LOW_RANK_NAME).is_file():
            stored |= load_file(folder / LOW_RANK_NAME)
        if model.head is not None:
            head = load_file(folder / HEAD_NAME)
            model.head.load_state_dict(head)
            stored |= {f"head.{name}": tensor for name, tensor in head.items()}
        if model.objective is not None:
            stored |= {f"objective.{name}": x for name, x in load_file(folder / OBJECTIVE_NAME).items()}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(stored[name if name in stored else model.published_name(name)])
        restore_optimizer(optimizer, model, load_file(folder / OPTIMIZER_NAME))
        state = read_json(folder / STATE_NAME)
        return RunState(**{name: state[name] for name in RunState.__dataclass_fields__})

    def save(self, state: RunState, model: LandmarkEncoder, optimizer: torch.optim.Optimizer) -> Path:
        """Write a checkpoint and drop all but the newest; a full disk leaves those there were."""
        target = self.folder / "checkpoints" / f"{state.step:08d}"
        with (
            durable.storage_errors(f"writing checkpoints/{target.name}"),
            durable.replacing_folder(target) as folder,
        ):
            write_encoder_folder(
                folder,
                self._trained(model),
                self._encoder,
                projection=self._projection(model),
                context=self._context,
            )
            save_file(optimizer_tensors(optimizer, model), folder / OPTIMIZER_NAME)
            head = {} if model.head is None else model.head.state_dict()
            objective = {} if model.objective is None else model.objective.state_dict()
            # A model folder has low-rank updates and a token head rounded.
            exactly = {LOW_RANK_NAME: low_rank_parameters(model), HEAD_NAME: head, OBJECTIVE_NAME: objective}
            for name, exact in exactly.items():
                if exact:
                    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in exact.items()}
                    save_file(tensors, folder / name)
            hashes = {
                path.relative_to(folder).as_posix(): durable.sha256_of_file(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
            own = _state_json(state)
            durable.write_json(
                folder / STATE_NAME, {**own, "sha256": hashes, "fingerprint": fingerprint(**own)}
            )
        durable.commit_point("train.checkpoint")
        for old in sorted(target.parent.glob("[0-9]*"))[:-KEPT]:
            shutil.rmtree(old)
        return target

    def save_model(self, name: str, model: LandmarkEncoder) -> Path:
        """Write ``best``, ``model`` or ``candidate`` and return where.

        A reader of the folder sees the one before or this one.
        """
        save_encoder_folder(
            self.folder / name,
            self._trained(model),
            self._encoder,
            replaces=True,
            projection=self._projection(model),
            context=self._context,
        )
        return self.folder / name

    def rename_model(self, name: str, new_name: str) -> None:
        """Put a model in the place of another."""
        with durable.storage_errors(f"renaming {name} to {new_name}"):
            durable.put_in_place(self.folder / name, self.folder / new_name)

    def drop_model(self, name: str) -> None:
        """Remove a model."""
        with durable.storage_errors(f"removing {name}"):
            shutil.rmtree(self.folder / name)

    def save_changes(self, model: LandmarkEncoder, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write what differs from the base.

        As ``cairn_extra.safetensors`` beside the base's weights it makes the trained model. Tensors have the
        base's names; published parameters are stored in ``dtype``, gates and null token in float32. A
        first stage of its own is stored whole.
        """
        changed: dict[str, torch.Tensor] = {}
        for name, tensor in model.published_tensors().items():
            if name in (*OWN_NAMES, CONTEXT_SIZE):
                changed[name] = tensor
            elif (
                name.startswith(FIRST_STAGE)
                or name not in self._base.tensors
                or not torch.equal(tensor, self._base.tensors[name].float())
            ):
                changed[name] = tensor.to(dtype)
        with (
            durable.storage_errors("writing what changed"),
            durable.replacing(self.folder / "changes.safetensors") as temporary,
        ):
            save_file(changed, temporary)

    def _projection(self, model: LandmarkEncoder) -> TokenProjection | None:
        return None if model.head is None else model.head.projection("", bits=self._late_bits, pool_tokens=1)

    def _trained(self, model: LandmarkEncoder) -> Checkpoint:
        return replace(self._base, tensors={**self._base.tensors, **model.published_tensors()})


def _state_json(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RunState.__dataclass_fields__}


def _is_whole(folder: Path) -> bool:
    try:
        stored = read_json(folder / STATE_NAME)
        own = {name: stored[name] for name in RunState.__dataclass_fields__}
        hashes: Mapping[str, str] = dict(stored["sha256"])
        # Checkpoints of older versions have no fingerprint.
        is_same = stored.get("fingerprint", fingerprint(**own)) == fingerprint(**own)
    except (ModelError, KeyError, TypeError, ValueError):
        return False
    return (
        is_same
        and set(hashes) >= set(_HASHED)
        and all(
            (folder / name).is_file() and durable.sha256_of_file(folder / name) == digest
            for name, digest in hashes.items()
        )
    )


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
