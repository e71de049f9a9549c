"""Train an encoder as a job.

`cairn train` with its settings in a file, on one machine, GPUs as PyTorch finds them.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jobs.job_file import TrainJob
from pipeline.errors import ConfigError
from pipeline.types import ProgressListener


def train_encoder(
    job: TrainJob, progress: ProgressListener, stop_after_seconds: float | None = None
) -> dict[str, Any]:
    """Run the training and return its report.

    The same job goes on from the newest checkpoint after a kill, or after ``stop_after_seconds``, which raise
    :class:`TryAgainError`.
    """
    from pipeline.train.settings import TrainConfig

    known = [item.name for item in fields(TrainConfig)]
    for name in job.settings:
        if name not in known:
            raise ConfigError(f"[train] must not have {name!r}; there are {', '.join(known)}")
    if "steps" not in job.settings:
        raise ConfigError("[train] steps must be given")
    try:
        config = TrainConfig(**job.settings)
    except ConfigError as error:
        raise ConfigError(f"[train] {error}") from error
    from pipeline.train.loop import train  # imports torch

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


if __name__ == "__main__":
    from jobs.job import main

    sys.exit(main("train_encoder", train_encoder))
