"""Checkpoints of a run: whole or absent, and enough to go on bit for bit.

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
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ModelError, TryAgainError
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, LandmarkEncoder
from cairn.pipeline.lab.train.low_rank import low_rank_parameters
from cairn.pipeline.lab.train.optimizer import optimizer_tensors, restore_optimizer
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import WEIGHTS_NAME, Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder, write_encoder_folder
from cairn.pipeline.model.folders.own_tensors import CONTEXT_SIZE, FIRST_STAGE
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.token_vectors.projection import TokenProjection
from safetensors.torch import load_file, save_file

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
            own = _as_json(state)
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


def _as_json(state: RunState) -> dict[str, Any]:
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
