"""One published generation, opened: everything a search reads, pinned and immutable.

Files are believed only when size and SHA-256 equal the manifest's (neither FAISS nor Lance notices a flipped
bit); the Lance tables are pinned to the manifest's versions. Opening never locks and never writes: a writer
publishes beside it. Building one is ``publish``'s business.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int32, Int64, UInt64
from lance.query import FullTextQuery

from pipeline.durable import sha256_of_file, storage_errors
from pipeline.errors import DamageError, IntegrityError
from pipeline.index.faiss_index import open_faiss_index
from pipeline.index.lance_files import damaged_lance_files, read_lance_files
from pipeline.index.layout import (
    CHUNKS_ARROW,
    CHUNKS_FAISS,
    DOCUMENTS_ARROW,
    DOCUMENTS_FAISS,
    LANCE_FILES,
    PASSAGES_ARROW,
    CollectionLayout,
)
from pipeline.index.passage_bm25 import PassageBM25
from pipeline.index.passage_terms import open_passage_terms
from pipeline.index.position_files import CHUNK_POSITIONS_SCHEMA, DOCUMENT_POSITIONS_SCHEMA, open_positions
from pipeline.index.protocol import VectorIndex
from pipeline.index.tables import DOCUMENTS, TABLES, open_pinned_dataset, open_pinned_table
from pipeline.manifest import FileRecord, Manifest

if TYPE_CHECKING:
    import lancedb

SAMPLED_CHUNKS = 4_096
"""Chunks that stand for the corpus where an average will do."""
OPEN_ATTEMPTS = 3
"""A reader that loses its generation to two publications in a row while opening it starts over."""


class HeldFiles:
    """Mapped files, held open to notice when one is cut or written into.

    Reading a mapped part that was cut off would end the process. A file that was removed stays whole for its
    holder. A file that is missing when it is to be held raises :class:`DamageError`, as mapping it does, so
    that a reader that lost its generation starts over.
    """

    def __init__(self, folder: Path, records: Mapping[str, FileRecord]) -> None:
        self._records = dict(records)
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for name in records:
            try:
                self._descriptors[name] = os.open(folder / name, os.O_RDONLY)
            except OSError as error:
                raise DamageError(f"{name} cannot be read") from error
        self._written_ns = {name: os.fstat(file).st_mtime_ns for name, file in self._descriptors.items()}

    def damaged_file(self) -> tuple[str, str] | None:
        """Return a file that is no longer what it was and what is wrong with it, None where all are whole.

        Costs a ``stat`` a file; one that was written into since is hashed again.
        """
        for name, descriptor in self._descriptors.items():
            found, size = os.fstat(descriptor), self._records[name].size_bytes
            if found.st_size < size:
                return name, f"must have {size:,} bytes, got {found.st_size:,}: it was cut while it was open"
            if found.st_mtime_ns != self._written_ns[name]:
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    file.seek(0)
                    if hashlib.file_digest(file, "sha256").hexdigest() != self._records[name].sha256:
                        return name, "was written into while it was open, and does not match its SHA-256"
                self._written_ns[name] = found.st_mtime_ns
        return None


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """What one search reads: two vector indexes, their positions, and the pinned table.

    Position p of ``documents`` is row p of ``doc_ids``, ``row_ids`` and ``cluster_ids``; its chunks are
    positions ``chunk_offsets[p]`` to ``chunk_offsets[p + 1]`` of ``chunks``. ``passage_terms`` is None in a
    generation published before passages had a BM25 of their own; the next publication makes it. ``warning``
    is a sentence for the user when an older generation is served because the current one is damaged.
    """

    layout: CollectionLayout
    manifest: Manifest
    documents: VectorIndex
    chunks: VectorIndex
    positions: pa.RecordBatch
    spans: pa.RecordBatch
    passage_terms: pa.RecordBatch | None
    dataset: lance.LanceDataset
    held_files: HeldFiles
    warning: str | None = None

    @property
    def number(self) -> int:
        """The generation's number."""
        return self.manifest.generation

    @property
    def folder(self) -> Path:
        """Where the generation's files lie, ``context.arrow`` and ``clusters.arrow`` among them."""
        return self.layout.generation_folder(self.number)

    @property
    def num_documents(self) -> int:
        """Count the documents."""
        return self.positions.num_rows

    @cached_property
    def document_schema(self) -> pa.Schema:
        """The documents table's schema."""
        return self.dataset.schema

    @cached_property
    def document_table(self) -> lancedb.table.Table:
        """The pinned documents table as LanceDB has it, for filters.

        All else asks ``dataset``: a take or a full-text query there costs a third of one through the table,
        which waits on a background thread.
        """
        return open_pinned_table(self.layout, DOCUMENTS, self.manifest.lance_versions[DOCUMENTS])

    @cached_property
    def doc_ids(self) -> pa.LargeStringArray:
        """Document ids by position, memory-mapped."""
        return self.positions.column("doc_id")

    @cached_property
    def row_ids(self) -> UInt64[np.ndarray, " N"]:
        """Lance row ids by position, valid at the pinned version only."""
        return self.positions.column("row_id").to_numpy(zero_copy_only=True)

    @cached_property
    def chunk_offsets(self) -> Int64[np.ndarray, " N_plus_1"]:
        """First chunk of each document, and the number of chunks at the end."""
        return np.append(
            self.positions.column("chunk_offset").to_numpy(zero_copy_only=True), np.int64(self.spans.num_rows)
        )

    @cached_property
    def cluster_ids(self) -> Int32[np.ndarray, " N"]:
        """Cluster of each document."""
        return self.positions.column("cluster_id").to_numpy(zero_copy_only=True)

    @cached_property
    def num_tokens(self) -> Int32[np.ndarray, " N"]:
        """Tokens of each document."""
        return self.positions.column("num_tokens").to_numpy(zero_copy_only=True)

    @cached_property
    def chunk_documents(self) -> Int64[np.ndarray, " M"]:
        """Document position of each chunk."""
        return self.spans.column("document_position").to_numpy(zero_copy_only=True)

    @cached_property
    def chunk_starts(self) -> Int64[np.ndarray, " M"]:
        """First character of each chunk in its document's text."""
        return self.spans.column("start_char").to_numpy(zero_copy_only=True)

    @cached_property
    def chunk_ends(self) -> Int64[np.ndarray, " M"]:
        """One past the last character of each chunk."""
        return self.spans.column("end_char").to_numpy(zero_copy_only=True)

    @cached_property
    def passage_bm25(self) -> PassageBM25 | None:
        """BM25 of windows of chunks, None where ``passage_terms`` is."""
        if self.passage_terms is None:
            return None
        return PassageBM25(self.passage_terms, self.chunk_offsets, self.chunk_starts, self.chunk_ends)

    @cached_property
    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        """The mean of the chunk vectors, of a sample where there are many.

        Its product with a query is what an average chunk scores.
        """
        return self.chunks.reconstruct(sampled_chunks(self.spans.num_rows)).mean(axis=0)

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
        """Raise :class:`DamageError` where a file was cut or written into since it was opened."""
        found = self.held_files.damaged_file()
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

    def match_documents(self, query: FullTextQuery, limit: int) -> pa.Table:
        """Return ``_rowid`` and ``_score`` of the best documents for a full-text query, best first."""
        scanner = self.dataset.scanner(
            columns=["_score"],
            with_row_id=True,
            full_text_query=query,
            limit=limit,
        )
        return scanner.to_table()


