"""Write what has to be encoded, and only that, as small Parquet shards.

Last step of stage 1: checked rows pass the ledger; new and changed ones are staged, duplicates join the
quarantine, the rest is counted. A shard is closed by the row that brings it to ``shard_characters``, so that
shards do not depend on how the source was batched. It does not encode, and does not touch the collection.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.checks import CheckedBatch
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.ledger import CHANGED, DUPLICATE, ENCODED, NEW, UNCHANGED, Ledger
from cairn.pipeline.corpus.quarantine import (
    Reason,
    RowWriter,
    examples,
    reason_counts,
    rejected_rows,
)
from cairn.pipeline.corpus.scan import Scan, read_damaged_files, read_file
from cairn.pipeline.corpus.source_record import ORIGIN_SCHEMA, digest_of
from cairn.pipeline.types import GIVEN_VECTORS, ProgressListener, silent_progress, staged_schema
from jaxtyping import Bool, Int8

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

SHARD_ROWS = 8_192
"""Rows of a shard at most, however short their texts are: what a reader of shards must hold at once."""
BYTES_A_CHARACTER: Final = 64
"""Of given vectors, what fills a shard as one character of text does: a document may bring thousands."""
PROGRESS_SECONDS = 0.25
SHOWN_NAMES: Final = 20
"""Files with guessed encodings that a warning names: any of them may be misread."""
MAX_COMPARED = 10_000
"""Changed documents whose files are compared with those that they had before."""
SAME_ID: Final = "an earlier row of this corpus has the same id; the first one is kept"
UNSTORED: Final = ("query", GIVEN_VECTORS)
"""Columns of staged rows that no table has."""
StoredSources = Callable[[], Iterable[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Place:
    """Which of ``num_partitions`` a document is for, by its id."""

    num_partitions: int
    of: Callable[[str], int]


ONE_PLACE: Final = Place(1, lambda _: 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """What stage 1 did; ``rows == indexed + unchanged + quarantined``.

    ``rows`` counts every row of the readable files, and each damaged file as one. ``is_complete`` is false
    when a file or a part of one could not be read, or was doubted: then a document that was not met may still
    exist, and none may be deleted for it. ``characters`` counts staged texts.
    ``passed_over`` are the places in the scan of files that were not read, as nothing has changed in them;
    their rows are counted as if they had been.
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
    quarantine_examples: dict[str, str]
    is_complete: bool
    passed_over: tuple[int, ...]
    warnings: tuple[str, ...] = ()

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
    folder: Path | None = None,
    shard_characters: int = 0,
    quarantine: RowWriter | None = None,
    progress: ProgressListener = silent_progress,
    origins: RowWriter | None = None,
    stored: StoredSources | None = None,
    place: Place = ONE_PLACE,
) -> Staged:
    """Pass the corpus through checks and ledger; write the rows to encode to ``folder``, emptied first.

    Without a folder they are counted alone. ``place`` says which of how many partitions a row is for: the
    numbers of its shards leave that remainder. ``origins`` takes where each row that is to be indexed stands,
    as :data:`ORIGIN_SCHEMA`. ``stored`` reads the ids and source files of the documents that are published.
    """
    schema = staged_schema(scan.metadata_fields)
    shards = None if folder is None else _Shards(folder, schema, shard_characters, place)
    return _Pass(scan, config, ledger, shards, quarantine, progress, origins, stored).run()


def stage_stored(
    documents: Iterable[pa.RecordBatch],
    ledger: Ledger,
    folder: Path,
    shard_characters: int,
    schema: pa.Schema,
    place: Place = ONE_PLACE,
) -> tuple[tuple[Path, ...], int]:
    """Stage rows that are stored already, without those the ledger has encoded.

    Returns the shards and the number of characters of their texts. Rows have the columns of the staged
    ``schema`` but for ``query`` and :data:`GIVEN_VECTORS`, which are not stored.
    """
    characters = 0
    shards = _Shards(folder, schema, shard_characters, place)
    for batch in documents:
        codes = ledger.classify(
            batch.column("doc_id").to_pylist(), batch.column("content_sha256").to_pylist()
        )
        rows = batch.filter(pa.array(codes != ENCODED))
        columns = [
            pa.nulls(rows.num_rows, field.type) if field.name in UNSTORED else rows.column(field.name)
            for field in schema
        ]
        characters += int(pc.sum(pc.utf8_length(rows.column("text"))).as_py() or 0)
        shards.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    return shards.finish(), characters


def guess_told(encoding: str, names: Sequence[str]) -> str:
    """Say of files what their encoding was guessed to be."""
    also = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
    return (
        f"read as {encoding.replace('cp125', 'windows-125')}, as they are not UTF-8: "
        f"{', '.join(names[:SHOWN_NAMES])}{also}; if "
        "letters are wrong, write the texts again in UTF-8"
    )


