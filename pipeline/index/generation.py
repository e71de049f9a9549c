"""One published generation, opened: everything a search reads, pinned and immutable.

Files are believed only when size and SHA-256 equal the manifest's (neither FAISS nor Lance notices a flipped
bit); the Lance tables are pinned to the manifest's versions. Opening never locks and never writes: a writer
publishes beside it. Building one is ``publish``'s business.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import CairnError, DamageError, IntegrityError
from cairn.pipeline.index.bm25 import DocumentBM25, PassageBM25
from cairn.pipeline.index.exact_index import VectorIndex
from cairn.pipeline.index.faiss_index import REFINE_SUFFIX, FaissIndex
from cairn.pipeline.index.held_files import HeldFiles, WatchedFiles
from cairn.pipeline.index.lance_files import damaged_rows
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import COPIES, DELETED_BITS, DOCUMENTS_FAISS, TOKENS_ARROW, is_copied
from cairn.pipeline.index.segments.joined import (
    JoinedColumns,
    JoinedIndex,
    JoinedWords,
    joined_column,
    open_token_vectors,
)
from cairn.pipeline.index.segments.segment import (
    DeletedRows,
    Segment,
    SegmentRows,
    open_rows,
    open_segment,
    read_deleted,
)
from cairn.pipeline.index.stored_files import (
    HASHES,
    Checks,
    check_generation_files,
    find_lance_files,
    find_manifest,
    link_table,
    read_manifest,
    require_copies,
)
from cairn.pipeline.index.tables import DOCUMENTS, lance_errors, open_pinned_dataset, open_pinned_table
from cairn.pipeline.index.token_file import ChunkTokens, TokenCodes, TokenVectors
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.manifest import MANIFEST_NAME, Manifest, record_file
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.projection import LATE_NAME
from jaxtyping import Float32, Int64, UInt64

if TYPE_CHECKING:
    import lance
    import lancedb


SAMPLED_CHUNKS = 4_096
"""Chunks that stand for the corpus where an average will do."""
OPEN_ATTEMPTS = 3
"""A reader that loses its generation to two publications in a row while opening it starts over."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation(JoinedColumns):
    """What one search reads: two vector indexes, their columns, and the pinned table.

    Position p of ``documents`` is row p of ``doc_ids`` and ``cluster_ids``, and of a scan of the table; its
    chunks are positions ``chunk_offsets[p]`` to ``chunk_offsets[p + 1]`` of ``chunks``. ``token_vectors``
    is None where the collection has no token projection. ``copied`` are files of which the second copy is
    read, since the first is damaged, ``lacking`` damaged ones that are not read at all. ``warning`` is a
    sentence for the user when that is so, or when an older generation is served because the current one is
    damaged.
    """

    layout: CollectionLayout
    manifest: Manifest
    segments: Sequence[Segment]
    documents: VectorIndex
    chunks: VectorIndex
    token_vectors: TokenVectors | None
    database: Path
    dataset: lance.LanceDataset
    held_files: HeldFiles
    lance_files: WatchedFiles
    copied: Sequence[str] = ()
    lacking: Sequence[str] = ()
    warning: str | None = None

    @property
    def number(self) -> int:
        """The generation's number."""
        return self.manifest.generation

    @property
    def folder(self) -> Path:
        """Where the generation's files lie."""
        return self.layout.generation_folder(self.number)

    def side_file(self, name: str) -> Path:
        """Return the path of ``context.arrow`` or another file that is there twice."""
        return (self.folder / COPIES if name in self.copied else self.folder) / name

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

    @property
    def vectors_sha256(self) -> str:
        """A hash of the files that the document vectors lie in, and of which of them count."""
        names = [DOCUMENTS_FAISS, DOCUMENTS_FAISS + REFINE_SUFFIX, DELETED_BITS]
        files = [segment.record.name + name for segment in self.segments for name in names]
        hashes = [self.manifest.files[name].sha256 for name in files if name in self.manifest.files]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    @cached_property
    def document_schema(self) -> pa.Schema:
        """The documents table's schema."""
        return self.dataset.schema

    @cached_property
    def document_table(self) -> lancedb.table.Table:
        """The pinned documents table as LanceDB has it, for filters.

        All else asks ``dataset``: a take there costs a third of one through the table, which waits on a
        background thread. LanceDB opens the latest version first, which may be broken: then
        the table is opened by links to this one.
        """
        version = self.manifest.lance_versions[DOCUMENTS]
        with contextlib.suppress(CairnError), lance_errors("opening the table of documents"):
            return open_pinned_table(self.database, DOCUMENTS, version)
        linked = link_table(self.layout, self.number, DOCUMENTS, self.lance_files.records, self.held_files)
        return open_pinned_table(linked, DOCUMENTS, version)

    @cached_property
    def row_ids(self) -> UInt64[np.ndarray, " N"]:
        """Lance row ids by position, valid at the pinned version only."""
        batches = self.dataset.scanner(columns=[], with_row_id=True, scan_in_order=True).to_batches()
        parts = [batch.column("_rowid").to_numpy() for batch in batches]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    @cached_property
    def text_words(self) -> JoinedWords:
        """The words of chunks."""
        return JoinedWords([(each.words, each.rows.deleted_chunks) for each in self.segments])

    @cached_property
    def passage_bm25(self) -> PassageBM25:
        """BM25 of windows of chunks."""
        return PassageBM25(self.text_words, self.chunk_offsets, self.chunk_starts, self.chunk_ends)

    @cached_property
    def document_bm25(self) -> DocumentBM25:
        """BM25 of documents."""
        lengths = [(each.lengths, each.rows.deleted_documents) for each in self.segments]
        return DocumentBM25(
            self.text_words,
            JoinedWords([(each.titles, each.rows.deleted_documents) for each in self.segments]),
            self.chunk_documents,
            joined_column(lengths, "text_words"),
            joined_column(lengths, "title_words"),
        )

    @cached_property
    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        """The mean of the chunk vectors, of a sample where there are many.

        Its product with a query is what an average chunk scores.
        """
        return self.chunks.reconstruct(sampled_chunks(self.num_chunks)).mean(axis=0)

    @cached_property
    def _row_order(self) -> Int64[np.ndarray, " N"]:
        return np.argsort(self.row_ids, kind="stable")

    @cached_property
    def _sorted_row_ids(self) -> UInt64[np.ndarray, " N"]:
        return self.row_ids[self._row_order]

    def position_of_row_ids(self, row_ids: Sequence[int] | np.ndarray) -> Int64[np.ndarray, " A"]:
        """Return the document position of each Lance row id.

        An id of another version raises :class:`IntegrityError`.
        """
        wanted = np.asarray(row_ids, dtype=np.uint64)
        found = np.searchsorted(self._sorted_row_ids, wanted)
        if np.any(found >= self.num_documents) or np.any(
            self._sorted_row_ids[np.minimum(found, self.num_documents - 1)] != wanted
        ):
            raise self.layout.damaged(
                f"row ids must belong to generation {self.number} of {self.layout.name!r}", "verify"
            )
        return self._row_order[found]

    def require_whole(self) -> None:
        """Raise :class:`DamageError` where a file that is read was damaged since it was opened.

        Files of tables go with a generation that is no longer kept: its reader keeps what it holds.
        """
        found = self.held_files.damaged_file()
        if found is None and (changed := self.lance_files.changed_file()) and self.folder.exists():
            found = changed
        if found is not None:
            name, fault = found
            raise self.layout.damaged(f"{name} of generation {self.number} {fault}")

    def fetch_documents(self, positions: Sequence[int] | np.ndarray, columns: Sequence[str]) -> pa.Table:
        """Read columns of the documents at these positions from the pinned table, in the order asked.

        A position may repeat.
        """
        unique, inverse = np.unique(np.asarray(positions, dtype=np.int64), return_inverse=True)
        asked = ["doc_id", *(name for name in columns if name != "doc_id")]
        rows = self.dataset.take(unique.tolist(), columns=asked)
        # A position is a row's place in the scan: should Lance ever count otherwise, no document may pass for
        # another.
        if rows.column("doc_id").to_pylist() != self.doc_ids.take(pa.array(unique)).to_pylist():
            raise self.layout.damaged(
                f"table `documents` of {self.layout.name!r} must hold generation {self.number} in its order",
                "verify",
            )
        return rows.take(pa.array(inverse)).select(list(columns))


