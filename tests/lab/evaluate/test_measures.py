from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.lab.evaluate.measures import (
    MRR,
    NDCG,
    RECALL,
    RankedDocuments,
    document_measures,
    measure_run,
    qrels_of,
)
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet


def random_set(
    generator: np.random.Generator, num_documents: int = 300, num_queries: int = 8
) -> RetrievalSet:
    pairs = [
        (q, int(d)) for q in range(num_queries) for d in generator.choice(num_documents, 12, replace=False)
    ]
    gains = generator.integers(0, 4, len(pairs))
    gains[::12] = 1  # every query has a relevant document
    return RetrievalSet(
        name="random",
        doc_ids=tuple(f"d{index}" for index in range(num_documents)),
        titles=("",) * num_documents,
        texts=("x",) * num_documents,
        query_ids=tuple(f"q{index}" for index in range(num_queries)),
        queries=("x",) * num_queries,
        judgements=Judgements(
            query_J=np.array([q for q, _ in pairs]),
            document_J=np.array([d for _, d in pairs]),
            gain_J=gains,
            start_J=np.full(len(pairs), -1),
            end_J=np.full(len(pairs), -1),
        ),
    )


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
    orders = [generator.permutation(300)[:150] for _ in judged.query_ids]
    run = [RankedDocuments.of(order, np.linspace(1.0, 0.0, len(order))) for order in orders]

    values = document_measures(judged, run)

    for index, (query_id, order) in enumerate(zip(judged.query_ids, orders, strict=True)):
        expected = naive_measures(
            qrels_of(judged)[query_id], [judged.doc_ids[position] for position in order.tolist()]
        )
        assert {name: values[name][index] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_measures_of_equal_scores_follow_the_order_given():
    judged = random_set(np.random.default_rng(1))
    orders = [np.random.default_rng(index).permutation(300)[:100] for index in range(8)]

    tied = document_measures(judged, [RankedDocuments.of(order, np.full(100, 0.5)) for order in orders])
    apart = document_measures(judged, [RankedDocuments.of(order, np.linspace(1, 0, 100)) for order in orders])

    assert {name: x.tolist() for name, x in tied.items()} == {name: x.tolist() for name, x in apart.items()}


def test_query_a_run_lacks_scores_zero():
    judged = random_set(np.random.default_rng(2), num_queries=2)
    relevant = next(doc_id for doc_id, gain in qrels_of(judged)["q1"].items() if gain > 0)

    values = measure_run(judged, {"q1": {relevant: 1.0}})

    assert values[MRR].tolist() == [0.0, 1.0]


def test_repeated_judgements_count_as_the_highest(judged):
    judgements = judged.judgements
    added = {"query_J": [0, 0], "document_J": [0, 0], "gain_J": [3, 1], "start_J": [0, 1], "end_J": [1, 2]}
    columns = {name: np.append(getattr(judgements, name), more) for name, more in added.items()}
    twice = replace(judged, judgements=Judgements(**columns))

    assert qrels_of(twice)["q1"] == {"cat": 3, "stone": 1}
