"""Distill an encoder as a job: `cairn distill` with its settings in a file."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cairn.jobs.job_file import DistillJob
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.types import ProgressListener


def distill_encoder(job: DistillJob, progress: ProgressListener) -> dict[str, Any]:
    """Run the distillation and return its report; the same job goes on from the newest checkpoint."""
    from cairn.pipeline.lab.train.settings import DistillConfig

    known = [item.name for item in fields(DistillConfig)]
    for name in job.settings:
        if name not in known:
            raise ConfigError(f"[distill] must not have {name!r}; there are {', '.join(known)}")
    if "steps" not in job.settings:
        raise ConfigError("[distill] steps must be given")
    try:
        config = DistillConfig(**job.settings)
    except ConfigError as error:
        raise ConfigError(f"[distill] {error}") from error
    from cairn.pipeline.lab.train.distill import distill  # imports torch

    texts = list(map(Path, job.texts))
    return asdict(distill(job.teacher, job.student, texts, Path(job.output), config, progress=progress))


if __name__ == "__main__":
    from cairn.jobs.job import main

    sys.exit(main("distill_encoder", distill_encoder))
