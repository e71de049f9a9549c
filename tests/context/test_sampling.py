from __future__ import annotations

from fractions import Fraction

import numpy as np
from cairn.pipeline.context.sampling import allocate, draw_context
from hypothesis import example, given
from hypothesis import strategies as st

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.int64)
)
places = st.integers(0, 2_000)


def naive_allocate(sizes_k: list[int], num_documents: int) -> list[int]:
    total, wanted = sum(sizes_k), min(num_documents, sum(sizes_k))
    quotas = [Fraction(wanted * size, total) if total else Fraction(0) for size in sizes_k]
    given_places = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes_k)), key=lambda k: (given_places[k] - quotas[k], k))
    for k in by_remainder[: wanted - sum(given_places)]:
        given_places[k] += 1
    return given_places


@given(sizes, places)
@example(np.array([3, 3, 3], np.int64), 4)
def test_allocate_equals_naive_largest_remainder(sizes_k: np.ndarray, num_documents: int) -> None:
    found = allocate(sizes_k, num_documents)
    assert found.tolist() == naive_allocate(sizes_k.tolist(), num_documents)
    assert (found <= sizes_k).all()
    assert found.sum() == min(num_documents, sizes_k.sum())


def corpus(num_documents: int = 300, num_clusters: int = 7) -> tuple[list[str], np.ndarray]:
    clusters = (np.random.default_rng(2).random(num_documents) ** 2 * num_clusters).astype(np.int32)
    return [f"doc-{row}" for row in range(num_documents)], clusters


def test_draw_context_takes_each_clusters_share() -> None:
    ids, clusters = corpus()
    drawn = draw_context(ids, clusters, 40, seed=0)
    np.testing.assert_array_equal(
        np.bincount(clusters[drawn], minlength=7), allocate(np.bincount(clusters, minlength=7), 40)
    )
    assert (np.diff(clusters[drawn]) >= 0).all(), "ordered by cluster"
    every = draw_context(ids[:9], clusters[:9], 512, seed=0)
    assert sorted(every.tolist()) == list(range(9))


def test_draw_context_does_not_depend_on_row_order() -> None:
    ids, clusters = corpus()
    order = np.random.default_rng(3).permutation(len(ids))
    shuffled = [ids[row] for row in order]
    there = [ids[row] for row in draw_context(ids, clusters, 40, seed=0)]
    assert there == [shuffled[row] for row in draw_context(shuffled, clusters[order], 40, seed=0)]
