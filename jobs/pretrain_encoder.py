"""Pretrain an encoder as a job: `cairn pretrain` with its settings in a file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.jobs.job import main
from cairn.jobs.job_file import LIST, Job
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.types import ProgressListener


def pretrain_encoder(job: Job, progress: ProgressListener) -> dict[str, Any]:
    """Run the pretraining and return its report; the same job goes on from the newest checkpoint."""
    from cairn.pipeline.lab.train.pretrain.settings import PretrainConfig

    own, config = job.config(
        PretrainConfig,
        own={"sources": LIST, "output": str, "base": str, "from_config": str},
        required=("output", "sources"),
    )
    from cairn.pipeline.lab.train.pretrain.loop import pretrain  # imports torch

    report = pretrain(
        list(map(Path, own["sources"])),
        Path(own["output"]),
        config,
        base=own["base"] or BASE_MODEL,
        from_config=own["from_config"] and Path(own["from_config"]),
        progress=progress,
    )
    return asdict(report)


if __name__ == "__main__":
    sys.exit(main("pretrain_encoder", pretrain_encoder))
