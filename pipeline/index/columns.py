"""Arrow files of a segment: columns that tie a position in a FAISS file to a row, a span, a document, tokens.

Each is ONE uncompressed record batch, so that readers map it and view columns as numpy arrays without a copy.
Columns are spooled to files while the tables stream past; the order of documents and chunks, their ordinals
and their spans are checked on the way, since every later answer depends on them.

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

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import DamageError, IntegrityError
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.codebook import TokenCoder
from jaxtyping import Int64, UInt8

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


COMPARED_IDS = 65_536
"""Ids held at once where they are compared."""

_VARIABLE = (pa.large_string(), pa.large_binary())


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


def unnamed_file(path: Path) -> IO[bytes]:
    """Open a file that is gone when it is closed, on the disk of ``path``."""
    return tempfile.TemporaryFile(dir=path.parent)


def mapped(stream: IO[bytes]) -> pa.Buffer:
    """View what was written to a file without reading it into memory."""
    stream.flush()
    size = stream.tell()
    return (
        pa.py_buffer(np.memmap(stream, dtype=np.uint8, mode="r", shape=(size,)))
        if size
        else pa.py_buffer(b"")
    )


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


TOKEN_FILE_SCHEMA = pa.schema(
    [
        pa.field("token_codes", pa.large_binary(), nullable=False),
        pa.field("title_codes", pa.large_binary(), nullable=False),
    ]
)
TOKEN_FILE_COLUMNS = tuple(TOKEN_FILE_SCHEMA.names)


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


def write_token_vectors(rows: Iterable[pa.RecordBatch], path: Path) -> pa.RecordBatch:
    """Write the file from a scan of :data:`TOKEN_FILE_COLUMNS`; return it, mapped. Null is no codes."""
    with contextlib.closing(ColumnSpool(TOKEN_FILE_SCHEMA, path)) as spool:
        for batch in rows:
            spool.append(**{name: batch.column(name).fill_null(b"") for name in TOKEN_FILE_COLUMNS})
        return spool.finish()
