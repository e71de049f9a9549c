"""The segments of a new generation: those of the one before, linked, and what has changed since.

    deleted rows ─▶ new bits beside the files of older segments
    new rows     ─▶ one segment
    when due     ─▶ the newest segments merged into one

All rows become one segment where that is as quick, where a codebook has to be trained, and where a file of
the generation before is damaged or not there to be shared. A merge would give damaged rows a right hash, and
sharing would leave no generation whole.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import DamageError, IntegrityError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.faiss_build import Codebook
from cairn.pipeline.index.lance_index import StoredRows
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import (
    CHUNKS_ARROW,
    CHUNKS_FAISS,
    DELETED_BITS,
    DOCUMENTS_ARROW,
    DOCUMENTS_FAISS,
    TOKENS_ARROW,
)
from cairn.pipeline.index.segments.change import RowChange, rows_changed
from cairn.pipeline.index.segments.codes import largest, needs_training, read_codebook
from cairn.pipeline.index.segments.merge import merge_segments
from cairn.pipeline.index.segments.parts import (
    RunTasks,
    StoredSegment,
    WrittenFiles,
    merge_by_task,
    num_parts,
    write_in_parts,
)
from cairn.pipeline.index.segments.segment import (
    SegmentRows,
    bits_of,
    needed_files,
    open_rows,
    row_files,
    segment_name,
)
from cairn.pipeline.index.segments.writer import SegmentWriter
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.manifest import FileRecord, Manifest, SegmentRecord
from cairn.pipeline.types import ProgressListener

NO_LINKS: Final = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What the file system says where a file cannot have a second name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A segment of the generation before, with what is deleted of it now."""

    record: SegmentRecord
    rows: SegmentRows
    is_changed: bool


