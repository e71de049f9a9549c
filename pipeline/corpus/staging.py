"""Write what has to be encoded, and only that, as small Parquet shards.

Last step of stage 1: checked rows pass the ledger; new and changed ones are staged, duplicates join the
quarantine, the rest is counted. A shard is closed by the row that brings it to ``shard_characters``, so that
shards do not depend on how the source was batched. It does not encode, and does not touch the collection.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.checks import CheckedBatch
from cairn.pipeline.corpus.ledger import CHANGED, DUPLICATE, ENCODED, NEW, UNCHANGED, Ledger
from cairn.pipeline.corpus.origins import ORIGIN_SCHEMA
from cairn.pipeline.corpus.quarantine import (
    Reason,
    RowWriter,
    reason_counts,
    rejected_rows,
)
from cairn.pipeline.corpus.read_files import ReadFiles
from cairn.pipeline.corpus.scan import Scan, read_damaged_files, read_file
from cairn.pipeline.corpus.source_record import digest_of
from cairn.pipeline.types import ProgressListener, silent_progress, staged_schema
from jaxtyping import Bool, Int8

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

ROW_GROUP_CHARACTERS = 1 << 20
ROW_GROUP_ROWS = 8_192
"""A shard's row group ends at either: what a reader of shards must hold at once."""
PROGRESS_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """What stage 1 did; ``rows == indexed + unchanged + quarantined``.

    ``rows`` counts every row of the readable files, and each damaged file as one. ``is_complete`` is false
    when a file or a part of one could not be read: then a document that was not met may still exist, and none
    may be deleted for it. ``characters`` counts staged texts. ``passed_over`` are the places in the scan of
    files that were not read, as nothing has changed in them; their rows are counted as if they had been.
    """

    shards: tuple[Path, ...]
    rows: int
    new: int
    changed: int
    unchanged: int
    already_encoded: int
    quarantined: int
    characters: int
    quarantine_reasons: dict[str, int]
    is_complete: bool
    passed_over: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.rows == self.indexed + self.unchanged + self.quarantined

    @property
    def indexed(self) -> int:
        """Documents that are new, or have a new version, in the next generation."""
        return self.new + self.changed + self.already_encoded

    @property
    def staged(self) -> int:
        """Documents that have to be encoded."""
        return self.new + self.changed


