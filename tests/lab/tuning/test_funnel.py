from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.errors import SourceError
from cairn.pipeline.index.exact_index import ExactIndex
from cairn.pipeline.lab.tuning.funnel import FunnelIndex, FunnelRow, _advice, measure_funnel


def unit(rows: int, width: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.fixture
def vectors() -> np.ndarray:
    return unit(300, 16, 0)


@pytest.fixture
def queries() -> np.ndarray:
    return unit(7, 16, 1)


def naive_funnel(vectors: np.ndarray, query: np.ndarray, dims: int, num: int, top_k: int) -> list[int]:
    """Rank by the cosine of the first dimensions, then the best by whole inner products."""
    first = [v[:dims] @ query[:dims] / np.linalg.norm(v[:dims]) for v in vectors]
    left = sorted(range(len(vectors)), key=lambda n: -first[n])[:num]
    return sorted(left, key=lambda n: -(vectors[n] @ query))[:top_k]


@pytest.mark.parametrize(("dims", "num"), [(4, 20), (8, 50), (2, 100)])
def test_funnel_equals_two_sorts(vectors, queries, dims, num):
    scores, positions = FunnelIndex(vectors, dims).search(queries, 10, num)

    for query, own, found in zip(queries, scores, positions, strict=True):
        expected = naive_funnel(vectors, query, dims, num, 10)
        assert found.tolist() == expected
        np.testing.assert_allclose(own, vectors[expected] @ query, atol=1e-6)


def test_report_holds_the_recall_of_every_funnel(vectors, queries):
    report = measure_funnel(
        "c", "flat", ExactIndex(vectors), queries, dims=(4, 8), candidates=(20, 100), top_k=10
    )
    exact = ExactIndex(vectors).search(queries, 10)[1]

    assert [(row.dims, row.candidates) for row in report.rows] == [
        (None, None),
        (None, None),
        (4, 20),
        (4, 100),
        (8, 20),
        (8, 100),
    ]
    assert [row.recall for row in report.rows[:2]] == [1.0, 1.0]
    for row in report.rows[2:]:
        found = FunnelIndex(vectors, row.dims).search(queries, 10, row.candidates)[1]
        expected = [len(set(own) & set(best)) / 10 for own, best in zip(found, exact, strict=True)]
        assert row.recall == pytest.approx(np.mean(expected))
        assert row.more_bytes == 300 * row.dims * 4


@pytest.mark.parametrize(
    ("recall", "milliseconds", "words"),
    [
        (0.5, 0.1, "nothing, because no funnel finds 98%"),
        (0.99, 3.0, "nothing, because the fastest good funnel (8 first) takes no less time than the index"),
        (0.99, 0.5, "8 first would save 1.50 ms a query of 2.00"),
    ],
)
def test_advice_weighs_recall_and_time(recall, milliseconds, words):
    rows = [
        FunnelRow(name="exact", recall=1.0, milliseconds=4.0, more_bytes=0),
        FunnelRow(name="the index", recall=1.0, milliseconds=2.0, more_bytes=0),
        FunnelRow(
            name="8 first", recall=recall, milliseconds=milliseconds, more_bytes=9, dims=8, candidates=100
        ),
    ]

    assert _advice(rows).startswith(words)


def test_few_vectors_are_refused(queries):
    with pytest.raises(SourceError, match="must narrow more than 50 vectors, got 50"):
        measure_funnel("c", "flat", ExactIndex(unit(50, 16, 2)), queries)
