"""Make the files of one segment from rows of the tables: new ones, or those of several segments again.

Memory does not grow with the rows, but for the vocabulary, a bit a row, and 12 bytes a document: columns are
spooled to files while the tables stream past. The order of documents and chunks, their ordinals and their
spans are checked on the way, since every later answer depends on them. A segment of few vectors keeps them as
they are; others are coded by the collection's codebook.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# SWIG's module has no types, and pyarrow makes its compute functions at import time.

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.faiss_library import faiss
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
from cairn.pipeline.index.segments.segment import (
    CHUNK_POSITIONS_SCHEMA,
    DOCUMENT_POSITIONS_SCHEMA,
    LENGTHS_SCHEMA,
    TOKEN_FILE_COLUMNS,
    TOKEN_FILE_SCHEMA,
    open_positions,
)
from cairn.pipeline.index.segments.words import (
    CountedWords,
    count_languages,
    mapped,
    num_words,
    unnamed_file,
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

COMPARED_IDS = 65_536
"""Ids held at once where they are compared."""

_VARIABLE = (pa.large_string(), pa.large_binary())
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
    with contextlib.closing(ColumnSpool(LENGTHS_SCHEMA, path)) as spool:
        spool.append(
            text_words=np.diff(bounds[chunk_offsets]),
            title_words=num_words(titles, len(chunk_offsets) - 1),
            language=words.languages_N,
        )
        spool.finish()


class ColumnSpool:
    """Columns growing in unnamed files beside ``path``; :meth:`finish` writes them as one record batch."""

    def __init__(self, schema: pa.Schema, path: Path) -> None:
        self._schema = schema
        self._path = path
        with contextlib.ExitStack() as opened:  # all are closed, whatever fails
            self._files: dict[str, IO[bytes]] = {
                field.name: opened.enter_context(unnamed_file(path)) for field in schema
            }
            self._string_bytes: dict[str, IO[bytes]] = {
                field.name: opened.enter_context(unnamed_file(path))
                for field in schema
                if field.type in _VARIABLE
            }
            self._string_ends = dict.fromkeys(self._string_bytes, 0)
            for stream in (self._files[name] for name in self._string_bytes):
                stream.write(np.int64(0).tobytes())
            self._opened = opened.pop_all()
        self.num_rows = 0

    def append(self, **columns: Any) -> None:
        """Append equally long columns: numpy arrays, and Arrow arrays of strings or bytes."""
        for name, column in columns.items():
            if name in self._string_bytes:
                self._append_strings(name, column)
            else:
                dtype = self._schema.field(name).type.to_pandas_dtype()
                self._files[name].write(np.ascontiguousarray(column, dtype=dtype).data)
        self.num_rows += len(next(iter(columns.values())))

    def _append_strings(self, name: str, column: pa.Array) -> None:
        strings = column.cast(self._schema.field(name).type)
        _, offsets, content = strings.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)[strings.offset : strings.offset + len(strings) + 1]
        if len(strings):
            self._string_bytes[name].write(
                memoryview(content)[ends[0] : ends[-1]] if content is not None else b""
            )
            self._files[name].write((ends[1:] - ends[0] + self._string_ends[name]).tobytes())
            self._string_ends[name] += int(ends[-1] - ends[0])

    def column(self, name: str) -> pa.Array:
        """Return a column as far as it has grown, mapped."""
        buffers = [None, mapped(self._files[name])]
        if name in self._string_bytes:
            buffers.append(mapped(self._string_bytes[name]))
        return pa.Array.from_buffers(self._schema.field(name).type, self.num_rows, buffers)

    def finish(self, **whole: pa.Array) -> pa.RecordBatch:
        """Write the file and return its batch, mapped; ``whole`` are columns that were not appended to."""
        arrays = [whole[name] if name in whole else self.column(name) for name in self._schema.names]
        with pa.OSFile(str(self._path), "wb") as sink, pa.ipc.new_file(sink, self._schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self.close()
        return open_positions(self._path, self._schema)

    def close(self) -> None:
        """Drop the spooled columns."""
        self._opened.close()


def write_document_positions(rows: Iterator[pa.RecordBatch], path: Path) -> pa.RecordBatch:
    """Write ``documents.arrow`` from a scan of its columns' sources, and of content_sha256.

    Takes 12 bytes a document, for putting the ids in order.
    """
    with contextlib.closing(ColumnSpool(DOCUMENT_POSITIONS_SCHEMA, path)) as spool:
        first_chunk = 0
        for batch in rows:
            hashes = batch.column("content_sha256").to_pylist()
            num_chunks = batch.column("num_chunks").to_numpy().astype(np.int64)
            ends = first_chunk + np.cumsum(num_chunks)
            spool.append(
                doc_id=batch.column("doc_id"),
                chunk_offset=ends - num_chunks,
                num_chunks=num_chunks,
                cluster_id=batch.column("cluster_id").to_numpy(),
                num_tokens=batch.column("num_tokens").to_numpy(),
                content=np.array([int(sha256[:16], 16) for sha256 in hashes], np.uint64),
            )
            first_chunk += int(num_chunks.sum())
        documents = spool.finish(by_id=pc.sort_indices(spool.column("doc_id")).cast(pa.int32()))
        _require_unique(documents.column("doc_id"), documents.column("by_id").to_numpy())
        return documents


def _require_unique(doc_ids: pa.LargeStringArray | pa.ChunkedArray, by_id: np.ndarray) -> None:
    """Refuse a repeated id, which stands beside itself in the order of the ids."""
    repeated = 0
    for start in range(0, len(by_id) - 1, COMPARED_IDS):
        ordered = doc_ids.take(pa.array(by_id[start : start + COMPARED_IDS + 1]))
        repeated += pc.sum(pc.equal(ordered[1:], ordered[:-1])).as_py() or 0
    if repeated:
        raise IntegrityError(
            f"table `documents` must hold each doc_id once, got {repeated} repeated; run the same "
            "ingest again, nothing was published"
        )


def write_chunk_positions(
    rows: Iterator[pa.RecordBatch], documents: pa.RecordBatch, path: Path
) -> pa.RecordBatch:
    """Write ``chunks.arrow`` from a scan of doc_id, ordinal, start_char and end_char.

    Chunks that do not stand in the order of the documents, one after another from character 0 to the end,
    raise :class:`IntegrityError`.
    """
    offsets = documents.column("chunk_offset").to_numpy()
    num_chunks = documents.column("num_chunks").to_numpy()
    expected = int(offsets[-1] + num_chunks[-1]) if len(offsets) else 0
    position, last_end = 0, 0
    with contextlib.closing(ColumnSpool(CHUNK_POSITIONS_SCHEMA, path)) as spool:
        for batch in rows:
            positions = np.arange(position, position + batch.num_rows)
            position += batch.num_rows
            if position > expected:
                break
            owners = np.searchsorted(offsets, positions, side="right") - 1
            ordinals = positions - offsets[owners]
            doc_ids = documents.column("doc_id").take(pa.array(owners))
            starts, ends = batch.column("start_char").to_numpy(), batch.column("end_char").to_numpy()
            is_first = ordinals == 0
            if not (
                doc_ids.equals(batch.column("doc_id").cast(pa.large_string()))
                and np.array_equal(ordinals, batch.column("ordinal").to_numpy())
                and np.array_equal(starts, np.where(is_first, 0, np.concatenate(([last_end], ends[:-1]))))
                and np.all(ends >= starts)
            ):
                raise _misfit(f"others up to position {position}")
            spool.append(document_position=owners, start_char=starts, end_char=ends)
            last_end = int(ends[-1]) if len(ends) else last_end
        if position != expected:
            raise _misfit(f"{position} in the place of {expected}")
        return spool.finish()


def _misfit(got: str) -> IntegrityError:
    return IntegrityError(
        "table `chunks` must hold the chunks of each document in order, with spans that cover its text, got "
        f"{got}; run the same ingest again, nothing was published"
    )


def write_token_vectors(rows: Iterable[pa.RecordBatch], path: Path) -> pa.RecordBatch:
    """Write the file from a scan of :data:`TOKEN_FILE_COLUMNS`; return it, mapped. Null is no codes."""
    with contextlib.closing(ColumnSpool(TOKEN_FILE_SCHEMA, path)) as spool:
        for batch in rows:
            spool.append(**{name: batch.column(name).fill_null(b"") for name in TOKEN_FILE_COLUMNS})
        return spool.finish()
