"""Make the files of one segment from rows of the tables: new ones, or those of several segments again.

Memory does not grow with the rows, but for the vocabulary, a bit a row, and 12 bytes a document. A segment of
few vectors keeps them as they are; others are coded by the collection's codebook.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# SWIG's module has no types, and pyarrow makes its compute functions at import time.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.columns import (
    LENGTHS_SCHEMA,
    TOKEN_FILE_COLUMNS,
    ColumnSpool,
    write_chunk_positions,
    write_document_positions,
    write_token_vectors,
)
from cairn.pipeline.index.names import (
    CHUNKS,
    CHUNKS_ARROW,
    DOCUMENTS,
    DOCUMENTS_ARROW,
    LENGTHS_ARROW,
    PASSAGES_ARROW,
    SPARSE_ARROW,
    TITLES_ARROW,
    TOKENS_ARROW,
    VECTOR_FILES,
)
from cairn.pipeline.index.rows import StoredRows
from cairn.pipeline.index.words import (
    CountedWords,
    count_languages,
    num_words,
    write_passage_terms,
    write_sparse_terms,
)
from cairn.pipeline.manifest import SegmentRecord
from cairn.pipeline.types import SPARSE_FIELDS, ProgressListener
from cairn.pipeline.vector_index import REFINE_SUFFIX
from cairn.pipeline.vector_index.faiss_build import (
    Codebook,
    VectorStream,
    build_faiss_index,
    write_coded,
    write_flat,
)
from cairn.pipeline.vector_index.faiss_index import choose_kind, faiss_kind, read_faiss_file
from jaxtyping import Int64, UInt8

EXACT_VECTORS: Final = 512
"""A segment of so few vectors keeps them as they are: 0.8 MB at 384 dimensions.

With 2,048, a search of twelve segments takes 1.21 times as long as one of one, with 512 1.16 times.
"""
UNFIT_VECTORS: Final = 2_048
"""So many are kept as they are where the codebook does not fit them.

