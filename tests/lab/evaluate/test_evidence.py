from __future__ import annotations

import itertools

import numpy as np
import pytest
from cairn.pipeline.lab.evaluate.evidence import Spans, ceiling, evidence_by_query, evidence_recall
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements


def spans(*rows: tuple[int, int, int]) -> Spans:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Spans(document_S=table[:, 0], start_S=table[:, 1], end_S=table[:, 2])


def characters(document: int, start: int, end: int) -> set[tuple[int, int]]:
    return {(document, place) for place in range(start, end)}


def naive_recall(
    passages: list[tuple[int, int, int]], evidence: list[tuple[int, int, int]], budget: int, cut: bool
) -> float:
    gold = set().union(*(characters(*span) for span in evidence))
    read: set[tuple[int, int]] = set()
    for document, start, end in passages:
        left = budget - len(read)
        if end - start > left:
            if cut:
                read |= characters(document, start, start + left)
            break
        read |= characters(document, start, end)
    return len(read & gold) / len(gold)


def random_passages(generator: np.random.Generator) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    for document in range(3):
        bounds = np.sort(generator.choice(60, 6, replace=False)).tolist()
        rows += [(document, a, b) for a, b in itertools.pairwise(bounds)]
    return [rows[index] for index in generator.permutation(len(rows)).tolist()]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_recall_equals_counting_characters(seed, cut):
    generator = np.random.default_rng(seed)
    passages = random_passages(generator)
    evidence = [
        (document, int(start), int(start + generator.integers(1, 20)))
        for document, start in enumerate(generator.integers(0, 50, 3))
    ]
    budgets = (7, 30, 90, 1_000)

    recalls = evidence_recall(spans(*passages), spans(*evidence), budgets, cut=cut)

    assert recalls.tolist() == pytest.approx(
        [naive_recall(passages, evidence, budget, cut) for budget in budgets]
    )


def test_overlapping_evidence_of_a_document_is_merged():
    judgements = Judgements(
        query_J=np.array([1, 1, 1, 1, 0]),
        document_J=np.array([5, 5, 6, 5, 5]),
        gain_J=np.ones(5, np.int64),
        start_J=np.array([10, 0, 0, 12, -1]),
        end_J=np.array([20, 11, 4, 15, -1]),
    )
    none, merged, empty = evidence_by_query(judgements, 3)

    assert list(
        zip(merged.document_S.tolist(), merged.start_S.tolist(), merged.end_S.tolist(), strict=True)
    ) == [(5, 0, 20), (6, 0, 4)]
    assert len(none.start_S) == len(empty.start_S) == 0


def test_ceiling_is_the_budgets_share_of_long_evidence():
    assert ceiling(spans((0, 0, 3_000), (1, 0, 1_000))).tolist() == [0.25, 0.5, 1.0]
