"""A segment written in parts by several processes, and joined: its files are what one process would write.

    rows ─▶ codebooks, where none is trained ─▶ parts, cut between documents ─▶ joined ─▶ moved into place
            a task a table                      a task each                     one task

A task is told all it needs, reads pinned tables and writes into a folder of its own. So one that is given to
a second worker, because the first seemed dead, harms nothing, whichever of them ends. What a killed
run leaves the next writer clears.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point, fsync_file, storage_errors
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.faiss_build import Codebook, train_codebook
from cairn.pipeline.index.faiss_index import choose_kind
from cairn.pipeline.index.lance_index import StoredRows
from cairn.pipeline.index.position_files import require_unique_ids
from cairn.pipeline.index.segments.merge import merge_segments
from cairn.pipeline.index.segments.segment import DeletedRows, Segment, open_rows, open_segment
from cairn.pipeline.index.segments.writer import SegmentWriter
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.manifest import FileRecord, SegmentRecord, record_file
from cairn.pipeline.types import silent_progress

PART_CHUNKS: Final = 65_536
"""Chunks of a part: some five seconds of a core. Fewer would cost more than they save."""
MAX_PARTS: Final = 64
PARTS_FOLDER: Final = ".parts.tmp"
"""Beside the folder of the generation; a name that :func:`cairn.pipeline.durable.clear_temporary` clears."""

PART_COMMIT_POINTS: Final = ("codebooks-trained", "parts-written", "parts-joined", "merged-by-worker")
"""Steps of a segment written in parts, which take the place of those of the files of one, and of a merge."""


class Task(Protocol):
    """A piece of work for another process: pickled with all it needs, run there, its answer pickled back.

    ``num_rows`` says how much it is, next to others.
    """

    @property
    def num_rows(self) -> int:
        """Rows of tables that it reads."""
        ...

    def reads(self) -> Iterable[Path]:
        """Return the files that it reads, for a worker that does not see them."""
        ...

    def run(self) -> Any:
        """Do it; a second time does no harm."""
        ...


RunTasks = Callable[[Sequence[Task], Path], Sequence[Any]]
"""Run tasks in other processes and return their answers in order.