def sampled_chunks(count: int) -> Int64[np.ndarray, " S"]:
    """Return which of ``count`` chunks stand for all: at most :data:`SAMPLED_CHUNKS`, evenly spread."""
    return np.linspace(0, count - 1, min(count, SAMPLED_CHUNKS)).astype(np.int64)


def open_generation(
    layout: CollectionLayout, number: int | None = None, checks: Checks = HASHES
) -> Generation:
    """Open the served generation, or the one asked for.

    Damage raises :class:`IntegrityError`, never a guess.
    """
    layout.require_exists()
    layout.refresh()
    if number is not None:
        return _open(layout, number, checks)
    for attempt in range(OPEN_ATTEMPTS):
        served = layout.current_generation_number()
        assert served is not None, "require_exists found a generation"
        try:
            found = _open(layout, served, checks)
            complaint = None if layout.replica is None else layout.replica.complaint
            return found if complaint is None else replace(found, warning=complaint)
        except IntegrityError:
            if attempt + 1 == OPEN_ATTEMPTS or layout.current_generation_number() == served:
                raise
    raise AssertionError("the last attempt returns or raises")


def open_latest_intact_generation(layout: CollectionLayout, checks: Checks = HASHES) -> Generation:
    """Open the served generation or, when it is damaged, the newest older one that is whole.

    Where none is, one of which token vectors alone are damaged is opened without them. ``warning`` says so.
    """
    try:
        return open_generation(layout, checks=checks)
    except IntegrityError as error:
        damage = error
    try:
        served = layout.current_generation_number()
    except IntegrityError:
        served = None
    last_resort: Generation | None = None
    for number in reversed(layout.generation_numbers()):
        if served is None or number <= served:
            try:
                found = _open(layout, number, checks, without_tokens=True)
            except IntegrityError:
                continue
            if number != served:
                instead = f"generation {number} is served instead of the current one: {damage}"
                found = replace(found, warning=instead)
            if not found.lacking:
                return found
            last_resort = last_resort or found
    if last_resort is None:
        raise damage
    return last_resort


