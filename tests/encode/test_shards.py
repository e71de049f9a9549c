from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pipeline import durable
from pipeline.encode.shards import (
    as_parquet,
    encoded_schema,
    finished_shards,
    read_document_hashes,
    read_encoded,
    shard_path,
    write_encoded_shard,
)
from pipeline.errors import IntegrityError
from pipeline.types import chunks_schema, documents_schema


def _vectors(count):
    return pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * count, dtype=np.float32)), 2)


def _shard(*doc_ids):
    """Documents of two chunks each, as the bytes of their files."""
    return tuple(as_parquet(table) for table in _tables(*doc_ids))


def _tables(*doc_ids):
    count = len(doc_ids)
    numbers = pa.array(range(count), pa.int32())
    text = pa.array(doc_ids, pa.string())
    documents = [
        text,
        text,
        text.cast(pa.large_string()),
        text,
        text,
        numbers,
        numbers,
        numbers,
        _vectors(count),
    ]
    owners = [doc_id for doc_id in doc_ids for _ in range(2)]
    places = pa.array([0, 1] * count, pa.int64())
    chunks = [
        pa.array([f"{owner}#{place}" for owner, place in zip(owners, [0, 1] * count, strict=True)]),
        pa.array(owners),
        places.cast(pa.int32()),
        places,
        places,
        _vectors(2 * count),
    ]
    return pa.table(documents, schema=documents_schema([], 2)), pa.table(chunks, schema=chunks_schema(2))


def _doc_ids(folder, table, **options):
    return [
        doc_id
        for batch in read_encoded(folder, table, **options)
        for doc_id in batch.column("doc_id").to_pylist()
    ]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "encoded"
    write_encoded_shard(folder, 10, *_shard("a", "d"))
    write_encoded_shard(folder, 2, *_shard("c", "a"))
    return folder


@pytest.fixture
def observers(monkeypatch):
    monkeypatch.setattr(durable, "_observers", [])
    return durable.observe_commit_points


def test_finished_shards_are_in_numeric_order(folder):
    assert finished_shards(folder) == [2, 10]


def test_finished_shards_of_a_missing_folder_are_none(tmp_path):
    assert finished_shards(tmp_path / "absent") == []


def test_read_documents_come_shard_by_shard(folder):
    assert _doc_ids(folder, "documents") == ["c", "a", "a", "d"]


def test_read_chunks_come_in_their_documents_order(folder):
    assert _doc_ids(folder, "chunks") == ["c", "c", "a", "a", "a", "a", "d", "d"]


@pytest.mark.parametrize("table", ["documents", "chunks"])
def test_read_stale_document_is_left_out_of_its_own_shard_only(folder, table):
    assert list(dict.fromkeys(_doc_ids(folder, table, stale={2: ["a"]}))) == ["c", "a", "d"]
    assert _doc_ids(folder, table, stale={2: ["a"]}).count("a") == (1 if table == "documents" else 2)


def test_read_shard_all_stale_gives_nothing_of_it(folder):
    assert _doc_ids(folder, "documents", stale={2: ["a", "c"]}) == ["a", "d"]


def test_read_small_batches_give_the_same_rows(folder):
    assert _doc_ids(folder, "chunks", batch_rows=3) == _doc_ids(folder, "chunks")


def test_read_rows_equal_what_was_written(folder):
    written = _tables("c", "a")[1]
    batches = list(read_encoded(folder, "chunks", stale={10: ["a", "d"]}))
    assert pa.Table.from_batches(batches).equals(written)


def test_encoded_schema_is_the_written_one(folder):
    assert encoded_schema(folder, "documents").equals(documents_schema([], 2))


def test_read_document_hashes_give_what_staleness_is_told_by(folder):
    assert read_document_hashes(folder, 2).to_pylist() == [
        {"doc_id": "c", "content_sha256": "c"},
        {"doc_id": "a", "content_sha256": "a"},
    ]


@pytest.mark.parametrize(("point", "finished"), [("shard-chunks-written", []), ("shard-written", [0])])
def test_write_killed_at_a_commit_point_leaves_a_whole_shard_or_none(tmp_path, observers, point, finished):
    def kill(name):
        if name == point:
            raise KeyboardInterrupt

    observers(kill)
    with pytest.raises(KeyboardInterrupt):
        write_encoded_shard(tmp_path, 0, *_shard("a"))
    assert finished_shards(tmp_path) == finished


def test_write_again_after_a_kill_finishes_the_shard(tmp_path):
    write_encoded_shard(tmp_path, 0, *_shard("a"))
    shard_path(tmp_path, "documents", 0).unlink()
    write_encoded_shard(tmp_path, 0, *_shard("a"))
    assert _doc_ids(tmp_path, "chunks") == ["a", "a"]


def test_write_twice_gives_the_same_bytes(tmp_path):
    for number in (0, 1):
        write_encoded_shard(tmp_path, number, *_shard("a", "b"))
    assert (
        shard_path(tmp_path, "documents", 0).read_bytes() == shard_path(tmp_path, "documents", 1).read_bytes()
    )


def test_read_damaged_shard_is_an_integrity_error(folder):
    path = shard_path(folder, "chunks", 2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(IntegrityError, match=r"chunks-000002\.parquet must be a whole Parquet file"):
        list(read_encoded(folder, "chunks"))