The folder lies on the file system that the tasks work on: a process that does not see it can run none.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFiles:
    """The files of a segment in a folder of their own, each with its hash."""

    folder: Path
    record: SegmentRecord
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSegment:
    """A segment for another process to open; ``deleted`` = None of one that has just been written."""

    folder: Path
    record: SegmentRecord
    files: Collection[str]
    deleted: DeletedRows | None = None

    def open(self) -> Segment:
        """Map its files."""
        rows = open_rows(self.folder, self.record, self.deleted)
        return open_segment(self.folder, self.record, self.files, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCodebook:
    """Trains the codebook of a table on a sample of its rows."""

    rows: StoredRows
    table: str
    num_rows: int
    config: IndexConfig

    def reads(self) -> Iterable[Path]:
        """See :class:`Task`."""
        return self.rows.files([self.table])

    @returning_freed_memory()
    def run(self) -> Codebook | None:
        """Return the codebook, None where vectors are kept as they are."""
        vectors = partial(self.rows.vectors, self.table)
        return train_codebook(vectors, self.num_rows, self.rows.tables.vector_dim, self.config)


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePart:
    """Writes a span of rows as a segment, in a new folder below the writer's."""

    writer: SegmentWriter
    rows: StoredRows
    num_rows: int

    def reads(self) -> Iterable[Path]:
        """See :class:`Task`."""
        return self.rows.files()

    @returning_freed_memory()
    def run(self) -> StoredSegment:
        """Write it; no manifest names it, so nothing is hashed."""
        with storage_errors("writing a part of a segment"):
            folder = _new_folder(self.writer.folder)
            record = replace(self.writer, folder=folder).write("", self.rows)
            return StoredSegment(folder=folder, record=record, files={path.name for path in folder.iterdir()})


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinParts:
    """Joins neighbouring segments to one, whose files begin with ``name``, in a new folder in ``folder``."""

    folder: Path
    name: str
    parts: Sequence[StoredSegment]
    codebooks: Mapping[str, Codebook | None]
    num_rows: int

    def reads(self) -> Iterable[Path]:
        """See :class:`Task`."""
        return (part.folder / name for part in self.parts for name in part.files)

    @returning_freed_memory()
    def run(self) -> WrittenFiles:
        """Write, flush and hash the files."""
        with storage_errors("joining segments"):
            segments = [part.open() for part in self.parts]
            written = zip(self.parts, segments, strict=True)
            new = [each.rows.documents.column("doc_id") for part, each in written if part.deleted is None]
            if new:
                require_unique_ids(new)
            folder = _new_folder(self.folder)
            record = merge_segments(segments, self.name, folder, self.codebooks)
            files: dict[str, FileRecord] = {}
            for path in sorted(folder.iterdir()):
                fsync_file(path)
                files[path.name] = record_file(path)
            return WrittenFiles(folder=folder, record=record, files=files)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRows:
    """Cuts rows into at most ``parts`` spans of about as many chunks each, no document in two of them."""

    rows: StoredRows
    num_rows: int
    parts: int

    def reads(self) -> Iterable[Path]:
        """See :class:`Task`."""
        return self.rows.files([DOCUMENTS])

    def run(self) -> list[dict[str, slice]]:
        """Return the spans; documents that have other than ``num_rows`` chunks are refused."""
        return cut_between_documents(self.rows, self.num_rows, self.parts)


def num_parts(num_chunks: int) -> int:
    """Return how many parts so many chunks are worth; one is not worth a task."""
    return min(num_chunks // PART_CHUNKS, MAX_PARTS)


def write_in_parts(
    writer: SegmentWriter, name: str, rows: StoredRows, counts: Mapping[str, int], run_tasks: RunTasks
) -> WrittenFiles:
    """Write a segment of ``counts`` rows of each table as :meth:`SegmentWriter.write` does, by tasks.

    Codes are those of one process, but for a vector that is as near to two centroids, to the last bit.
    """
    with _parts_folder(writer.folder) as folder:
        writer.progress("index", 0, 5, "files")
        codebooks = _with_trained(writer, rows, counts, run_tasks, folder)
        commit_point("codebooks-trained")
        writer.progress("index", 1, 5, "files")
        told = replace(writer, folder=folder, codebooks=codebooks, progress=silent_progress)
        cut = CutRows(rows=rows, num_rows=counts[CHUNKS], parts=num_parts(counts[CHUNKS]))
        (spans,) = run_tasks([cut], folder)
        parts = run_tasks(
            [
                WritePart(writer=told, rows=replace(rows, spans=span), num_rows=_length(span[CHUNKS]))
                for span in spans
            ],
            folder,
        )
        commit_point("parts-written")
        writer.progress("index", 4, 5, "files")
        joined = _join(parts, name, codebooks, writer.folder, folder, run_tasks)
    commit_point("parts-joined")
    indexes = {
        # A part does not know how many vectors there are in all, which is why they are kept as they are.
        table: index if codebooks[table] else {**index, "why": choose_kind(counts[table], writer.config)[1]}
        for table, index in joined.record.indexes.items()
    }
    return replace(joined, record=replace(joined.record, indexes=indexes))


def merge_by_task(
    segments: Sequence[StoredSegment],
    name: str,
    folder: Path,
    codebooks: Mapping[str, Codebook | None],
    run_tasks: RunTasks,
) -> WrittenFiles:
    """Write one segment into ``folder`` in the place of several, as ``merge_segments`` does, by a task."""
    with _parts_folder(folder) as below:
        merged = _join(segments, name, codebooks, folder, below, run_tasks)
    commit_point("merged-by-worker")
    return merged


@contextlib.contextmanager
def _parts_folder(folder: Path) -> Generator[Path]:
    """Make the folder of tasks beside that of a generation.

    A worker given up for dead may write there still; what it leaves is the next writer's to clear.
    """
    below = folder.with_name(PARTS_FOLDER)
    shutil.rmtree(below, ignore_errors=True)
    below.mkdir()
    try:
        yield below
    finally:
        shutil.rmtree(below, ignore_errors=True)


def _join(
    parts: Sequence[StoredSegment],
    name: str,
    codebooks: Mapping[str, Codebook | None],
    folder: Path,
    below: Path,
    run_tasks: RunTasks,
) -> WrittenFiles:
    """Have parts joined, and take the files into ``folder``, but for those that a store has."""
    num_rows = sum(part.record.live_chunks for part in parts)
    task = JoinParts(folder=below, name=name, parts=parts, codebooks=codebooks, num_rows=num_rows)
    joined: WrittenFiles = run_tasks([task], below)[0]
    if joined.folder.is_dir():
        for file in joined.files:
            (joined.folder / file).rename(folder / file)
        joined = replace(joined, folder=folder)
    return joined


def cut_between_documents(rows: StoredRows, num_chunks: int, parts: int) -> list[dict[str, slice]]:
    """Cut rows into at most so many spans of about as many chunks each, no document in two of them."""
    aims = [num_chunks * part // parts for part in range(1, parts)]
    bounds = [(0, 0)]
    documents = chunks = 0
    for batch in rows.scan(DOCUMENTS, ["num_chunks"]):
        ends = chunks + np.cumsum(batch.column("num_chunks").to_numpy(), dtype=np.int64)
        while aims and len(ends) and aims[0] <= ends[-1]:
            place = int(np.searchsorted(ends, aims.pop(0)))
            bounds.append((documents + place + 1, int(ends[place])))
        documents += len(ends)
        chunks = int(ends[-1]) if len(ends) else chunks
    if chunks != num_chunks:
        raise IntegrityError(
            f"table `chunks` must hold {chunks} rows, as the documents say, got {num_chunks}; run the same "
            "ingest again, nothing was published"
        )
    bounds = list(dict.fromkeys([*bounds, (documents, chunks)]))
    return [
        {DOCUMENTS: slice(begin[0], end[0]), CHUNKS: slice(begin[1], end[1])}
        for begin, end in pairwise(bounds)
    ]


def _with_trained(
    writer: SegmentWriter,
    rows: StoredRows,
    counts: Mapping[str, int],
    run_tasks: RunTasks,
    folder: Path,
) -> dict[str, Codebook | None]:
    """Return the codebooks of the tables, those trained that are due."""
    missing = [table for table in TABLES if writer.codebooks[table] is None]
    tasks = [
        TrainCodebook(rows=rows, table=table, num_rows=counts[table], config=writer.config)
        for table in missing
    ]
    return {**writer.codebooks, **dict(zip(missing, run_tasks(tasks, folder), strict=True))}


def _new_folder(below: Path) -> Path:
    folder = below / uuid.uuid4().hex
    folder.mkdir(parents=True)
    return folder


def _length(span: slice) -> int:
    return span.stop - span.start