@dataclass
class _Pass:
    """One pass of a corpus through checks and ledger, file by file, with what it counts."""

    scan: Scan
    config: CorpusConfig
    ledger: Ledger
    shards: _Shards | None
    quarantine: RowWriter | None
    progress: ProgressListener
    origins: RowWriter | None
    stored: StoredSources | None

    def __post_init__(self) -> None:
        self.scan = replace(self.scan, damaged_files=(*self.scan.damaged_files, *self._cut_tables()))
        self._changed = dict[str, str]()
        self._passed_over = list[int]()
        self.ledger.begin(self.scan, self.config)
        self._codes: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter()
        self._examples = dict[str, str]()
        self._doubts: list[str] = []
        self._guesses = dict[str, list[str]]()
        self._rows = self._characters = 0
        self._next_report_seconds = 0.0

    def run(self) -> Staged:
        for batch in read_damaged_files(self.scan):
            self._take(batch)
        for place, scanned in enumerate(self.scan.files):
            if self.ledger.passes_over(place):
                self._passed_over.append(place)
                self._codes[UNCHANGED] += scanned.footer.num_rows
                for rejected in self.ledger.rejected(place):
                    self._reject(rejected)
                    self._codes[UNCHANGED] -= rejected.num_rows
                self._count(scanned.footer.num_rows)
                continue
            before = self._rows
            for batch in read_file(self.scan, scanned, self.config):
                if batch.encoding is not None:
                    guessed = self._guesses.setdefault(batch.encoding, [])
                    guessed += {scanned.file.name}.difference(guessed[-1:])
                if batch.doubt is not None:
                    self._doubts.append(batch.doubt)
                    self.ledger.doubt()
                for rejected in self._take(batch):
                    self.ledger.reject(rejected)
            self.ledger.end(place, self._rows - before)
        self._report()
        codes, reasons = self._codes, self._reasons
        return Staged(
            shards=() if self.shards is None else self.shards.finish(),
            rows=self._rows,
            new=codes[NEW],
            changed=codes[CHANGED],
            unchanged=codes[UNCHANGED],
            already_encoded=codes[ENCODED],
            quarantined=reasons.total(),
            characters=self._characters,
            quarantine_reasons=dict(sorted(reasons.items())),
            quarantine_examples=dict(sorted(self._examples.items())),
            is_complete=not (reasons[Reason.DAMAGED_FILE] or reasons[Reason.DAMAGED_ROWS] or self._doubts),
            passed_over=tuple(self._passed_over),
            warnings=(
                *self._doubts,
                *self._replacements(),
                *(guess_told(encoding, names) for encoding, names in sorted(self._guesses.items())),
            ),
        )

    def _take(self, batch: CheckedBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Stage what has to be encoded of a batch; return its quarantined rows."""
        codes = self.ledger.classify(
            batch.rows.column("doc_id").to_pylist(), batch.rows.column("content_sha256").to_pylist()
        )
        duplicates = _duplicates(batch, codes)
        self._reject(batch.rejected)
        self._reject(duplicates)
        self._codes.update(codes.tolist())
        if len(self._changed) < MAX_COMPARED and (codes == CHANGED).any():
            changed = batch.rows.select(["doc_id", "source_file"]).filter(pa.array(codes == CHANGED))
            for row in changed.to_pylist():
                if row["source_file"].endswith(row["doc_id"]):  # a file that is a document
                    self._changed[row["doc_id"]] = row["source_file"]
        is_staged = (codes == NEW) | (codes == CHANGED)
        staged = batch.rows if is_staged.all() else batch.rows.filter(pa.array(is_staged))
        self._characters += int(pc.sum(pc.utf8_length(staged.column("text"))).as_py() or 0)
        if self.shards is not None:
            self.shards.write(staged)
        if self.origins is not None:
            self.origins.write(_origins(batch, is_staged | (codes == ENCODED)))
        self._count(batch.num_rows)
        return batch.rejected, duplicates

    def _replacements(self) -> Iterator[str]:
        """Say which documents of other files the changed ones take the place of."""
        if not self._changed or self.stored is None:
            return
        replaced = list[tuple[str, str]]()
        for batch in self.stored():
            found = batch.filter(pc.is_in(batch.column("doc_id"), pa.array(self._changed, pa.string())))
            for row in found.to_pylist():
                old, new = row["source_file"], self._changed[row["doc_id"]]
                if not _may_be_same(old, new):
                    replaced.append((old, new))
        if replaced:
            old, new = min(replaced)
            yield (
                f"{len(replaced):,} documents took the place of those of other files with the same ids, such "
                f"as {new} that of {old}; to keep both, ingest both with --id-prefix into a new collection"
            )

    def _cut_tables(self) -> Iterator[tuple[SourceFile, str]]:
        """Yield the tables without an id or text that gave documents which are stored, and may be cut now."""
        left_out = dict[str, list[tuple[SourceFile, str]]]()
        for file, reason in self.scan.schema.left_out:
            left_out.setdefault(PurePath(file.name).name, []).append((file, reason))
        for batch in self.stored() if self.stored and left_out else ():
            for old in batch.column("source_file").unique().to_pylist():
                named = left_out.get(PurePath(old).name, [])
                for file, reason in [each for each in named if _may_be_same(old, each[0].name)]:
                    named.remove((file, reason))
                    yield (
                        file,
                        f"it gave documents before and is now of {reason}; write it again, or delete it",
                    )

    def _reject(self, rejected: pa.RecordBatch) -> None:
        self.ledger.mark_present(rejected.column("doc_id").drop_null().to_pylist())
        self._reasons.update(reason_counts(rejected))
        self._examples = examples(rejected) | self._examples
        if self.quarantine is not None:
            self.quarantine.write(rejected)

    def _count(self, num_rows: int) -> None:
        self._rows += num_rows
        if time.monotonic() >= self._next_report_seconds:
            self._report()
            self._next_report_seconds = time.monotonic() + PROGRESS_SECONDS

    def _report(self) -> None:
        self.progress("corpus", self._rows, self.scan.num_rows + len(self.scan.damaged_files), "rows")


def _may_be_same(old: str, new: str) -> bool:
    """Whether names may be of one file, which was named from another folder before."""
    ends = [f"/{PurePath(name)}" for name in (old, new)]
    return ends[0].endswith(ends[1]) or ends[1].endswith(ends[0])


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
        SAME_ID,
        rows.column("doc_id"),
    )


class _Shards:
    """Append rows to the shards of their partitions: partition p has shards p, p + P and so on."""

    def __init__(self, folder: Path, schema: pa.Schema, shard_characters: int, place: Place) -> None:
        with durable.storage_errors("staging the corpus"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._place = place
        self._writers = [
            _ShardWriter(folder, schema, shard_characters, number, place.num_partitions)
            for number in range(place.num_partitions)
        ]

    def write(self, rows: pa.RecordBatch) -> None:
        if len(self._writers) == 1:
            self._writers[0].write(rows)
            return
        owner_N = np.array(list(map(self._place.of, rows.column("doc_id").to_pylist())), np.int64)
        for owner in np.unique(owner_N).tolist():
            self._writers[owner].write(rows.take(pa.array(np.flatnonzero(owner_N == owner))))

    def finish(self) -> tuple[Path, ...]:
        """Write the rows that are left, and return the paths of all shards, ascending."""
        return tuple(sorted(path for writer in self._writers for path in writer.finish()))


class _ShardWriter:
    """Append rows to numbered shards; where one ends depends on the rows alone."""

    def __init__(self, folder: Path, schema: pa.Schema, shard_characters: int, first: int, step: int) -> None:
        self._folder, self._schema, self._shard_characters = folder, schema, shard_characters
        self._first, self._step = first, step
        self._paths: list[Path] = []
        self._rows: list[pa.RecordBatch] = []
        self._num_rows = self._characters = 0

    def write(self, rows: pa.RecordBatch) -> None:
        given = pc.fill_null(pc.binary_length(rows.column(GIVEN_VECTORS)), 0)
        sizes = np.asarray(pc.utf8_length(rows.column("text"))) + np.asarray(given) // BYTES_A_CHARACTER
        ends = np.cumsum(sizes, dtype=np.int64)
        start = 0
        while start < rows.num_rows:
            before = int(ends[start - 1]) if start else 0
            room = self._shard_characters - self._characters
            stop = int(np.searchsorted(ends, before + room, side="left")) + 1
            stop = min(stop, start + SHARD_ROWS - self._num_rows, rows.num_rows)
            self._rows.append(rows.slice(start, stop - start))
            self._num_rows += stop - start
            self._characters += int(ends[stop - 1]) - before
            if self._characters >= self._shard_characters or self._num_rows >= SHARD_ROWS:
                self.finish()
            start = stop

    def finish(self) -> Sequence[Path]:
        """Write the rows that are left, and return the paths of all shards."""
        if self._rows:
            path = self._folder / f"{self._first + self._step * len(self._paths):06d}.parquet"
            unique = {"doc_id", "text", "content_sha256", GIVEN_VECTORS}  # a dictionary of them only costs
            dictionaries: Any = [name for name in self._schema.names if name not in unique]
            rows = pa.Table.from_batches(self._rows, self._schema)
            with durable.storage_errors("staging the corpus"):
                pq.write_table(
                    rows, path, compression="zstd", use_dictionary=dictionaries, write_statistics=False
                )
            self._paths.append(path)
            self._rows, self._num_rows, self._characters = [], 0, 0
        return self._paths
