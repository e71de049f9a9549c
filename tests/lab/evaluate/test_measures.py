from __future__ import annotations

import itertools
import math
from dataclasses import replace

import ir_measures
import numpy as np
import pytest
from cairn.pipeline.lab.evaluate.measures import (
    MRR,
    NDCG,
    RECALL,
    PairedComparison,
    RankedDocuments,
    Spans,
    compare_paired,
    document_measures,
    evidence_by_query,
    evidence_recall,
    qrels_of,
    verdict_of,
    write_run,
)
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet

from tests.lab.evaluate.conftest import retrieval_set


def random_set(generator: np.random.Generator) -> RetrievalSet:
    pairs = [(query, int(d)) for query in range(8) for d in generator.choice(300, 12, replace=False)]
    query_J, document_J = np.array(pairs).T
    gain_J, none = generator.integers(0, 4, len(pairs)), np.full(len(pairs), -1)
    gain_J[::12] = 1  # every query has a relevant document
    judgements = Judgements(query_J=query_J, document_J=document_J, gain_J=gain_J, start_J=none, end_J=none)
    ids = [f"d{index}" for index in range(300)]
    return retrieval_set(ids, ["x"] * 8, ["x"] * 300, judgements=judgements)


def naive_measures(gains: dict[str, int], ranking: list[str]) -> dict[str, float]:
    def dcg(values: list[int]) -> float:
        return sum(value / math.log2(rank + 1) for rank, value in enumerate(values[:10], start=1))

    relevant = {doc_id for doc_id, gain in gains.items() if gain > 0}
    firsts = [rank for rank, doc_id in enumerate(ranking[:10], start=1) if doc_id in relevant]
    return {
        NDCG: dcg([gains.get(doc_id, 0) for doc_id in ranking]) / dcg(sorted(gains.values(), reverse=True)),
        RECALL: len(relevant & set(ranking[:100])) / len(relevant),
        MRR: 1 / firsts[0] if firsts else 0.0,
    }


def test_measures_equal_their_definitions():
    generator = np.random.default_rng(0)
    judged = random_set(generator)
    orders = [generator.permutation(300)[:150] for _ in judged.query_ids[1:]] + [np.zeros(0, np.int64)]
    values, tied = (
        document_measures(judged, [RankedDocuments.of(order, scores[: len(order)]) for order in orders])
        for scores in (np.linspace(1.0, 0.0, 150), np.full(150, 0.5))
    )

    assert {name: each.tolist() for name, each in tied.items()} == {
        name: each.tolist() for name, each in values.items()
    }
    for index, (query_id, order) in enumerate(zip(judged.query_ids, orders, strict=True)):
        ranking = [judged.doc_ids[position] for position in order.tolist()]
        expected = naive_measures(qrels_of(judged)[query_id], ranking)
        assert {name: values[name][index] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_repeated_judgements_count_as_the_highest(judged):
    judgements = judged.judgements
    added = {"query_J": [0, 0], "document_J": [0, 0], "gain_J": [3, 1], "start_J": [0, 1], "end_J": [1, 2]}
    columns = {name: np.append(getattr(judgements, name), more) for name, more in added.items()}
    twice = replace(judged, judgements=Judgements(**columns))

    assert qrels_of(twice)["q1"] == {"cat": 3, "stone": 1}


def characters(document: int, start: int, end: int) -> set[tuple[int, int]]:
    return {(document, place) for place in range(start, end)}


def naive_recall(
    passages: list[tuple[int, int, int]], evidence: list[tuple[int, int, int]], budget: int
) -> float:
    gold = set().union(*(characters(*span) for span in evidence))
    read: set[tuple[int, int]] = set()
    for document, start, end in passages:
        if end - start > budget - len(read):
            break
        read |= characters(document, start, end)
    return len(read & gold) / len(gold)


def random_passages(generator: np.random.Generator) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    for document in range(3):
        bounds = np.sort(generator.choice(60, 6, replace=False)).tolist()
        rows += [(document, a, b) for a, b in itertools.pairwise(bounds)]
    return [rows[index] for index in generator.permutation(len(rows)).tolist()]


@pytest.mark.parametrize("seed", range(20))
def test_recall_equals_counting_characters(seed):
    generator = np.random.default_rng(seed)
    passages = random_passages(generator)
    evidence = [
        (document, int(start), int(start + generator.integers(1, 20)))
        for document, start in enumerate(generator.integers(0, 50, 3))
    ]
    budgets = (7, 30, 90, 1_000)

    recalls = evidence_recall(Spans.of(passages), Spans.of(evidence), budgets)

    assert recalls.tolist() == pytest.approx([naive_recall(passages, evidence, budget) for budget in budgets])


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


def exact_p_value(difference: np.ndarray) -> float:
    """Try every assignment of signs."""
    observed = abs(difference.mean())
    means = [
        abs((np.array(signs) * difference).mean())
        for signs in itertools.product((-1, 1), repeat=len(difference))
    ]
    return float(np.mean([mean >= observed - 1e-12 for mean in means]))


@pytest.mark.parametrize("seed", range(3))
def test_p_value_approaches_that_of_every_sign_assignment(seed):
    generator = np.random.default_rng(seed)
    a, b = generator.random(10), generator.random(10) + 0.1 * seed

    assert compare_paired(a, b).p_value == pytest.approx(exact_p_value(a - b), abs=0.02)


def test_interval_of_many_queries_is_that_of_the_normal_law_and_those_without_a_value_are_left_out():
    generator = np.random.default_rng(0)
    a, b = generator.random(2_000), generator.random(2_000)
    comparison = compare_paired(np.append(a, np.nan), np.append(b, 1.0))
    half_width = 1.96 * np.std(a - b) / np.sqrt(2_000)

    assert comparison.num_queries == 2_000
    assert comparison.difference == pytest.approx(np.mean(a - b))
    assert comparison.low == pytest.approx(comparison.difference - half_width, abs=0.1 * half_width)
    assert comparison.high == pytest.approx(comparison.difference + half_width, abs=0.1 * half_width)


@pytest.mark.parametrize(
    ("low", "high", "p_value", "verdict"),
    [
        (0.01, 0.03, 0.01, "helps"),
        (0.01, 0.03, 0.13, "noise"),
        (-0.01, 0.03, 0.04, "noise"),
        (-0.03, -0.01, 0.01, "hurts"),
    ],
)
def test_verdict_is_helps_only_beyond_noise(low, high, p_value, verdict):
    comparison = PairedComparison(difference=0.0, low=low, high=high, p_value=p_value, num_queries=9)
    assert verdict_of(comparison) == verdict


def test_run_that_ir_measures_reads_back_measures_the_same(tmp_path, judged):
    generator = np.random.default_rng(0)
    scores = np.array([0.9, 0.1, 0.1, -0.3])
    run = [RankedDocuments.of(generator.permutation(len(judged.doc_ids)), scores) for _ in judged.query_ids]
    write_run(tmp_path / "a.trec", judged, run, "tag")
    ndcg = ir_measures.parse_measure("nDCG@10")
    read = ir_measures.iter_calc(
        [ndcg], qrels_of(judged), ir_measures.read_trec_run(str(tmp_path / "a.trec"))
    )

    assert {each.query_id: each.value for each in read} == dict(
        zip(judged.query_ids, document_measures(judged, run)[NDCG].tolist(), strict=True)
    )
