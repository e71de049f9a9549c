"""A segment opened, and several read as one by position among the rows that are left.

Its Arrow files tie a position in a FAISS file to a row, a span, a document, words, tokens. Each is ONE
uncompressed record batch, so that readers map it and view columns as numpy arrays without a copy. They are
trusted here: they are compared with the manifest when their generation is opened. The columns of a single
segment without deleted rows are those of its mapped files; others are joined in memory when they are first
asked for: 20 bytes a document and its id, 24 bytes a chunk.

``tokens.arrow`` holds the codes of every chunk's tokens, and of every title's, for late interaction:

    row m    vectors of chunk m    vectors of its document's title, in the first row of a document
    vector   codes of dims · bits / 8 bytes, then one byte: characters since the token before began

Its rows stand in the order of ``chunks.arrow``, so the codes of a window of chunks are one stretch of bytes.
Codes of two files of one codebook are joined without being decoded.

    N documents    M chunks    T tokens
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import os
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.names import (
    CHUNKS,
    CHUNKS_ARROW,
    CHUNKS_FAISS,
    DELETED_BITS,
    DOCUMENTS,
    DOCUMENTS_ARROW,
    DOCUMENTS_FAISS,
    LENGTHS_ARROW,
    OPTIONAL_FILES,
    PASSAGES_ARROW,
    TITLES_ARROW,
)
from cairn.pipeline.manifest import Manifest, SegmentRecord
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.codebook import TokenCoder, load_token_coder
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.vector_index.faiss_index import NO_POSITION, FaissIndex, best_first, open_faiss_index
from jaxtyping import Float32, Int32, Int64, Integer, UInt8, UInt32

DOCUMENT_POSITIONS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.large_string(), nullable=False),
        pa.field("chunk_offset", pa.int64(), nullable=False),
        pa.field("num_chunks", pa.int32(), nullable=False),
        pa.field("cluster_id", pa.int32(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("content", pa.uint64(), nullable=False),
        pa.field("by_id", pa.int32(), nullable=False),
    ]
)
"""``documents.arrow``: one row a document, in table order.

The row's number is the document's position in ``documents.faiss``. ``content`` is the beginning of the hash
of what the document holds. ``by_id`` are the numbers of the rows in the order of their ids, so that an id is
found by bisection.
"""

CHUNK_POSITIONS_SCHEMA = pa.schema(
    [
        pa.field("document_position", pa.int64(), nullable=False),
        pa.field("start_char", pa.int64(), nullable=False),
        pa.field("end_char", pa.int64(), nullable=False),
    ]
)
"""``chunks.arrow``: one row a chunk, documents in order, chunks by ordinal.

Its number is the position in ``chunks.faiss``.
"""


LENGTHS_SCHEMA = pa.schema(
    [
        pa.field("text_words", pa.int32(), nullable=False),
        pa.field("title_words", pa.int32(), nullable=False),
        pa.field("language", pa.uint8(), nullable=False),
    ]
)
"""``lengths.arrow``: one row a document, its words as BM25 counts them, and the language they are in."""

PASSAGE_TERMS_SCHEMA = pa.schema(
    [
        pa.field("term", pa.large_string(), nullable=False),
        pa.field("chunks", pa.large_list(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
        pa.field("counts", pa.large_list(pa.field("item", pa.uint8(), nullable=False)), nullable=False),
    ]
)
"""``passages.arrow`` and ``titles.arrow``: see :mod:`cairn.pipeline.index.segments.words`."""

TOKEN_FILE_SCHEMA = pa.schema(
    [
        pa.field("token_codes", pa.large_binary(), nullable=False),
        pa.field("title_codes", pa.large_binary(), nullable=False),
    ]
)
TOKEN_FILE_COLUMNS = tuple(TOKEN_FILE_SCHEMA.names)
"""``tokens.arrow``: one row a chunk."""


_mapped: WeakValueDictionary[tuple[int, int, int, int], pa.RecordBatch] = WeakValueDictionary()
"""Files that someone reads, so that none of their inodes is another file's."""


