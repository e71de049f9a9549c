"""However rows are cut into segments, changed and merged, a search answers as one segment does."""

from __future__ import annotations

from dataclasses import astuple
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection
from cairn.pipeline.index.names import DELETED_BITS, NEEDED_FILES, TOKENS_ARROW
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.segments import writer
from cairn.pipeline.index.status import collection_status
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.search.reader import words_asked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damages import flip
from tests.index import stones

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

IDS = [f"d{'x' * (i % 4)}{i}" for i in range(24)]
QUERIES = ("stone", "w0x1", "w1x2 stone dx1", "title")
FLAT = IndexConfig(index_kind="flat")


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest collections have segments."""
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    monkeypatch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)


steps = st.lists(
    st.tuples(st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=8), st.booleans()),
    min_size=2,
    max_size=10,
)
"""Publications: of documents that are written again or new, or that are deleted."""


def publications(layout: CollectionLayout, work: Iterable[tuple[list[str], bool]]) -> Iterator[list[str]]:
    """Publish each step; yield the ids that are left, in the order in which they were written."""
    left: list[str] = []
    for version, (ids, is_deletion) in enumerate(work):
        if is_deletion:
            gone = [doc_id for doc_id in ids if doc_id in left]
            if gone and len(gone) < len(left):
                stones.delete(layout, gone)
                left = [doc_id for doc_id in left if doc_id not in gone]
        else:
            stones.publish_documents(
                layout, ids, replaced=ids, version=version % 3, config=FLAT, with_tokens=True
            )
            left = [doc_id for doc_id in left if doc_id not in ids] + ids
        yield left


def publish(layout: CollectionLayout, work: Iterable[tuple[list[str], bool]]) -> list[str]:
    """Publish all steps; return the ids that are left at the end."""
    *_, left = publications(layout, work)
    return left


def read(generation: Generation) -> dict[str, Any]:
    """Return all that a search reads of a generation."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((3, 16)).astype(np.float32)
    positions = np.arange(generation.num_documents)
    bm25 = generation.passage_bm25
    of_documents = generation.document_bm25
    tokens = generation.token_vectors
    assert tokens is not None
    every_other = positions[::2]
    shuffled = rng.permutation(generation.num_chunks)
    asked_words = [words_asked(query, generation.query_languages) for query in QUERIES]
    return {
        "doc_ids": generation.doc_ids.to_pylist(),
        "places": [generation.position_of(doc_id) for doc_id in generation.doc_ids.to_pylist()],
        "chunk_offsets": generation.chunk_offsets,
        "cluster_ids": generation.cluster_ids,
        "num_tokens": generation.num_tokens,
        "chunk_documents": generation.chunk_documents,
        "chunk_starts": generation.chunk_starts,
        "chunk_ends": generation.chunk_ends,
        "mean": generation.mean_chunk_vector,
        "document_vectors": generation.documents.reconstruct(positions),
        "chunk_vectors": generation.chunks.reconstruct(np.arange(generation.num_chunks)),
        "found": [
            answer
            for index in (generation.documents, generation.chunks)
            for top_k in (1, 7, 60)
            for allowed in (None, every_other)
            for answer in index.search(queries, top_k, allowed)
        ],
        "bm25": [
            *(bm25.scores(each, size) for each in asked_words for size in (1, 2, 20)),
            *map(of_documents.scores, asked_words),
        ],
        "tokens": [
            part
            for column in (tokens.chunks, tokens.titles)
            for asked in (shuffled, shuffled[:3], shuffled[:0])
            for part in astuple(column.read(asked))
        ],
        "texts": generation.fetch_documents(positions, ["text"]).column("text").to_pylist(),
    }


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray) and expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(work=steps)
def test_any_publications_answer_as_one_segment_does(
    small_segments: None, tmp_path_factory: pytest.TempPathFactory, work: Any
) -> None:
    layout = CollectionLayout(tmp_path_factory.mktemp("root"), "stones")
    left = publish(layout, [(IDS[:6], False), *work])
    generation = open_generation(layout)
    split = read(generation)
    assert split["doc_ids"] == left
    assert split["places"] == list(range(len(left)))
    assert {generation.position_of(doc_id) for doc_id in {*IDS, "", "~"} - {*left}} <= {None}
    assert verify_collection(layout) == []
    compact_collection(layout)
    whole = open_generation(layout)
    assert len(whole.segments) == 1
    merged = read(whole)
    assert_same(split, merged)
    for one, other in zip(split["bm25"], merged["bm25"], strict=True):
        np.testing.assert_array_equal(one, other)  # to the last bit


