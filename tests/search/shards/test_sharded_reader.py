"""However documents are cut into shards, a search answers as one process does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.build_index import build_index
from pipeline import Collection, open_collection
from pipeline.collection import load_query_encoder
from pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IndexConfig, IngestConfig
from pipeline.errors import CairnError
from pipeline.index import tiers
from pipeline.index.generation import open_generation
from pipeline.index.layout import CollectionLayout
from pipeline.index.part import part_of
from pipeline.search.searcher import Searcher
from pipeline.search.shards.fan_out import document_bounds
from pipeline.search_options import SearchOptions
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
@given(num_shards=st.integers(1, 4), query=st.sampled_from(QUERIES), asked=options)
def test_search_of_any_shards_equals_that_of_one_process(
    split_layout: CollectionLayout,
    make_encoder: Callable[[], Any],
    num_shards: int,
    query: str,
    asked: dict[str, Any],
) -> None:
    def answer(**made: Any) -> Any:
        try:
            return Searcher(split_layout, make_encoder(), **made).search(query, **asked)
        except CairnError as error:
            return type(error), str(error)

    assert answer(make_reader=shards_of(split_layout.root, num_shards)) == answer()


@pytest.mark.parametrize("num_shards", [2, 3])
def test_batch_of_shards_equals_that_of_one_process(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], num_shards: int
) -> None:
    sharded = Searcher(split_layout, make_encoder(), make_reader=shards_of(split_layout.root, num_shards))
    whole = Searcher(split_layout, make_encoder())
    assert sharded.answer(QUERIES, SearchOptions()) == whole.answer(QUERIES, SearchOptions())


def test_more_shards_than_documents_leaves_some_out(
    tmp_path: Path, publish: Callable[..., Any], make_encoder: Callable[[], Any]
) -> None:
    layout = CollectionLayout(tmp_path, "few")
    publish(layout, 2)
    sharded = Searcher(layout, make_encoder(), make_reader=shards_of(tmp_path, 4))
    assert sharded.search("granite") == Searcher(layout, make_encoder()).search("granite")


def test_shards_have_about_as_many_chunks_each() -> None:
    offsets = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 9, 1_000))])
    bounds = document_bounds(offsets, 4)
    chunks = np.diff(offsets[bounds])
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 1_000, 5)
    assert chunks.max() - chunks.min() <= 16


def test_parts_hold_every_row_once(split_layout: CollectionLayout) -> None:
    generation = open_generation(split_layout)
    num_documents = generation.num_documents
    bounds = [0, 7, 39, 50, num_documents]
    parts = [part_of(generation, first, end) for first, end in pairwise(bounds)]
    doc_ids = pa.concat_arrays([part.doc_ids for part in parts])
    assert doc_ids.equals(generation.doc_ids)
    vectors = [part.chunks.reconstruct(np.arange(part.num_chunks)) for part in parts]
    expected = generation.chunks.reconstruct(np.arange(generation.num_chunks))
    np.testing.assert_array_equal(np.concatenate(vectors), expected)


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
