"""Encoded documents as rows: what an encoder adds to a staged shard, and its chunks.

The text and the other columns of a staged row are not repeated here: they stay in the staged file, which
``shards`` keeps beside these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from cairn.pipeline.ragged import places_in_groups
from cairn.pipeline.types import chunks_schema, documents_schema
from jaxtyping import Float32, Int32, Int64

if TYPE_CHECKING:
    from cairn.pipeline.encode.documents import EncodedDocuments
    from cairn.pipeline.encode.token_rows import TokenRows

ADDED_COLUMNS = ("cluster_id", "num_tokens", "num_chunks", "vector")
"""Columns of ``documents`` that a staged row has not."""


def shard_tables(
    doc_ids: Sequence[str], encoded: EncodedDocuments, assignments_N: Int32[np.ndarray, " N"]
) -> tuple[pa.Table, pa.Table]:
    """Return the ``ADDED_COLUMNS`` of ``documents`` and the rows of ``chunks``, both in document order."""
    vector_dim = encoded.document_vectors_NV.shape[1]
    num_chunks = np.diff(encoded.chunk_offsets)
    stored = documents_schema((), vector_dim)
    added = pa.table(
        [
            pa.array(assignments_N),
            pa.array(encoded.num_tokens),
            pa.array(num_chunks.astype(np.int32)),
            _vector_array(encoded.document_vectors_NV),
        ],
        schema=pa.schema([stored.field(name) for name in ADDED_COLUMNS]),
    )
    ordinals = places_in_groups(num_chunks)
    owners = np.repeat(np.array(doc_ids, dtype=object), num_chunks).tolist()
    chunks = pa.table(
        [
            pa.array(
                [f"{doc_id}#{ordinal}" for doc_id, ordinal in zip(owners, ordinals.tolist(), strict=True)],
                pa.string(),
            ),
            pa.array(owners, pa.string()),
            pa.array(ordinals.astype(np.int32)),
            pa.array(encoded.start_char),
            pa.array(encoded.end_char),
            _vector_array(encoded.chunk_vectors_MV),
            *_token_columns(encoded, ordinals),
        ],
        schema=chunks_schema(vector_dim, has_tokens=encoded.chunk_tokens is not None),
    )
    return added, chunks


def _token_columns(encoded: EncodedDocuments, ordinals: Int64[np.ndarray, " M"]) -> list[pa.Array]:
    """Return the codes of chunks, and those of titles in each document's first row; nothing without any."""
    if encoded.chunk_tokens is None:
        return []
    columns = [_codes_array(encoded.chunk_tokens)]
    if encoded.title_tokens is None:
        return [*columns, pa.nulls(len(ordinals), pa.large_binary())]
    document_M = np.where(ordinals == 0, np.cumsum(ordinals == 0) - 1, -1)
    return [*columns, _codes_array(encoded.title_tokens.take(document_M))]


def _codes_array(tokens: TokenRows) -> pa.LargeBinaryArray:
    rows = np.ascontiguousarray(tokens.rows)
    offsets = (tokens.offsets * rows.shape[1]).astype(np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _vector_array(vectors_NV: Float32[np.ndarray, "N V"]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors_NV.reshape(-1)), vectors_NV.shape[1])