def test_document_that_an_older_segment_has_is_published_by_no_other(
    small_segments: None, layout: CollectionLayout
) -> None:
    stones.publish_documents(layout, IDS[:6])
    with pytest.raises(IntegrityError, match="each doc_id once, got 2 repeated"):
        stones.publish_documents(layout, IDS[4:8])


def test_files_of_merged_segments_are_those_of_rows_written_together(
    small_segments: None, layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "FACTOR", 3)
    publish(layout, [(IDS[:4], False), (IDS[4:8], False), (IDS[1:3], True), (IDS[8:12], False)])
    manifest = open_generation(layout).manifest
    assert [record.name for record in manifest.segments] == ["00000004-"]
    compact_collection(layout)
    whole = open_generation(layout).manifest
    names = ("documents.faiss", "chunks.faiss", "documents.arrow", "chunks.arrow", "passages.arrow")
    assert [manifest.files["00000004-" + name] for name in names] == [whole.files[name] for name in names]


@pytest.mark.parametrize("kind", ["ivf_sq8", "ivf_rabitq"])
def test_merged_inverted_files_hold_the_codes_of_their_segments(
    small_segments: None,
    layout: CollectionLayout,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
) -> None:
    monkeypatch.setattr(writer, "EXACT_VECTORS", 20)
    config = IndexConfig(index_kind=kind)
    first, second, third = stones.document_ids(400), stones.document_ids(60, "n"), stones.document_ids(5, "m")
    stones.publish_documents(layout, first, config=config)
    stones.publish_documents(layout, second, config=config)
    stones.publish_documents(layout, [*third, *first[:9]], replaced=first[:9], version=1, config=config)
    split = open_generation(layout)
    kinds = [segment.record.indexes["documents"]["kind"] for segment in split.segments]
    assert kinds == [kind, kind, "flat"]
    monkeypatch.setattr(tiers, "tier_of", lambda _: 0)
    monkeypatch.setattr(tiers, "FACTOR", 4)
    stones.publish_documents(layout, ["last"], config=config)
    merged = open_generation(layout)
    assert len(merged.segments) == 1
    assert merged.segments[0].record.indexes["documents"]["kind"] == kind
    queries = stones.unit_vectors("queries", 20)
    # The merged one has a document more at its end.
    for before, after in ((split.documents, merged.documents), (split.chunks, merged.chunks)):
        positions = np.arange(before.num_vectors)
        vectors, codes_of_it = before.reconstruct(positions), after.reconstruct(positions)
        np.testing.assert_allclose(vectors, codes_of_it, atol=0.2)  # beyond the range of the codes
        np.testing.assert_array_equal(vectors[:451], codes_of_it[:451])
        found, expected = after.search(queries, 10)[1], before.search(queries, 10)[1]
        same = np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(found, expected, strict=True)])
        assert same > 0.9
    assert verify_collection(layout) == []


def test_publication_writes_what_changed_and_links_the_rest(
    small_segments: None, layout: CollectionLayout
) -> None:
    stones.publish_documents(layout, IDS[:10], with_tokens=True)
    stones.publish_documents(layout, [IDS[3]], replaced=[IDS[3]], version=1)
    first, second = (layout.generation_folder(number) for number in (1, 2))
    for name in (*NEEDED_FILES, TOKENS_ARROW):
        assert (first / name).samefile(second / name)
        assert (second / f"00000002-{name}").is_file()
    assert (second / "deleted.bits").read_bytes() == bytes([0b0000_1000, 0])
    (record, added) = open_generation(layout).manifest.segments
    assert (record.live_documents, record.deleted_documents, added.documents) == (9, 1, 1)