def open_positions(path: Path, schema: pa.Schema) -> pa.RecordBatch:
    """Map a position file; anything but one batch of the schema raises :class:`DamageError`.

    One that is mapped already, under another generation's name too, is the same batch.
    """
    try:
        file = pa.memory_map(str(path))
        found = os.fstat(file.fileno())  # of what is mapped: the name may be another file's by now
        key = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        known = _mapped.get(key)
        if known is not None and known.schema.equals(schema):
            return known
        reader = pa.ipc.open_file(file)
        if reader.num_record_batches == 1 and reader.schema.equals(schema):
            batch = _mapped[key] = reader.get_batch(0)
            return batch
    except (pa.ArrowInvalid, OSError) as error:
        raise DamageError(f"{path.name} cannot be read") from error
    raise DamageError(f"{path.name} must hold one batch of {', '.join(schema.names)}")


FEW_DOCUMENTS: Final = 64
"""So many ids are looked up one by one; for more, all ids of a segment are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class DeletedRows:
    """Which of ``num_stored`` rows are deleted, ascending; none by default."""

    num_stored: int
    rows: Int64[np.ndarray, " D"] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_live(self) -> int:
        """Count the rows that are left."""
        return self.num_stored - len(self.rows)

    def holds(self, stored: int) -> bool:
        """Tell whether a stored row is deleted."""
        place = int(np.searchsorted(self.rows, stored))
        return place < len(self.rows) and int(self.rows[place]) == stored

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


def _texts_at(column: pa.LargeStringArray) -> Callable[[int], bytes]:
    """Return what gives a text of a column in UTF-8.

    Their order is that of code points; bytes cost a third of what strings of Arrow do.
    """
    _, offsets, content = column.buffers()
    text, bounds = memoryview(content or b""), memoryview(offsets or b"").cast("q")[column.offset :]
    return lambda row: text[bounds[row] : bounds[row + 1]].tobytes()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentRows:
    """The position files of a segment, mapped, and which of their rows are deleted."""

    documents: pa.RecordBatch
    chunks: pa.RecordBatch
    deleted_documents: DeletedRows
    deleted_chunks: DeletedRows

    def find(self, doc_id: str) -> int | None:
        """Return the stored row of a document that is left, None where there is none."""
        by_id = memoryview(self.documents.column("by_id").to_numpy())
        id_at, wanted = _texts_at(self.documents.column("doc_id")), doc_id.encode(errors="surrogatepass")
        place = bisect_left(by_id, wanted, key=id_at)
        if place == len(by_id) or id_at(by_id[place]) != wanted:
            return None
        return None if self.deleted_documents.holds(by_id[place]) else by_id[place]

    def without(self, doc_ids: pa.LargeStringArray) -> SegmentRows:
        """Return the same rows without those of the documents that are among them."""
        if len(doc_ids) <= FEW_DOCUMENTS:
            found = {row for doc_id in doc_ids.to_pylist() if (row := self.find(doc_id)) is not None}
            stored = np.array(sorted(found), np.int64)
        else:
            is_gone = pc.is_in(self.documents.column("doc_id"), value_set=doc_ids).to_numpy(False)
            stored = np.flatnonzero(is_gone & self.deleted_documents.is_live())
        if not len(stored):
            return self
        rows = np.sort(np.concatenate([self.deleted_documents.rows, stored]))
        deleted = DeletedRows(self.deleted_documents.num_stored, rows)
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
    """A segment opened; ``tokens`` and ``sparse`` are None in a collection without."""

    record: SegmentRecord
    rows: SegmentRows
    documents: FaissIndex
    chunks: FaissIndex
    words: pa.RecordBatch
    titles: pa.RecordBatch
    lengths: pa.RecordBatch
    tokens: pa.RecordBatch | None
    sparse: pa.RecordBatch | None


def open_rows(folder: Path, record: SegmentRecord) -> SegmentRows:
    """Map the position files of a segment, and read which of its rows are deleted."""
    documents = open_positions(folder / (record.name + DOCUMENTS_ARROW), DOCUMENT_POSITIONS_SCHEMA)
    chunks = open_positions(folder / (record.name + CHUNKS_ARROW), CHUNK_POSITIONS_SCHEMA)
    deleted, deleted_chunks = DeletedRows(documents.num_rows), DeletedRows(chunks.num_rows)
    if record.deleted_documents:
        path = folder / (record.name + DELETED_BITS)
        deleted = read_deleted(path, documents.num_rows, record.deleted_documents)
        deleted_chunks = _chunks_of(deleted, documents, chunks.num_rows)
    return SegmentRows(
        documents=documents, chunks=chunks, deleted_documents=deleted, deleted_chunks=deleted_chunks
    )


def _chunks_of(deleted: DeletedRows, documents: pa.RecordBatch, num_chunks: int) -> DeletedRows:
    """Return the deleted chunks; costs the deleted rows alone, however many documents there are."""
    firsts, sizes = (
        documents.column(name).to_numpy()[deleted.rows] for name in ("chunk_offset", "num_chunks")
    )
    return DeletedRows(num_chunks, ranges(firsts, sizes.astype(np.int64)))


def open_segment(folder: Path, record: SegmentRecord, files: Collection[str]) -> Segment:
    """Map all files of a segment."""
    rows = open_rows(folder, record)
    tokens, sparse = (record.name + name for name in OPTIONAL_FILES)
    return Segment(
        record=record,
        rows=rows,
        documents=open_faiss_index(
            folder / (record.name + DOCUMENTS_FAISS), record.indexes[DOCUMENTS], rows.deleted_documents.rows
        ),
        chunks=open_faiss_index(
            folder / (record.name + CHUNKS_FAISS), record.indexes[CHUNKS], rows.deleted_chunks.rows
        ),
        words=open_positions(folder / (record.name + PASSAGES_ARROW), PASSAGE_TERMS_SCHEMA),
        titles=open_positions(folder / (record.name + TITLES_ARROW), PASSAGE_TERMS_SCHEMA),
        lengths=open_positions(folder / (record.name + LENGTHS_ARROW), LENGTHS_SCHEMA),
        tokens=open_positions(folder / tokens, TOKEN_FILE_SCHEMA) if tokens in files else None,
        sparse=open_positions(folder / sparse, PASSAGE_TERMS_SCHEMA) if sparse in files else None,
    )


class JoinedColumns:
    """N documents with M chunks."""

    @abstractmethod
    def segment_rows(self) -> Sequence[SegmentRows]:
        """Return the rows of the segments, in their order."""

    @cached_property
    def doc_ids(self) -> pa.LargeStringArray:
        """Document ids by position."""
        parts = [
            rows.documents.column("doc_id").filter(pa.array(rows.deleted_documents.is_live()))
            if len(rows.deleted_documents.rows)
            else rows.documents.column("doc_id")
            for rows in self.segment_rows()
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def position_of(self, doc_id: str) -> int | None:
        """Return the position of a document, None where there is none; looks at few ids of each segment."""
        begin = 0
        for rows in self.segment_rows():
            stored = rows.find(doc_id)
            if stored is not None:
                return begin + int(rows.deleted_documents.live_of(np.array([stored]))[0])
            begin += rows.deleted_documents.num_live
        return None

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

    def chunks_of(
        self, documents: Int64[np.ndarray, " A"]
    ) -> tuple[Int64[np.ndarray, " A"], Int64[np.ndarray, " A"]]:
        """Return the first chunk of each of some documents, and one past its last."""
        return self.chunk_offsets[documents], self.chunk_offsets[documents + 1]

    def owners_of(self, chunks: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " A"]:
        """Return the documents that some chunks belong to."""
        return self.chunk_documents[chunks]

    def spans_of(
        self, first_n: Int64[np.ndarray, " n"], end_n: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return the first character of each of some runs of chunks, and one past its last."""
        return self.chunk_starts[first_n], self.chunk_ends[end_n - 1]

    def ids_of(self, documents: Int64[np.ndarray, " A"]) -> list[str]:
        """Return the ids of some documents."""
        return self.doc_ids.take(pa.array(documents)).to_pylist()

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


