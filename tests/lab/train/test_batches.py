"""Claims of batches."""

from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.config import ClusterConfig, Tour
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.batches import BatchPlan, Domain, cluster_domains, draw_batches
from cairn.pipeline.lab.train.pair_vectors import PairVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import TrainConfig

TOPICS, V = 4, 8


def corpus(sizes: dict[str, int]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Return sources, vectors of both sides and the topic of each pair.

    Every source has the same four topics.
    """
    generator = np.random.default_rng(0)
    sources = [source for source, size in sizes.items() for _ in range(size)]
    topics = generator.integers(TOPICS, size=len(sources))
    centres = np.eye(V, dtype=np.float32)[:TOPICS]
    phi, psi = (
        centres[topics] + 0.1 * generator.standard_normal((len(sources), V)).astype(np.float32)
        for _ in range(2)
    )
    return sources, phi.astype(np.float32), psi.astype(np.float32), topics


def clustered(
    sizes: dict[str, int], cluster_size: int = 25
) -> tuple[tuple[Domain, ...], np.ndarray, np.ndarray, np.ndarray]:
    sources, phi, psi, topics = corpus(sizes)
    domains = cluster_domains(sources, phi, psi, cluster_size, ClusterConfig(), surrogate_fingerprint="test")
    return domains, phi, psi, topics


def test_cluster_domains_hold_the_pairs_of_their_source():
    domains, *_ = clustered({"b": 50, "a": 30})
    assert [domain.source for domain in domains] == ["a", "b"]
    assert domains[0].positions_n.tolist() == list(range(50, 80))
    assert len(domains[1].centroids_KP) == 2


@pytest.mark.parametrize("tour", ["random", "greedy"])
def test_draw_batches_every_pair_comes_once_an_epoch_or_is_left_over(tour: Tour):
    domains, phi, psi, _ = clustered({"a": 103, "b": 70, "c": 5})
    packed = draw_batches(domains, phi, psi, 16, seed=1, epoch=0, tour=tour)
    assert packed.batches_BN.shape == (11, 16)
    assert sorted([*packed.batches_BN.ravel().tolist(), *packed.left_over.tolist()]) == list(range(178))


def test_draw_batches_hold_one_topic_of_one_source_far_more_often_than_chance():
    domains, phi, psi, topics = clustered({"a": 400, "b": 400}, cluster_size=100)
    batches = draw_batches(domains, phi, psi, 16, seed=0, epoch=0).batches_BN
    assert np.mean([len(np.unique(topics[batch])) == 1 for batch in batches]) > 0.6
    assert np.mean([len({position // 400 for position in batch.tolist()}) == 1 for batch in batches]) > 0.9


def test_draw_batches_sources_smaller_than_a_batch_share_batches():
    domains, phi, psi, _ = clustered(dict.fromkeys("abcdefgh", 5))
    assert draw_batches(domains, phi, psi, 16, seed=0, epoch=0).batches_BN.shape == (2, 16)


def test_draw_batches_fewer_pairs_than_a_batch_are_refused():
    domains, phi, psi, _ = clustered({"a": 9, "b": 5})
    with pytest.raises(SourceError, match="at least the 16 pairs of one batch, got 14"):
        draw_batches(domains, phi, psi, 16, seed=0, epoch=0)


NUM_TOPICS, SIZE = 8, 24


@pytest.fixture
def world() -> tuple[TrainingPairs, PairVectors]:
    """Return pairs of eight topics, in no order."""
    generator = np.random.default_rng(0)
    topic_N = generator.permutation(np.repeat(np.arange(NUM_TOPICS), SIZE))
    names = tuple(f"{topic} {place}" for place, topic in enumerate(topic_N.tolist()))
    vectors = np.eye(NUM_TOPICS)[topic_N] + 0.05 * generator.standard_normal((2, len(topic_N), NUM_TOPICS))
    vectors = (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).astype(np.float32)
    pairs = TrainingPairs(
        queries=names, documents=names, titles=("",) * len(names), sources=("s",) * len(names)
    )
    return pairs, PairVectors(document_NV=vectors[0], query_NV=vectors[1], fingerprint="test")


def topics_of_a_batch(world: tuple[TrainingPairs, PairVectors], **settings: object) -> float:
    """Return how many topics a batch of 24 pairs holds, on average."""
    pairs, vectors = world
    config = TrainConfig(steps=8, batch_pairs=SIZE, sequence_documents=1, tour="random", **settings)
    plan = BatchPlan(pairs, np.zeros(0, np.int64), vectors, config)
    batches = [
        [pairs.queries[pair].split()[0] for unit in plan.at(step) for pair in unit] for step in range(8)
    ]
    assert all(len(batch) == SIZE for batch in batches)
    return float(np.mean([len(set(batch)) for batch in batches]))


def test_batch_plan_clusters_have_a_size_of_their_own(world: tuple[TrainingPairs, PairVectors]):
    by_default = topics_of_a_batch(world, cluster_attempts=3)
    assert topics_of_a_batch(world, cluster_attempts=3, cluster_pairs=SIZE) == by_default
    # One cluster of all pairs: batches are drawn from everything.
    assert by_default < 4 < topics_of_a_batch(world, cluster_pairs=NUM_TOPICS * SIZE)


def test_batch_plan_clusters_take_the_iterations_that_are_asked_for(world: tuple[TrainingPairs, PairVectors]):
    one, many = (topics_of_a_batch(world, cluster_iterations=count) for count in (1, 30))
    assert many <= one