def test_file_that_is_not_there_to_be_shared_lets_all_be_made_again(
    small_segments: None, layout: CollectionLayout
) -> None:
    stones.publish_documents(layout, IDS[:10])
    (layout.generation_folder(1) / "passages.arrow").unlink()
    stones.delete(layout, [IDS[3]])
    assert [record.name for record in open_generation(layout).manifest.segments] == [""]
    assert verify_collection(layout)[0].generation == 1


@pytest.mark.parametrize(
    ("name", "factor"),
    [*zip([*NEEDED_FILES, TOKENS_ARROW, DELETED_BITS], cycle([2, 8]), strict=False)],
)
def test_damaged_file_is_neither_shared_nor_merged(
    small_segments: None,
    layout: CollectionLayout,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    factor: int,
) -> None:
    left = publish(layout, [(IDS[:6], False), (IDS[6:10], False), (IDS[2:4], True)])
    monkeypatch.setattr(stones, "served_ids", lambda _: left)  # as the ledger of an ingest, without the files
    flip(layout.generation_folder(3) / name, bits=0b110 if name == DELETED_BITS else 1)
    monkeypatch.setattr(tiers, "tier_of", lambda _: 0)
    monkeypatch.setattr(tiers, "FACTOR", factor)
    left = publish(layout, [(IDS[8:12], False)]) and [*left[:-2], *IDS[8:12]]
    healed = open_generation(layout)
    found = read(healed)
    assert found["doc_ids"] == left
    compact_collection(layout)
    assert_same(found, read(open_generation(layout)))


def test_small_collection_stays_one_segment(layout: CollectionLayout) -> None:
    for count in (5, 10):
        stones.publish_documents(layout, IDS[count - 5 : count])
    assert [record.name for record in open_generation(layout).manifest.segments] == [""]


@pytest.mark.parametrize("name", ["documents.faiss", "00000002-chunks.arrow"])
def test_repair_makes_damaged_files_again(small_segments: None, layout: CollectionLayout, name: str) -> None:
    publish(layout, [(IDS[:9], False), (IDS[5:14], False), (IDS[2:4], True), (IDS[20:22], False)])
    before = open_generation(layout)
    expected = read(before)
    (before.folder / name).write_bytes(b"x")  # in every generation that shares it
    assert repair_collection(layout).lost == ()
    assert verify_collection(layout) == []
    assert_same(read(open_generation(layout)), expected)
    stones.publish_documents(layout, IDS[22:], config=FLAT, with_tokens=True)
    assert verify_collection(layout) == []


def test_status_tells_segments_and_counts_shared_files_once(
    small_segments: None, layout: CollectionLayout
) -> None:
    stones.publish_documents(layout, IDS[:10])
    stones.delete(layout, [IDS[2]])
    status = collection_status(layout)
    chunks = sum(stones.num_chunks_of(doc_id) for doc_id in IDS[:10] if doc_id != IDS[2])
    kinds = {"documents": "flat", "chunks": "flat"}
    counts = {"documents": 9, "chunks": chunks, "deleted_documents": 1}
    assert status["segments"] == [{"name": "", **counts, "kinds": kinds}]
    named = sum(path.stat().st_size for path in layout.folder.rglob("*") if path.is_file())
    shared = [path for path in layout.generation_folder(2).iterdir() if path.stat().st_nlink == 2]
    assert status["disk_bytes"] == named - sum(path.stat().st_size for path in shared)
    assert len(shared) == len(NEEDED_FILES)


def test_status_tells_what_the_next_publication_merges(
    small_segments: None, layout: CollectionLayout
) -> None:
    stones.publish_documents(layout, [f"first{number}" for number in range(60)])
    for doc_id in IDS[:7]:
        assert collection_status(layout)["merge"] is None
        stones.publish_documents(layout, [doc_id])
    found = collection_status(layout)
    chunks = sum(record["chunks"] for record in found["segments"][1:])
    assert (len(found["segments"]), found["merge"]) == (8, {"segments": 7, "chunks": chunks})
    stones.publish_documents(layout, [IDS[7]])
    segments = collection_status(layout)["segments"]
    assert [each["chunks"] for each in segments[1:]] == [chunks + stones.num_chunks_of(IDS[7])]
