"""Encoded shards on disk: Parquet files, three each, written once, read back as streams.

    encoded/rows-000007.parquet        the staged shard, moved here as it is: ids, titles, texts, metadata
    encoded/chunks-000007.parquet
    encoded/documents-000007.parquet   what the encoder adds to the rows, in their order. Written last: the
                                       shard is finished when this file exists
    encoded/stored-000007.parquet      stands for the last two where they, and a copy of the rows, are in an
                                       object store: their sizes and hashes, and what the driver reads of them

A killed run leaves whole shards and nothing else to trust; a rerun encodes only the others. Reading leaves
out documents that went stale between two runs, shard by shard, because a later shard may hold the same
document's new text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.manifest import FileRecord
from cairn.pipeline.ragged import places_in_groups
from cairn.pipeline.types import TOKEN_FIELDS, chunks_schema, documents_schema
from jaxtyping import Float32, Int32, Int64

EncodedTable = Literal["documents", "chunks"]
ENCODED_TABLES: Final[tuple[EncodedTable, ...]] = ("documents", "chunks")
EncodedFile = Literal["rows", "documents", "chunks", "stored"]

SHARD_FORMAT: Final = 3
"""Raised when the files of a shard change, so that a run does not take over shards it cannot read."""
READ_BATCH_ROWS: Final = 4_096
_LAST_NAME = re.compile(r"(documents|stored)-(\d{6,})\.parquet")
_STORED_FILES: Final = b"files"
"""The key of the records in the metadata of a ``stored`` file's schema."""


def shard_path(folder: Path, file: EncodedFile, number: int) -> Path:
    """Return the path of one of a shard's files."""
    return folder / f"{file}-{number:06d}.parquet"


def as_parquet(table: pa.Table) -> pa.Buffer:
    """Return one of a shard's tables as the bytes of its Parquet file."""
    # Vectors neither repeat nor compress; a dictionary over them would only cost time.
    raw = {"vector", *(field.name for field in TOKEN_FIELDS)}
    dictionaries: Any = [name for name in table.schema.names if name not in raw]
    stream = pa.BufferOutputStream()
    pq.write_table(
        table, stream, compression="lz4", use_dictionary=dictionaries, row_group_size=READ_BATCH_ROWS
    )
    return stream.getvalue()


def as_stored(documents: pa.Table, files: Mapping[str, FileRecord]) -> pa.Buffer:
    """Return the ``stored`` file of a shard whose files are in an object store."""
    records = json.dumps({name: asdict(record) for name, record in files.items()}).encode()
    known = documents.drop_columns(["vector"])
    return as_parquet(known.replace_schema_metadata({_STORED_FILES: records}))


def write_encoded_shard(
    folder: Path, number: int, staged: Path, documents: pa.Buffer | Path, chunks: pa.Buffer | Path | None
) -> None:
    """Put a staged shard beside its two tables, durably; after a crash it is finished or does not exist.

    Tables that are files already lie on the disk of ``folder``, durably, and are moved. Where ``chunks`` is
    None, both are in an object store, and ``documents`` is the ``stored`` file.
    """
    last: EncodedFile = "stored" if chunks is None else "documents"
    with durable.storage_errors(f"writing encoded shard {number}"):
        folder.mkdir(parents=True, exist_ok=True)
        # What a deleted file left: until the end no shard of this number is finished.
        unfinish_shard(folder, number)
        durable.fsync_file(staged)
        staged.replace(shard_path(folder, "rows", number))
        if chunks is not None:
            _put(chunks, shard_path(folder, "chunks", number))
        durable.commit_point("shard-chunks-written")
        _put(documents, shard_path(folder, last, number))
    durable.commit_point("shard-written")


def unfinish_shard(folder: Path, number: int) -> None:
    """Let a shard count as not encoded."""
    for last in ("documents", "stored"):
        shard_path(folder, last, number).unlink(missing_ok=True)


def _put(content: pa.Buffer | Path, path: Path) -> None:
    if isinstance(content, Path):
        content.replace(path)
        durable.fsync_folder(path.parent)
    else:
        durable.write_bytes(path, content)


def finished_shards(folder: Path) -> list[int]:
    """Return the numbers of the finished shards, ascending."""
    if not folder.is_dir():
        return []
    matches = (_LAST_NAME.fullmatch(path.name) for path in folder.iterdir())
    numbers = sorted({int(match.group(2)) for match in matches if match})
    return [number for number in numbers if _is_finished(folder, number)]


def _is_finished(folder: Path, number: int) -> bool:
    has_tables = all(shard_path(folder, file, number).is_file() for file in ("documents", "chunks"))
    return shard_path(folder, "rows", number).is_file() and (has_tables or is_stored(folder, number))


