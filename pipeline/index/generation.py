"""One published generation, opened: everything a search reads, pinned and immutable.

Files are believed only when size and SHA-256 equal the manifest's (neither FAISS nor Lance notices a flipped
bit); the Lance tables are pinned to the manifest's versions. Opening never locks and never writes: a writer
publishes beside it. Building one is ``publish``'s business.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import (
    CairnError,
    DamageError,
    IntegrityError,
    PartitionsMissingError,
    StorageError,
    is_panic,
)
from cairn.pipeline.index.files import SCAN_BUFFER_BYTES, damaged_lance_files, open_pinned_dataset
from cairn.pipeline.index.layout import (
    HASHES,
    Checks,
    CollectionLayout,
    check_generation_files,
    read_manifest,
)
from cairn.pipeline.index.names import DOCUMENTS, POSITION_FILES
from cairn.pipeline.index.segments.segment import (
    JoinedColumns,
    JoinedWords,
    Segment,
    SegmentRows,
    StoredColumns,
    TokenVectors,
    VectorIndex,
    joined_column,
    joined_index,
    open_segment,
    open_token_vectors,
)
from cairn.pipeline.index.segments.words import count_languages
from cairn.pipeline.lexical.bm25 import DocumentBM25, PassageBM25
from cairn.pipeline.lexical.tokenizer import main_languages
from cairn.pipeline.manifest import FileRecord, Manifest
from cairn.pipeline.ragged import ranges
from jaxtyping import Float32, Int32, Int64, UInt8

if TYPE_CHECKING:
    import lance


Key = TypeVar("Key")
Value = TypeVar("Value")

SAMPLED_CHUNKS = 4_096
"""Chunks that stand for the corpus where an average will do."""
OPEN_ATTEMPTS = 3
"""A reader that loses its generation to two publications in a row while opening it starts over."""


MAX_COLUMN_BYTES: Final = 64 << 20
"""What a generation keeps in memory of its columns, for filters by a value."""
MAX_ROWS_BYTES: Final = 32 << 20
"""What it keeps of the documents that answers had: reading ten that lie far apart takes a millisecond."""
MAX_KEPT_ROWS: Final = 100
"""Rows of a longer answer are not kept: they would be all there is."""
MAX_MATCHES_BYTES: Final = 8 << 20
"""What it keeps of what filters leave, which are asked again and again."""
OBJECT_BYTES: Final = 600
"""What Arrow takes for a column of a kept row beside its value, and a filter beside its text."""


class Kept(Generic[Key, Value]):
    """What was asked for last, up to a size, such as bytes; safe to share between threads."""

    def __init__(self, max_size: int) -> None:
        self._max_size, self._size = max_size, 0
        self._lock = threading.Lock()
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """Return a value, None where it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def add(self, key: Key, value: Value, size: int) -> None:
        """Keep a value in the place of those that were asked for longest ago; one too large is not kept."""
        if size > self._max_size:
            return
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = value, size
            self._size += size - before
            while self._size > self._max_size:
                self._size -= self._values.popitem(last=False)[1][1]


