"""Evidence recall at a character budget: the share of the evidence in so many characters of passages.

    recall@B = gold characters inside the passages read / gold characters
    passages are read best first while their total length is ≤ B

The first passage that does not fit ends the reading. So chunks of any size compare at one cost, that of
reading them; but a chunk longer than the whole budget is never read, and coarse chunks waste its rest. The
second reading, ``cut``, ends the last passage at the budget instead and is kept beside the first: where the
two differ, chunk size decides and not the ranking.

Evidence longer than the budget cannot be recalled whole: ``ceiling`` says what the best possible reader gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements
from jaxtyping import Float64, Int64

BUDGETS = (1_000, 2_000, 4_000)
"""Characters: about two, four and eight paragraphs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """Spans of characters in documents, by position.

    As evidence they are disjoint, as passages they stand best first.
    """

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
    passages: Spans, evidence: Spans, budgets: Sequence[int] = BUDGETS, *, cut: bool = False
) -> Float64[np.ndarray, " budgets"]:
    """Return the share of the evidence inside the passages read at each budget.

    Passages are disjoint and best first.
    """
    lengths = passages.end_S - passages.start_S
    after = np.cumsum(lengths)
    recalls = np.empty(len(budgets))
    for index, budget in enumerate(budgets):
        room = np.clip(budget - (after - lengths), 0, lengths)
        read = room if cut else np.where(after <= budget, lengths, 0)
        recalls[index] = _covered(passages, passages.start_S + read, evidence) / evidence.num_characters
    return recalls


def ceiling(evidence: Spans, budgets: Sequence[int] = BUDGETS) -> Float64[np.ndarray, " budgets"]:
    """Return the recall of a reader who reads nothing but evidence."""
    return np.minimum(1.0, np.asarray(budgets) / evidence.num_characters)


def _covered(passages: Spans, end_S: Int64[np.ndarray, " S"], evidence: Spans) -> int:
    low = np.maximum(passages.start_S[:, None], evidence.start_S)
    high = np.minimum(end_S[:, None], evidence.end_S)
    return int(
        np.where(passages.document_S[:, None] == evidence.document_S, np.maximum(high - low, 0), 0).sum()
    )
