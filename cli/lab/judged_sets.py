"""The judged sets that say what a model is worth while it is trained or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.cli.terminal import echo
from cairn.pipeline.config import Precision

if TYPE_CHECKING:
    from cairn.pipeline.types import ModelScorer, ProgressListener


def dev_scorer(
    folders: Sequence[Path],
    *,
    max_queries: int,
    max_documents: int,
    seed: int,
    progress: ProgressListener,
    precision: Precision = "auto",
) -> ModelScorer:
    """Return what scores models on samples of judged sets; warn of what was left out of these."""
    from cairn.pipeline.lab.evaluate.dev_scores import DevScorer
    from cairn.pipeline.lab.evaluate.retrieval_set import read_retrieval_set, sample_set

    sets = [
        sample_set(
            read_retrieval_set(folder), max_queries=max_queries, max_documents=max_documents, seed=seed
        )
        for folder in folders
    ]
    for judged in sets:
        if judged.skipped:
            counted = ", ".join(f"{count} {reason}" for reason, count in judged.skipped.items())
            echo(f"warning: left out of {judged.name}: {counted}", err=True)
    return DevScorer(sets, precision=precision, progress=progress)
