"""Encoded shards on disk: a pair of Parquet files each, written once, read back as streams.

    encoded/chunks-000007.parquet      written first
    encoded/documents-000007.parquet   written last: the shard is finished when this file exists

A killed run therefore leaves whole shards and nothing else to trust; a rerun encodes only the others. Reading
leaves out documents that went stale between two runs, shard by shard, because a later shard may hold the same
document's new text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import durable
from pipeline.errors import IntegrityError

EncodedTable = Literal["documents", "chunks"]

READ_BATCH_ROWS: Final = 4_096
_DOCUMENTS_NAME = re.compile(r"documents-(\d{6,})\.parquet")


def shard_path(folder: Path, table: EncodedTable, number: int) -> Path:
    """Return where a shard's file of one table lies."""
    return folder / f"{table}-{number:06d}.parquet"


def as_parquet(table: pa.Table) -> pa.Buffer:
    """Return a shard's table as the bytes of its Parquet file, wherever it was encoded."""
    # Vectors neither repeat nor compress; a dictionary over them would only cost time.
    dictionaries: Any = [name for name in table.schema.names if name != "vector"]
    stream = pa.BufferOutputStream()
    pq.write_table(
        table, stream, compression="lz4", use_dictionary=dictionaries, row_group_size=READ_BATCH_ROWS
    )
    return stream.getvalue()


def write_encoded_shard(folder: Path, number: int, documents: pa.Buffer, chunks: pa.Buffer) -> None:
    """Write a shard's two files durably; after a crash it is finished or it does not exist."""
    with durable.storage_errors(f"writing encoded shard {number}"):
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(shard_path(folder, "chunks", number), chunks)
        durable.commit_point("shard-chunks-written")
        durable.write_bytes(shard_path(folder, "documents", number), documents)
    durable.commit_point("shard-written")


def finished_shards(folder: Path) -> list[int]:
    """Return the numbers of the finished shards, ascending."""
    if not folder.is_dir():
        return []
    matches = (_DOCUMENTS_NAME.fullmatch(path.name) for path in folder.iterdir())
    numbers = sorted(int(match.group(1)) for match in matches if match)
    return [number for number in numbers if shard_path(folder, "chunks", number).is_file()]


def read_document_hashes(folder: Path, number: int) -> pa.Table:
    """Return ``doc_id`` and ``content_sha256`` of a finished shard.

    What tells stale documents from current ones.
    """
    path = shard_path(folder, "documents", number)
    with _reading(path) as file:
        return file.read(columns=["doc_id", "content_sha256"])


def read_encoded(
    folder: Path,
    table: EncodedTable,
    *,
    stale: Mapping[int, Collection[str]] | None = None,
    batch_rows: int = READ_BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Stream one table of all finished shards in their order, without the documents named ``stale`` for their shard.

    Both tables keep the same document order. At most one batch is in memory.
    """
    for number in finished_shards(folder):
        left_out = frozenset((stale or {}).get(number, ()))
        path = shard_path(folder, table, number)
        with _reading(path) as file:
            for batch in _batches(file, path, batch_rows):
                kept = batch if not left_out else _without(batch, left_out)
                if kept.num_rows:
                    yield kept


def _without(batch: pa.RecordBatch, doc_ids: Collection[str]) -> pa.RecordBatch:
    return batch.filter(
        pa.array([doc_id not in doc_ids for doc_id in batch.column("doc_id").to_pylist()], pa.bool_())
    )


def encoded_schema(folder: Path, table: EncodedTable) -> pa.Schema:
    """Return the schema of the first finished shard's table; there must be one."""
    numbers = finished_shards(folder)
    assert numbers, "asked for the schema of no shards"
    with _reading(shard_path(folder, table, numbers[0])) as file:
        return file.schema_arrow


def _reading(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(
            f"encoded shard {path.name} must be a whole Parquet file, got a damaged one; delete it and "
            "run the same command again"
        ) from error


def _batches(file: pq.ParquetFile, path: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(batch_size=batch_rows)
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(
            f"encoded shard {path.name} must be a whole Parquet file, got a damaged one; delete it and "
            "run the same command again"
        ) from error
