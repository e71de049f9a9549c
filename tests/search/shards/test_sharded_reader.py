"""However documents are cut into shards, a search answers as one process does, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.collection import Collection, load_query_encoder, open_collection
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.errors import CairnError, PartitionsMissingError, StorageError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import repartition
from cairn.pipeline.index.names import partition_of
from cairn.pipeline.index.publish import remove_generations
from cairn.pipeline.search.contents import count_documents, list_matches, read_document, summarise_columns
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search.shards import parts, sharded_generation
from cairn.pipeline.search.shards.parts import ShardUnreachableError
from cairn.pipeline.search.shards.sharded_generation import ShardedGeneration
from cairn.pipeline.search_options import SearchOptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import small_ingests
from tests.search.shards.in_process import Shards, shards_of
from tests.small_ingests import ingest_rows

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
    """A collection in five partitions."""
    layout = CollectionLayout(tmp_path_factory.mktemp("root"), "stones")
    config = IndexConfig(index_kind="flat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "WHOLE_CHUNKS", 0)
        patch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)
        publish(layout, 40, version=0, config=config)
        second = publish(layout, 25, version=1, config=config)
        publish(layout, 12, version=2, replaces=_some(second, 1), config=config)
    repartition(layout, 5)
    assert len(open_generation(layout).parts) == 5
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


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_shards=st.integers(1, 6),
    query=st.sampled_from(QUERIES),
    asked=options,
)
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

    assert answer(open_one=shards_of(split_layout.root, num_shards)) == answer()


@pytest.mark.parametrize("asked", [{}, {"hybrid": False, "granularity": "chunk"}, {"passages": 3}])
def test_search_asks_every_shard_for_candidates_with_scores_then_for_texts(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], asked: dict[str, Any]
) -> None:
    shards = Shards(split_layout.root, 3)
    searcher = Searcher(split_layout, make_encoder(), open_one=shards.open)
    searcher.search("granite basalt", **asked)  # counts its words
    shards.asked.clear()
    shards.rounds = 0
    searcher.search("granite basalt", **asked)
    assert shards.asked[:3] == ["search"] * 3
    assert (shards.rounds, {*shards.asked[3:]}) == (2, {"reader.read_passages"})


def _sharded(layout: CollectionLayout, shards: Shards) -> ShardedGeneration:
    generation = open_generation(layout, open_one=shards.open)
    assert isinstance(generation, ShardedGeneration)
    return generation


def test_part_of_another_generation_of_the_number_is_refused(split_layout: CollectionLayout) -> None:
    shards = Shards(split_layout.root, 2)
    key = _sharded(split_layout, shards).shards.keys[0]
    nothing = np.empty(0, np.int64)
    assert len(shards.held[0].answer(key, "part.chunks.reconstruct", (nothing,))) == 0
    with pytest.raises(StorageError, match="must be the same for every process"):
        shards.held[0].answer(key._replace(manifest="0" * 64), "part.chunks.reconstruct", (nothing,))


def test_searches_of_shards_leave_few_documents_in_the_process_that_asks(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_generation, "MAX_KNOWN", 20)
    asked: dict[str, Any] = {
        "filters": FILTERS[1],
        "group_by": "cluster_id",
        "mmr": 0.5,
        "max_characters": 400,
    }
    sharded = Searcher(split_layout, make_encoder(), open_one=shards_of(split_layout.root, 3))
    whole = Searcher(split_layout, make_encoder())
    for query in QUERIES:
        assert sharded.search(query, **asked) == whole.search(query, **asked)
    held = {name: each for name, each in vars(sharded.generation).items() if name != "_met"}
    assert held.pop("mean_chunk_vector").ndim == 1
    assert not [name for name, each in held.items() if isinstance(each, np.ndarray | pa.Array | pa.Table)]
    (documents, *_) = vars(sharded.generation)["_met"]
    assert len(documents) <= 20 + 40


@pytest.mark.parametrize(
    "read",
    [
        lambda searcher: searcher.answer(QUERIES, SearchOptions()),
        lambda searcher: searcher.reading(read_document, "doc-1-004"),
        lambda searcher: searcher.reading(read_document, "doc-1-004", restriction=FILTERS[1]),
        lambda searcher: searcher.reading(read_document, "no such document"),
        lambda searcher: searcher.reading(list_matches, FILTERS[1], limit=3),
        lambda searcher: searcher.reading(summarise_columns),
        lambda searcher: searcher.reading(count_documents, FILTERS[2]),
        lambda searcher: searcher.generation.cluster_ids.tolist(),
        lambda searcher: searcher.generation.num_tokens.tolist(),
        lambda searcher: searcher.generation.doc_ids.to_pylist(),
        lambda searcher: [each.tolist() for each in searcher.generation.chunks_of(np.array([9, 3, 3]))],
        lambda searcher: searcher.generation.owners_of(np.array([30, 2, 77])).tolist(),
        lambda searcher: searcher.generation.documents.reconstruct(np.array([9, 3])).tolist(),
        lambda searcher: searcher.generation.documents.reconstruct(np.empty(0, np.int64)).tolist(),
    ],
)
def test_what_is_read_of_shards_equals_what_one_process_reads(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], read: Callable[[Searcher], Any]
) -> None:
    sharded = Searcher(split_layout, make_encoder(), open_one=shards_of(split_layout.root, 3))
    assert read(sharded) == read(Searcher(split_layout, make_encoder()))


@pytest.fixture
def published_twice(layout: CollectionLayout, publish: Callable[..., Any]) -> None:
    for version in range(2):
        publish(layout, 20, version=version)


@pytest.mark.usefixtures("published_twice")
def test_damage_that_a_shard_meets_makes_the_generation_before_answer_the_same_call(
    layout: CollectionLayout, make_encoder: Callable[[], Any]
) -> None:
    sharded = Searcher(layout, make_encoder(), open_one=shards_of(layout.root, 2))
    assert sharded.search("granite").generation == 2
    path = next(layout.generation_folder(2).glob("*documents.arrow"))
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    assert sharded.search("granite").generation == 1
    assert "generation 1 is served" in sharded.warnings[0]


@pytest.mark.usefixtures("published_twice")
def test_rows_damaged_before_a_shard_opens_them_make_the_generation_before_answer_until_they_are_whole(
    layout: CollectionLayout, make_encoder: Callable[[], Any]
) -> None:
    older, newer = (read_manifest(layout, number).lance_files for number in (1, 2))
    names = [name for name in newer if name not in older and name.startswith("documents.lance/data/")]
    paths = [layout.lance_folder / name for name in names]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(b"\xff" * len(content))
    shards = Shards(layout.root, 1)
    sharded = Searcher(layout, make_encoder(), open_one=shards.open)
    assert sharded.generation.number == 2
    for _ in range(2):
        assert sharded.search("granite").generation == 1
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert Searcher(layout, make_encoder(), open_one=shards.open).search("granite").generation == 2


@pytest.fixture
def late_collection(tmp_path: Path, tiny_model_folder: Path) -> Collection:
    """A collection with token vectors, in four partitions of several segments."""
    root = tmp_path
    generator = np.random.default_rng(0)
    words = ("old", "stone", "path", "over", "the", "mountain", "river", "sea", "cat", "sat", "on", "mat")
    config = small_ingests.settings(tiny_model_folder, partitions=4, token_bytes=8)
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
            ingest_rows(rows, root / "data", config)
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
        sharded = Searcher(layout, load_query_encoder, open_one=shards.open)
        assert [sharded.search(query, **each) for query, each in asked] == expected
        assert "max_sim" in shards.asked


def test_what_no_shard_took_for_a_candidate_is_scored_when_it_is_one(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_likely", lambda count, _: min(count, 2))
    shards = Shards(split_layout.root, 3)
    sharded = Searcher(split_layout, make_encoder(), open_one=shards.open)
    whole = Searcher(split_layout, make_encoder())
    for query in QUERIES:
        for asked in ({}, {"passages": 3, "chunk_tokens": 64}, {"hybrid": False, "granularity": "chunk"}):
            assert sharded.search(query, **asked) == whole.search(query, **asked)
    assert "score" in shards.asked


@pytest.mark.parametrize("down", [(0,), (1, 3)])
def test_shards_that_do_not_answer_are_left_out_where_a_search_asks_for_the_others(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], down: tuple[int, ...]
) -> None:
    shards = Shards(split_layout.root, 5)
    searcher = Searcher(split_layout, make_encoder(), open_one=shards.open)
    everything = searcher.search("granite basalt", top_k=100)
    assert searcher.search("granite basalt", top_k=100, partial=True) == everything
    shards.down.update(down)
    with pytest.raises(ShardUnreachableError):
        searcher.search("granite basalt", top_k=100)
    left = searcher.search("granite basalt", top_k=100, partial=True)
    assert {hit.doc_id for hit in left.hits} == {
        hit.doc_id for hit in everything.hits if partition_of(hit.doc_id, 5) not in down
    }
    records = read_manifest(split_layout, everything.generation).partitions
    assert all(records[shard].name in left.warnings[0] for shard in down)
    shards.down.update(range(5))
    with pytest.raises(ShardUnreachableError):
        searcher.search("granite basalt", top_k=100, partial=True)
    shards.down.clear()
    assert searcher.search("granite basalt", top_k=100, partial=True) == everything


@pytest.mark.parametrize("num_shards", [1, 3, 5])
def test_shards_answer_without_a_lost_partition_as_one_process_does(
    split_layout: CollectionLayout, make_encoder: Callable[[], Any], tmp_path: Path, num_shards: int
) -> None:
    shutil.copytree(split_layout.root, tmp_path / "root")
    layout = CollectionLayout(tmp_path / "root", split_layout.name)
    remove_generations(layout, layout.kept_generations()[:-1])  # which would answer, being whole
    shutil.rmtree(sorted(layout.partitions_folder.iterdir())[2])
    searchers = [
        Searcher(layout, make_encoder(), open_one=open_one)
        for open_one in (None, shards_of(layout.root, num_shards))
    ]
    for searcher in searchers:
        with pytest.raises(PartitionsMissingError):
            searcher.search("granite basalt")
    alone, sharded = (each.search("granite basalt", top_k=100, partial=True) for each in searchers)
    assert alone.hits
    assert sharded == alone
