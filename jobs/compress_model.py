"""Compress a model as a job: `cairn compress` with its settings in a file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.jobs.job import main
from cairn.jobs.job_file import LIST, Job
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.types import ProgressListener


def compress_model(job: Job, progress: ProgressListener) -> dict[str, Any]:
    """Run the compression and return its report, with scores where judged sets are named.

    A killed one leaves no model, and starts again.
    """
    from cairn.pipeline.lab.compress.settings import CompressConfig

    own, config = job.config(
        CompressConfig,
        own={"texts": LIST, "judged": LIST, "output": str, "model": str},
        required=("output", "texts"),
    )
    from cairn.pipeline.lab.compress.compression import compress  # imports torch
    from cairn.pipeline.lab.evaluate.dev_scores import DevScorer
    from cairn.pipeline.lab.evaluate.retrieval_set import read_retrieval_set

    judged = [read_retrieval_set(Path(folder)) for folder in own["judged"]]
    report = compress(
        own["model"] or BASE_MODEL,
        list(map(Path, own["texts"])),
        Path(own["output"]),
        config,
        scorer=DevScorer(judged, progress=progress) if judged else None,
        progress=progress,
    )
    return asdict(report)


if __name__ == "__main__":
    sys.exit(main("compress_model", compress_model))