def stage_changes(
    scan: Scan,
    config: CorpusConfig,
    ledger: Ledger,
    folder: Path,
    shard_characters: int,
    quarantine: RowWriter,
    progress: ProgressListener = silent_progress,
    origins: RowWriter | None = None,
) -> Staged:
    """Pass the corpus through checks and ledger; write the rows to encode to ``folder``, emptied first.

    ``origins`` takes where each row that is to be indexed stands, as :data:`ORIGIN_SCHEMA`.
    """
    with durable.storage_errors("staging the corpus"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    with _ShardWriter(folder, staged_schema(scan.metadata_fields), shard_characters) as shards:
        return _Pass(scan, config, ledger, shards, quarantine, progress, origins).run()


def plan_changes(
    scan: Scan,
    config: CorpusConfig,
    ledger: Ledger,
    quarantine: RowWriter | None = None,
    progress: ProgressListener = silent_progress,
) -> Staged:
    """Count what :func:`stage_changes` would do, writing no shard."""
    return _Pass(scan, config, ledger, None, quarantine, progress).run()


def stage_stored(
    documents: Iterable[pa.RecordBatch],
    ledger: Ledger,
    folder: Path,
    shard_characters: int,
    schema: pa.Schema,
) -> tuple[tuple[Path, ...], int]:
    """Stage rows that are stored already, without those the ledger has encoded.

    Returns the shards and the number of characters of their texts. Rows have the columns of the staged
    ``schema`` but for ``query``, which is not stored.
    """
    with durable.storage_errors("staging the stored documents"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    characters = 0
    with _ShardWriter(folder, schema, shard_characters) as shards:
        for batch in documents:
            codes = ledger.classify(
                batch.column("doc_id").to_pylist(), batch.column("content_sha256").to_pylist()
            )
            rows = batch.filter(pa.array(codes != ENCODED))
            columns = [
                pa.nulls(rows.num_rows, field.type) if field.name == "query" else rows.column(field.name)
                for field in schema
            ]
            characters += int(pc.sum(pc.utf8_length(rows.column("text"))).as_py() or 0)
            shards.write(pa.RecordBatch.from_arrays(columns, schema=schema))
        return shards.finish(), characters


class _Pass:
    """One pass of a corpus through checks and ledger, file by file, with what it counts."""

    def __init__(
        self,
        scan: Scan,
        config: CorpusConfig,
        ledger: Ledger,
        shards: _ShardWriter | None,
        quarantine: RowWriter | None,
        progress: ProgressListener,
        origins: RowWriter | None = None,
    ) -> None:
        self._scan = scan
        self._config = config
        self._ledger = ledger
        self._shards = shards
        self._quarantine = quarantine
        self._progress = progress
        self._origins = origins
        self._files = ReadFiles(ledger, scan, config)
        self._codes: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter()
        self._rows = self._characters = 0
        self._next_report_seconds = 0.0

    def run(self) -> Staged:
        for batch in read_damaged_files(self._scan):
            self._take(batch)
        for place, num_rows in enumerate(self._scan.file_rows):
            if self._files.passes_over(place):
                self._codes[UNCHANGED] += num_rows
                for rejected in self._files.rejected(place):
                    self._reject(rejected)
                    self._codes[UNCHANGED] -= rejected.num_rows
                self._count(num_rows)
                continue
            for batch in read_file(self._scan, place, self._config):
                for rejected in self._take(batch):
                    self._files.reject(rejected)
            self._files.end(place)
        self._report()
        codes, reasons = self._codes, self._reasons
        return Staged(
            shards=() if self._shards is None else self._shards.finish(),
            rows=self._rows,
            new=codes[NEW],
            changed=codes[CHANGED],
            unchanged=codes[UNCHANGED],
            already_encoded=codes[ENCODED],
            quarantined=reasons.total(),
            characters=self._characters,
            quarantine_reasons=dict(sorted(reasons.items())),
            is_complete=not (reasons[Reason.DAMAGED_FILE] or reasons[Reason.DAMAGED_ROWS]),
            passed_over=tuple(self._files.passed_over),
        )

    def _take(self, batch: CheckedBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Stage what has to be encoded of a batch; return its quarantined rows."""
        codes = self._ledger.classify(
            batch.rows.column("doc_id").to_pylist(), batch.rows.column("content_sha256").to_pylist()
        )
        duplicates = _duplicates(batch, codes)
        self._reject(batch.rejected)
        self._reject(duplicates)
        self._codes.update(codes.tolist())
        is_staged = (codes == NEW) | (codes == CHANGED)
        staged = batch.rows if is_staged.all() else batch.rows.filter(pa.array(is_staged))
        self._characters += int(pc.sum(pc.utf8_length(staged.column("text"))).as_py() or 0)
        if self._shards is not None:
            self._shards.write(staged)
        if self._origins is not None:
            self._origins.write(_origins(batch, is_staged | (codes == ENCODED)))
        self._count(batch.num_rows)
        return batch.rejected, duplicates

    def _reject(self, rejected: pa.RecordBatch) -> None:
        self._ledger.mark_present(rejected.column("doc_id").drop_null().to_pylist())
        self._reasons.update(reason_counts(rejected))
        if self._quarantine is not None:
            self._quarantine.write(rejected)

    def _count(self, num_rows: int) -> None:
        self._rows += num_rows
        if time.monotonic() >= self._next_report_seconds:
            self._report()
            self._next_report_seconds = time.monotonic() + PROGRESS_SECONDS

    def _report(self) -> None:
        self._progress("corpus", self._rows, self._scan.num_rows + len(self._scan.damaged_files), "rows")


def _origins(batch: CheckedBatch, is_indexed: Bool[np.ndarray, " N"]) -> pa.RecordBatch:
    rows = batch.rows.filter(pa.array(is_indexed))
    arrays = [
        rows.column("doc_id"),
        pa.array(
            map(digest_of, rows.column("content_sha256").to_pylist()), ORIGIN_SCHEMA.field("content").type
        ),
        pa.array(batch.row_indices()[is_indexed] if rows.num_rows else [], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ORIGIN_SCHEMA)


def _duplicates(batch: CheckedBatch, codes: Int8[np.ndarray, " N"]) -> pa.RecordBatch:
    positions = np.flatnonzero(codes == DUPLICATE)
    rows = batch.rows.take(pa.array(positions, pa.int64()))
    return rejected_rows(
        rows.column("source_file"),
        batch.row_indices()[positions] if len(positions) else [],
        Reason.DUPLICATE_ID,
        "an earlier row of this corpus has the same id; the first one is kept",
        rows.column("doc_id"),
    )


class _ShardWriter:
    """Append rows to numbered shards; where one ends depends on the rows alone."""

    def __init__(self, folder: Path, schema: pa.Schema, shard_characters: int) -> None:
        self._folder = folder
        self._schema = schema
        self._shard_characters = shard_characters
        self._paths: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        self._buffer: list[pa.RecordBatch] = []
        self._buffer_rows = self._buffer_characters = self._written_characters = 0

    def __enter__(self) -> _ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, rows: pa.RecordBatch) -> None:
        ends = np.cumsum(np.asarray(pc.utf8_length(rows.column("text"))), dtype=np.int64)
        start = 0
        while start < rows.num_rows:
            before = int(ends[start - 1]) if start else 0
            room = min(
                ROW_GROUP_CHARACTERS - self._buffer_characters,
                self._shard_characters - self._written_characters,
            )
            stop = int(np.searchsorted(ends, before + room, side="left")) + 1
            stop = min(stop, start + ROW_GROUP_ROWS - self._buffer_rows, rows.num_rows)
            taken = int(ends[stop - 1]) - before
            self._buffer.append(rows.slice(start, stop - start))
            self._buffer_rows += stop - start
            self._buffer_characters += taken
            self._written_characters += taken
            is_full = self._written_characters >= self._shard_characters
            if (
                is_full
                or self._buffer_characters >= ROW_GROUP_CHARACTERS
                or self._buffer_rows >= ROW_GROUP_ROWS
            ):
                self._flush()
            if is_full:
                self._close_shard()
            start = stop

    def finish(self) -> tuple[Path, ...]:
        self._flush()
        self._close_shard()
        return tuple(self._paths)

    def _flush(self) -> None:
        if not self._buffer:
            return
        with durable.storage_errors("staging the corpus"):
            if self._writer is None:
                self._paths.append(self._folder / f"{len(self._paths):06d}.parquet")
                unique = (
                    "doc_id",
                    "text",
                    "content_sha256",
                )  # a dictionary of values that never repeat only costs
                settings: dict[str, Any] = {
                    "use_dictionary": [name for name in self._schema.names if name not in unique]
                }
                self._writer = pq.ParquetWriter(
                    self._paths[-1], self._schema, compression="zstd", write_statistics=False, **settings
                )
            self._writer.write_table(pa.Table.from_batches(self._buffer, self._schema))
        self._buffer = []
        self._buffer_rows = self._buffer_characters = 0

    def _close_shard(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with durable.storage_errors("staging the corpus"):
                writer.close()
        self._written_characters = 0
