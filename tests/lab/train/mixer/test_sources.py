from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.mixer_data import NO_TITLE, draw_pairs
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import MixerConfig

TINY: dict[str, Any] = {"min_pairs": 2}


def pairs_of(*rows: tuple[str, str, str, str]) -> TrainingPairs:
    queries, documents, titles, sources = zip(*rows, strict=True)
    return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=sources)


def pages(num_pages: int, size: int, source: str = "s") -> list[tuple[str, str, str, str]]:
    return [
        (f"q {page} {number}", f"d {page} {number}", f"t {page}", source)
        for page in range(num_pages)
        for number in range(size)
    ]


def test_draw_pairs_keeps_pages_whole_and_at_most_so_many_of_a_source():
    pairs = pairs_of(*pages(6, 3, "a"), *pages(2, 3, "b"))
    drawn = draw_pairs(pairs, MixerConfig(max_pairs=10, **TINY))
    sizes = Counter(zip(drawn.sources, drawn.titles, strict=True))
    assert set(sizes.values()) == {3}
    assert Counter(drawn.sources) == {"a": 9, "b": 6}
    assert drawn.skipped == {"pair beyond max_pairs of its source": 9}
    rows = list(zip(pairs.sources, pairs.queries, strict=True))
    places = [rows.index(row) for row in zip(drawn.sources, drawn.queries, strict=True)]
    assert places == sorted(places)


def test_draw_pairs_is_a_matter_of_the_seed_alone():
    pairs = pairs_of(*pages(20, 2))
    first, again, other = (
        draw_pairs(pairs, MixerConfig(max_pairs=10, seed=seed, **TINY)).titles for seed in (0, 0, 1)
    )
    assert first == again
    assert set(first) != set(other)


def test_draw_pairs_of_a_page_that_is_too_large_are_its_beginning():
    drawn = draw_pairs(pairs_of(*pages(1, 9)), MixerConfig(max_pairs=4, **TINY))
    assert drawn.documents == ("d 0 0", "d 0 1", "d 0 2", "d 0 3")


def test_draw_pairs_leaves_small_sources_out_and_refuses_when_none_is_left():
    same_document = [(f"q {number}", "d", "", "one document") for number in range(5)]
    pairs = pairs_of(*pages(2, 3, "large"), ("q", "d", "", "small"), *same_document)
    drawn = draw_pairs(pairs, MixerConfig(min_pairs=4))
    assert (set(drawn.sources), drawn.skipped) == ({"large"}, {"pair of a source too small": 6})
    with pytest.raises(
        SourceError,
        match="needs a source of at least min_pairs 48 pairs with two documents, got none: the largest, "
        "'large'",
    ):
        draw_pairs(pairs, MixerConfig())


def test_embed_sources_lays_documents_out_by_page(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=5, num_sections=4, sources=("a", "b"))
    data = world.data(MixerConfig(hold_out=0.0, **TINY))
    first, second = data.sources
    assert (first.name, second.name) == ("a", "b")
    assert first.pages == tuple(tuple(range(4 * page, 4 * page + 4)) for page in range(5))
    assert first.page_n.tolist() == np.repeat(np.arange(5), 4).tolist()
    assert second.row_n.tolist() == list(range(20, 40))
    assert second.title_n.tolist() == np.repeat(np.arange(5, 10), 4).tolist()
    assert first.queries == tuple((number,) for number in range(20))
    assert first.num_training_pairs == 20
    np.testing.assert_array_equal(second.mean_nD, data.documents.means()[20:])
    np.testing.assert_allclose(np.linalg.norm(data.query_QD, axis=1), 1, atol=1e-5)


def test_embed_sources_holds_whole_pages_out(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=8, num_sections=4)
    (source,) = world.data(MixerConfig(hold_out=0.3, **TINY)).sources
    held_out = source.is_heldout_n.reshape(8, 4)
    assert held_out.sum() == 8
    assert (held_out.all(1) == held_out.any(1)).all()
    assert source.num_training_pairs == 24


def test_embed_sources_document_without_a_title_is_a_page_by_itself(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=2, num_sections=3)
    world.file.write_text(world.file.read_text().replace('"page 1"', '" "'))
    (source,) = world.data(MixerConfig(hold_out=0.0, **TINY)).sources
    assert source.pages == ((0, 1, 2), (3,), (4,), (5,))
    assert source.title_n.tolist() == [0, 0, 0, NO_TITLE, NO_TITLE, NO_TITLE]