def sampled_chunks(count: int) -> Int64[np.ndarray, " S"]:
    """Return which of ``count`` chunks stand for all: at most :data:`SAMPLED_CHUNKS`, evenly spread."""
    return np.linspace(0, count - 1, min(count, SAMPLED_CHUNKS)).astype(np.int64)


def open_generation(
    layout: CollectionLayout, number: int | None = None, check_hashes: bool = True
) -> Generation:
    """Open the served generation, or the one asked for; damage raises :class:`IntegrityError`, never a guess.

    ``check_hashes`` = False trusts sizes alone: for files that this process has just hashed.
    """
    layout.require_exists()
    layout.refresh()
    if number is not None:
        return _open(layout, number, check_hashes)
    for attempt in range(OPEN_ATTEMPTS):
        served = layout.current_generation_number()
        assert served is not None, "require_exists found a generation"
        try:
            found = _open(layout, served, check_hashes)
            return found if layout.replica is None else replace(found, warning=layout.replica.complaint)
        except IntegrityError:
            if attempt + 1 == OPEN_ATTEMPTS or layout.current_generation_number() == served:
                raise
    raise AssertionError("the last attempt returns or raises")


def open_latest_intact_generation(layout: CollectionLayout, check_hashes: bool = True) -> Generation:
    """Open the served generation or, when it is damaged, the newest older one that is whole.

    ``warning`` then says so.
    """
    try:
        return open_generation(layout, check_hashes=check_hashes)
    except IntegrityError as error:
        damage = error
    try:
        served = layout.current_generation_number()
    except IntegrityError:
        served = None
    for number in reversed(layout.generation_numbers()):
        if served is None or number < served:
            try:
                found = _open(layout, number, check_hashes)
            except IntegrityError:
                continue
            return replace(
                found, warning=f"generation {number} is served instead of the current one: {damage}"
            )
    raise damage