def _open(
    layout: CollectionLayout, number: int, checks: Checks, *, without_tokens: bool = False
) -> Generation:
    with layout.naming_damage():
        return _open_files(layout, number, checks, without_tokens=without_tokens)


def _open_files(layout: CollectionLayout, number: int, checks: Checks, *, without_tokens: bool) -> Generation:
    manifest = read_manifest(layout, number)
    folder = layout.generation_folder(number)
    verified = VerifiedFiles.of_this_machine(is_believed=not checks.verify)
    damaged = dict(check_generation_files(layout, manifest, checks.hashes, verified=verified))
    lacking = {
        name: damaged.pop(name)
        for record in manifest.segments
        if without_tokens and (name := record.name + TOKENS_ARROW) in damaged
    }
    copied = require_copies(layout, number, manifest.files, damaged.items())
    rows = {
        name: record
        for name, record in find_lance_files(layout, manifest).items()
        if name.startswith(f"{DOCUMENTS}.lance/")
    }
    used = manifest.files.keys() - lacking.keys()
    files = {name: manifest.files[name] for name in used - copied.keys()}
    manifest_path = find_manifest(layout, number)[1]
    if manifest_path.parent == folder:
        files[MANIFEST_NAME] = record_file(manifest_path)
    else:
        copied[MANIFEST_NAME] = "does not match its SHA-256"
    held = HeldFiles(folder, files, [name for name in files if is_copied(name)])
    records = {**manifest.files, MANIFEST_NAME: record_file(manifest_path)}
    copied |= require_copies(layout, number, records, held.refused.items())
    suspects = rows if checks.verify else checks.suspects
    rows_copied = require_copies(layout, number, rows, damaged_rows(layout, rows, suspects))
    database = link_table(layout, number, DOCUMENTS, rows, held) if rows_copied else layout.lance_folder
    watched = WatchedFiles(database, rows)
    dataset = open_pinned_dataset(database, DOCUMENTS, manifest.lance_versions[DOCUMENTS])
    deleted = {
        record.name: read_deleted(folder / COPIES / bits, record.documents, record.deleted_documents)
        for record in manifest.segments
        if (bits := record.name + DELETED_BITS) in copied
    }
    segments = [
        open_segment(folder, record, used, open_rows(folder, record, deleted.get(record.name)))
        for record in manifest.segments
    ]
    _require_counts(manifest, [segment.rows for segment in segments])
    copied |= rows_copied
    late_folder = folder / COPIES if LATE_NAME in copied else folder
    return Generation(
        layout=layout,
        manifest=manifest,
        segments=segments,
        documents=joined_index([(segment.documents, segment.rows.deleted_documents) for segment in segments]),
        chunks=joined_index([(segment.chunks, segment.rows.deleted_chunks) for segment in segments]),
        token_vectors=open_token_vectors(used, segments, late_folder),
        database=database,
        dataset=dataset,
        held_files=held,
        lance_files=watched,
        copied=tuple(copied),
        lacking=tuple(lacking),
        warning=_damage_warning(layout, number, copied, lacking),
    )


