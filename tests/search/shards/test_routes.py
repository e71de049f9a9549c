"""Searches that ask the shards of the nearest clusters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search.shards.placement import Sharding, place
from cairn.pipeline.search.shards.route_recall import measure_route_recall
from cairn.pipeline.search.shards.routes import Routes, cluster_centroids

from tests.search.shards.in_process import Shards

NUM_CLUSTERS = 4
"""Those of the published stones: the cluster of a document is its number modulo 4."""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory, publish: Callable[..., Any]) -> CollectionLayout:
    layout = CollectionLayout(tmp_path_factory.mktemp("root"), "stones")
    publish(layout, 48, config=IndexConfig(index_kind="flat"))
    return layout


def test_documents_of_a_cluster_share_a_shard(layout: CollectionLayout) -> None:
    generation = open_generation(layout)
    placement = place(generation, NUM_CLUSTERS, "cluster")
    clusters = [np.unique(generation.cluster_ids[documents]).tolist() for documents in placement.documents]
    assert sorted(clusters) == [[0], [1], [2], [3]]


def test_centroids_are_directions_of_mean_chunks(layout: CollectionLayout) -> None:
    generation = open_generation(layout)
    cluster_M = generation.cluster_ids[generation.chunk_documents]
    vectors_MV = generation.chunks.reconstruct(np.arange(generation.num_chunks))
    means = np.stack([vectors_MV[cluster_M == cluster].mean(axis=0) for cluster in range(NUM_CLUSTERS)])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    assert np.bincount(cluster_M).max() <= 64  # of so many none is left out
    np.testing.assert_allclose(cluster_centroids(generation), expected, atol=1e-6)


def test_route_leads_to_the_nearest_clusters_that_have_allowed_documents(layout: CollectionLayout) -> None:
    generation = open_generation(layout)
    placement = place(generation, NUM_CLUSTERS, "cluster")
    centroids = cluster_centroids(generation)
    home = {int(generation.cluster_ids[own[0]]): shard for shard, own in enumerate(placement.documents)}
    order = np.argsort(-(centroids @ centroids[2]), kind="stable").tolist()
    routes = Routes(generation, placement, 2)
    assert routes.shards(centroids[2], None) == {home[order[0]], home[order[1]]}
    allowed = np.flatnonzero(generation.cluster_ids != order[0])
    assert routes.shards(centroids[2], allowed) == {home[order[1]], home[order[2]]}


@pytest.mark.parametrize(
    "options", [{}, {"hybrid": False}, {"filters": {"type": "gte", "key": "year", "value": 1994}}]
)
def test_routed_search_asks_its_shards_once_and_finds_their_documents_alone(
    layout: CollectionLayout, make_encoder: Callable[[], Any], options: dict[str, Any]
) -> None:
    shards = Shards(layout.root, NUM_CLUSTERS, "cluster", route_clusters=1)
    searcher = Searcher(layout, make_encoder(), make_reader=shards.reader)
    shards.asked.clear()
    hits = searcher.search("granite basalt", top_k=5, **options).hits
    assert shards.asked == ["search"]
    clusters = {int(hit.doc_id.rsplit("-", 1)[1]) % NUM_CLUSTERS for hit in hits}
    assert len(hits) == 5
    assert len(clusters) == 1


def test_route_over_all_clusters_answers_as_one_process(
    layout: CollectionLayout, make_encoder: Callable[[], Any]
) -> None:
    shards = Shards(layout.root, 3, "cluster", route_clusters=NUM_CLUSTERS)
    routed = Searcher(layout, make_encoder(), make_reader=shards.reader)
    assert routed.search("slate marble") == Searcher(layout, make_encoder()).search("slate marble")


def test_recall_is_the_share_of_the_best_that_routed_searches_find(
    layout: CollectionLayout, make_encoder: Callable[[], Any]
) -> None:
    def measured(num_clusters: int) -> Any:
        sharding = Sharding(num_shards=NUM_CLUSTERS, place_by="cluster", route_clusters=num_clusters)
        return measure_route_recall(layout, make_encoder(), sharding)

    every, one = measured(NUM_CLUSTERS), measured(1)
    assert (every.recall_at_10, every.asked_share, every.queries) == (1.0, 1.0, 48)
    assert one.asked_share == 1 / NUM_CLUSTERS
    assert 0.0 < one.recall_at_10 < 1.0
