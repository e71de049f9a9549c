from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.lab.train.batches import BatchPlan
from cairn.pipeline.lab.train.pair_vectors import PairVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import TrainConfig

TOPICS, SIZE = 8, 24


@pytest.fixture
def world() -> tuple[TrainingPairs, PairVectors]:
    """Return pairs of eight topics, in no order."""
    generator = np.random.default_rng(0)
    topic_N = generator.permutation(np.repeat(np.arange(TOPICS), SIZE))
    names = tuple(f"{topic} {place}" for place, topic in enumerate(topic_N.tolist()))
    vectors = np.eye(TOPICS)[topic_N] + 0.05 * generator.standard_normal((2, len(topic_N), TOPICS))
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
    assert by_default < 4 < topics_of_a_batch(world, cluster_pairs=TOPICS * SIZE)


def test_batch_plan_clusters_take_the_iterations_that_are_asked_for(world: tuple[TrainingPairs, PairVectors]):
    one, many = (topics_of_a_batch(world, cluster_iterations=count) for count in (1, 30))
    assert many <= one
