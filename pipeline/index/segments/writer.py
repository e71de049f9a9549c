"""Make the files of one segment from rows of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point
from cairn.pipeline.index.faiss_build import Codebook
from cairn.pipeline.index.lance_index import StoredRows
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
from cairn.pipeline.index.passage_terms import num_words, write_passage_terms
from cairn.pipeline.index.position_files import (
    LENGTHS_SCHEMA,
    ColumnSpool,
    chunk_offsets_of,
    write_chunk_positions,
    write_document_positions,
)
from cairn.pipeline.index.segments.codes import write_index
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.index.token_file import TOKEN_FILE_COLUMNS, write_token_vectors
from cairn.pipeline.manifest import SegmentRecord
from cairn.pipeline.types import ProgressListener
from jaxtyping import Int64


@dataclass(frozen=True, slots=True)
class SegmentWriter:
    """Writes segments into the folder of a generation.

    ``codebooks`` are the collection's by table; None of a table lets a codebook be trained where one is due.
    ``has_tokens`` says whether there are token vectors.
    """

    folder: Path
    config: IndexConfig
    codebooks: Mapping[str, Codebook | None]
    progress: ProgressListener
    has_tokens: bool

    def write(self, name: str, rows: StoredRows) -> SegmentRecord:
        """Write the segment of some rows; files begin with ``name``."""
        self.progress("index", 0, 5, "files")
        document_columns = ["doc_id", "num_chunks", "cluster_id", "num_tokens", "content_sha256"]
        documents = write_document_positions(
            rows.scan(DOCUMENTS, document_columns), self.folder / (name + DOCUMENTS_ARROW)
        )
        chunk_columns = ["doc_id", "ordinal", "start_char", "end_char"]
        chunks = write_chunk_positions(
            rows.scan(CHUNKS, chunk_columns), documents, self.folder / (name + CHUNKS_ARROW)
        )
        commit_point("positions-written")
        self.progress("index", 2, 5, "files")
        offsets = chunk_offsets_of(documents, chunks.num_rows)
        words = write_passage_terms(
            rows.texts(),
            offsets,
            chunks.column("start_char").to_numpy(),
            chunks.column("end_char").to_numpy(),
            self.folder / (name + PASSAGES_ARROW),
        )
        titles = _write_titles(rows, documents.num_rows, self.folder / (name + TITLES_ARROW))
        _write_lengths(words, titles, offsets, self.folder / (name + LENGTHS_ARROW))
        commit_point("passages-written")
        if self.has_tokens:
            write_token_vectors(rows.scan(CHUNKS, TOKEN_FILE_COLUMNS), self.folder / (name + TOKENS_ARROW))
        commit_point("token-vectors-written")
        counts = {DOCUMENTS: documents.num_rows, CHUNKS: chunks.num_rows}
        return SegmentRecord(
            name=name,
            documents=documents.num_rows,
            chunks=chunks.num_rows,
            deleted_documents=0,
            deleted_chunks=0,
            indexes=self._write_indexes(name, rows, counts),
        )

    def _write_indexes(
        self, name: str, rows: StoredRows, counts: Mapping[str, int]
    ) -> dict[str, Mapping[str, Any]]:
        indexes: dict[str, Mapping[str, Any]] = {}
        for done, (table, file) in enumerate(((DOCUMENTS, DOCUMENTS_FAISS), (CHUNKS, CHUNKS_FAISS)), start=3):
            self.progress("index", done, 5, "files")
            indexes[table] = write_index(
                partial(rows.vectors, table),
                counts[table],
                rows.tables.vector_dim,
                self.codebooks[table],
                self.config,
                self.folder / (name + file),
            )
            commit_point(f"{table}-index-written")
        return indexes


def _write_titles(rows: StoredRows, num_documents: int, path: Path) -> pa.RecordBatch:
    """Count the words of titles, as if each were a chunk."""
    each = np.arange(num_documents + 1)
    beyond = np.full(num_documents, np.iinfo(np.int64).max)
    return write_passage_terms(rows.titles(), each, np.zeros(num_documents, np.int64), beyond, path)


def _write_lengths(
    words: pa.RecordBatch, titles: pa.RecordBatch, chunk_offsets: Int64[np.ndarray, " N_plus_1"], path: Path
) -> None:
    num_words_M = num_words(words, int(chunk_offsets[-1]))
    bounds = np.concatenate([[0], np.cumsum(num_words_M)])
    with closing(ColumnSpool(LENGTHS_SCHEMA, path)) as spool:
        spool.append(
            text_words=np.diff(bounds[chunk_offsets]),
            title_words=num_words(titles, len(chunk_offsets) - 1),
        )
        spool.finish()
