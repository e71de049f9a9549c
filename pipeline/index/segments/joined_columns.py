"""What is known of each document and chunk of several segments, by position among the rows that are left.

The columns of a single segment without deleted rows are those of its mapped files; others are joined in
memory when they are first asked for: 20 bytes a document and its id, 24 bytes a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.segments.deleted import DeletedRows
from cairn.pipeline.index.segments.segment import SegmentRows, open_rows
from cairn.pipeline.manifest import Manifest
from jaxtyping import Int32, Int64


class JoinedColumns:
    """N documents with M chunks."""

    @abstractmethod
    def segment_rows(self) -> Sequence[SegmentRows]:
        """Return the rows of the segments, in their order."""

    @cached_property
    def doc_ids(self) -> pa.LargeStringArray:
        """Document ids by position."""
        parts = [
            rows.documents.column("doc_id").take(pa.array(_live_rows(rows.deleted_documents)))
            if len(rows.deleted_documents.rows)
            else rows.documents.column("doc_id")
            for rows in self.segment_rows()
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    @cached_property
    def chunk_offsets(self) -> Int64[np.ndarray, " N_plus_1"]:
        """First chunk of each document, and the number of chunks at the end."""
        num_chunks_N = self._of_documents("num_chunks")
        offsets = np.zeros(len(num_chunks_N) + 1, np.int64)
        np.cumsum(num_chunks_N, out=offsets[1:])
        return offsets

    @cached_property
    def cluster_ids(self) -> Int32[np.ndarray, " N"]:
        """Cluster of each document."""
        return self._of_documents("cluster_id")

    @cached_property
    def num_tokens(self) -> Int32[np.ndarray, " N"]:
        """Tokens of each document."""
        return self._of_documents("num_tokens")

    @cached_property
    def chunk_documents(self) -> Int64[np.ndarray, " M"]:
        """Document position of each chunk."""
        first, *others = self.segment_rows()
        if not others and not len(first.deleted_documents.rows):
            return first.chunks.column("document_position").to_numpy(zero_copy_only=True)
        return np.repeat(np.arange(len(self.chunk_offsets) - 1), np.diff(self.chunk_offsets))

    @cached_property
    def chunk_starts(self) -> Int64[np.ndarray, " M"]:
        """First character of each chunk in its document's text."""
        return self._of_chunks("start_char")

    @cached_property
    def chunk_ends(self) -> Int64[np.ndarray, " M"]:
        """One past the last character of each chunk."""
        return self._of_chunks("end_char")

    def _of_documents(self, name: str) -> Any:
        return joined_column([(rows.documents, rows.deleted_documents) for rows in self.segment_rows()], name)

    def _of_chunks(self, name: str) -> Any:
        return joined_column([(rows.chunks, rows.deleted_chunks) for rows in self.segment_rows()], name)


def joined_column(parts: Sequence[tuple[pa.RecordBatch, DeletedRows]], name: str) -> Any:
    """Return a column of numbers of several files, without the deleted rows."""
    columns: list[np.ndarray] = []
    for batch, deleted in parts:
        column = batch.column(name).to_numpy(zero_copy_only=True)
        columns.append(column[deleted.is_live()] if len(deleted.rows) else column)
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


class StoredColumns(JoinedColumns):
    """The columns of a generation that is not opened otherwise."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._rows = [open_rows(folder, record) for record in manifest.segments]

    def segment_rows(self) -> Sequence[SegmentRows]:
        """Return the rows of the segments, in their order."""
        return self._rows


def _live_rows(deleted: DeletedRows) -> Int64[np.ndarray, " L"]:
    return np.flatnonzero(deleted.is_live())
