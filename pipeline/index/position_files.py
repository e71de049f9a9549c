"""``documents.arrow`` and ``chunks.arrow`` tie a position in a FAISS file to a row, a span and a document.

Each is ONE uncompressed record batch, so that readers map it and view columns as numpy arrays without a copy.
Columns are spooled to files while the tables stream past; the order of documents and chunks, their ordinals
and their spans are checked on the way, since every later answer depends on them.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import DamageError, IntegrityError
from jaxtyping import Int64

DOCUMENT_POSITIONS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.large_string(), nullable=False),
        pa.field("chunk_offset", pa.int64(), nullable=False),
        pa.field("num_chunks", pa.int32(), nullable=False),
        pa.field("cluster_id", pa.int32(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("content", pa.uint64(), nullable=False),
    ]
)
"""``documents.arrow``: one row a document, in table order.

The row's number is the document's position in ``documents.faiss``. ``content`` is the beginning of the hash
of what the document holds.
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
    ]
)
"""``lengths.arrow``: one row a document, its words as BM25 counts them."""


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
        for field in self._schema:
            column = columns[field.name]
            if field.name in self._string_bytes:
                self._append_strings(field.name, column)
            else:
                self._files[field.name].write(
                    np.ascontiguousarray(column, dtype=field.type.to_pandas_dtype()).data
                )
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

    def finish(self) -> pa.RecordBatch:
        """Write the file and return its batch, mapped."""
        arrays = []
        for field in self._schema:
            buffers = [None, mapped(self._files[field.name])]
            if field.name in self._string_bytes:
                buffers.append(mapped(self._string_bytes[field.name]))
            arrays.append(pa.Array.from_buffers(field.type, self.num_rows, buffers))
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


def open_positions(path: Path, schema: pa.Schema) -> pa.RecordBatch:
    """Map a position file; anything but one batch of the schema raises :class:`DamageError`."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.num_record_batches == 1 and reader.schema.equals(schema):
            return reader.get_batch(0)
    except (pa.ArrowInvalid, OSError) as error:
        raise DamageError(f"{path.name} cannot be read") from error
    raise DamageError(f"{path.name} must hold one batch of {', '.join(schema.names)}")


def chunk_offsets_of(documents: pa.RecordBatch, num_chunks: int) -> Int64[np.ndarray, " N_plus_1"]:
    """Return the first chunk of each document of a segment, and the number of its chunks."""
    return np.append(documents.column("chunk_offset").to_numpy(zero_copy_only=True), np.int64(num_chunks))


def append_documents(spool: ColumnSpool, rows: pa.RecordBatch, content: np.ndarray, first_chunk: int) -> int:
    """Append documents whose chunks begin at ``first_chunk``; return where those of the next begin."""
    num_chunks = rows.column("num_chunks").to_numpy().astype(np.int64)
    ends = first_chunk + np.cumsum(num_chunks)
    spool.append(
        doc_id=rows.column("doc_id"),
        chunk_offset=ends - num_chunks,
        num_chunks=num_chunks,
        cluster_id=rows.column("cluster_id").to_numpy(),
        num_tokens=rows.column("num_tokens").to_numpy(),
        content=content,
    )
    return first_chunk + int(num_chunks.sum())


def write_document_positions(rows: Iterator[pa.RecordBatch], path: Path) -> pa.RecordBatch:
    """Write ``documents.arrow`` from a scan of its columns' sources, and of content_sha256."""
    id_hashes: list[np.ndarray] = []
    with contextlib.closing(ColumnSpool(DOCUMENT_POSITIONS_SCHEMA, path)) as spool:
        first_chunk = 0
        for batch in rows:
            hashes = batch.column("content_sha256").to_pylist()
            content = np.array([int(sha256[:16], 16) for sha256 in hashes], np.uint64)
            first_chunk = append_documents(spool, batch, content, first_chunk)
            ids = batch.column("doc_id").to_pylist()
            id_hashes.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
        documents = spool.finish()
        _require_unique(documents.column("doc_id"), id_hashes)
        return documents


def require_unique_ids(parts: Sequence[pa.LargeStringArray]) -> None:
    """Refuse an id that stands twice, in one part or in two."""
    id_hashes = [
        np.fromiter((hash(doc_id.as_py()) for doc_id in doc_ids), np.int64, len(doc_ids)) for doc_ids in parts
    ]
    _require_unique(pa.chunked_array(parts, pa.large_string()), id_hashes)


def _require_unique(doc_ids: pa.LargeStringArray | pa.ChunkedArray, id_hashes: list[np.ndarray]) -> None:
    """Refuse a repeated id, comparing hashes of eight bytes first and ids only where hashes are equal."""
    ordered = np.sort(np.concatenate(id_hashes)) if id_hashes else np.empty(0, np.int64)
    if np.any(ordered[1:] == ordered[:-1]):
        repeated = len(doc_ids) - pc.count_distinct(doc_ids).as_py()
        if repeated:
            raise IntegrityError(
                f"table `documents` must hold each doc_id once, got {repeated} repeated; run the same "
                "ingest again, nothing was published"
            )


def write_chunk_positions(
    rows: Iterator[pa.RecordBatch], documents: pa.RecordBatch, path: Path
) -> pa.RecordBatch:
    """Write ``chunks.arrow`` from a scan of doc_id, ordinal, start_char and end_char.

    The scan is checked against the documents.
    """
    spool = ColumnSpool(CHUNK_POSITIONS_SCHEMA, path)
    offsets = documents.column("chunk_offset").to_numpy()
    num_chunks = documents.column("num_chunks").to_numpy()
    expected = int(offsets[-1] + num_chunks[-1]) if len(offsets) else 0
    position, last_end = 0, 0
    try:
        for batch in rows:
            _require(
                position + batch.num_rows <= expected,
                f"at most {expected} chunks",
                f"more from position {expected}",
            )
            positions = np.arange(position, position + batch.num_rows)
            owners = np.searchsorted(offsets, positions, side="right") - 1
            ordinals = positions - offsets[owners]
            same_ids = pc.all(
                pc.equal(
                    documents.column("doc_id").take(pa.array(owners)),
                    batch.column("doc_id").cast(pa.large_string()),
                )
            ).as_py()
            _require(
                same_ids is not False,
                "chunks in the order of their documents",
                f"another document near position {position}",
            )
            _require(
                bool(np.array_equal(ordinals, batch.column("ordinal").to_numpy())),
                "ordinals 0..n-1 within a document",
                f"others near position {position}",
            )
            starts, ends = batch.column("start_char").to_numpy(), batch.column("end_char").to_numpy()
            expected_starts = np.where(ordinals == 0, 0, np.concatenate(([last_end], ends[:-1])))
            is_contiguous = bool(np.array_equal(starts, expected_starts) and np.all(ends >= starts))
            _require(
                is_contiguous,
                "contiguous spans from character 0",
                f"a gap or overlap near position {position}",
            )
            spool.append(document_position=owners, start_char=starts, end_char=ends)
            position += batch.num_rows
            last_end = int(ends[-1]) if len(ends) else last_end
        _require(position == expected, f"{expected} chunks, as the documents say", str(position))
        return spool.finish()
    finally:
        spool.close()


def _require(condition: bool, contract: str, got: str) -> None:
    if not condition:
        raise IntegrityError(
            f"table `chunks` must hold {contract}, got {got}; run the same ingest again, nothing was "
            "published"
        )
