"""Document measures of a ranking, one value a query: nDCG@10, recall@100 and MRR@10, computed by ir_measures.

TREC run files hold what was ranked for each query, in the six columns that every retrieval tool reads:

    query_id Q0 doc_id rank score tag

Ids hold no white space: the set they come from was checked for it. A ranking is positions of documents with
float32 scores that strictly fall, so that every tool that sorts by score, trec_eval's float32 among them,
sees the order that was meant.

Evidence recall at a character budget: the share of the evidence in so many characters of passages.

    recall@B = gold characters inside the passages read / gold characters
    passages are read best first while their total length is ≤ B

The first passage that does not fit ends the reading. So chunks of any size compare at one cost, that of
reading them; but a chunk longer than the whole budget is never read, and coarse chunks waste its rest.

Evidence longer than the budget cannot be recalled whole.

Whether two systems differ on the same queries: a paired randomisation test and a bootstrap interval.

The interval is that of the mean difference. Under the null hypothesis either system may have given either
score of a query, so the sign of every difference is a coin toss; p is the share of tosses whose mean is at
least as far from 0 as the one observed, that one among them. The interval resamples queries with replacement.
Both are seeded. Source: Smucker, Allan & Carterette 2007, "A Comparison of Statistical Significance Tests".

A p-value is for one comparison: of fifty, some fall below .05 by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError, install_command
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet
from cairn.pipeline.search.fusion import at_least_nth
from jaxtyping import Float, Float32, Float64, Int64

BUDGETS = (1_000, 2_000, 4_000)
"""Characters: about two, four and eight paragraphs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """Spans of characters in documents, by position: evidence disjoint, passages best first."""

    document_S: Int64[np.ndarray, " S"]
    start_S: Int64[np.ndarray, " S"]
    end_S: Int64[np.ndarray, " S"]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Spans:
        """Take documents, starts and ends."""
        table = np.array(rows, np.int64).reshape(-1, 3)
        return cls(document_S=table[:, 0], start_S=table[:, 1], end_S=table[:, 2])

    @property
    def num_characters(self) -> int:
        """Count the characters of all spans."""
        return int((self.end_S - self.start_S).sum())


def evidence_by_query(judgements: Judgements, num_queries: int) -> list[Spans]:
    """Return each query's evidence, overlapping spans of a document merged; empty for a query without."""
    has_span = judgements.start_J >= 0
    query, document = judgements.query_J[has_span], judgements.document_J[has_span]
    start, end = judgements.start_J[has_span], judgements.end_J[has_span]
    order = np.lexsort((end, start, document, query))
    bounds = np.searchsorted(query[order], np.arange(num_queries + 1))
    return [_merged(document[own], start[own], end[own]) for own in np.split(order, bounds[1:-1])]


def _merged(
    document: Int64[np.ndarray, " S"], start: Int64[np.ndarray, " S"], end: Int64[np.ndarray, " S"]
) -> Spans:
    merged: list[list[int]] = []
    for d, s, e in zip(document.tolist(), start.tolist(), end.tolist(), strict=True):
        if merged and merged[-1][0] == d and s <= merged[-1][2]:
            merged[-1][2] = max(merged[-1][2], e)
        else:
            merged.append([d, s, e])
    return Spans.of(merged)


def evidence_recall(
    passages: Spans, evidence: Spans, budgets: Sequence[int] = BUDGETS
) -> Float64[np.ndarray, " budgets"]:
    """Return the share of the evidence inside the passages, disjoint and best first, read at each budget."""
    lengths = passages.end_S - passages.start_S
    after = np.cumsum(lengths)
    recalls = np.empty(len(budgets))
    for index, budget in enumerate(budgets):
        read = np.where(after <= budget, lengths, 0)
        recalls[index] = _covered(passages, passages.start_S + read, evidence) / evidence.num_characters
    return recalls


def _covered(passages: Spans, end_S: Int64[np.ndarray, " S"], evidence: Spans) -> int:
    low = np.maximum(passages.start_S[:, None], evidence.start_S)
    high = np.minimum(end_S[:, None], evidence.end_S)
    return int(
        np.where(passages.document_S[:, None] == evidence.document_S, np.maximum(high - low, 0), 0).sum()
    )


MAX_P_VALUE: Final = 0.05
NUM_SAMPLES = 10_000
BLOCK_SAMPLES = 256
"""Samples drawn at once: 25 MB of indices at 13,000 queries."""


