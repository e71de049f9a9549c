"""Encoded shards on disk: Parquet files, three each, written once, read back as streams.

    encoded/rows-000007.parquet        the staged shard, moved here as it is: ids, titles, texts, metadata
    encoded/chunks-000007.parquet
    encoded/documents-000007.parquet   what the encoder adds to the rows, in their order. Written last: the
                                       shard is finished when this file exists

A killed run leaves whole shards and nothing else to trust; a rerun encodes only the others. Reading leaves
out documents that went stale between two runs, shard by shard, because a later shard may hold the same
document's new text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.ragged import places_in_groups
from cairn.pipeline.types import (
    GIVEN_VECTORS,
    LINE_FIELD,
    SPARSE_FIELDS,
    TOKEN_FIELDS,
    chunks_schema,
    documents_schema,
)
from jaxtyping import Float32, Int32, Int64

EncodedTable = Literal["documents", "chunks"]
EncodedFile = Literal["rows", "documents", "chunks"]
ENCODED_FILES: Final[tuple[EncodedFile, ...]] = ("rows", "documents", "chunks")

SHARD_FORMAT: Final = 3
"""Raised when the files of a shard change, so that a run does not take over shards it cannot read."""
READ_BATCH_ROWS: Final = 4_096
_LAST_NAME = re.compile(r"documents-(\d{6,})\.parquet")


def shard_path(folder: Path, file: EncodedFile, number: int) -> Path:
    """Return the path of one of a shard's files."""
    return folder / f"{file}-{number:06d}.parquet"


def as_parquet(table: pa.Table) -> pa.Buffer:
    """Return one of a shard's tables as the bytes of its Parquet file."""
    # Vectors neither repeat nor compress; a dictionary over them would only cost time.
    raw = {"vector", *(field.name for field in (*TOKEN_FIELDS, *SPARSE_FIELDS))}
    dictionaries: Any = [name for name in table.schema.names if name not in raw]
    stream = pa.BufferOutputStream()
    pq.write_table(
        table, stream, compression="lz4", use_dictionary=dictionaries, row_group_size=READ_BATCH_ROWS
    )
    return stream.getvalue()


def write_encoded_shard(
    folder: Path,
    number: int,
    staged: Path,
    documents: pa.Buffer | Path,
    chunks: pa.Buffer | Path,
    *,
    flushes: bool = True,
) -> None:
    """Put a staged shard beside its two tables, durably; after a crash it is finished or does not exist.

    Tables that are files already lie on the disk of ``folder``, durably, and are moved. Without ``flushes``
    the shard is for this run alone.
    """
    with durable.storage_errors(f"writing encoded shard {number}"):
        folder.mkdir(parents=True, exist_ok=True)
        # What a deleted file left: until the end no shard of this number is finished.
        shard_path(folder, "documents", number).unlink(missing_ok=True)
        if flushes:
            durable.fsync_file(staged)
        staged.replace(shard_path(folder, "rows", number))
        _put(chunks, shard_path(folder, "chunks", number), flushes=flushes)
        durable.commit_point("shard-chunks-written")
        _put(documents, shard_path(folder, "documents", number), flushes=flushes)
        if isinstance(documents, Path):
            durable.fsync_folder(folder)  # once: a shard of which a name is lost is not finished
    durable.commit_point("shard-written")


def _put(content: pa.Buffer | Path, path: Path, *, flushes: bool) -> None:
    if isinstance(content, Path):
        content.replace(path)
    elif flushes:
        durable.write_bytes(path, content)
    else:
        path.write_bytes(content)


def finished_shards(folder: Path) -> list[int]:
    """Return the numbers of the finished shards, ascending."""
    if not folder.is_dir():
        return []
    matches = (_LAST_NAME.fullmatch(path.name) for path in folder.iterdir())
    numbers = sorted({int(match.group(1)) for match in matches if match})
    return [
        number
        for number in numbers
        if all(shard_path(folder, each, number).is_file() for each in ENCODED_FILES)
    ]


def count_rows(folder: Path, table: EncodedTable, number: int) -> int:
    """Return the rows of one table of a finished shard, as its footer says."""
    path = shard_path(folder, table, number)
    with _damage_of(path), pq.ParquetFile(path) as file:
        return file.metadata.num_rows


def read_document_hashes(folder: Path, number: int) -> pa.Table:
    """Return ``doc_id`` and ``content_sha256`` of a finished shard, which tell which documents are stale."""
    return _read_columns(shard_path(folder, "rows", number), ["doc_id", "content_sha256"])


def read_chunk_counts(folder: Path, number: int) -> dict[str, int]:
    """Return the number of chunks of each document of a finished shard, by document id."""
    doc_ids = _read_columns(shard_path(folder, "rows", number), ["doc_id"]).column("doc_id")
    counts = _read_columns(shard_path(folder, "documents", number), ["num_chunks"]).column("num_chunks")
    return dict(zip(doc_ids.to_pylist(), counts.to_pylist(), strict=True))


