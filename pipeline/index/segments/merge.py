"""Several neighbouring segments as one: bytes are joined and deleted rows dropped, nothing is encoded again.

The files are those that the rows would have been given if they had been written together, byte by byte but
for codes of FAISS, which stay as they are. Memory does not grow with the rows, but for the vocabulary and a
bit a row.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.faiss_build import Codebook
from cairn.pipeline.index.names import (
    CHUNKS_ARROW,
    CHUNKS_FAISS,
    DOCUMENTS_ARROW,
    DOCUMENTS_FAISS,
    LENGTHS_ARROW,
    PASSAGES_ARROW,
    TITLES_ARROW,
    TOKENS_ARROW,
)
from cairn.pipeline.index.passage_terms import block_bounds, write_postings
from cairn.pipeline.index.position_files import (
    CHUNK_POSITIONS_SCHEMA,
    DOCUMENT_POSITIONS_SCHEMA,
    LENGTHS_SCHEMA,
    ColumnSpool,
    append_documents,
    unnamed_file,
)
from cairn.pipeline.index.segments.codes import IndexPart, join_indexes
from cairn.pipeline.index.segments.segment import DeletedRows, Segment, SegmentRows
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.index.token_file import TOKEN_FILE_COLUMNS, TOKEN_FILE_SCHEMA
from cairn.pipeline.manifest import SegmentRecord
from jaxtyping import Int64

JOINED_ROWS: Final = 65_536
"""Rows of a position file held at once."""
JOINED_CODES: Final = 4_096
"""Chunks whose token codes are held at once, some 4 MB."""


def merge_segments(
    segments: Sequence[Segment], name: str, folder: Path, codebooks: Mapping[str, Codebook | None]
) -> SegmentRecord:
    """Write one segment in the place of several; its files begin with ``name``."""
    rows = [segment.rows for segment in segments]
    _join_documents(rows, folder / (name + DOCUMENTS_ARROW))
    _join_chunks(rows, folder / (name + CHUNKS_ARROW))
    deleted_chunks = [each.deleted_chunks for each in rows]
    deleted_documents = [each.deleted_documents for each in rows]
    for file, batches, deleted in (
        (PASSAGES_ARROW, [each.words for each in segments], deleted_chunks),
        (TITLES_ARROW, [each.titles for each in segments], deleted_documents),
    ):
        _join_words(list(zip(batches, deleted, strict=True)), folder / (name + file))
    lengths = [each.lengths for each in segments]
    _join_lengths(list(zip(lengths, deleted_documents, strict=True)), folder / (name + LENGTHS_ARROW))
    _join_codes(segments, folder / (name + TOKENS_ARROW))
    indexes: dict[str, Mapping[str, Any]] = {}
    for table, file, parts in (
        (DOCUMENTS, DOCUMENTS_FAISS, [(each.documents, each.rows.deleted_documents) for each in segments]),
        (CHUNKS, CHUNKS_FAISS, [(each.chunks, each.rows.deleted_chunks) for each in segments]),
    ):
        joined = [IndexPart(index=index, deleted=deleted) for index, deleted in parts]
        vector_dim = parts[0][0].vector_dim
        indexes[table] = join_indexes(joined, vector_dim, codebooks[table], folder / (name + file))
    return SegmentRecord(
        name=name,
        documents=sum(each.deleted_documents.num_live for each in rows),
        chunks=sum(each.deleted_chunks.num_live for each in rows),
        deleted_documents=0,
        deleted_chunks=0,
        indexes=indexes,
    )


def _join_documents(parts: Sequence[SegmentRows], path: Path) -> None:
    with closing(ColumnSpool(DOCUMENT_POSITIONS_SCHEMA, path)) as spool:
        first_chunk = 0
        for part in parts:
            for stored in _live_blocks(part.deleted_documents):
                batch = part.documents.take(pa.array(stored))
                first_chunk = append_documents(spool, batch, batch.column("content").to_numpy(), first_chunk)
        spool.finish()


def _join_chunks(parts: Sequence[SegmentRows], path: Path) -> None:
    with closing(ColumnSpool(CHUNK_POSITIONS_SCHEMA, path)) as spool:
        first_document = 0
        for part in parts:
            for stored in _live_blocks(part.deleted_chunks):
                owners = part.chunks.column("document_position").to_numpy()[stored]
                spool.append(
                    document_position=part.deleted_documents.live_of(owners) + first_document,
                    start_char=part.chunks.column("start_char").to_numpy()[stored],
                    end_char=part.chunks.column("end_char").to_numpy()[stored],
                )
            first_document += part.deleted_documents.num_live
        spool.finish()


def _join_lengths(parts: Sequence[tuple[pa.RecordBatch, DeletedRows]], path: Path) -> None:
    with closing(ColumnSpool(LENGTHS_SCHEMA, path)) as spool:
        for lengths, deleted in parts:
            for stored in _live_blocks(deleted):
                spool.append(
                    text_words=lengths.column("text_words").to_numpy()[stored],
                    title_words=lengths.column("title_words").to_numpy()[stored],
                )
        spool.finish()


def _join_codes(segments: Sequence[Segment], path: Path) -> None:
    """Join the token codes; nothing is written for a collection without."""
    if any(segment.tokens is None for segment in segments):
        return
    with closing(ColumnSpool(TOKEN_FILE_SCHEMA, path)) as spool:
        for segment in segments:
            assert segment.tokens is not None, "as asked above"
            for stored in _live_blocks(segment.rows.deleted_chunks, JOINED_CODES):
                codes = segment.tokens.take(pa.array(stored))
                spool.append(**{name: codes.column(name) for name in TOKEN_FILE_COLUMNS})
        spool.finish()


def _live_blocks(deleted: DeletedRows, block_rows: int = JOINED_ROWS) -> list[Int64[np.ndarray, " n"]]:
    bounds = range(0, deleted.num_live, block_rows)
    return [
        deleted.stored_of(np.arange(start, min(start + block_rows, deleted.num_live))) for start in bounds
    ]


def _join_words(parts: Sequence[tuple[pa.RecordBatch, DeletedRows]], path: Path) -> None:
    terms = pa.concat_arrays([batch.column("term") for batch, _ in parts]).unique()
    terms = terms.take(pc.sort_indices(terms))
    begins = np.cumsum([0, *(deleted.num_live for _, deleted in parts)]).tolist()
    words = [
        _RankedWords(batch, deleted, begin, terms)
        for (batch, deleted), begin in zip(parts, begins, strict=False)
    ]
    num_chunks_T = np.sum([each.count(len(terms)) for each in words], axis=0, dtype=np.int64)
    is_left_T = num_chunks_T > 0
    ends_T = np.cumsum(num_chunks_T)
    with ExitStack() as spools:
        chunks, counts = (spools.enter_context(unnamed_file(path)) for _ in range(2))
        for first, end in pairwise(block_bounds(ends_T)):
            found = [each.postings(first, end) for each in words]
            ranks = np.concatenate([rank for rank, _, _ in found])
            order = np.argsort(ranks, kind="stable")
            chunks.write(np.concatenate([chunk for _, chunk, _ in found])[order].data)
            counts.write(np.concatenate([count for _, _, count in found])[order].data)
        write_postings(terms.filter(pa.array(is_left_T)), ends_T[is_left_T], chunks, counts, path)


class _RankedWords:
    """The postings of one segment by the rank of their term among those of all."""

    def __init__(self, batch: pa.RecordBatch, deleted: DeletedRows, begin: int, terms: pa.Array) -> None:
        ranks = pc.index_in(batch.column("term"), value_set=terms)
        if ranks.null_count:
            raise DamageError("the words of a segment must be among those of all")
        self._ranks = ranks.to_numpy().astype(np.int64)
        self._bounds = batch.column("chunks").offsets.to_numpy()
        self._chunks = batch.column("chunks").values.to_numpy()
        self._counts = batch.column("counts").values.to_numpy()
        self._deleted, self._begin = deleted, begin
        self._is_live = deleted.is_live()

    def count(self, num_terms: int) -> Int64[np.ndarray, " T"]:
        """Count the chunks that are left of each term of all."""
        counts_T = np.zeros(num_terms, np.int64)
        for first, end in pairwise(block_bounds(self._bounds[1:])):
            low, high = int(self._bounds[first]), int(self._bounds[end])
            sums = np.concatenate([[0], np.cumsum(self._is_live[self._chunks[low:high]])])
            counts_T[self._ranks[first:end]] = np.diff(sums[self._bounds[first : end + 1] - low])
        return counts_T

    def postings(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rank, chunk and count of what is left of the postings of these ranks, by rank and chunk."""
        place, stop = np.searchsorted(self._ranks, (first, end)).tolist()
        low, high = int(self._bounds[place]), int(self._bounds[stop])
        chunks = self._chunks[low:high]
        is_live = self._is_live[chunks]
        ranks = np.repeat(self._ranks[place:stop], np.diff(self._bounds[place : stop + 1]))
        left = self._deleted.live_of(chunks[is_live].astype(np.int64)) + self._begin
        return ranks[is_live], left.astype(np.uint32), self._counts[low:high][is_live]
