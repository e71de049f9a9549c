"""One number for a model while it is trained: what an ingest with its own settings scores on judged sets.

    model folder ─▶ system ``cairn/fused`` with the folder's settings ─▶ nDCG@10, evidence recall
      ─▶ their mean a set ─▶ mean of the sets

Scores of one run compare with one another; those of sampled sets with nothing else. What a model is worth
says the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Final

from cairn.pipeline.config import Precision
from cairn.pipeline.lab.evaluate.bench import primary_measures, run_bench
from cairn.pipeline.lab.evaluate.encodings import text_digest
from cairn.pipeline.lab.evaluate.measures import require_measures
from cairn.pipeline.lab.evaluate.retrieval_set import (
    Judgements,
    RetrievalSet,
    read_retrieval_set,
    require_distinct_names,
    sample_set,
)
from cairn.pipeline.lab.evaluate.systems import configured_systems
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config
from cairn.pipeline.types import ModelScores, ProgressListener, silent_progress

RANKING: Final = "fused"
"""By document and chunk vectors: what BM25 finds does not depend on the model."""


@dataclass(frozen=True, slots=True)
class DevScorer:
    """A :class:`cairn.pipeline.types.ModelScorer` over judged sets that are held in memory."""

    sets: Sequence[RetrievalSet]
    precision: Precision = "auto"
    progress: ProgressListener = silent_progress

    @classmethod
    def of(
        cls,
        folders: Sequence[Path],
        *,
        max_queries: int,
        max_documents: int,
        seed: int,
        warn: Callable[[str], None],
        precision: Precision = "auto",
        progress: ProgressListener = silent_progress,
    ) -> DevScorer:
        """Draw a sample of each folder's set; ``warn`` is told what was left out of it."""
        sets = [
            sample_set(each, max_queries=max_queries, max_documents=max_documents, seed=seed)
            for each in map(read_retrieval_set, folders)
        ]
        for judged in sets:
            if judged.skipped:
                counted = ", ".join(f"{count} {reason}" for reason, count in judged.skipped.items())
                warn(f"left out of {judged.name}: {counted}")
        return cls(sets, precision, progress)

    def __post_init__(self) -> None:
        require_measures()
        require_distinct_names(self.sets)

    @property
    def fingerprint(self) -> str:
        """Identify the sets: texts, queries and judgements."""
        return fingerprint(ranking=RANKING, sets=[_digest_of_set(judged) for judged in self.sets])

    def score(self, model_folder: Path) -> ModelScores:
        """Score a model folder; measures are named ``set/measure``."""
        config = encoder_config({"model": str(model_folder), "precision": self.precision})
        system = next(system for system in configured_systems(config) if system.ranking == RANKING)
        context = context_config(str(model_folder), {})
        found: dict[str, dict[str, float]] = {}
        for judged in self.sets:
            [result] = run_bench(judged, [system], context, self.progress)
            means = result.means()
            found[judged.name] = {measure: means[measure] for measure in primary_measures(means)}
        return ModelScores(
            mean=fmean(fmean(means.values()) for means in found.values()),
            by_measure={
                f"{name}/{measure}": value
                for name, means in found.items()
                for measure, value in means.items()
            },
        )


def _digest_of_set(judged: RetrievalSet) -> str:
    numbers = (str(getattr(judged.judgements, each.name).tolist()) for each in fields(Judgements))
    texts = (*judged.doc_ids, *judged.texts, *judged.query_ids, *judged.queries)
    return text_digest((judged.name, *texts, *numbers))