class WatchedFiles:
    """Files of an opened generation, watched while they are read: ``records`` by their paths in ``folder``.

    One that was removed, replaced or written into since this was made is hashed again; a mapped file that was
    removed or replaced stays whole for its holder. ``damaged`` are those that were found so.
    """

    def __init__(self, folder: Path, records: Mapping[str, FileRecord], *, are_mapped: bool = False) -> None:
        self.records = dict(records)
        self.damaged: set[str] = set()
        self._folder, self._are_mapped = folder, are_mapped
        self._paths = {name: os.fspath(folder / name) for name in records}
        self._stamps = {name: _stamp(path) for name, path in self._paths.items()}

    def changed_file(self) -> tuple[str, str] | None:
        """Return a file that is no longer what it was and what is wrong with it; costs a ``stat`` a file."""
        for name, stamp in self._stamps.items():
            found = _stamp(self._paths[name])
            is_held = self._are_mapped and (found is None or stamp is None or found[0] != stamp[0])
            if found != stamp and not is_held:
                problem = self._problem(name)
                if problem is not None:
                    return name, problem
                self._stamps[name] = found
        return None

    def damaged_file(self) -> tuple[str, str] | None:
        """Hash all files; return one that is damaged and what is wrong with it."""
        problems = [(name, problem) for name in self.records if (problem := self._problem(name)) is not None]
        return problems[0] if problems else None

    def _problem(self, name: str) -> str | None:
        problem = self.records[name].problem(self._folder / name)
        if problem is not None:
            self.damaged.add(name)
        return problem


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a third of the time of a Path
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def table_errors(action: str, layout: CollectionLayout | None = None) -> Generator[None]:
    """Report what Lance raises while a search reads tables in one sentence, without its text.

    That may hold paths and values. ``action`` reads like "reading the answer's documents".
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, CairnError) or not (
            isinstance(error, RuntimeError | OSError | ValueError) or is_panic(error)
        ):
            raise
        advice = f"; run `{layout.command('verify')}`" if layout else ""
        raise StorageError(f"{action} failed{advice}") from error


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ColumnValues:
    """A column: each of its values once, and by document the number of its value, -1 for null."""

    values: pa.Array
    codes_N: Int32[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation(JoinedColumns):
    """What one search reads: two vector indexes, their columns, and the pinned table.

    Position p of ``documents`` is row p of ``doc_ids`` and ``cluster_ids``, and of a scan of the table; its
    chunks are positions ``chunk_offsets[p]`` to ``chunk_offsets[p + 1]`` of ``chunks``. ``token_vectors``
    is None where the collection has no token vectors. ``parts`` are the
    partitions where there are several: positions run through them in their order, their segments are its
    segments, and ``dataset`` is the first one's. ``warning`` is a sentence for the user when an older
    generation is served because the current one is damaged. ``missing`` are the names of partitions whose
    documents are not there, with the reason.
    """

    layout: CollectionLayout
    manifest: Manifest
    segments: Sequence[Segment]
    documents: VectorIndex
    chunks: VectorIndex
    token_vectors: TokenVectors | None
    dataset: lance.LanceDataset
    files: WatchedFiles
    lance_files: Sequence[WatchedFiles]
    parts: Sequence[Generation] = ()
    warning: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict[str, str])

    def warned(self, warning: str) -> Generation:
        """Return it with a sentence for the user."""
        return replace(self, warning=warning)

    @property
    def number(self) -> int:
        """The generation's number."""
        return self.manifest.generation

    @property
    def folder(self) -> Path:
        """Where the generation's files lie."""
        return self.layout.generation_folder(self.number)

    def segment_rows(self) -> Sequence[SegmentRows]:
        """Return the rows of the segments, in their order."""
        return [segment.rows for segment in self.segments]

    @property
    def num_documents(self) -> int:
        """Count the documents."""
        return self.manifest.documents

    @property
    def num_chunks(self) -> int:
        """Count the chunks."""
        return self.manifest.chunks

    @cached_property
    def part_starts(self) -> Int64[np.ndarray, " P"]:
        """The position of the first document of each part, and the number of documents at the end."""
        return np.append(0, np.cumsum([part.num_documents for part in self.parts], dtype=np.int64))

    @cached_property
    def document_schema(self) -> pa.Schema:
        """The documents table's schema."""
        return self.dataset.schema

    def scan_columns(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Stream columns of all documents of a generation without partitions."""
        scanner = self.dataset.scanner(
            columns=list(names),
            scan_in_order=True,
            batch_readahead=1,
            fragment_readahead=1,
            io_buffer_size=SCAN_BUFFER_BYTES,
        )
        return iter(scanner.to_batches())

    def read_column(self, name: str) -> pa.ChunkedArray:
        """Read a column of all documents."""
        if self.parts:
            chunks = [chunk for part in self.parts for chunk in part.read_column(name).chunks]
            return pa.chunked_array(chunks, self.document_schema.field(name).type)
        return self.dataset.scanner(columns=[name], scan_in_order=True).to_table().column(name)

    @cached_property
    def _values(self) -> tuple[threading.Lock, dict[str, ColumnValues | None]]:
        return threading.Lock(), {}

    def column_values(self, name: str, num_parts: int = 1) -> ColumnValues | None:
        """Return a column of all documents for memory; None where it takes more than there is for columns.

        None, too, while another search reads it. ``num_parts`` partitions share what there is.
        """
        lock, values = self._values
        if not lock.acquire(blocking=False):
            return values.get(name)
        try:
            if name not in values:
                known = [each for each in values.values() if each is not None]
                kept = sum(each.values.nbytes + each.codes_N.nbytes for each in known)
                values[name] = self._read_values(name, MAX_COLUMN_BYTES // num_parts - kept)
            return values[name]
        finally:
            lock.release()

    def _read_values(self, name: str, max_bytes: int) -> ColumnValues | None:
        parts: list[pa.DictionaryArray] = []
        for batch in self.scan_columns([name]):
            parts.append(batch.column(0).dictionary_encode())
            max_bytes -= parts[-1].nbytes
            if max_bytes < 0:
                return None
        whole = pa.chunked_array(parts).unify_dictionaries().combine_chunks()
        return ColumnValues(values=whole.dictionary, codes_N=whole.indices.fill_null(-1).to_numpy())

    @cached_property
    def shows_states(self) -> bool:
        """Tell whether the query encoder shows the states of its tokens."""
        return self.manifest.encoder.shows_states

    @cached_property
    def query_languages(self) -> tuple[str, ...]:
        """The languages that queries are read in."""
        return main_languages(self.manifest.languages)

    @cached_property
    def text_words(self) -> JoinedWords:
        """The words of chunks."""
        return JoinedWords([(each.words, each.rows.deleted_chunks) for each in self.segments])

    @cached_property
    def sparse_words(self) -> JoinedWords | None:
        """The weights of chunks by a sparse encoder; None where the collection has none."""
        parts = [(each.sparse, each.rows.deleted_chunks) for each in self.segments if each.sparse is not None]
        return JoinedWords(parts) if len(parts) == len(self.segments) else None

    @cached_property
    def passage_bm25(self) -> PassageBM25:
        """BM25 of windows of chunks."""
        return PassageBM25(self.text_words, self.chunk_offsets, self.chunk_starts, self.chunk_ends)

    @cached_property
    def document_bm25(self) -> DocumentBM25:
        """BM25 of documents."""
        return DocumentBM25(
            self.text_words,
            JoinedWords([(each.titles, each.rows.deleted_documents) for each in self.segments]),
            self.chunk_documents,
            self._counted("text_words"),
            self._counted("title_words"),
        )

    def _counted(self, name: str) -> Any:
        return joined_column([(each.lengths, each.rows.deleted_documents) for each in self.segments], name)

    @cached_property
    def _languages(self) -> UInt8[np.ndarray, " N"]:
        return self._counted("language")

    def languages_of(self, documents: Int64[np.ndarray, " A"]) -> tuple[str, ...]:
        """Return the languages that queries would be read in if these documents were all there are."""
        return main_languages(count_languages(self._languages[documents]))

    def mean_of_chunks(self, documents: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, " V"]:
        """Return the mean of the chunk vectors of some documents, of a sample where they are many."""
        firsts = self.chunk_offsets[documents]
        chunks = ranges(firsts, self.chunk_offsets[documents + 1] - firsts)
        return mean_vector(self.chunks.reconstruct(chunks[sampled_chunks(len(chunks))]))

    @cached_property
    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        """The mean of the chunk vectors, of a sample where there are many.

        Its product with a query is what an average chunk scores.
        """
        return mean_vector(self.chunks.reconstruct(sampled_chunks(self.num_chunks)))

    def require_all(self) -> None:
        """Raise :class:`PartitionsMissingError` where partitions are missing."""
        if self.missing:
            first, reason = next(iter(self.missing.items()))
            raise PartitionsMissingError(
                f"a search of {self.layout.name!r} must reach the partition(s) {', '.join(self.missing)}, or "
                f"ask the others alone with `partial`, got of {first}: {reason}"
            )

    def require_whole(self) -> None:
        """Raise :class:`DamageError` where a file that is read was damaged since it was opened.

        Files go with a generation that is no longer kept: its reader keeps what it holds.
        """
        for part in self.parts:
            part.require_whole()
        watched = (self.files,) if self.parts else (self.files, *self.lance_files)
        error = self._first_damage(each.changed_file() for each in watched)
        if error is not None and self.folder.exists():
            raise error

    def damage_of_rows(self) -> DamageError | None:
        """Hash all files of Lance that are read; return the error of one that is damaged."""
        return self._first_damage(each.damaged_file() for each in self.lance_files)

    def _first_damage(self, found: Iterable[tuple[str, str] | None]) -> DamageError | None:
        name, problem = next(filter(None, found), ("", ""))
        return self.layout.damaged(f"{name} of generation {self.number} {problem}") if name else None

    def fetch_documents(self, positions: Sequence[int] | np.ndarray, columns: Sequence[str]) -> pa.Table:
        """Read columns of the documents at these positions from the pinned table, in the order asked.

        A position may repeat.
        """
        unique, inverse = np.unique(np.asarray(positions, dtype=np.int64), return_inverse=True)
        if not 0 < len(unique) <= MAX_KEPT_ROWS:
            return self._read_documents(unique, columns).take(pa.array(inverse))
        keys = [(position, *columns) for position in unique.tolist()]
        rows = [self._rows.get(key) for key in keys]
        missing = [place for place, row in enumerate(rows) if row is None]
        if missing:
            read = self._read_documents(unique[missing], columns)
            # Each row keeps all that was read in memory.
            num_bytes = read.nbytes + OBJECT_BYTES * len(columns)
            for number, place in enumerate(missing):
                rows[place] = row = read.slice(number, 1)
                self._rows.add(keys[place], row, num_bytes)
        return pa.concat_tables([row for row in map(rows.__getitem__, inverse.tolist()) if row is not None])

    @cached_property
    def _rows(self) -> Kept[tuple[int | str, ...], pa.Table]:
        return Kept(MAX_ROWS_BYTES)

    @cached_property
    def matches(self) -> Kept[str, Int64[np.ndarray, " A"]]:
        """What filters left, by what they ask."""
        return Kept(MAX_MATCHES_BYTES)

    def _read_documents(self, unique: Int64[np.ndarray, " A"], columns: Sequence[str]) -> pa.Table:
        if self.parts:
            cuts = np.searchsorted(unique, self.part_starts)
            tables = [
                part._read_documents(unique[first:last] - start, columns)
                for part, start, (first, last) in zip(
                    self.parts, self.part_starts, pairwise(cuts.tolist()), strict=False
                )
                if last > first or part is self.parts[0]
            ]
            return pa.concat_tables(tables)
        asked = ["doc_id", *(name for name in columns if name != "doc_id")]
        rows = self._take(unique, asked)
        # A position is a row's place in the scan: should Lance ever count otherwise, no document may pass for
        # another.
        if rows.column("doc_id").to_pylist() != self.doc_ids.take(pa.array(unique)).to_pylist():
            raise self.layout.damaged(
                f"table `documents` of {self.layout.name!r} must hold generation {self.number} in its order",
                "verify",
            )
        return rows.select(list(columns))

    def _take(self, positions: Int64[np.ndarray, " A"], columns: list[str]) -> pa.Table:
        """Read rows of the scan, ascending; from one fragment that costs three fifths of a look at all."""
        fragments, ends = self._fragments
        owners = (
            np.searchsorted(ends, positions[[0, -1]], side="right").tolist() if len(positions) else [0, 1]
        )
        if owners[0] != owners[1]:
            return self.dataset.take(positions.tolist(), columns=columns)
        begin = ends[owners[0] - 1] if owners[0] else 0
        return fragments[owners[0]].take((positions - begin).tolist(), columns)

    @cached_property
    def _fragments(self) -> tuple[Sequence[lance.LanceFragment], Int64[np.ndarray, " F"]]:
        """The fragments of the table, in the order of a scan, and where the rows of each end."""
        fragments = self.dataset.get_fragments()
        return fragments, np.cumsum([fragment.count_rows() for fragment in fragments], dtype=np.int64)

    @cached_property
    def has_sparse(self) -> bool:
        """Tell whether chunks have weights by a sparse encoder."""
        return self.sparse_words is not None


class Elsewhere(Generation):
    """A generation whose rows other processes hold; this one asks for those it needs."""

    @abstractmethod
    def matching(
        self,
        filters: Mapping[str, Any] | None,
        restriction: Mapping[str, Any] | None,
        timeout: dt.timedelta | None,
    ) -> Int64[np.ndarray, " A"]:
        """Return the positions of the documents that match both filters, ascending."""


OpenOne = Callable[[CollectionLayout, int, Checks], Generation]
"""Opens the generation of a number."""


def stored_columns(layout: CollectionLayout, manifest: Manifest, checks: Checks = HASHES) -> StoredColumns:
    """Map what is known of each document of a folder of rows; damage raises :class:`DamageError`."""
    names = [record.name + file for record in manifest.segments for file in POSITION_FILES]
    for name, problem in check_generation_files(
        layout, manifest, checks.hashes, names=names, believes_notes=not checks.verify
    ):
        raise layout.damaged(f"{name} of generation {manifest.generation} {problem}")
    with layout.naming_damage():
        return StoredColumns(layout.generation_folder(manifest.generation), manifest)


def sampled_chunks(count: int) -> Int64[np.ndarray, " S"]:
    """Return which of ``count`` chunks stand for all: at most :data:`SAMPLED_CHUNKS`, evenly spread."""
    return np.linspace(0, count - 1, min(count, SAMPLED_CHUNKS)).astype(np.int64)


def mean_vector(vectors_SV: Float32[np.ndarray, "S V"]) -> Float32[np.ndarray, " V"]:
    """Return the mean of at most :data:`SAMPLED_CHUNKS` unit vectors, zeros for none.

    Its bits do not depend on their order: float64 has sums of whole numbers below 2^53 exactly.
    """
    scaled_SV = np.multiply(vectors_SV, 2.0**40, dtype=np.float64)
    np.rint(scaled_SV, out=scaled_SV)
    return np.ldexp(scaled_SV.sum(axis=0) / max(1, len(vectors_SV)), -40).astype(np.float32)


def open_generation(
    layout: CollectionLayout,
    number: int | None = None,
    checks: Checks = HASHES,
    open_one: OpenOne | None = None,
) -> Generation:
    """Open the served generation, or the one asked for; ``open_one`` opens it elsewhere.

    Damage raises :class:`IntegrityError`, never a guess.
    """
    open_one = open_one or _open
    layout.require_exists()
    layout.refresh()
    if number is not None:
        return open_one(layout, number, checks)
    for attempt in range(OPEN_ATTEMPTS):
        served = layout.current_generation_number()
        assert served is not None, "require_exists found a generation"
        try:
            found = open_one(layout, served, checks)
            complaint = None if layout.replica is None else layout.replica.complaint
            return found if complaint is None else found.warned(complaint)
        except IntegrityError:
            if attempt + 1 == OPEN_ATTEMPTS or layout.current_generation_number() == served:
                raise
    raise AssertionError("the last attempt returns or raises")


def open_latest_intact_generation(
    layout: CollectionLayout, checks: Checks = HASHES, open_one: OpenOne | None = None
) -> Generation:
    """Open the served generation or, when it is damaged, the older one; ``warning`` says so.

    Where neither is whole, the served one is opened without partitions that are damaged.
    """
    try:
        return open_generation(layout, None, checks, open_one)
    except IntegrityError as error:
        damage = error
    try:
        served = layout.current_generation_number()
    except IntegrityError:
        served = None
    for number in reversed(layout.generation_numbers()):
        if served is None or number <= served:
            try:
                found = (open_one or _open)(layout, number, checks)
            except IntegrityError:
                continue
            if number == served:
                return found
            return found.warned(f"generation {number} is served instead of the current one: {damage}")
    with contextlib.suppress(IntegrityError):
        if served is not None and read_manifest(layout, served).partitions:
            return (open_one or _open)(layout, served, replace(checks, skips_lost=True)).warned(str(damage))
    raise damage


def _open(layout: CollectionLayout, number: int, checks: Checks, wanted: range | None = None) -> Generation:
    """Open a generation of which every file is as recorded; rows of Lance are measured, and hashed.

    ``wanted`` are some of its partitions by their numbers, None is all.
    """
    with layout.naming_damage():
        manifest = read_manifest(layout, number)
        folder = layout.generation_folder(number)
        rows = {
            name: record
            for name, record in manifest.lance_files.items()
            if name.startswith(f"{DOCUMENTS}.lance/")
        }
        files = WatchedFiles(folder, manifest.files, are_mapped=True)
        lance_files = [WatchedFiles(layout.lance_folder, rows)]
        damaged = check_generation_files(layout, manifest, checks.hashes, believes_notes=not checks.verify)
        damaged += damaged_lance_files(layout.lance_folder, rows, None if checks.verify else checks.suspects)
        for name, problem in damaged:
            raise DamageError(f"{name} of generation {number} {problem}")
        parts: list[Generation] = []
        missing = manifest.lost
        if manifest.partitions:
            for record in manifest.filled if wanted is None else manifest.filled[wanted.start : wanted.stop]:
                try:
                    parts.append(_open(layout.partition(record), record.generation, checks))
                except IntegrityError as error:
                    if not checks.skips_lost:
                        raise
                    missing[record.name] = str(error)
            if not parts:
                raise DamageError(f"generation {number} has no partition that is whole")
            segments = [segment for part in parts for segment in part.segments]
            dataset = parts[0].dataset
            lance_files = [watched for part in parts for watched in part.lance_files]
            manifest = replace(
                manifest,
                documents=sum(part.num_documents for part in parts),
                chunks=sum(part.num_chunks for part in parts),
            )
        else:
            segments = [open_segment(folder, record, manifest.files) for record in manifest.segments]
            version = manifest.lance_versions[DOCUMENTS]
            dataset = open_pinned_dataset(layout.lance_folder, DOCUMENTS, version)
        return Generation(
            layout=layout,
            manifest=manifest,
            segments=segments,
            documents=joined_index([(each.documents, each.rows.deleted_documents) for each in segments]),
            chunks=joined_index([(each.chunks, each.rows.deleted_chunks) for each in segments]),
            token_vectors=open_token_vectors(manifest.files, segments, folder),
            dataset=dataset,
            files=files,
            lance_files=lance_files,
            parts=parts,
            missing=missing,
        )


def open_parts(layout: CollectionLayout, number: int, wanted: range, checks: Checks) -> Generation:
    """Open some of the partitions of a generation, counted as it counts them, as one.

    Of a collection without partitions that is the generation.
    """
    layout.refresh(number)
    return _open(layout, number, checks, wanted)
