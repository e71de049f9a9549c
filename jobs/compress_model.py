"""Compress a model as a job: `cairn compress` with its settings in a file."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cairn.jobs.job_file import CompressJob
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.types import ProgressListener


def compress_model(job: CompressJob, progress: ProgressListener) -> dict[str, Any]:
    """Run the compression and return its report, with scores where judged sets are named.

    A killed one leaves no model, and starts again.
    """
    from cairn.pipeline.lab.compress.settings import CompressConfig

    known = [item.name for item in fields(CompressConfig)]
    for name in job.settings:
        if name not in known:
            raise ConfigError(f"[compress] must not have {name!r}; there are {', '.join(known)}")
    try:
        config = CompressConfig(**job.settings)
    except ConfigError as error:
        raise ConfigError(f"[compress] {error}") from error
    from cairn.pipeline.lab.compress.compression import compress  # imports torch
    from cairn.pipeline.lab.evaluate.dev_scores import DevScorer
    from cairn.pipeline.lab.evaluate.retrieval_set import read_retrieval_set

    judged = [read_retrieval_set(Path(folder)) for folder in job.judged]
    report = compress(
        job.model,
        list(map(Path, job.texts)),
        Path(job.output),
        config,
        scorer=DevScorer(judged, progress=progress) if judged else None,
        progress=progress,
    )
    return asdict(report)


if __name__ == "__main__":
    from cairn.jobs.job import main

    sys.exit(main("compress_model", compress_model))
