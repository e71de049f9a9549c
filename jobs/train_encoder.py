"""Train an encoder as a job.

`cairn train` with its settings in a file, on one machine, GPUs as PyTorch finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from cairn.jobs.job_file import TrainJob
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.settings import RunConfig
from cairn.pipeline.types import ProgressListener

_Settings = TypeVar("_Settings", bound=RunConfig)


def train_encoder(
    job: TrainJob, progress: ProgressListener, stop_after_seconds: float | None = None
) -> dict[str, Any]:
    """Run the training and return its report.

    The same job goes on from the newest checkpoint after a kill, or after ``stop_after_seconds``, which raise
    :class:`TryAgainError`.
    """
    from cairn.pipeline.lab.train.settings import TrainConfig

    config = run_settings("train", TrainConfig, job.settings)
    from cairn.pipeline.lab.train.contrastive import train  # imports torch

    sources, documents, judged = (
        list(map(Path, paths)) for paths in (job.sources, job.documents, job.judged)
    )
    report = train(
        sources,
        Path(job.output),
        config,
        base=job.base,
        documents=documents,
        judged=judged,
        stop_after_seconds=stop_after_seconds,
        progress=progress,
    )
    return asdict(report)


def run_settings(table: str, kind: type[_Settings], settings: Mapping[str, Any]) -> _Settings:
    """Return a run's settings; an unknown, missing or wrong one raises :class:`ConfigError`."""
    known = list(signature(kind).parameters)
    for name in settings:
        if name not in known:
            raise ConfigError(f"[{table}] must not have {name!r}; there are {', '.join(known)}")
    if "steps" not in settings:
        raise ConfigError(f"[{table}] steps must be given")
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"[{table}] {error}") from error


if __name__ == "__main__":
    from cairn.jobs.job import main

    sys.exit(main("train_encoder", train_encoder))
