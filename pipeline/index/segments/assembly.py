"""The segments of a new generation: those of the one before, linked, and what has changed since.

    deleted rows ─▶ new bits beside the files of older segments
    new rows     ─▶ one segment, with the rows of the newest segments where a merge is due

What a commit deleted are the documents of some ids, which position files find; what it added ends every scan
of the tables. A merged segment is written from the rows, as any other.

All rows become one segment where that is as quick, where a codebook has to be trained, and where a file of
the generation before is damaged or not there to be shared: sharing it would leave no generation whole.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.files import has_sha256
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import (
    CHUNKS,
    DELETED_BITS,
    DOCUMENTS,
    OPTIONAL_FILES,
    TABLES,
    VECTOR_FILES,
    generation_name,
    needed_files,
    row_files,
)
from cairn.pipeline.index.rows import StoredRows
from cairn.pipeline.index.segments.segment import SegmentRows, bits_of, open_rows
from cairn.pipeline.index.segments.writer import SegmentWriter, largest, needs_training, read_codebook
from cairn.pipeline.manifest import FileRecord, Manifest, SegmentRecord
from cairn.pipeline.types import ProgressListener
from cairn.pipeline.vector_index.faiss_build import Codebook

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

    ``base`` is the generation served now, None where nothing of it is to be shared. ``optional`` are those of
    :data:`OPTIONAL_FILES` that segments of the new one have.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        base: Manifest | None,
        number: int,
        folder: Path,
        config: IndexConfig,
        *,
        optional: Collection[str],
    ) -> None:
        self._layout, self._base = layout, base
        self._number, self._folder, self._config = number, folder, config
        self._optional = optional
        self.hashed: dict[str, FileRecord] = {}
        """Files with their hashes: those that are the generation's before."""

    def build(self, rows: StoredRows, progress: ProgressListener) -> tuple[SegmentRecord, ...]:
        """Write or link every file of the segments."""
        kept = None if self._base is None else self._keep(self._base, rows.tables.deleted_ids)
        if self._base is not None and kept and self._is_worth_it(kept, rows.tables.num_added):
            records = self._add(self._base, kept, rows, progress)
        else:
            records = [self._writer(dict.fromkeys(TABLES), progress).write("", rows)]
        commit_point("segments-assembled")
        return tuple(records)

    def _share(self, base: Manifest, name: str) -> None:
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

    def _keep(self, base: Manifest, deleted_ids: pa.LargeStringArray) -> list[_Kept] | None:
        """Return the segments that have rows left; None where a file of theirs cannot be shared."""
        kept: list[_Kept] = []
        for record in base.segments:
            rows = self._shared_rows(base, record)
            if rows is None:
                return None
            left = rows.without(deleted_ids)
            if left.deleted_documents.num_live:
                kept.append(_Kept(record=left.described(record), rows=left, is_changed=left is not rows))
        return kept

    def _shared_rows(self, base: Manifest, record: SegmentRecord) -> SegmentRows | None:
        """Map the rows of a segment of the generation before; None where a file of it cannot be shared."""
        if {name for name in OPTIONAL_FILES if record.name + name in base.files} != set(self._optional):
            return None
        folder = self._layout.generation_folder(base.generation)
        names = {*needed_files(record), *row_files(record, base.files)}
        if not all(
            name in base.files
            and base.files[name].problem(folder / name, check_hash=False) is None
            and has_sha256(folder / name, base.files[name].sha256)
            for name in names
        ):
            return None
        return open_rows(folder, record)

    def _is_worth_it(self, kept: Sequence[_Kept], num_added: Mapping[str, int]) -> bool:
        """Tell whether sharing segments is quicker than one whole, and their codebooks still do."""
        records = [each.record for each in kept]
        counts = {table: count + num_added[table] for table, count in _num_live(records).items()}
        return counts[CHUNKS] > tiers.WHOLE_CHUNKS and not any(
            needs_training(records, table, counts[table], self._config) for table in TABLES
        )

    def _add(
        self, base: Manifest, kept: Sequence[_Kept], rows: StoredRows, progress: ProgressListener
    ) -> list[SegmentRecord]:
        records, added = [each.record for each in kept], rows.tables.num_added
        _require_all(records, rows)
        live, stored = [each.live_chunks for each in records], [each.chunks for each in records]
        if added[DOCUMENTS]:
            live, stored = [*live, added[CHUNKS]], [*stored, added[CHUNKS]]
        first = tiers.first_to_merge(live, stored)
        shared = records[:first]
        for each in kept[:first]:
            self._share_segment(base, each)
        if added[DOCUMENTS] or first is not None:
            own = replace(rows, first=_num_live(shared))
            codebooks = self._codebooks(base, records)
            name = f"{generation_name(self._number)}-"
            shared.append(self._writer(codebooks, progress).write(name, own))
            _require_new(kept[:first], open_rows(self._folder, shared[-1]).documents.column("doc_id"))
        return shared

    def _writer(self, codebooks: Mapping[str, Codebook | None], progress: ProgressListener) -> SegmentWriter:
        return SegmentWriter(self._folder, self._config, codebooks, progress, self._optional)

    def _codebooks(self, base: Manifest, records: Sequence[SegmentRecord]) -> dict[str, Codebook | None]:
        folder = self._layout.generation_folder(base.generation)
        codebooks: dict[str, Codebook | None] = {}
        for table, file in VECTOR_FILES:
            owner = largest(records, table)
            codebooks[table] = read_codebook(folder / (owner.name + file), owner.indexes[table])
        return codebooks

    def _share_segment(self, base: Manifest, kept: _Kept) -> None:
        for name in row_files(kept.record, base.files):
            self._share(base, name)
        bits = kept.record.name + DELETED_BITS
        if kept.is_changed:
            (self._folder / bits).write_bytes(bits_of(kept.rows.deleted_documents))
        elif bits in base.files:
            self._share(base, bits)


def _num_live(records: Sequence[SegmentRecord]) -> dict[str, int]:
    """Count the rows of each table that are left in some segments."""
    return {
        DOCUMENTS: sum(record.live_documents for record in records),
        CHUNKS: sum(record.live_chunks for record in records),
    }


def _require_new(kept: Sequence[_Kept], doc_ids: pa.LargeStringArray) -> None:
    for each in kept:
        left = each.rows.without(doc_ids).deleted_documents.num_live
        if repeated := each.rows.deleted_documents.num_live - left:
            raise IntegrityError(
                f"table `documents` must hold each doc_id once, got {repeated} repeated; run the same "
                "ingest again, nothing was published"
            )


def _require_all(records: Sequence[SegmentRecord], rows: StoredRows) -> None:
    """Refuse tables that hold other rows than the segments and what was added."""
    for table, count in _num_live(records).items():
        expected = count + rows.tables.num_added[table]
        stored = rows.tables.count_rows(table, rows.versions)
        if stored != expected:
            raise IntegrityError(
                f"table `{table}` must hold {expected} rows, got {stored}; run the same ingest again, "
                "nothing was published"
            )
