"""Pretrain an encoder as a job.

`cairn pretrain` with its settings in a file, on one machine, GPUs as PyTorch finds them.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.jobs.job_file import PretrainJob
from cairn.jobs.train_encoder import run_settings
from cairn.pipeline.types import ProgressListener


def pretrain_encoder(job: PretrainJob, progress: ProgressListener) -> dict[str, Any]:
    """Run the pretraining and return its report; the same job goes on from the newest checkpoint."""
    from cairn.pipeline.lab.train.settings import PretrainConfig

    config = run_settings("pretrain", PretrainConfig, job.settings)
    from cairn.pipeline.lab.train.pretrain import pretrain  # imports torch

    report = pretrain(
        list(map(Path, job.sources)),
        Path(job.output),
        config,
        base=job.base,
        from_config=None if job.from_config is None else Path(job.from_config),
        progress=progress,
    )
    return asdict(report)


if __name__ == "__main__":
    from cairn.jobs.job import main

    sys.exit(main("pretrain_encoder", pretrain_encoder))