def _damage_warning(
    layout: CollectionLayout, number: int, copied: Mapping[str, str], lacking: Mapping[str, str]
) -> str | None:
    """Return a sentence for the user about the first damaged file, None where all are whole."""
    name, problem = next(iter({**lacking, **copied}.items()), (None, None))
    if name is None:
        return None
    instead = "searches go without token vectors" if name in lacking else "its second copy is read"
    return str(layout.damaged(f"{name} of generation {number} {problem}: {instead}"))


def _require_counts(manifest: Manifest, rows: Sequence[SegmentRows]) -> None:
    counts = {
        "documents": sum(each.deleted_documents.num_live for each in rows),
        "chunks": sum(each.deleted_chunks.num_live for each in rows),
    }
    if counts != {"documents": manifest.documents, "chunks": manifest.chunks}:
        raise DamageError(
            f"generation {manifest.generation} must hold {manifest.documents} documents and "
            f"{manifest.chunks} chunks, got {counts}"
        )


def joined_index(parts: Sequence[tuple[FaissIndex, DeletedRows]]) -> VectorIndex:
    """Return the one index as it is where there is just one, whole."""
    index, deleted = parts[0]
    return JoinedIndex(parts) if len(parts) > 1 or len(deleted.rows) else index


def part_of(generation: Generation, documents: Int64[np.ndarray, " P"]) -> Generation:
    """Return some documents of a generation, which ascend, numbered from 0: what a shard holds.

    Rows beyond the part count as deleted in the segment that holds them, so every file stays as it is and
    only what is read of it is mapped into memory. Tables are left as they are: texts and filters are the
    business of the whole generation, and a position of the part is no row of them.
    """
    first_P = generation.chunk_offsets[documents]
    chunks = ranges(first_P, generation.chunk_offsets[documents + 1] - first_P)
    segments = _segments(generation, documents)
    manifest = replace(
        generation.manifest,
        documents=len(documents),
        chunks=len(chunks),
        segments=tuple(segment.record for segment in segments),
    )
    tokens = generation.token_vectors
    return replace(
        generation,
        manifest=manifest,
        segments=segments,
        documents=joined_index([(each.documents, each.rows.deleted_documents) for each in segments]),
        chunks=joined_index([(each.chunks, each.rows.deleted_chunks) for each in segments]),
        token_vectors=None
        if tokens is None
        else TokenVectors(
            projection=tokens.projection,
            chunks=_CodesOf(tokens.chunks, chunks),
            titles=_CodesOf(tokens.titles, chunks),
        ),
    )


def _segments(generation: Generation, documents: Int64[np.ndarray, " P"]) -> list[Segment]:
    segments: list[Segment] = []
    begin = 0
    for segment in generation.segments:
        num_live = segment.rows.deleted_documents.num_live
        cuts = np.searchsorted(documents, (begin, begin + num_live)).tolist()
        own = documents[slice(*cuts)] - begin
        begin += num_live
        if not len(own):
            continue
        if len(own) < num_live:
            is_beyond = np.ones(num_live, np.bool_)
            is_beyond[own] = False
            rows = segment.rows.without(np.flatnonzero(is_beyond))
            record = rows.described(segment.record)
            segment = open_segment(generation.folder, record, generation.manifest.files, rows)
        segments.append(segment)
    return segments


@dataclass(frozen=True, slots=True, eq=False)
class _CodesOf:
    """The tokens of some chunks of a generation, by their number among them."""

    codes: TokenCodes
    chunks: Int64[np.ndarray, " M"]

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> ChunkTokens:
        return self.codes.read(self.chunks[chunk_C])
