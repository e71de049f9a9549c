"""Distill an encoder as a job: `cairn distill` with its settings in a file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.jobs.job import main
from cairn.jobs.job_file import LIST, Job
from cairn.pipeline.types import ProgressListener


def distill_encoder(job: Job, progress: ProgressListener) -> dict[str, Any]:
    """Run the distillation and return its report; the same job goes on from the newest checkpoint."""
    from cairn.pipeline.lab.train.distill.settings import DistillConfig

    names = {"teacher": str, "student": str, "texts": LIST, "output": str}
    own, config = job.config(DistillConfig, own=names, required=tuple(names))
    from cairn.pipeline.lab.train.distill.loop import distill  # imports torch

    texts, output = list(map(Path, own["texts"])), Path(own["output"])
    return asdict(distill(own["teacher"], own["student"], texts, output, config, progress=progress))


if __name__ == "__main__":
    sys.exit(main("distill_encoder", distill_encoder))
