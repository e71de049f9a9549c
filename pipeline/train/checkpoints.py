"""Checkpoints of a run: whole or absent, and enough to go on bit for bit.

    RUN/checkpoints/00000150/   a model folder, optimizer.safetensors, state.json with the hashes of both, written last
    RUN/best/                   the model folder of the best held-out score
    RUN/model/                  the model folder of the last step
    RUN/changes.safetensors     what of it differs from the base, in bf16

A checkpoint is written under another name and renamed; the two newest are kept. All that is drawn at random is drawn from the seed and the
step, so nothing else has to be stored. One that is damaged is passed over with a warning.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from pipeline import durable
from pipeline.config import EncoderConfig
from pipeline.model.checkpoint import EXTRA_NAME, WEIGHTS_NAME, Checkpoint, read_checkpoint
from pipeline.model.sentence_transformers_folder import read_json
from pipeline.train.encoder_folder import save_changes, save_encoder
from pipeline.train.landmark_encoder import LandmarkEncoder
from pipeline.train.optimizer import optimizer_tensors, restore_optimizer

logger = logging.getLogger(__name__)

OPTIMIZER_NAME: Final = "optimizer.safetensors"
STATE_NAME: Final = "state.json"
KEPT: Final = 2
_HASHED: Final = (WEIGHTS_NAME, EXTRA_NAME, OPTIMIZER_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: steps done, bytes of the log they wrote, the best held-out score and its step."""

    step: int
    log_bytes: int
    best_score: float
    best_step: int


class RunFolder:
    """The files of one run."""

    def __init__(self, folder: Path, base: Checkpoint, encoder: EncoderConfig) -> None:
        self.folder = folder
        self._base = base
        self._encoder = encoder

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

    def restore(self, folder: Path, model: LandmarkEncoder, optimizer: torch.optim.Optimizer) -> RunState:
        """Put a checkpoint's weights and optimiser state into place, and return where it stands."""
        stored = LandmarkEncoder(read_checkpoint(folder))
        model.load_state_dict(stored.state_dict())
        restore_optimizer(optimizer, model, load_file(folder / OPTIMIZER_NAME))
        state = read_json(folder / STATE_NAME)
        return RunState(**{name: state[name] for name in RunState.__dataclass_fields__})

    def save(self, state: RunState, model: LandmarkEncoder, optimizer: torch.optim.Optimizer) -> Path:
        """Write a checkpoint and drop all but the newest; a full disk leaves those there were."""
        target = self.folder / "checkpoints" / f"{state.step:08d}"

        def write(folder: Path) -> None:
            save_encoder(model, self._base, folder, self._encoder)
            save_file(optimizer_tensors(optimizer, model), folder / OPTIMIZER_NAME)
            durable.fsync_file(folder / OPTIMIZER_NAME)
            hashes = {name: durable.sha256_of_file(folder / name) for name in _HASHED}
            durable.write_json(folder / STATE_NAME, {**_as_json(state), "sha256": hashes})

        _replace_folder(target, write)
        durable.commit_point("train.checkpoint")
        for old in sorted(target.parent.glob("[0-9]*"))[:-KEPT]:
            shutil.rmtree(old)
        return target

    def save_model(self, name: str, model: LandmarkEncoder) -> None:
        """Write ``best`` or ``model``."""
        _replace_folder(self.folder / name, lambda folder: save_encoder(model, self._base, folder, self._encoder))

    def save_changes(self, model: LandmarkEncoder) -> None:
        """Write what differs from the base."""
        save_changes(model, self._base, self.folder / "changes.safetensors")


def _as_json(state: RunState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RunState.__dataclass_fields__}


def _is_whole(folder: Path) -> bool:
    if not (folder / STATE_NAME).is_file():
        return False
    hashes: Mapping[str, str] = read_json(folder / STATE_NAME).get("sha256", {})
    return set(hashes) == set(_HASHED) and all(
        (folder / name).is_file() and durable.sha256_of_file(folder / name) == digest for name, digest in hashes.items()
    )


def _replace_folder(target: Path, write: Any) -> None:
    """Write a folder beside ``target`` and rename it; what was there goes away first, what is half written does not stay."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with durable.storage_errors(f"writing {target.parent.name}/{target.name}"):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(temporary)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            durable.fsync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
