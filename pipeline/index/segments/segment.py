"""One segment of a generation: the names of its files, and the segment opened.

Files are trusted here: they are compared with the manifest when their generation is opened.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.faiss_index import REFINE_SUFFIX, FaissIndex, open_faiss_index
from cairn.pipeline.index.names import (
    CHUNKS_ARROW,
    CHUNKS_FAISS,
    DELETED_BITS,
    DOCUMENTS_ARROW,
    DOCUMENTS_FAISS,
    LENGTHS_ARROW,
    PASSAGES_ARROW,
    TITLES_ARROW,
    TOKENS_ARROW,
)
from cairn.pipeline.index.passage_terms import open_passage_terms
from cairn.pipeline.index.position_files import (
    CHUNK_POSITIONS_SCHEMA,
    DOCUMENT_POSITIONS_SCHEMA,
    LENGTHS_SCHEMA,
    open_positions,
)
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.index.token_file import open_token_file
from cairn.pipeline.manifest import SegmentRecord
from cairn.pipeline.ragged import ranges
from jaxtyping import Int32, Int64


@dataclass(frozen=True, slots=True, eq=False)
class DeletedRows:
    """Which of ``num_stored`` rows are deleted, ascending."""

    num_stored: int
    rows: Int64[np.ndarray, " D"]

    @property
    def num_live(self) -> int:
        """Count the rows that are left."""
        return self.num_stored - len(self.rows)

    def live_of(self, stored: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " A"]:
        """Return the live numbers of stored rows that are not deleted."""
        return stored - np.searchsorted(self.rows, stored) if len(self.rows) else stored

    def stored_of(self, live: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " A"]:
        """Return the stored rows of live numbers."""
        if not len(self.rows):
            return live
        num_live_before = self.rows - np.arange(len(self.rows))
        return live + np.searchsorted(num_live_before, live, side="right")

    def is_live(self) -> np.ndarray:
        """Return a mask over the stored rows."""
        mask = np.ones(self.num_stored, np.bool_)
        mask[self.rows] = False
        return mask

    def with_live(self, live: Int64[np.ndarray, " A"]) -> DeletedRows:
        """Return these and the rows of further live numbers."""
        return DeletedRows(self.num_stored, np.sort(np.concatenate([self.rows, self.stored_of(live)])))

    def of_chunks(
        self, first_chunks: Int64[np.ndarray, " N"], num_chunks: Int32[np.ndarray, " N"], num_stored: int
    ) -> DeletedRows:
        """Return which of ``num_stored`` chunks are deleted, given the first and the number of each document.

        Costs the deleted rows alone, however many documents there are.
        """
        sizes = num_chunks[self.rows].astype(np.int64)
        return DeletedRows(num_stored, ranges(first_chunks[self.rows], sizes))


def none_deleted(num_stored: int) -> DeletedRows:
    """Return the deleted rows of a segment that has none."""
    return DeletedRows(num_stored, np.empty(0, np.int64))


def bits_of(deleted: DeletedRows) -> bytes:
    """Return the content of the file."""
    return np.packbits(~deleted.is_live(), bitorder="little").tobytes()


def read_deleted(path: Path, num_stored: int, num_deleted: int) -> DeletedRows:
    """Read the bits; a file that does not fit the segment raises :class:`DamageError`."""
    try:
        bits = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read") from error
    rows = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    if len(bits) != -(-num_stored // 8) or len(rows) != num_deleted or np.any(rows >= num_stored):
        raise DamageError(f"{path.name} must mark {num_deleted} of {num_stored} rows, got {len(rows)}")
    return DeletedRows(num_stored, rows)


NEEDED_FILES: Final = (
    DOCUMENTS_ARROW,
    CHUNKS_ARROW,
    DOCUMENTS_FAISS,
    CHUNKS_FAISS,
    PASSAGES_ARROW,
    TITLES_ARROW,
    LENGTHS_ARROW,
)
ROW_FILES: Final = (
    *NEEDED_FILES,
    TOKENS_ARROW,
    DOCUMENTS_FAISS + REFINE_SUFFIX,
    CHUNKS_FAISS + REFINE_SUFFIX,
)
"""Files of a segment that never change, as many of them as it has."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentRows:
    """The position files of a segment, mapped, and which of their rows are deleted."""

    documents: pa.RecordBatch
    chunks: pa.RecordBatch
    deleted_documents: DeletedRows
    deleted_chunks: DeletedRows

    def without(self, live: Int64[np.ndarray, " D"]) -> SegmentRows:
        """Return the same rows without further documents, by their number among those left."""
        deleted = self.deleted_documents.with_live(live)
        deleted_chunks = _chunks_of(deleted, self.documents, self.chunks.num_rows)
        return replace(self, deleted_documents=deleted, deleted_chunks=deleted_chunks)

    def num_tokens(self) -> int:
        """Count the tokens of the documents that are left."""
        tokens = self.documents.column("num_tokens").to_numpy()
        return int(tokens.sum(dtype=np.int64) - tokens[self.deleted_documents.rows].sum(dtype=np.int64))

    def described(self, record: SegmentRecord) -> SegmentRecord:
        """Return the record with these deleted rows."""
        return replace(
            record,
            deleted_documents=len(self.deleted_documents.rows),
            deleted_chunks=len(self.deleted_chunks.rows),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A segment opened; ``tokens`` is None in a collection without token vectors."""

    record: SegmentRecord
    rows: SegmentRows
    documents: FaissIndex
    chunks: FaissIndex
    words: pa.RecordBatch
    titles: pa.RecordBatch
    lengths: pa.RecordBatch
    tokens: pa.RecordBatch | None


def segment_name(generation: int, kind: str = "") -> str:
    """Return the name of a segment that a publication adds, or of its ``kind``; that of all rows has none."""
    return f"{generation:08d}-{kind}-" if kind else f"{generation:08d}-"


def row_files(record: SegmentRecord, files: Collection[str]) -> list[str]:
    """Return the names of a segment's files in a generation, but for its deleted rows."""
    return [name for each in ROW_FILES if (name := record.name + each) in files]


def segment_files(record: SegmentRecord) -> set[str]:
    """Return the names that files of a segment may have."""
    return {record.name + name for name in (*ROW_FILES, DELETED_BITS)}


def needed_files(record: SegmentRecord) -> list[str]:
    """Return the names of the files that a segment cannot do without."""
    deleted = [DELETED_BITS] if record.deleted_documents else []
    return [record.name + name for name in (*NEEDED_FILES, *deleted)]


def open_rows(folder: Path, record: SegmentRecord, deleted: DeletedRows | None = None) -> SegmentRows:
    """Map the position files of a segment; ``deleted`` = None reads which rows are."""
    documents = open_positions(folder / (record.name + DOCUMENTS_ARROW), DOCUMENT_POSITIONS_SCHEMA)
    chunks = open_positions(folder / (record.name + CHUNKS_ARROW), CHUNK_POSITIONS_SCHEMA)
    if deleted is None and record.deleted_documents:
        path = folder / (record.name + DELETED_BITS)
        deleted = read_deleted(path, documents.num_rows, record.deleted_documents)
    if deleted is None or not len(deleted.rows):
        deleted, deleted_chunks = none_deleted(documents.num_rows), none_deleted(chunks.num_rows)
    else:
        deleted_chunks = _chunks_of(deleted, documents, chunks.num_rows)
    return SegmentRows(
        documents=documents, chunks=chunks, deleted_documents=deleted, deleted_chunks=deleted_chunks
    )


def _chunks_of(deleted: DeletedRows, documents: pa.RecordBatch, num_chunks: int) -> DeletedRows:
    first_chunks, sizes = (documents.column(name).to_numpy() for name in ("chunk_offset", "num_chunks"))
    return deleted.of_chunks(first_chunks, sizes, num_chunks)


def open_segment(
    folder: Path,
    record: SegmentRecord,
    files: Collection[str],
    rows: SegmentRows | None = None,
) -> Segment:
    """Map all files of a segment; ``rows`` are what is mapped already."""
    rows = rows or open_rows(folder, record)

    tokens = record.name + TOKENS_ARROW
    return Segment(
        record=record,
        rows=rows,
        documents=open_faiss_index(
            folder / (record.name + DOCUMENTS_FAISS), record.indexes[DOCUMENTS], rows.deleted_documents.rows
        ),
        chunks=open_faiss_index(
            folder / (record.name + CHUNKS_FAISS), record.indexes[CHUNKS], rows.deleted_chunks.rows
        ),
        words=open_passage_terms(folder / (record.name + PASSAGES_ARROW)),
        titles=open_passage_terms(folder / (record.name + TITLES_ARROW)),
        lengths=open_positions(folder / (record.name + LENGTHS_ARROW), LENGTHS_SCHEMA),
        tokens=open_token_file(folder / tokens, record.chunks) if tokens in files else None,
    )