def check_generation_files(
    layout: CollectionLayout,
    manifest: Manifest,
    check_hashes: bool = True,
    *,
    names: Collection[str] | None = None,
) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for each file of a generation that does not match its manifest.

    ``names`` are the files to look at, None is all.
    """
    folder = layout.generation_folder(manifest.generation)
    problems: list[tuple[str, str]] = []
    for name, record in manifest.files.items():
        if names is not None and name not in names:
            continue
        path = folder / name
        with storage_errors(f"reading {name} of generation {manifest.generation}"):
            if Path(name).name != name:
                problems.append((name, "is not a name inside the folder"))
            elif not path.is_file():
                problems.append((name, "is missing"))
            elif path.stat().st_size != record.size_bytes:
                problems.append((name, f"must have {record.size_bytes} bytes, got {path.stat().st_size}"))
            elif check_hashes and sha256_of_file(path) != record.sha256:
                problems.append((name, "does not match its SHA-256"))
    missing = {DOCUMENTS_FAISS, CHUNKS_FAISS, DOCUMENTS_ARROW, CHUNKS_ARROW, LANCE_FILES} - set(
        manifest.files
    )
    return problems + [(name, "is not in the manifest") for name in sorted(missing)]


def read_manifest(layout: CollectionLayout, number: int) -> Manifest:
    """Read a generation's manifest, checked against the hash in ``CURRENT``.

    One that speaks of another number raises :class:`IntegrityError`.
    """
    with layout.naming_damage():
        manifest = Manifest.read(layout.generation_folder(number), layout.manifest_sha256(number))
    if manifest.generation != number or set(manifest.lance_versions) != set(TABLES):
        raise layout.damaged(
            f"the manifest of generation {number} must describe it and the tables {', '.join(TABLES)}"
        )
    return manifest


def _open(layout: CollectionLayout, number: int, check_hashes: bool) -> Generation:
    with layout.naming_damage():
        return _open_files(layout, number, check_hashes)


def _open_files(layout: CollectionLayout, number: int, check_hashes: bool) -> Generation:
    manifest = read_manifest(layout, number)
    folder = layout.generation_folder(number)
    for name, problem in check_generation_files(layout, manifest, check_hashes):
        raise DamageError(f"{name} of generation {number} {problem}")
    for name, problem in damaged_lance_files(layout, read_lance_files(folder), manifests_only=True):
        raise DamageError(f"{name} of generation {number} {problem}")
    positions = open_positions(folder / DOCUMENTS_ARROW, DOCUMENT_POSITIONS_SCHEMA)
    spans = open_positions(folder / CHUNKS_ARROW, CHUNK_POSITIONS_SCHEMA)
    counts = {"documents": positions.num_rows, "chunks": spans.num_rows}
    if counts != {"documents": manifest.documents, "chunks": manifest.chunks}:
        raise DamageError(
            f"generation {number} must hold {manifest.documents} documents and {manifest.chunks} chunks, "
            f"got {counts}"
        )
    return Generation(
        layout=layout,
        manifest=manifest,
        documents=open_faiss_index(folder / DOCUMENTS_FAISS, manifest.indexes["documents"]),
        chunks=open_faiss_index(folder / CHUNKS_FAISS, manifest.indexes["chunks"]),
        positions=positions,
        spans=spans,
        passage_terms=open_passage_terms(folder / PASSAGES_ARROW)
        if PASSAGES_ARROW in manifest.files
        else None,
        dataset=open_pinned_dataset(layout, DOCUMENTS, manifest.lance_versions[DOCUMENTS]),
        held_files=HeldFiles(folder, manifest.files),
    )