class JoinedIndex:
    """What :class:`~cairn.pipeline.vector_index.faiss_index.FaissIndex` is, over segments in their order.

    Each comes with its deleted rows, which its own index already leaves out of every answer.
    """

    def __init__(self, parts: Sequence[tuple[FaissIndex, DeletedRows]]) -> None:
        self._parts = [(index, deleted) for index, deleted in parts if deleted.num_live]
        self._vector_dim = parts[0][0].vector_dim
        self._ends = np.cumsum([deleted.num_live for _, deleted in self._parts], dtype=np.int64)
        self._sharing = _sharing([index for index, _ in self._parts])

    @property
    def num_vectors(self) -> int:
        """Count the vectors that are left."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def search(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Return the ``top_k`` best of each query, best first, ties by lower position."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        queries_QV = np.ascontiguousarray(queries_QV, dtype=np.float32)
        nearest = None
        if self._sharing and allowed is None:
            num_lists = max(index.nprobe for index in self._sharing)
            nearest = self._sharing[0].nearest_lists(queries_QV, num_lists)
        wanted = None if allowed is None else np.unique(allowed)
        for (index, deleted), begin, end in self._places():
            stored = None
            if wanted is not None:
                own = wanted[slice(*np.searchsorted(wanted, (begin, end)).tolist())]
                if not len(own):
                    continue
                stored = deleted.stored_of(own - begin)
            scores_QF, stored_QF = index.find(
                queries_QV, min(top_k, end - begin), stored, nearest if index in self._sharing else None
            )
            own_QF = deleted.live_of(stored_QF)
            found.append((scores_QF, np.where(stored_QF == NO_POSITION, NO_POSITION, own_QF + begin)))
        if not found:
            found = [(np.empty((len(queries_QV), 0), np.float32), np.empty((len(queries_QV), 0), np.int64))]
        scores, positions = zip(*found, strict=True)
        return best_first(np.concatenate(scores, axis=1), np.concatenate(positions, axis=1), top_k)

    def reconstruct(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions, in their order."""
        positions = np.asarray(positions, np.int64)
        owners = np.searchsorted(self._ends, positions, side="right")
        vectors_AV = np.empty((len(positions), self._vector_dim), np.float32)
        for owner in np.unique(owners).tolist():
            index, deleted = self._parts[owner]
            own = np.flatnonzero(owners == owner)
            stored = deleted.stored_of(positions[own] - (self._ends[owner] - deleted.num_live))
            vectors_AV[own] = index.reconstruct(stored)
        return vectors_AV

    def _places(self) -> list[tuple[tuple[FaissIndex, DeletedRows], int, int]]:
        """Return each part with its first position and the first one behind it."""
        ends = self._ends.tolist()
        return list(zip(self._parts, [0, *ends[:-1]], ends, strict=True))


