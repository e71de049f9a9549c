"""The layout of a map: neighbours stay together, the rest falls between them, and it is deterministic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import SIZES, CollectionLayout
from cairn.pipeline.serve import corpus_map
from cairn.pipeline.serve.corpus_map import densest_place, draw_map, lay_out, place


def groups(count: int, each: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    """Unit vectors in ``count`` tight groups."""
    generator = np.random.default_rng(seed)
    vectors = np.repeat(generator.normal(size=(count, dim)), each, axis=0) + 0.05 * generator.normal(
        size=(count * each, dim)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_layout_keeps_groups_together_and_apart() -> None:
    places = lay_out(groups(4, 30))
    middles = places.reshape(4, 30, 2).mean(axis=1)
    distances = np.linalg.norm(places[:, None] - middles[None], axis=2)
    assert (distances.argmin(axis=1) == np.repeat(np.arange(4), 30)).all()


def test_layout_fills_the_square_and_is_the_same_each_time() -> None:
    places = lay_out(groups(3, 20))
    assert np.abs(places).max() == pytest.approx(1.0, abs=1e-5)
    assert np.array_equal(places, lay_out(groups(3, 20)))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_few_documents_are_laid_out_too(count: int) -> None:
    places = lay_out(groups(9, 1)[:count])
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()


def test_layout_ends_early_where_nobody_wants_it_any_more() -> None:
    told: list[float] = []

    def report(share: float) -> None:
        told.append(share)
        if len(told) == 2:
            raise TryAgainError("enough")

    with pytest.raises(TryAgainError, match="enough"):
        lay_out(groups(3, 20), report)
    assert len(told) == 2


def test_layout_reports_shares_that_grow_to_one() -> None:
    told: list[float] = []
    lay_out(groups(3, 20), told.append)
    assert told == sorted(set(told))
    assert told[0] > 0
    assert told[-1] == 1.0


def test_many_begin_between_a_first_sample_and_find_their_own_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = groups(60, 5)
    monkeypatch.setattr(corpus_map, "FIRST_SAMPLE", 30)
    told: list[float] = []
    moved = lay_out(vectors, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    first = np.linspace(0, len(vectors) - 1, 30).astype(np.int64)
    between = place(vectors, vectors[first], lay_out(vectors[first]))
    assert own_group_share(between) < 0.9
    assert own_group_share(moved) > 0.95


def own_group_share(places: np.ndarray) -> float:
    """Return how often the nearest four of a place are of its group of five."""
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    nearest = distances.argsort(axis=1)[:, :4]
    return float((nearest // 5 == np.arange(len(places))[:, None] // 5).mean())


def test_documents_that_are_all_alike_stand_in_one_place() -> None:
    assert not lay_out(np.repeat(groups(1, 1), 40, axis=0)).any()


def test_others_are_placed_beside_their_neighbours() -> None:
    vectors = groups(4, 30)
    sample = np.arange(0, 120, 2)
    laid_out = lay_out(vectors[sample])
    middles = laid_out.reshape(4, 15, 2).mean(axis=1)
    placed = place(vectors[1::2], vectors[sample], laid_out)
    assert (
        np.linalg.norm(placed[:, None] - middles[None], axis=2).argmin(axis=1) == np.repeat(np.arange(4), 15)
    ).all()


def test_map_of_a_large_collection_is_of_an_even_part(
    served_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MAX_DOCUMENTS", 7)
    monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MAX_SAMPLE", 4)
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    drawn = draw_map(generation, np.arange(20))
    assert drawn.positions_N.tolist() == [0, 3, 6, 9, 12, 15, 19]
    assert drawn.places_N2.shape == (7, 2)
    assert sum(cluster.documents for cluster in drawn.clusters) == 7


def test_map_of_an_even_part_has_every_cluster(served_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MAX_DOCUMENTS", 1)
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    drawn = draw_map(generation, np.arange(20))
    filled = np.unique(generation.cluster_ids)
    assert len(filled) > 1
    assert [cluster.cluster for cluster in drawn.clusters] == filled.tolist()


def test_label_stands_among_the_documents_of_a_ring_and_of_two_islands() -> None:
    turns = np.linspace(0, 2 * np.pi, 700, endpoint=False) ** 1.05
    ring = np.stack([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)
    assert 0.7 < np.linalg.norm(densest_place(ring)) < 1.1
    rng = np.random.default_rng(0)
    islands = np.concatenate([rng.normal(-1, 0.05, (60, 2)), rng.normal(1, 0.05, (61, 2))]).astype(np.float32)
    assert np.abs(np.abs(densest_place(islands)) - 1).max() < 0.05
    blob = rng.normal(0.3, 0.1, (2_000, 2)).astype(np.float32)
    assert np.abs(densest_place(blob) - 0.3).max() < 0.06
    for few in (blob[:1], np.repeat(blob[:1], 3, axis=0)):
        assert densest_place(few) == pytest.approx(few[0])
