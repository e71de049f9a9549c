"""Encoded documents as rows of the two tables."""

from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.shards import ADDED_COLUMNS, shard_tables
from cairn.pipeline.types import chunks_schema, documents_schema

DOC_IDS = ["b", "a", "c"]
TEXTS = ["old stone path " * 10, "cat", "the mat"]


@pytest.fixture
def encoded(config, backbone):
    return DocumentEncoder(config, None, backbone).encode(TEXTS)


@pytest.fixture
def shard(encoded):
    return shard_tables(DOC_IDS, encoded, np.arange(3, dtype=np.int32) + 7)


def test_shard_tables_have_the_stored_schemas(shard):
    documents, chunks = shard
    stored = documents_schema((), 32)
    assert list(documents.schema) == [stored.field(name) for name in ADDED_COLUMNS]
    assert chunks.schema.equals(chunks_schema(32))


def test_shard_tables_chunks_follow_their_documents(shard):
    documents, chunks = shard
    assert documents.column("num_chunks").to_pylist() == [3, 1, 1]
    assert chunks.column("chunk_id").to_pylist() == ["b#0", "b#1", "b#2", "a#0", "c#0"]
    assert chunks.column("doc_id").to_pylist() == ["b", "b", "b", "a", "c"]
    assert chunks.column("ordinal").to_pylist() == [0, 1, 2, 0, 0]


def test_shard_tables_vectors_are_the_encoders(shard, encoded):
    documents, chunks = (np.array(table.column("vector").to_pylist(), np.float32) for table in shard)
    np.testing.assert_array_equal(documents, encoded.document_vectors_NV)
    np.testing.assert_array_equal(chunks, encoded.chunk_vectors_MV)