def is_stored(folder: Path, number: int) -> bool:
    """Tell whether the tables of a finished shard are in an object store."""
    return shard_path(folder, "stored", number).is_file()


def stored_files(folder: Path, number: int) -> dict[Path, FileRecord]:
    """Return what each file of a shard in an object store must be, by the path that it would have here."""
    path = shard_path(folder, "stored", number)
    with _damage_of(path):
        records = json.loads(pq.read_schema(path).metadata[_STORED_FILES])
    return {shard_path(folder, file, number): FileRecord(**record) for file, record in records.items()}


def table_paths(folder: Path, table: EncodedTable, number: int) -> tuple[Path, ...]:
    """Return the files that rows of one table are read from."""
    chunks = shard_path(folder, "chunks", number)
    rows, documents = (shard_path(folder, file, number) for file in ("rows", "documents"))
    return (rows, documents) if table == "documents" else (chunks,)


def count_rows(folder: Path, table: EncodedTable, number: int) -> int:
    """Return the rows of one table of a finished shard, as its footer says."""
    if table == "chunks" and is_stored(folder, number):
        return sum(read_chunk_counts(folder, number).values())
    path = shard_path(folder, table, number) if table == "chunks" else _known_path(folder, number)
    with _damage_of(path), pq.ParquetFile(path) as file:
        return file.metadata.num_rows


def _known_path(folder: Path, number: int) -> Path:
    """Return the file with the numbers that the encoder added to each document."""
    return shard_path(folder, "stored" if is_stored(folder, number) else "documents", number)


def read_document_hashes(folder: Path, number: int) -> pa.Table:
    """Return ``doc_id`` and ``content_sha256`` of a finished shard, which tell which documents are stale."""
    return _read_columns(shard_path(folder, "rows", number), ["doc_id", "content_sha256"])


def read_chunk_counts(folder: Path, number: int) -> dict[str, int]:
    """Return the number of chunks of each document of a finished shard, by document id."""
    doc_ids = _read_columns(shard_path(folder, "rows", number), ["doc_id"]).column("doc_id")
    counts = _read_columns(_known_path(folder, number), ["num_chunks"]).column("num_chunks")
    return dict(zip(doc_ids.to_pylist(), counts.to_pylist(), strict=True))


def read_cluster_ids(folder: Path, number: int, stale_ids: Collection[str]) -> Int64[np.ndarray, " N"]:
    """Return the cluster of each document of a finished shard, without stale ones."""
    clusters = _read_columns(_known_path(folder, number), ["cluster_id"]).column("cluster_id")
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
    """Stream one table of shards in their order, without the ids ``stale`` has for each shard.

    None asks for all that are finished.

    Rows of ``documents`` have the columns of the staged rows, then those the encoder added. Both tables keep
    the same document order. At most one batch is in memory.
    """
    for number in finished_shards(folder) if numbers is None else numbers:
        stale_ids = frozenset((stale or {}).get(number, ()))
        batches = (
            _joined(folder, number, batch_rows)
            if table == "documents"
            else _batches(shard_path(folder, table, number), batch_rows)
        )
        for batch in batches:
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
    return batch.filter(
        pa.array([doc_id not in doc_ids for doc_id in batch.column("doc_id").to_pylist()], pa.bool_())
    )


def _read_columns(path: Path, columns: list[str]) -> pa.Table:
    with _damage_of(path), pq.ParquetFile(path) as file:
        return file.read(columns=columns)


def _batches(path: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    with _damage_of(path), pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=batch_rows)


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
    from cairn.pipeline.encode.documents import EncodedDocuments
    from cairn.pipeline.encode.token_rows import TokenRows

ADDED_COLUMNS = ("cluster_id", "num_tokens", "num_chunks", "vector")
"""Columns of ``documents`` that a staged row has not."""


def shard_tables(
    doc_ids: Sequence[str], encoded: EncodedDocuments, assignments_N: Int32[np.ndarray, " N"]
) -> tuple[pa.Table, pa.Table]:
    """Return the ``ADDED_COLUMNS`` of ``documents`` and the rows of ``chunks``, both in document order."""
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
    chunks = pa.table(
        [
            pa.array(
                [f"{doc_id}#{ordinal}" for doc_id, ordinal in zip(owners, ordinals.tolist(), strict=True)],
                pa.string(),
            ),
            pa.array(owners, pa.string()),
            pa.array(ordinals.astype(np.int32)),
            pa.array(encoded.start_char),
            pa.array(encoded.end_char),
            _vector_array(encoded.chunk_vectors_MV),
            *_token_columns(encoded, ordinals),
        ],
        schema=chunks_schema(vector_dim, has_tokens=encoded.chunk_tokens is not None),
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
