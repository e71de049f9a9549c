"""Train an encoder as a job: `cairn train` with its settings in a file, GPUs as PyTorch finds them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.jobs.job import main
from cairn.jobs.job_file import LIST, Job
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.types import ProgressListener


def train_encoder(
    job: Job, progress: ProgressListener, stop_after_seconds: float | None = None
) -> dict[str, Any]:
    """Run the training and return its report.

    The same job goes on from the newest checkpoint after a kill, or after ``stop_after_seconds``, which raise
    :class:`TryAgainError`.
    """
    from cairn.pipeline.lab.train.settings import TrainConfig

    own, config = job.config(
        TrainConfig,
        own={"sources": LIST, "documents": LIST, "judged": LIST, "output": str, "base": str},
        required=("output",),
    )
    from cairn.pipeline.lab.train.loop import train  # imports torch

    report = train(
        list(map(Path, own["sources"])),
        Path(own["output"]),
        config,
        base=own["base"] or BASE_MODEL,
        documents=list(map(Path, own["documents"])),
        judged=list(map(Path, own["judged"])),
        stop_after_seconds=stop_after_seconds,
        progress=progress,
    )
    return asdict(report)


if __name__ == "__main__":
    sys.exit(main("train_encoder", train_encoder))