Verdict = Literal["helps", "hurts", "noise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """Mean of a - b with its 95 % interval, the two-sided p-value and the number of queries compared."""

    difference: float
    low: float
    high: float
    p_value: float
    num_queries: int


def verdict_of(comparison: PairedComparison) -> Verdict:
    """Say whether a difference lies beyond noise: its interval leaves 0 out, and p is below .05.

    Both are asked: where few queries changed, an interval alone is too narrow.
    """
    if comparison.p_value >= MAX_P_VALUE or comparison.low <= 0 <= comparison.high:
        return "noise"
    return "helps" if comparison.low > 0 else "hurts"


def compare_paired(
    a_Q: Float[np.ndarray, " Q"],
    b_Q: Float[np.ndarray, " Q"],
    *,
    seed: int = 0,
    num_samples: int = NUM_SAMPLES,
) -> PairedComparison:
    """Compare two systems query by query; queries where either has no value (NaN) are left out."""
    difference_Q = np.asarray(a_Q, np.float64) - np.asarray(b_Q, np.float64)
    difference_Q = difference_Q[~np.isnan(difference_Q)]
    assert len(difference_Q), "two systems without a common query were compared"
    observed = float(difference_Q.mean())
    flipped = _resample(difference_Q, np.random.default_rng([seed, 0]), num_samples, by_sign=True)
    resampled = _resample(difference_Q, np.random.default_rng([seed, 1]), num_samples, by_sign=False)
    # A hair's breadth of slack: the same sum added in another order must count as equal.
    num_as_far = int((np.abs(flipped) >= abs(observed) - 1e-12).sum())
    low, high = np.quantile(resampled, [0.025, 0.975])
    return PairedComparison(
        difference=observed,
        low=float(low),
        high=float(high),
        p_value=(1 + num_as_far) / (1 + num_samples),
        num_queries=len(difference_Q),
    )


def _resample(
    difference_Q: Float64[np.ndarray, " Q"],
    generator: np.random.Generator,
    num_samples: int,
    *,
    by_sign: bool,
) -> Float64[np.ndarray, " R"]:
    """Return the mean difference of every sample: signs tossed, or queries drawn with replacement."""
    means: list[Float64[np.ndarray, " r"]] = []
    for start in range(0, num_samples, BLOCK_SAMPLES):
        shape = (min(BLOCK_SAMPLES, num_samples - start), len(difference_Q))
        if by_sign:
            means.append(
                (1 - 2 * generator.integers(0, 2, shape, dtype=np.int8)) @ difference_Q / len(difference_Q)
            )
        else:
            means.append(difference_Q[generator.integers(0, len(difference_Q), shape)].mean(axis=1))
    return np.concatenate(means)


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
        """Take documents best first; a score that does not fall is moved to the next smaller float32."""
        falling = np.asarray(scores, np.float32).copy()
        for rank in range(1, len(falling)):
            falling[rank] = min(falling[rank], np.nextafter(falling[rank - 1], np.float32(-np.inf)))
        return cls(positions=positions, scores=falling)

    @classmethod
    def best(
        cls, scores_N: Float[np.ndarray, " N"], id_rank_N: Int64[np.ndarray, " N"], limit: int
    ) -> RankedDocuments:
        """Take the best documents, ties by id; one of minus infinity is no candidate and never among them."""
        few = at_least_nth(scores_N, limit)
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


def document_measures(
    judged: RetrievalSet, run: Sequence[RankedDocuments]
) -> dict[str, Float64[np.ndarray, " Q"]]:
    """Return every document measure of every query, in the set's order of queries; 0 for one without hits."""
    scored: dict[str, dict[str, float]] = {}
    for query_id, ranked in zip(judged.query_ids, run, strict=True):
        ids = (judged.doc_ids[position] for position in ranked.positions.tolist())
        scored[query_id] = dict(zip(ids, ranked.scores.tolist(), strict=True))
    ir_measures = _ir_measures()
    place = {query_id: index for index, query_id in enumerate(judged.query_ids)}
    measures = {ir_measures.parse_measure(ir_name): name for name, ir_name in _IR_NAMES.items()}
    values = {name: np.zeros(len(place)) for name in DOCUMENT_MEASURES}
    for metric in ir_measures.iter_calc(list(measures), qrels_of(judged), scored):
        values[measures[metric.measure]][place[metric.query_id]] = metric.value
    return values


def qrels_of(judged: RetrievalSet) -> dict[str, dict[str, int]]:
    """Return the judgements as query id to document id to the highest gain."""
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
