from __future__ import annotations

import numpy as np
from cairn.pipeline.lab.train.batches import greedy_tour, pack
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def circle(num_clusters: int) -> np.ndarray:
    angles = 2 * np.pi * np.arange(num_clusters) / num_clusters
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    batch_size=st.integers(1, 17),
)
def test_pack_every_point_is_packed_or_left_over_once(sizes: list[int], batch_size: int):
    clusters = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    batches, left_over = pack(clusters, circle(len(sizes)), batch_size, drawn())
    assert batches.shape == (len(clusters) // batch_size, batch_size)
    assert sorted([*batches.ravel().tolist(), *left_over.tolist()]) == list(range(len(clusters)))


def test_pack_large_clusters_fill_batches_of_their_own():
    clusters = np.repeat(np.arange(3, dtype=np.int32), [20, 3, 25])
    batches, _ = pack(clusters, circle(3), 8, drawn())
    alone = [len(np.unique(clusters[batch])) == 1 for batch in batches]
    assert sum(alone) == 5  # two of 20, three of 25
    assert batches.shape == (6, 8)


def test_pack_greedy_tour_joins_neighbouring_clusters():
    clusters = np.repeat(np.arange(16, dtype=np.int32), 4)
    batches, _ = pack(clusters, circle(16), 8, drawn())
    for batch in batches:
        one, other = np.unique(clusters[batch]).tolist()
        assert min(other - one, 16 - other + one) == 1


def test_pack_same_seed_packs_the_same_and_another_packs_anew():
    clusters = np.repeat(np.arange(6, dtype=np.int32), 11)
    first, again, other = (pack(clusters, circle(6), 8, drawn(seed))[0] for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_greedy_tour_equals_the_search_written_out():
    centroids = np.random.default_rng(5).standard_normal((23, 4)).astype(np.float32)
    found = greedy_tour(centroids, drawn(7)).tolist()
    expected = [found[0]]
    while len(expected) < 23:
        rest = [cluster for cluster in range(23) if cluster not in expected]
        expected.append(
            max(rest, key=lambda cluster: (float(centroids[cluster] @ centroids[expected[-1]]), -cluster))
        )
    assert found == expected
