"""Encoded shards as rows for the tables: streamed by the committer, or written by workers as fragments.

A worker reads shards in ``pending/encoded`` and writes fragments of Lance beside the table's, which the
committer names in one commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from cairn.pipeline.durable import commit_point, fsync_file
from cairn.pipeline.encode.shards import ENCODED_TABLES, EncodedTable
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.lance_append import Fragments, fragment_files
from cairn.pipeline.index.lance_files import LanceFiles, small_table_files
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.segments.parts import RunTasks, num_parts
from cairn.pipeline.index.tiers import FACTOR
from cairn.pipeline.index.worker_files import LostFilesError
from cairn.pipeline.line.pending import EncodedShards
from cairn.pipeline.manifest import record_file

MAX_FRAGMENTS: Final = FACTOR - 1
"""Of a table in one commit: one more, and the next ingest would merge them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteFragments:
    """Writes a run of shards as a fragment of one table."""

    tables: LanceTables
    table: EncodedTable
    shards: EncodedShards
    num_rows: int

    def reads(self) -> Iterable[Path]:
        """See :class:`cairn.pipeline.index.segments.parts.Task`."""
        yield from small_table_files(self.tables.layout.lance_folder, self.tables.versions())
        yield from self.shards.files(self.table)

    @returning_freed_memory()
    def run(self) -> tuple[Fragments, LanceFiles]:
        """Write, flush and hash it; what is not committed is cleared with the next publication."""
        rows = self.shards.stream(self.table, self.tables.schemas[self.table])
        fragments = self.tables.write_fragments(self.table, rows, self.num_rows)
        files: LanceFiles = {}
        for name in fragment_files(self.table, fragments):
            path = self.tables.layout.lance_folder / name
            fsync_file(path)
            files[name] = record_file(path)
        return fragments, files


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsToAppend:
    """The rows of each table; ``files`` are those of fragments, with the hashes taken by who wrote them."""

    rows: Mapping[str, pa.RecordBatchReader | Fragments]
    files: LanceFiles


def rows_to_append(
    shards: EncodedShards, tables: LanceTables, run_tasks: RunTasks | None, folder: Path
) -> RowsToAppend:
    """Return rows as fragments where there are enough for workers to write, else as streams.

    ``folder`` is one that workers see if they see the root. Raises :class:`TryAgainError` where shards in an
    object store are not what was uploaded; they count as not encoded then.
    """
    try:
        return _rows_to_append(shards, tables, run_tasks, folder)
    except LostFilesError as error:
        lost = shards.unfinish(error.files)
        if not lost:
            raise
        raise TryAgainError(
            f"encoded shards in the object store must be there as they were uploaded, got {lost} that are "
            f"not ({error.fault}); run the same command again, it encodes them again"
        ) from error


def _rows_to_append(
    shards: EncodedShards, tables: LanceTables, run_tasks: RunTasks | None, folder: Path
) -> RowsToAppend:
    _, num_chunks = shards.count()
    parts = min(num_parts(num_chunks), MAX_FRAGMENTS)
    if run_tasks is None or parts < 2:
        if tables.layout.replica is not None:
            shards.fetch(tables.layout.replica.worker_files)
        streams = {table: shards.stream(table, tables.schemas[table]) for table in ENCODED_TABLES}
        return RowsToAppend(rows=streams, files={})
    tasks = [
        WriteFragments(tables=tables, table=table, shards=part, num_rows=num_rows)
        for part in shards.cut(parts)
        for table, num_rows in zip(ENCODED_TABLES, part.count(), strict=True)
        if num_rows
    ]
    rows: dict[str, Fragments] = {table: [] for table in ENCODED_TABLES}
    files: LanceFiles = {}
    for task, (fragments, written) in zip(tasks, run_tasks(tasks, folder), strict=True):
        rows[task.table] += fragments
        files |= written
    commit_point("fragments-written")
    return RowsToAppend(rows=rows, files=files)