class Assembly:
    """Puts the segments of generation ``number`` into ``folder``.

    ``base`` is the generation served now, None where none is or none is to be shared. ``has_tokens`` says
    whether the new one has token vectors.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        base: Manifest | None,
        number: int,
        folder: Path,
        config: IndexConfig,
        *,
        has_tokens: bool,
        run_tasks: RunTasks | None = None,
    ) -> None:
        self._layout, self._base = layout, base
        self._number, self._folder, self._config = number, folder, config
        self._has_tokens, self._run_tasks = has_tokens, run_tasks
        self.hashed: dict[str, FileRecord] = {}
        """Files with their hashes: those that are the generation's before, too, and those of tasks."""

    def build(
        self, rows: StoredRows, since: Mapping[str, int] | None, progress: ProgressListener
    ) -> tuple[SegmentRecord, ...]:
        """Write or link every file of the segments; ``since`` are the versions that the commit began with.

        None where rows are not comparable.
        """
        made = None
        if self._base is not None and since is not None:
            change = rows_changed(self._layout, since, rows.versions, rows.tables.deleted)
            kept = None if change is None else self._keep(self._base, change)
            if change is not None and kept is not None and self._is_worth_it(kept, change):
                made = self._add(self._base, kept, change, rows, progress)
        if made is None:
            counts = {table: rows.tables.count_rows(table, rows.versions) for table in TABLES}
            made = (self._write("", rows, counts, dict.fromkeys(TABLES), progress),)
            commit_point("segments-merged")
        commit_point("segments-assembled")
        return made

    def share(self, base: Manifest, name: str) -> None:
        """Give a file of the generation before a name in this one."""
        source, target = self._layout.generation_folder(base.generation) / name, self._folder / name
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            shutil.copyfile(source, target)
        else:
            self.hashed[name] = base.files[name]

    def _keep(self, base: Manifest, change: RowChange) -> list[_Kept] | None:
        """Return the segments that have rows left; None where a file of theirs cannot be shared."""
        kept: list[_Kept] = []
        begin = 0
        for record in base.segments:
            rows = self._shared_rows(base, record)
            if rows is None:
                return None
            end = begin + rows.deleted_documents.num_live
            own = change.deleted[slice(*np.searchsorted(change.deleted, (begin, end)).tolist())] - begin
            begin = end
            if len(own):
                rows = rows.without(own)
            if rows.deleted_documents.num_live:
                kept.append(_Kept(record=rows.described(record), rows=rows, is_changed=bool(len(own))))
        return kept

    def _shared_rows(self, base: Manifest, record: SegmentRecord) -> SegmentRows | None:
        """Map the rows of a segment of the generation before; None where a file of it cannot be shared."""
        has_tokens = record.name + TOKENS_ARROW in base.files
        if has_tokens != self._has_tokens:
            return None
        folder = self._layout.generation_folder(base.generation)
        names = {*needed_files(record), *row_files(record, base.files)}
        verified = VerifiedFiles.of_this_machine()
        if not all(
            name in base.files
            and base.files[name].problem(folder / name, check_hash=False) is None
            and verified.has_sha256(folder / name, base.files[name].sha256)
            for name in names
        ):
            return None
        try:
            return open_rows(folder, record)
        except DamageError:
            return None

    def _is_worth_it(self, kept: Sequence[_Kept], change: RowChange) -> bool:
        """Tell whether sharing segments is quicker than one whole, and their codebooks still do."""
        records = [each.record for each in kept]
        counts = {
            DOCUMENTS: sum(record.live_documents for record in records) + change.num_added[DOCUMENTS],
            CHUNKS: sum(record.live_chunks for record in records) + change.num_added[CHUNKS],
        }
        return (
            bool(kept)
            and counts[CHUNKS] > tiers.WHOLE_CHUNKS
            and not any(needs_training(records, table, counts[table], self._config) for table in TABLES)
        )

    def _add(
        self,
        base: Manifest,
        kept: Sequence[_Kept],
        change: RowChange,
        rows: StoredRows,
        progress: ProgressListener,
    ) -> tuple[SegmentRecord, ...]:
        records = [each.record for each in kept]
        codebooks = self._codebooks(base, records)
        if change.num_added[DOCUMENTS]:
            added = replace(rows, fragments=change.added)
            name = segment_name(self._number)
            records.append(self._write(name, added, change.num_added, codebooks, progress))
            _require_new(kept, open_rows(self._folder, records[-1]).documents.column("doc_id"))
        _require_all(records, rows)
        first = tiers.first_to_merge(
            [record.live_chunks for record in records], [record.chunks for record in records]
        )
        for each in kept[:first]:
            self._share_segment(base, each)
        if first is not None:
            self._merge(base, kept[first:], records, first, codebooks)
        commit_point("segments-merged")
        return tuple(records)

    def _write(
        self,
        name: str,
        rows: StoredRows,
        counts: Mapping[str, int],
        codebooks: Mapping[str, Codebook | None],
        progress: ProgressListener,
    ) -> SegmentRecord:
        """Write a segment of so many rows, by tasks where there are some to run them and it is worth it."""
        writer = SegmentWriter(self._folder, self._config, codebooks, progress, self._has_tokens)
        if self._run_tasks is None or num_parts(counts[CHUNKS]) < 2:
            return writer.write(name, rows)
        return self._take(write_in_parts(writer, name, rows, counts, self._run_tasks))

    def _take(self, written: WrittenFiles) -> SegmentRecord:
        """Note what tasks wrote, and fetch positions from a store, which are read here."""
        self.hashed.update(written.files)
        if written.folder != self._folder:
            replica = self._layout.replica
            assert replica is not None, "what is not in the folder is in a store"
            for name in written.files:
                replica.worker_files.move(written.folder / name, self._folder / name)
            names = (DOCUMENTS_ARROW, CHUNKS_ARROW)
            replica.worker_files.fetch(self._folder / (written.record.name + name) for name in names)
        return written.record

    def _codebooks(self, base: Manifest, records: Sequence[SegmentRecord]) -> dict[str, Codebook | None]:
        folder = self._layout.generation_folder(base.generation)
        codebooks: dict[str, Codebook | None] = {}
        for table, file in ((DOCUMENTS, DOCUMENTS_FAISS), (CHUNKS, CHUNKS_FAISS)):
            owner = largest(records, table)
            codebooks[table] = read_codebook(folder / (owner.name + file), owner.indexes[table])
        return codebooks

    def _share_segment(self, base: Manifest, kept: _Kept) -> None:
        for name in row_files(kept.record, base.files):
            self.share(base, name)
        bits = kept.record.name + DELETED_BITS
        if kept.is_changed:
            (self._folder / bits).write_bytes(bits_of(kept.rows.deleted_documents))
        elif bits in base.files:
            self.share(base, bits)

    def _merge(
        self,
        base: Manifest,
        kept: Sequence[_Kept],
        records: list[SegmentRecord],
        first: int,
        codebooks: Mapping[str, Codebook | None],
    ) -> None:
        """Put one segment in the place of those from ``first`` on, of which the newest may be new."""
        folder = self._layout.generation_folder(base.generation)
        name, new = segment_name(self._number, "merged"), records[first + len(kept) :]
        written = {path.name for path in self._folder.iterdir()} | self.hashed.keys()
        stored = [
            StoredSegment(
                folder=folder,
                record=each.record,
                files=row_files(each.record, base.files),
                deleted=each.rows.deleted_documents,
            )
            for each in kept
        ]
        stored += [
            StoredSegment(folder=self._folder, record=record, files=row_files(record, written))
            for record in new
        ]
        num_chunks = sum(record.live_chunks for record in records[first:])
        if self._run_tasks is None or num_parts(num_chunks) < 2:
            segments = [each.open() for each in stored]
            merged = merge_segments(segments, name, self._folder, codebooks)
        else:
            merged = self._take(merge_by_task(stored, name, self._folder, codebooks, self._run_tasks))
        for record in new:
            for name in row_files(record, written):
                (self._folder / name).unlink(missing_ok=True)  # a store may have it
                self.hashed.pop(name, None)
        records[first:] = [merged]


def _require_new(kept: Sequence[_Kept], doc_ids: pa.Array) -> None:
    for each in kept:
        is_known = pc.is_in(each.rows.documents.column("doc_id"), value_set=doc_ids).to_numpy(False)
        repeated = int((is_known & each.rows.deleted_documents.is_live()).sum())
        if repeated:
            raise IntegrityError(
                f"table `documents` must hold each doc_id once, got {repeated} repeated; run the same "
                "ingest again, nothing was published"
            )


def _require_all(records: Sequence[SegmentRecord], rows: StoredRows) -> None:
    """Refuse tables that hold other rows than the segments."""
    counts = {
        DOCUMENTS: sum(record.live_documents for record in records),
        CHUNKS: sum(record.live_chunks for record in records),
    }
    for table, count in counts.items():
        stored = rows.tables.count_rows(table, rows.versions)
        if stored != count:
            raise IntegrityError(
                f"table `{table}` must hold {count} rows, got {stored}; run the same ingest again, nothing "
                "was published"
            )