def read_undescribed(folder: Path, number: int) -> tuple[int, list[str]]:
    """Return the number of chunks of a finished shard, and the ids of those without a line."""
    chunks = _read_columns(shard_path(folder, "chunks", number), ["chunk_id", LINE_FIELD.name])
    return chunks.num_rows, chunks.filter(chunks.column(1).is_null()).column(0).to_pylist()


def read_cluster_ids(folder: Path, number: int, stale_ids: Collection[str]) -> Int64[np.ndarray, " N"]:
    """Return the cluster of each document of a finished shard, without stale ones."""
    clusters = _read_columns(shard_path(folder, "documents", number), ["cluster_id"]).column("cluster_id")
    doc_ids = _read_columns(shard_path(folder, "rows", number), ["doc_id"]).column("doc_id").to_pylist()
    is_kept = np.array([doc_id not in stale_ids for doc_id in doc_ids], np.bool_)
    return clusters.to_numpy()[is_kept].astype(np.int64)


def read_encoded(
    folder: Path,
    table: EncodedTable,
    numbers: Iterable[int] | None = None,
    *,
    stale: Mapping[int, Collection[str]] | None = None,
    batch_rows: int = READ_BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Stream one table of shards, None for all that are finished, without the ``stale`` ids of each shard.

    Rows of ``documents`` have the columns of the staged rows, then those the encoder added. Both tables keep
    the same document order. At most one batch is in memory.
    """
    for number in finished_shards(folder) if numbers is None else numbers:
        stale_ids = frozenset((stale or {}).get(number, ()))
        is_joined = table == "documents"
        path = shard_path(folder, table, number)
        for batch in _joined(folder, number, batch_rows) if is_joined else _batches(path, batch_rows):
            kept = _without(batch, stale_ids) if stale_ids else batch
            if kept.num_rows:
                yield kept


def _joined(folder: Path, number: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Read rows and documents side by side: row i of one file belongs to row i of the other."""
    paths = [shard_path(folder, "rows", number), shard_path(folder, "documents", number)]
    for rows, added in zip(*(_batches(path, batch_rows) for path in paths), strict=True):
        arrays, fields = [*rows.columns, *added.columns], [*rows.schema, *added.schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _without(batch: pa.RecordBatch, doc_ids: Collection[str]) -> pa.RecordBatch:
    is_kept = [doc_id not in doc_ids for doc_id in batch.column("doc_id").to_pylist()]
    return batch.filter(pa.array(is_kept, pa.bool_()))


def _read_columns(path: Path, columns: list[str]) -> pa.Table:
    with _damage_of(path), pq.ParquetFile(path) as file:
        return file.read(columns=columns)


def _batches(path: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    with _damage_of(path), pq.ParquetFile(path) as file:
        wanted = [name for name in file.schema_arrow.names if name != GIVEN_VECTORS]  # they are in `chunks`
        yield from file.iter_batches(batch_size=batch_rows, columns=wanted)


@contextmanager
def _damage_of(path: Path) -> Generator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(
            f"encoded shard {path.name} must be a whole Parquet file, got a damaged one; delete it and "
            "run the same command again"
        ) from error


if TYPE_CHECKING:
    from cairn.pipeline.encode.documents import EncodedDocuments, TokenRows

ADDED_COLUMNS = ("cluster_id", "num_tokens", "num_chunks", "vector")
"""Columns of ``documents`` that a staged row has not."""


def shard_tables(
    doc_ids: Sequence[str],
    encoded: EncodedDocuments,
    assignments_N: Int32[np.ndarray, " N"],
    sparse: TokenRows | None = None,
) -> tuple[pa.Table, pa.Table]:
    """Return the ``ADDED_COLUMNS`` of ``documents`` and the rows of ``chunks``, both in document order.

    ``sparse`` has the weights of every chunk.
    """
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
    chunk_ids = [f"{doc_id}#{ordinal}" for doc_id, ordinal in zip(owners, ordinals.tolist(), strict=True)]
    chunks = pa.table(
        [
            pa.array(chunk_ids, pa.string()),
            pa.array(owners, pa.string()),
            pa.array(ordinals.astype(np.int32)),
            pa.array(encoded.start_char),
            pa.array(encoded.end_char),
            _vector_array(encoded.chunk_vectors_MV),
            *([] if encoded.lines is None else [pa.array([line or None for line in encoded.lines])]),
            *_token_columns(encoded, ordinals),
            *([] if sparse is None else [_codes_array(sparse)]),
        ],
        schema=chunks_schema(
            vector_dim,
            (
                *(() if encoded.lines is None else (LINE_FIELD,)),
                *(TOKEN_FIELDS if encoded.chunk_tokens is not None else ()),
                *(() if sparse is None else SPARSE_FIELDS),
            ),
        ),
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
