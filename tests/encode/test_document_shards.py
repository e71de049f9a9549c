"""A staged shard as rows of the two tables."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pipeline.encode.documents import DocumentEncoder, encode_shard
from pipeline.types import chunks_schema, documents_schema


@pytest.fixture
def staged():
    return pa.table(
        {
            "doc_id": pa.chunked_array([["b", "a"], ["c"]], pa.string()),
            "title": pa.array(["B", None, "C"], pa.string()),
            "text": pa.array(["old stone path " * 10, "cat", "the mat"], pa.large_string()),
            "query": pa.array([None, "q", None], pa.string()),
            "content_sha256": pa.array(["1", "2", "3"], pa.string()),
            "source_file": pa.array(["f"] * 3, pa.string()),
            "tags": pa.array([["x"], None, []], pa.list_(pa.string())),
            "year": pa.array([1, None, 3], pa.int16()),
        }
    )


@pytest.fixture
def shard(config, backbone, staged):
    return encode_shard(
        staged,
        DocumentEncoder(config, None, backbone),
        lambda table: np.arange(table.num_rows, dtype=np.int32) + 7,
    )


def test_encode_shard_tables_have_the_stored_schemas(shard, staged):
    documents, chunks = shard
    assert documents.schema.equals(
        documents_schema([staged.schema.field("tags"), staged.schema.field("year")], 32)
    )
    assert chunks.schema.equals(chunks_schema(32))


def test_encode_shard_columns_pass_through_as_they_came(shard, staged):
    kept = ["doc_id", "title", "text", "content_sha256", "source_file", "tags", "year"]
    assert shard[0].select(kept).to_pylist() == staged.select(kept).to_pylist()


def test_encode_shard_clusters_come_from_assign(shard):
    assert shard[0].column("cluster_id").to_pylist() == [7, 8, 9]


def test_encode_shard_chunks_follow_their_documents(shard):
    documents, chunks = shard
    assert documents.column("num_chunks").to_pylist() == [3, 1, 1]
    assert chunks.column("chunk_id").to_pylist() == ["b#0", "b#1", "b#2", "a#0", "c#0"]
    assert chunks.column("doc_id").to_pylist() == ["b", "b", "b", "a", "c"]
    assert chunks.column("ordinal").to_pylist() == [0, 1, 2, 0, 0]


def test_encode_shard_vectors_are_the_encoders(shard, config, backbone, staged):
    encoded = DocumentEncoder(config, None, backbone).encode(staged.column("text").to_pylist())
    stored = np.array(shard[1].column("vector").to_pylist(), np.float32)
    np.testing.assert_array_equal(stored, encoded.chunk_vectors_MV)
