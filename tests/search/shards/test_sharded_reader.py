"""However documents are cut into shards, a search answers as one process does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import Collection, load_query_encoder, open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IndexConfig, IngestConfig
from cairn.pipeline.errors import CairnError, StorageError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation, part_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search.shards.fan_out import FanOut
from cairn.pipeline.search.shards.placement import Placement, cut_points
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.types import PlaceBy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.search.shards.in_process import Shards, shards_of

QUERIES = ("granite basalt", "stone3 slate slate marble", "title 7", "nothing of this", "é flint chert tuff")
FILTERS = (
    None,
    {"type": "gte", "key": "year", "value": 1994},
    {"type": "eq", "key": "Odd name", "value": "o1"},
    {"type": "eq", "key": "doc_id", "value": "doc-1-004"},
    {"type": "eq", "key": "doc_id", "value": "no such document"},
)


@pytest.fixture(scope="module")
def split_layout(tmp_path_factory: pytest.TempPathFactory, publish: Callable[..., Any]) -> CollectionLayout:
    """A collection of three segments, two of which have lost documents."""
    layout = CollectionLayout(tmp_path_factory.mktemp("root"), "stones")
    config = IndexConfig(index_kind="flat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "WHOLE_CHUNKS", 0)
        patch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)
        publish(layout, 40, version=0, config=config)
        second = publish(layout, 25, version=1, config=config)
        publish(layout, 12, version=2, replaces=_some(second, 1), config=config)
    assert len(open_generation(layout).segments) == 3
    return layout


def _some(stones: Any, first: int) -> Any:
    """Return what was published without some documents, which stay."""
    return type(stones)(
        layout=stones.layout,
        rows=stones.rows[first : first + 9],
        document_vectors=stones.document_vectors,
        chunk_vectors=stones.chunk_vectors,
        spans=stones.spans,
    )


options = st.fixed_dictionaries(
    {
        "granularity": st.sampled_from(["document", "chunk", "both"]),
        "hybrid": st.booleans(),
        "filters": st.sampled_from(FILTERS),
        "top_k": st.sampled_from([1, 5, 40]),
        "passages": st.sampled_from([0, 1, 3]),
        "chunk_tokens": st.sampled_from([None, 64, 128, 256]),
        "max_candidates": st.sampled_from([None, 12, 50]),
    },
    optional={"max_characters": st.sampled_from([50, 400]), "offset": st.sampled_from([0, 3])},
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_shards=st.integers(1, 4),
    place_by=st.sampled_from(["order", "cluster"]),
    query=st.sampled_from(QUERIES),
    asked=options,
)
def test_search_of_any_shards_equals_that_of_one_process(
    split_layout: CollectionLayout,
    make_encoder: Callable[[], Any],
    num_shards: int,
    place_by: PlaceBy,
    query: str,
    asked: dict[str, Any],
) -> None:
    def answer(**made: Any) -> Any:
        try:
            return Searcher(split_layout, make_encoder(), **made).search(query, **asked)
        except CairnError as error:
            return type(error), str(error)

    assert answer(make_reader=shards_of(split_layout.root, num_shards, place_by)) == answer()


@pytest.mark.parametrize("num_shards", [2, 3])
def test_batch_of_shards_equals_that_of_one_process(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], num_shards: int
) -> None:
    sharded = Searcher(split_layout, make_encoder(), make_reader=shards_of(split_layout.root, num_shards))
    whole = Searcher(split_layout, make_encoder())
    assert sharded.answer(QUERIES, SearchOptions()) == whole.answer(QUERIES, SearchOptions())


@pytest.mark.parametrize("asked", [{}, {"hybrid": False, "granularity": "chunk"}, {"max_characters": 400}])
def test_search_asks_every_shard_once(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], asked: dict[str, Any]
) -> None:
    shards = Shards(split_layout.root, 3)
    searcher = Searcher(split_layout, make_encoder(), make_reader=shards.reader)
    shards.asked.clear()
    searcher.search("granite basalt", **asked)
    assert shards.asked == ["search"] * 3


def test_part_that_was_placed_otherwise_is_refused(split_layout: CollectionLayout) -> None:
    shards = Shards(split_layout.root, 2)
    key = FanOut(open_generation(split_layout), shards.sharding, shards.ask).keys[0]
    nothing = np.empty(0, np.int64)
    assert len(shards.held[0].answer(key, "chunk_vectors", (nothing,))) == 0
    with pytest.raises(StorageError, match="must be the same for every process"):
        shards.held[0].answer(key._replace(place_by="cluster"), "chunk_vectors", (nothing,))


def test_more_shards_than_documents_leaves_some_out(
    tmp_path: Path, publish: Callable[..., Any], make_encoder: Callable[[], Any]
) -> None:
    layout = CollectionLayout(tmp_path, "few")
    publish(layout, 2)
    sharded = Searcher(layout, make_encoder(), make_reader=shards_of(tmp_path, 4))
    assert sharded.search("granite") == Searcher(layout, make_encoder()).search("granite")


def test_shards_have_about_as_many_chunks_each() -> None:
    offsets = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 9, 1_000))])
    bounds = cut_points(offsets, np.arange(1_001), 4)
    chunks = np.diff(offsets[bounds])
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 1_000, 5)
    assert chunks.max() - chunks.min() <= 16


def test_cuts_move_to_the_end_of_a_near_cluster_and_split_a_big_one() -> None:
    offsets = np.arange(0, 2_001, 2)
    assert cut_points(offsets, np.array([0, 280, 480, 760, 1_000]), 4).tolist() == [0, 280, 480, 760, 1_000]
    assert cut_points(offsets, np.array([0, 20, 980, 1_000]), 4).tolist() == [0, 250, 500, 750, 1_000]


def test_parts_hold_every_row_once(split_layout: CollectionLayout) -> None:
    generation = open_generation(split_layout)
    num_documents = generation.num_documents
    owner_N = np.random.default_rng(0).integers(0, 3, num_documents)
    placement = Placement(generation, [np.flatnonzero(owner_N == shard) for shard in range(3)])
    expected = generation.chunks.reconstruct(np.arange(generation.num_chunks))
    seen = np.zeros(generation.num_chunks, np.int64)
    for shard, documents in enumerate(placement.documents):
        part = part_of(generation, documents)
        assert part.doc_ids.equals(generation.doc_ids.take(pa.array(documents)))
        numbers = np.arange(part.num_chunks)
        chunks = placement.chunks_of(shard, numbers)
        np.testing.assert_array_equal(part.chunks.reconstruct(numbers), expected[chunks])
        [(owner, _, found)] = placement.split_chunks(chunks)
        assert (owner, found.tolist()) == (shard, numbers.tolist())
        seen[chunks] += 1
    assert np.all(seen == 1)


@pytest.fixture
def late_collection(tmp_path: Path, tiny_late_folder: Path) -> Collection:
    """A collection with token vectors, in two segments."""
    root = tmp_path
    generator = np.random.default_rng(0)
    words = [
        "old",
        "stone",
        "path",
        "over",
        "the",
        "mountain",
        "a",
        "river",
        "sea",
        "cat",
        "sat",
        "on",
        "mat",
    ]
    config = IngestConfig(
        encoder=EncoderConfig(model=str(tiny_late_folder), landmark_interval=16, use_context=False),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=2, max_document_tokens=16),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "WHOLE_CHUNKS", 0)
        patch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)
        for part in (range(20), range(15, 34)):
            rows = [
                {
                    "id": f"d{number:02d}",
                    "title": " ".join(words[number % 9 :][:3]) if number % 3 else None,
                    "year": 2_000 + number,
                    "text": " ".join(generator.choice(words, 20 + 3 * number)),
                }
                for number in part
            ]
            pq.write_table(pa.Table.from_pylist(rows), root / "corpus.parquet")
            build_index([str(root / "corpus.parquet")], root / "data", "c", config)
    return open_collection("c", root=root / "data")


LATE_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"filters": {"type": "gte", "key": "year", "value": 2_020}},
    {"chunk_tokens": 16, "passages": 5},
    {"max_characters": 200, "chunk_tokens": 48},
    {"hybrid": False, "granularity": "chunk"},
    {"late": False, "top_k": 30},
    {"group_by": "cluster_id", "group_size": 2, "mmr": 0.5},
)


def test_token_vectors_of_shards_judge_as_those_of_one_process(late_collection: Collection) -> None:
    layout = late_collection.layout
    asked = [(query, each) for query in ("the old stone path", "mountain") for each in LATE_OPTIONS]
    expected = [late_collection.search(query, **each) for query, each in asked]
    assert any(passage.highlights for hit in expected[0].hits for passage in hit.passages)
    for num_shards in (1, 2, 3, 4):
        shards = Shards(layout.root, num_shards)
        sharded = Searcher(layout, load_query_encoder, make_reader=shards.reader)
        assert len(sharded.generation.segments) == 2
        assert [sharded.search(query, **each) for query, each in asked] == expected
        assert {"max_sim", "token_matches"} <= set(shards.asked)
