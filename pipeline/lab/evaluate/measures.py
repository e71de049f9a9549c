"""Document measures of a ranking, one value a query: nDCG@10, recall@100 and MRR@10, computed by ir_measures.

TREC run files hold what was ranked for each query, in the six columns that every retrieval tool reads:

    query_id Q0 doc_id rank score tag

Ids hold no white space: the set they come from was checked for it. A ranking is positions of documents with
float32 scores that strictly fall, so that every tool that sorts by score, trec_eval's float32 among them,
sees the order that was meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError, SourceError, install_command
from cairn.pipeline.lab.evaluate.evidence import Spans
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from jaxtyping import Float, Float32, Float64, Int64

NDCG, RECALL, MRR = "nDCG@10", "R@100", "MRR@10"
DOCUMENT_MEASURES = (NDCG, RECALL, MRR)
_IR_NAMES = {NDCG: "nDCG@10", RECALL: "R@100", MRR: "RR@10"}

RUN_DEPTH = 100
"""Documents kept of a ranking: what the deepest measure looks at."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankedDocuments:
    """One query's ranking: positions best first, with scores that strictly fall."""

    positions: Int64[np.ndarray, " K"]
    scores: Float32[np.ndarray, " K"]

    @classmethod
    def of(cls, positions: Int64[np.ndarray, " K"], scores: Float[np.ndarray, " K"]) -> RankedDocuments:
        """Take documents best first.

        A score that does not fall below the one before is moved to the next smaller float32.
        """
        falling = np.asarray(scores, np.float32).copy()
        for rank in range(1, len(falling)):
            falling[rank] = min(falling[rank], np.nextafter(falling[rank - 1], np.float32(-np.inf)))
        return cls(positions=positions, scores=falling)

    @classmethod
    def best(
        cls, scores_N: Float[np.ndarray, " N"], id_rank_N: Int64[np.ndarray, " N"], limit: int
    ) -> RankedDocuments:
        """Take the best documents, ties by id; one of minus infinity is no candidate and never among them."""
        few = best_positions(scores_N, limit)
        few = few[scores_N[few] > -np.inf]
        order = few[np.lexsort((id_rank_N[few], -scores_N[few]))][:limit]
        return cls.of(order, scores_N[order])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """One query's ranking and, where asked for, the passages a reader meets, best first."""

    documents: RankedDocuments
    passages: Spans | None


def id_ranks(doc_ids: Sequence[str]) -> Int64[np.ndarray, " N"]:
    """Return each document's place among the sorted ids: ties go to the lower one, as in a search."""
    id_rank_N = np.empty(len(doc_ids), np.int64)
    id_rank_N[np.argsort(np.array(doc_ids, dtype=object), kind="stable")] = np.arange(len(doc_ids))
    return id_rank_N


def best_positions(scores: Float[np.ndarray, " X"], limit: int) -> Int64[np.ndarray, " K"]:
    """Return the positions of the ``limit`` best scores and of those that tie with the last, unsorted."""
    if len(scores) <= limit:
        return np.arange(len(scores))
    return np.flatnonzero(scores >= np.partition(scores, len(scores) - limit)[len(scores) - limit])


def document_measures(
    judged: RetrievalSet, run: Sequence[RankedDocuments]
) -> dict[str, Float64[np.ndarray, " Q"]]:
    """Return every document measure of every query, in the set's order of queries."""
    documents = judged.doc_ids
    scored = {
        query_id: {
            documents[p]: float(s)
            for p, s in zip(ranked.positions.tolist(), ranked.scores.tolist(), strict=True)
        }
        for query_id, ranked in zip(judged.query_ids, run, strict=True)
    }
    return measure_run(judged, scored)


def measure_run(
    judged: RetrievalSet, run: Mapping[str, Mapping[str, float]]
) -> dict[str, Float64[np.ndarray, " Q"]]:
    """Return every document measure of a run given as query id to document id to score.

    A query it lacks scores 0.
    """
    ir_measures = _ir_measures()
    place = {query_id: index for index, query_id in enumerate(judged.query_ids)}
    measures = {ir_measures.parse_measure(ir_name): name for name, ir_name in _IR_NAMES.items()}
    values = {name: np.zeros(len(place)) for name in DOCUMENT_MEASURES}
    for metric in ir_measures.iter_calc(list(measures), qrels_of(judged), run):
        values[measures[metric.measure]][place[metric.query_id]] = metric.value
    return values


def qrels_of(judged: RetrievalSet) -> dict[str, dict[str, int]]:
    """Return the judgements as query id to document id to gain.

    Several judgements of a pair count as their highest.
    """
    gains: dict[str, dict[str, int]] = {query_id: {} for query_id in judged.query_ids}
    judgements = judged.judgements
    for query, document, gain in zip(
        judgements.query_J.tolist(), judgements.document_J.tolist(), judgements.gain_J.tolist(), strict=True
    ):
        own, doc_id = gains[judged.query_ids[query]], judged.doc_ids[document]
        own[doc_id] = max(gain, own.get(doc_id, gain))
    return gains


def require_measures() -> None:
    """Raise :class:`ConfigError` where ir_measures is not installed, before anything costly begins."""
    _ir_measures()


def _ir_measures() -> Any:
    try:
        import ir_measures
    except ModuleNotFoundError as error:
        raise ConfigError(
            "evaluating must have the package ir_measures, got none; install it with "
            f"{install_command('evaluate')}"
        ) from error
    return ir_measures


_LINE = re.compile(
    r"(?P<query>\S+)\s+\S+\s+(?P<document>\S+)\s+\S+\s+(?P<score>[-+]?\d+(\.\d*)?([eE][-+]?\d+)?)\s+\S+"
)


def write_run(path: Path, judged: RetrievalSet, run: Sequence[RankedDocuments], tag: str) -> None:
    """Write a run durably, queries in the set's order; the folder is made."""
    lines = [
        f"{query_id} Q0 {judged.doc_ids[position]} {rank} {score!r} {tag}\n"
        for query_id, ranked in zip(judged.query_ids, run, strict=True)
        for rank, (position, score) in enumerate(
            zip(ranked.positions.tolist(), ranked.scores.tolist(), strict=True), start=1
        )
    ]
    with durable.storage_errors(f"writing the run {path.name}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(path, "".join(lines).encode())


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Return a run as query id to document id to score.

    A line that is not one of a run raises :class:`SourceError`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"a run must be a readable text file, got {str(path)!r}; name one that `--runs` wrote"
        ) from error
    run: dict[str, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.strip())
        if not match:
            raise SourceError(
                f"line {number} of {path.name} must read `query_id Q0 doc_id rank score tag`, got "
                f"{line[:80]!r}; mend it"
            )
        run.setdefault(match["query"], {})[match["document"]] = float(match["score"])
    return run
