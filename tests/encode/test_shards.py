from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.shards import (
    ADDED_COLUMNS,
    as_parquet,
    count_rows,
    finished_shards,
    read_chunk_counts,
    read_document_hashes,
    read_encoded,
    shard_path,
    shard_tables,
    write_encoded_shard,
)
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.types import GIVEN_VECTORS, chunks_schema, documents_schema, staged_schema

from tests.small_ingests import stopped_at


def _vectors(count):
    return pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * count, dtype=np.float32)), 2)


METADATA = [pa.field("tags", pa.list_(pa.string())), pa.field("year", pa.int16())]


def _write(folder, number, *doc_ids):
    """Stage documents of two chunks each, and write them as an encoded shard."""
    rows, documents, chunks = _tables(*doc_ids)
    folder.mkdir(exist_ok=True)
    staged = folder.with_name("staged.parquet")
    pq.write_table(rows, staged)
    write_encoded_shard(folder, number, staged, as_parquet(documents), as_parquet(chunks))


def _tables(*doc_ids):
    count = len(doc_ids)
    numbers = pa.array(range(count), pa.int32())
    text = pa.array(doc_ids, pa.string())
    rows = [
        *(text, text, text.cast(pa.large_string()), text, text, text),
        pa.nulls(count, pa.large_binary()),
        pa.array([[doc_id] for doc_id in doc_ids], pa.list_(pa.string())),
        numbers.cast(pa.int16()),
    ]
    documents = [numbers, numbers, pa.array([2] * count, pa.int32()), _vectors(count)]
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
    stored = documents_schema((), 2)
    return (
        pa.table(rows, schema=staged_schema(METADATA)),
        pa.table(documents, schema=pa.schema([stored.field(name) for name in ADDED_COLUMNS])),
        pa.table(chunks, schema=chunks_schema(2)),
    )


def _doc_ids(folder, table, **options):
    return [
        doc_id
        for batch in read_encoded(folder, table, **options)
        for doc_id in batch.column("doc_id").to_pylist()
    ]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "encoded"
    _write(folder, 10, "a", "d")
    _write(folder, 2, "c", "a")
    return folder


def test_finished_shards_are_read_in_numeric_order_and_counted(folder):
    assert finished_shards(folder) == [2, 10]
    assert _doc_ids(folder, "chunks") == ["c", "c", "a", "a", "a", "a", "d", "d"]
    assert (count_rows(folder, "documents", 2), count_rows(folder, "chunks", 2)) == (2, 4)
    assert read_chunk_counts(folder, 10) == {"a": 2, "d": 2}
    staleness = [{"doc_id": name, "content_sha256": name} for name in ("c", "a")]
    assert read_document_hashes(folder, 2).to_pylist() == staleness


@pytest.mark.parametrize("table", ["documents", "chunks"])
def test_read_stale_document_is_left_out_of_its_own_shard_only(folder, table):
    assert list(dict.fromkeys(_doc_ids(folder, table, stale={2: ["a"]}))) == ["c", "a", "d"]
    assert _doc_ids(folder, table, stale={2: ["a"]}).count("a") == (1 if table == "documents" else 2)


def test_read_rows_equal_what_was_written_and_documents_are_the_staged_rows_with_what_was_added(folder):
    rows, added, chunks = _tables("c", "a")
    own = {"stale": {10: ["a", "d"]}}
    assert pa.Table.from_batches(list(read_encoded(folder, "chunks", **own))).equals(chunks)
    documents = pa.Table.from_batches(list(read_encoded(folder, "documents", **own)))
    stored, rows = documents_schema(METADATA, 2), rows.drop_columns([GIVEN_VECTORS])
    assert documents.select(stored.names).schema.equals(stored)
    assert documents.select(rows.column_names).equals(rows)
    assert documents.select(added.column_names).equals(added)


def test_read_documents_of_many_row_groups_keep_rows_and_vectors_together(tmp_path):
    doc_ids = [f"d{number:04d}" for number in range(500)]
    rows, documents, chunks = _tables(*doc_ids)
    pq.write_table(rows, tmp_path / "staged.parquet", row_group_size=37)
    write_encoded_shard(
        tmp_path / "encoded", 0, tmp_path / "staged.parquet", as_parquet(documents), as_parquet(chunks)
    )
    batches = read_encoded(tmp_path / "encoded", "documents", stale={0: doc_ids[:101]}, batch_rows=64)
    table = pa.Table.from_batches(batches)
    assert table.column("doc_id").to_pylist() == doc_ids[101:]
    assert table.column("cluster_id").to_pylist() == list(range(101, 500))


@pytest.mark.parametrize(("point", "finished"), [("shard-chunks-written", []), ("shard-written", [0])])
def test_write_killed_at_a_commit_point_leaves_a_whole_shard_or_none_and_is_finished_again(
    tmp_path, point, finished
):
    with stopped_at(point):
        _write(tmp_path / "encoded", 0, "a")
    assert finished_shards(tmp_path / "encoded") == finished
    _write(tmp_path / "encoded", 0, "a")
    assert _doc_ids(tmp_path / "encoded", "chunks") == ["a", "a"]


def test_write_moves_the_staged_file_and_copies_no_text(folder):
    assert not folder.with_name("staged.parquet").exists()
    assert "text" not in pq.read_schema(shard_path(folder, "documents", 2)).names


def test_write_over_a_shard_that_lost_a_file_is_unfinished_until_its_end(folder):
    """Else chunks of the new one would be read with documents of the old one."""
    shard_path(folder, "chunks", 10).unlink()
    with stopped_at("shard-chunks-written"):
        _write(folder, 10, "e")
    assert finished_shards(folder) == [2]


@pytest.mark.parametrize(
    ("table", "file"), [("chunks", "chunks"), ("documents", "rows"), ("documents", "documents")]
)
def test_read_damaged_shard_is_an_integrity_error(folder, table, file):
    path = shard_path(folder, file, 2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(IntegrityError, match=rf"{file}-000002\.parquet must be a whole Parquet file"):
        list(read_encoded(folder, table))


def test_shard_tables_hold_what_was_encoded_in_the_stored_schemas(config, backbone):
    doc_ids, texts = ["b", "a", "c"], ["old stone path " * 10, "cat", "the mat"]
    encoded = DocumentEncoder(config, None, backbone).encode(texts)
    documents, chunks = shard_tables(doc_ids, encoded, np.arange(3, dtype=np.int32) + 7)
    stored = documents_schema((), 32)
    assert list(documents.schema) == [stored.field(name) for name in ADDED_COLUMNS]
    assert chunks.schema.equals(chunks_schema(32))
    assert documents.column("num_chunks").to_pylist() == [3, 1, 1]
    assert documents.column("cluster_id").to_pylist() == [7, 8, 9]
    assert chunks.column("chunk_id").to_pylist() == ["b#0", "b#1", "b#2", "a#0", "c#0"]
    assert chunks.column("doc_id").to_pylist() == ["b", "b", "b", "a", "c"]
    assert chunks.column("ordinal").to_pylist() == [0, 1, 2, 0, 0]
    for table, vectors in ((documents, encoded.document_vectors_NV), (chunks, encoded.chunk_vectors_MV)):
        np.testing.assert_array_equal(np.array(table.column("vector").to_pylist(), np.float32), vectors)