Coded, 1,000 vectors of subjects that are new, or half new, have a recall@10 of .35 to .96, not .91 to 1.
"""
RETRAINED_GROWTH: Final = 4
"""How many times the vectors a codebook was trained for make it too small."""


def largest(segments: Sequence[SegmentRecord], table: str) -> SegmentRecord:
    """Return the segment whose index of a table has most vectors: it has the codebook, if there is one."""
    return max(segments, key=lambda segment: segment.indexes[table]["num_vectors"])


def needs_training(
    segments: Sequence[SegmentRecord], table: str, num_vectors: int, config: IndexConfig
) -> bool:
    """Tell whether so many vectors ask for another codebook than the segments have."""
    wanted, _ = choose_kind(num_vectors, config)
    coded = [each.indexes[table] for each in segments if each.indexes[table]["kind"] != "flat"]
    if wanted == "flat":
        return bool(coded)
    if not coded:
        return True
    return coded[0]["kind"] != wanted or num_vectors >= RETRAINED_GROWTH * coded[0]["trained_for"]


def read_codebook(path: Path, description: Mapping[str, Any]) -> Codebook | None:
    """Return what a FAISS file was written with, None where its vectors are kept as they are."""
    kind = faiss_kind(description["kind"])
    if kind.make_lists is None:
        return None
    index, refine = read_faiss_file(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY), None
    lists = faiss.ArrayInvertedLists(index.nlist, index.code_size)
    lists.this.disown()
    index.replace_invlists(lists, True)
    index.ntotal = 0
    if kind.is_refined:
        full = read_faiss_file(path.with_name(path.name + REFINE_SUFFIX), faiss.IO_FLAG_MMAP_IFC)
        refine = faiss.IndexScalarQuantizer(full.d, full.sq.qtype, full.metric_type)
        refine.sq, refine.is_trained = full.sq, True
    shared = {name: value for name, value in description.items() if name != "num_vectors"}
    return Codebook(index=index, refine=refine, description=shared)


def write_index(
    vectors: VectorStream,
    num_vectors: int,
    vector_dim: int,
    codebook: Codebook | None,
    config: IndexConfig,
    path: Path,
) -> dict[str, Any]:
    """Write the index of a segment and return its description; None trains a codebook where one is due."""
    if codebook is None:
        return build_faiss_index(vectors, num_vectors, vector_dim, config, path)
    if _are_exact(vectors, num_vectors, codebook):
        why = f"a segment of {num_vectors:,} vectors is small enough for exact search"
        return write_flat(vectors(), num_vectors, vector_dim, path, why)
    return write_coded(codebook, vectors, num_vectors, path)


def _are_exact(vectors: VectorStream, num_vectors: int, codebook: Codebook) -> bool:
    """Tell whether vectors are kept as they are; all that a codebook was trained for are coded."""
    if num_vectors > UNFIT_VECTORS or num_vectors == codebook.description["trained_for"]:
        return False
    return num_vectors <= EXACT_VECTORS or not codebook.fits(np.concatenate(list(vectors())))


@dataclass(frozen=True, slots=True)
class SegmentWriter:
    """Writes segments into the folder of a generation.

    ``codebooks`` are the collection's by table; None of a table lets a codebook be trained where one is due.
    ``optional`` are those of :data:`OPTIONAL_FILES` that it has.
    """

    folder: Path
    config: IndexConfig
    codebooks: Mapping[str, Codebook | None]
    progress: ProgressListener
    optional: Collection[str]

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
        offsets = np.append(documents.column("chunk_offset").to_numpy(), np.int64(chunks.num_rows))
        words = write_passage_terms(
            rows.texts(),
            offsets,
            chunks.column("start_char").to_numpy(),
            chunks.column("end_char").to_numpy(),
            self.folder / (name + PASSAGES_ARROW),
            self.config.language,
            rows.lines(),
        )
        titles = _write_titles(rows, words.languages_N, self.folder / (name + TITLES_ARROW))
        _write_lengths(words, titles, offsets, self.folder / (name + LENGTHS_ARROW))
        commit_point("passages-written")
        if TOKENS_ARROW in self.optional:
            write_token_vectors(rows.scan(CHUNKS, TOKEN_FILE_COLUMNS), self.folder / (name + TOKENS_ARROW))
        if SPARSE_ARROW in self.optional:
            columns = [field.name for field in SPARSE_FIELDS]
            write_sparse_terms(rows.scan(CHUNKS, columns), self.folder / (name + SPARSE_ARROW))
        commit_point("token-vectors-written")
        counts = {DOCUMENTS: documents.num_rows, CHUNKS: chunks.num_rows}
        return SegmentRecord(
            name=name,
            documents=documents.num_rows,
            chunks=chunks.num_rows,
            deleted_documents=0,
            deleted_chunks=0,
            indexes=self._write_indexes(name, rows, counts),
            languages=count_languages(words.languages_N),
        )

    def _write_indexes(
        self, name: str, rows: StoredRows, counts: Mapping[str, int]
    ) -> dict[str, Mapping[str, Any]]:
        indexes: dict[str, Mapping[str, Any]] = {}
        for done, (table, file) in enumerate(VECTOR_FILES, start=3):
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


def _write_titles(rows: StoredRows, languages_N: UInt8[np.ndarray, " N"], path: Path) -> pa.RecordBatch:
    """Count the words of titles, as if each were a chunk."""
    num_documents = len(languages_N)
    each = np.arange(num_documents + 1)
    beyond = np.full(num_documents, np.iinfo(np.int64).max)
    none = np.zeros(num_documents, np.int64)
    return write_passage_terms(rows.titles(), each, none, beyond, path, languages_N).terms


def _write_lengths(
    words: CountedWords, titles: pa.RecordBatch, chunk_offsets: Int64[np.ndarray, " N_plus_1"], path: Path
) -> None:
    num_words_M = num_words(words.terms, int(chunk_offsets[-1]))
    bounds = np.concatenate([[0], np.cumsum(num_words_M)])
    with closing(ColumnSpool(LENGTHS_SCHEMA, path)) as spool:
        spool.append(
            text_words=np.diff(bounds[chunk_offsets]),
            title_words=num_words(titles, len(chunk_offsets) - 1),
            language=words.languages_N,
        )
        spool.finish()