VectorIndex = FaissIndex | JoinedIndex


def joined_index(parts: Sequence[tuple[FaissIndex, DeletedRows]]) -> VectorIndex:
    """Return the one index as it is where there is just one, whole."""
    index, deleted = parts[0]
    return JoinedIndex(parts) if len(parts) > 1 or len(deleted.rows) else index


def _sharing(indexes: Sequence[FaissIndex]) -> list[FaissIndex]:
    """Return the indexes that share the centroids of the first that has some, [] where it is alone."""
    first: np.ndarray | None = None
    alike: list[FaissIndex] = []
    for index in indexes:
        centroids = index.shared_centroids
        if centroids is None:
            continue
        first = centroids if first is None else first
        if np.array_equal(centroids, first):
            alike.append(index)
    return alike if len(alike) > 1 else []


SAMPLED_TERMS = 16
"""One term of so many is kept in memory, so that few are read to find one: 4 bytes a term of a file."""

KEPT_TERMS = 1_024
"""Terms whose places are kept: 2 kB each in twelve segments."""


class JoinedWords:
    """The postings of ``passages.arrow`` of segments, in their order, each with its deleted chunks."""

    def __init__(self, parts: Sequence[tuple[pa.RecordBatch, DeletedRows]]) -> None:
        files = [_Words(terms, deleted) for terms, deleted in parts]
        begins = np.cumsum([0, *(deleted.num_live for _, deleted in parts)]).tolist()
        # A query asks for its words several times. The cache does not hold this object, which would then
        # keep files mapped until it is found to be garbage.
        self._find = lru_cache(KEPT_TERMS)(partial(_places, list(zip(files, begins, strict=False))))

    def postings(self, term: str) -> tuple[Int64[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the positions of the chunks that hold a term, ascending, and how often each does."""
        places = self._find(term)
        if not places:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        found = [words.read(place) for words, _, place in places]
        chunks_P = np.concatenate([chunks for chunks, _ in found], dtype=np.int64)
        end = 0
        for (_, begin, _), (chunks, _) in zip(places, found, strict=True):
            if begin:
                chunks_P[end : end + len(chunks)] += begin
            end += len(chunks)
        return chunks_P, found[0][1] if len(found) == 1 else np.concatenate([counts for _, counts in found])

    def num_holding(self, term: str) -> int:
        """Count the chunks that hold a term."""
        return sum(words.num_holding(place) for words, _, place in self._find(term))

    def counts_of_few(self, terms: Sequence[str], few_A: Int64[np.ndarray, " A"]) -> UInt8[np.ndarray, "T A"]:
        """Return how often each of a few chunks, ascending, holds each term.

        Each chunk is looked up in the postings, which are not read.
        """
        counts_TA = np.zeros((len(terms), len(few_A)), np.uint8)
        parts: dict[_Words, tuple[slice, UInt32[np.ndarray, " a"]]] = {}
        for counts_A, term in zip(counts_TA, terms, strict=True):
            for words, begin, place in self._find(term):
                if words not in parts:
                    own = slice(*np.searchsorted(few_A, (begin, begin + words.num_live)).tolist())
                    parts[words] = own, words.stored_of(few_A[own] - begin)
                own, stored_a = parts[words]
                words.count(place, stored_a, counts_A[own])
        return counts_TA


def _places(files: Sequence[tuple[_Words, int]], term: str) -> list[tuple[_Words, int, slice]]:
    """Return where the files that hold a term have it, each with its first position."""
    wanted = term.encode()
    places = ((words, begin, words.find(wanted)) for words, begin in files)
    return [(words, begin, place) for words, begin, place in places if place is not None]


class _Words:
    """One file of :mod:`cairn.pipeline.index.segments.words`, without its deleted chunks."""

    def __init__(self, terms: pa.RecordBatch, deleted: DeletedRows) -> None:
        column = terms.column("term")
        self._term_at = _texts_at(column)
        self._places = range(len(column))
        self._sampled = [self._term_at(place) for place in self._places[::SAMPLED_TERMS]]
        self._bounds_T = memoryview(terms.column("chunks").offsets.to_numpy())
        self._chunks = terms.column("chunks").values.to_numpy()
        self._counts = terms.column("counts").values.to_numpy()
        self._deleted = deleted
        self.num_live = deleted.num_live

    def find(self, wanted: bytes) -> slice | None:
        """Return which postings are those of a term in UTF-8, None where there are none."""
        block = bisect_right(self._sampled, wanted) * SAMPLED_TERMS
        last = min(block, len(self._places))
        place = bisect_left(self._places, wanted, max(block - SAMPLED_TERMS, 0), last, key=self._term_at)
        if place == last or self._term_at(place) != wanted:
            return None
        return slice(self._bounds_T[place], self._bounds_T[place + 1])

    def read(self, own: slice) -> tuple[Integer[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the chunks among those that are left, and how often each holds the word."""
        chunks, counts = self._chunks[own], self._counts[own]
        if not len(self._deleted.rows):
            return chunks, counts
        before, up_to = _num_deleted(self._deleted.rows, chunks)
        is_live = before == up_to
        return (chunks - before)[is_live], counts[is_live]

    def num_holding(self, own: slice) -> int:
        """Count the chunks among those that are left; without deleted ones no posting is read."""
        return len(self.read(own)[0]) if len(self._deleted.rows) else own.stop - own.start

    def stored_of(self, live_A: Int64[np.ndarray, " A"]) -> UInt32[np.ndarray, " A"]:
        """Return chunks that are left by their numbers in the file."""
        return self._deleted.stored_of(live_A).astype(np.uint32)

    def count(
        self, own: slice, stored_A: UInt32[np.ndarray, " A"], counts_A: UInt8[np.ndarray, " A"]
    ) -> None:
        """Write down how often each of some chunks holds the word."""
        chunks = self._chunks[own]
        places = chunks.searchsorted(stored_A)
        is_held = chunks.take(places, mode="clip") == stored_A
        np.multiply(self._counts[own].take(places, mode="clip"), is_held, out=counts_A)


def _num_deleted(
    rows: Int64[np.ndarray, " D"], chunks: UInt32[np.ndarray, " P"]
) -> tuple[Int64[np.ndarray, " P"], Int64[np.ndarray, " P"]]:
    """Count the deleted rows before each chunk, and those up to it; both arrays ascend.

    The longer one is searched for each of the shorter.
    """
    if len(rows) > len(chunks):
        return np.searchsorted(rows, chunks), np.searchsorted(rows, chunks, side="right")
    wanted, ends = rows.astype(np.uint32), len(chunks) + 1
    behind, at = np.searchsorted(chunks, wanted, side="right"), np.searchsorted(chunks, wanted)
    before, up_to = (np.cumsum(np.bincount(each, minlength=ends))[:-1] for each in (behind, at))
    return before, up_to


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTokens:
    """The tokens of some chunks, laid end to end.

    ``size_C`` are the tokens of each chunk. ``step_T`` are the characters from one token to the next, the
    first counted from its chunk's start.
    """

    codes: UInt8[np.ndarray, "T bytes"]
    step_T: UInt8[np.ndarray, " T"]
    size_C: Int64[np.ndarray, " C"]


class TokenCodes(Protocol):
    """Where the tokens of chunks, or of titles, are read."""

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> ChunkTokens:
        """Return the tokens of some chunks, in the order asked."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeColumn:
    """Rows of tokens in memory or mapped: chunk ``m`` owns ``offsets_M1[m] // unit`` to the next.

    ``unit`` is the size of a token in the unit of the offsets: a mapped file counts bytes.
    """

    rows: UInt8[np.ndarray, "T row_bytes"]
    offsets_M1: Int64[np.ndarray, " M1"]
    unit: int = 1

    @classmethod
    def of(cls, column: pa.LargeBinaryArray, vector_bytes: int) -> CodeColumn:
        """View a column; one that does not hold whole vectors raises :class:`DamageError`."""
        row_bytes = vector_bytes + 1
        _, offsets, content = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        ends = ends if len(ends) else np.zeros(1, np.int64)
        num_bytes = int(ends[-1])
        if num_bytes % row_bytes:
            raise DamageError(f"token vectors must have {row_bytes} bytes each, got others")
        codes = np.frombuffer(content, np.uint8, num_bytes) if num_bytes else np.zeros(0, np.uint8)
        return cls(rows=codes.reshape(-1, row_bytes), offsets_M1=ends, unit=row_bytes)

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> ChunkTokens:
        """Return the tokens of some chunks, in the order asked."""
        start_C = self.offsets_M1[chunk_C] // self.unit
        size_C = self.offsets_M1[chunk_C + 1] // self.unit - start_C
        tokens = self.rows[ranges(start_C, size_C)]
        return ChunkTokens(codes=tokens[:, :-1], step_T=tokens[:, -1], size_C=size_C)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenVectors:
    """The token vectors of a generation: codes of chunks and titles, and the codebook that made them."""

    codebook: TokenCoder
    chunks: TokenCodes
    titles: TokenCodes


class JoinedCodes:
    """Columns of ``tokens.arrow`` of segments, in their order, each with its deleted chunks."""

    def __init__(self, parts: Sequence[tuple[CodeColumn, DeletedRows]]) -> None:
        self._parts = parts
        self._begin_S = np.cumsum([0, *(deleted.num_live for _, deleted in parts)])

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> ChunkTokens:
        """Return the tokens of some chunks, in the order asked."""
        segment_C = np.searchsorted(self._begin_S, chunk_C, side="right") - 1
        places = [np.flatnonzero(segment_C == segment) for segment in range(len(self._parts))]
        found = [
            column.read(deleted.stored_of(chunk_C[place] - begin))
            for (column, deleted), begin, place in zip(self._parts, self._begin_S[:-1], places, strict=True)
        ]
        # Laid out by segment; then in the order asked.
        size = np.concatenate([each.size_C for each in found])
        order = np.argsort(np.concatenate(places), kind="stable")
        token_T = ranges((np.cumsum(size) - size)[order], size[order])
        return ChunkTokens(
            codes=np.concatenate([each.codes for each in found])[token_T],
            step_T=np.concatenate([each.step_T for each in found])[token_T],
            size_C=size[order],
        )


def open_token_vectors(
    files: Container[str], segments: Sequence[Segment], late_folder: Path
) -> TokenVectors | None:
    """Return the token vectors of a generation, None where there are none.

    ``files`` names its files, ``late_folder`` holds the codebook. Damage raises :class:`DamageError`.
    """
    if LATE_NAME not in files:
        return None
    parts = [(each.tokens, each.rows.deleted_chunks) for each in segments if each.tokens is not None]
    if len(parts) < len(segments):
        return None
    codebook = load_token_coder(late_folder)
    is_joined = len(parts) > 1 or len(parts[0][1].rows) > 0
    columns = (
        [(CodeColumn.of(rows.column(name), codebook.vector_bytes), deleted) for rows, deleted in parts]
        for name in TOKEN_FILE_COLUMNS
    )
    chunks, titles = (JoinedCodes(each) if is_joined else each[0][0] for each in columns)
    return TokenVectors(codebook=codebook, chunks=chunks, titles=titles)
