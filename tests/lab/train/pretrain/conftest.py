"""Texts of two languages, and runs on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from cairn.pipeline.lab.train.pretrain import PretrainReport, pretrain
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.lab.train.token_stream import TokenStream
from cairn.pipeline.lab.train.training_files import read_texts
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.types import silent_progress

RUN_SETTINGS: Final[dict[str, Any]] = {
    "steps": 6,
    "batch_rows": 4,
    "max_tokens": 48,
    "landmark_intervals": (4, 8),
    "heldout_rows": 4,
    "evaluate_every": 3,
    "checkpoint_every": 2,
    "peak_lr": 3e-3,
    "micro_batch_tokens": 100,
    "precision": "fp32",
}


@pytest.fixture
def make_stream(texts_file: Path, tiny_model_folder: Path) -> Callable[..., TokenStream]:
    """Return a maker of streams over these texts."""

    def make(**settings: Any) -> TokenStream:
        config = PretrainConfig(**{**RUN_SETTINGS, **settings})
        return TokenStream(
            read_texts([texts_file]), read_checkpoint(tiny_model_folder), config, silent_progress
        )

    return make


@pytest.fixture
def run(texts_file: Path, tiny_model_folder: Path, tmp_path: Path) -> Any:
    """Return a starter of runs, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(name: str = "run", progress: Any = silent_progress, **settings: Any) -> PretrainReport:
        given = {key: settings.pop(key) for key in ("base", "from_config", "processes") if key in settings}
        return pretrain(
            [texts_file],
            tmp_path / name,
            PretrainConfig(**{**RUN_SETTINGS, **settings}),
            progress=progress,
            **{"base": str(tiny_model_folder), **given},
        )

    yield start
    torch.set_num_threads(threads)
