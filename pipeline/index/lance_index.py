"""The truth: LanceDB tables ``documents`` and ``chunks``, changed by one writer under the collection's lock.

Both tables hold the same documents in the same order, chunks by ordinal, and every later stage relies on that
order. A commit is a handful of Lance versions; none of them is visible to a reader before a generation pins
the last one. A killed commit is undone by :meth:`LanceTables.roll_back`, never resumed: an append committed
twice doubles rows.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, and lancedb types a local table as its abstract parent:
# no type checker sees either.

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import DamageError, SchemaError
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.lance_append import (
    Fragments,
    commit_fragments,
    require_grown,
    write_fragments,
)
from cairn.pipeline.index.lance_delete import DeletedDocuments, FindDocuments, delete_documents
from cairn.pipeline.index.lance_files import small_table_files
from cairn.pipeline.index.layout import CollectionLayout, generation_tag
from cairn.pipeline.index.tables import (
    CHUNKS,
    DOCUMENTS,
    LANCE_ERRORS,
    TABLES,
    lance_errors,
    open_pinned_dataset,
)
from cairn.pipeline.index.tiers import first_to_merge
from cairn.pipeline.types import TOKEN_FIELDS, chunks_schema, documents_schema
from jaxtyping import Float32

if TYPE_CHECKING:
    import lancedb.table


PRIMARY_KEYS = {DOCUMENTS: "doc_id", CHUNKS: "chunk_id"}

SCAN_ROWS = 4_096
SCAN_BUFFER_BYTES = 16 << 20
"""Lance reads ahead up to 2 GiB by default."""
COMPACTION_ROWS = 512
"""Rows a compaction holds at once: their text may be long."""

Versions = dict[str, int]
"""Table name to Lance version."""


class LanceTables:
    """Both tables of a collection, open for one writer or pinned scans.

    ``deleted`` is what the last commit deleted, None where Lance alone knows.
    """

    def __init__(
        self, layout: CollectionLayout, metadata_fields: Sequence[pa.Field], vector_dim: int, has_tokens: bool
    ) -> None:
        self.layout = layout
        self.metadata_fields = tuple(metadata_fields)
        self.vector_dim = vector_dim
        self.deleted: DeletedDocuments | None = None
        self.schemas = {
            DOCUMENTS: documents_schema(metadata_fields, vector_dim),
            CHUNKS: chunks_schema(vector_dim, has_tokens=has_tokens),
        }

    @functools.cached_property
    def _database(self) -> Any:
        import lancedb  # takes most of a second of a process, which an ingest without changes can do without

        return lancedb.connect(str(self.layout.lance_folder))

    @classmethod
    def open(cls, layout: CollectionLayout, versions: Mapping[str, int] | None = None) -> LanceTables:
        """Open the tables that stand, taking the schema from the latest version, or from a pinned one.

        Readers pin theirs: the latest may be broken. A missing table raises :class:`IntegrityError`.
        """
        missing = [name for name in TABLES if not (layout.lance_folder / f"{name}.lance").is_dir()]
        if missing:
            raise layout.damaged(
                f"collection {layout.name!r} must have the tables {', '.join(TABLES)}, missing: "
                f"{', '.join(missing)}"
            )
        pinned = versions or {}
        with layout.naming_damage(), lance_errors("opening the tables", damaged=True):
            schema, chunks = (
                lance.dataset(str(layout.lance_folder / f"{name}.lance"), version=pinned.get(name)).schema
                for name in TABLES
            )
        owned = set(documents_schema((), 1).names)
        metadata_fields = [field.remove_metadata() for field in schema if field.name not in owned]
        return cls(layout, metadata_fields, schema.field("vector").type.list_size, _has_tokens(chunks))

    def __reduce__(self) -> tuple[type[LanceTables], tuple[Any, ...]]:
        """Open the tables again in the process that a task is sent to, which has the folder alone."""
        layout = CollectionLayout(self.layout.root, self.layout.name)
        return LanceTables, (layout, self.metadata_fields, self.vector_dim, self.has_tokens)

    @property
    def has_tokens(self) -> bool:
        """Say whether ``chunks`` has columns for the codes of tokens."""
        return _has_tokens(self.schemas[CHUNKS])

    @classmethod
    def open_or_create(
        cls,
        layout: CollectionLayout,
        metadata_fields: Sequence[pa.Field],
        vector_dim: int,
        *,
        has_tokens: bool = False,
    ) -> LanceTables:
        """Open the tables, made empty where there are none, with columns for tokens where told.

        Another schema raises :class:`SchemaError` before anything is written.
        """
        stored = cls.open(layout) if layout.exists() else None
        has_tokens = has_tokens if stored is None else stored.has_tokens
        tables = cls(layout, metadata_fields, vector_dim, has_tokens)
        if stored is not None:  # tables that were never published bind no one: roll_back(None) empties them
            tables._check_schemas(stored.schemas)
        with lance_errors("creating the tables"):
            for name in TABLES:
                if not tables._path(name).is_dir():
                    tables._create(name)
        return tables

    def versions(self) -> Versions:
        """Return the latest version of each table, published or not."""
        with lance_errors("reading the table versions"):
            return {name: self._dataset(name).version for name in TABLES}

    def num_rows(self) -> dict[str, int]:
        """Count the rows of each table's latest version."""
        with lance_errors("counting rows"):
            return {name: self._dataset(name).count_rows() for name in TABLES}

    def count_rows(self, name: str, versions: Mapping[str, int]) -> int:
        """Count the rows of a table at its pinned version."""
        return self._dataset(name, versions[name]).count_rows()

    def roll_back(self, versions: Mapping[str, int] | None) -> None:
        """Undo what a killed run left: make the latest versions equal the pinned ones.

        None, where nothing was ever published, makes both tables empty. Idempotent; a pinned version
        that Lance cannot open any more raises :class:`IntegrityError`.
        """
        for name in TABLES:
            if versions is None:
                self._recreate_if_used(name)
                continue
            try:
                if self._dataset(name).version != versions[name]:
                    self._dataset(name, versions[name]).restore()
            except LANCE_ERRORS as error:
                raise self.layout.damaged(
                    f"version {versions[name]} of table `{name}` cannot be opened"
                ) from error
        if versions is not None:  # a killed run may have added the columns for tokens
            self.schemas[CHUNKS] = chunks_schema(
                self.vector_dim, has_tokens=_has_tokens(self._dataset(CHUNKS).schema)
            )
        commit_point("lance-rolled-back")

    def add_token_columns(self) -> None:
        """Give ``chunks`` its columns for tokens, null in all rows, where it has none."""
        if not self.has_tokens:
            with lance_errors("adding columns to table `chunks`"):
                self._latest(CHUNKS).add_columns(list(TOKEN_FIELDS))
            self.schemas[CHUNKS] = chunks_schema(self.vector_dim, has_tokens=True)

    @returning_freed_memory()
    def compact(self, *, force: bool = False) -> Versions:
        """Merge fragments where it is due; return the versions. Rows keep their order, not their ids."""
        for name in TABLES:
            self._compact(name, force=force)
        commit_point("compacted")
        return self.versions()

    @returning_freed_memory()
    def commit(
        self,
        *,
        generation: int,
        deleted_ids: Iterable[Sequence[str]] = (),
        find_documents: FindDocuments | None = None,
        replaces_all: bool = False,
        documents: pa.RecordBatchReader | Fragments | None = None,
        chunks: pa.RecordBatchReader | Fragments | None = None,
        expected_documents: int = 0,
        expected_chunks: int = 0,
    ) -> Versions:
        """Delete, append and tag; return the versions that hold the result.

        ``deleted_ids`` comes in lists of at most 1,000; ``find_documents`` says where they stand in the
        latest version, so that a few are deleted without a look at all ids. ``replaces_all`` deletes every
        row instead. ``documents`` and ``chunks`` carry the same documents in the same order, each in ONE
        append: as rows, or as fragments of :meth:`write_fragments`. Row counts are checked after each write;
        a difference raises :class:`IntegrityError` and leaves the roll-back to the next run.
        """
        with self._reading("deleting documents from the tables"):
            self.deleted = delete_documents(
                self._dataset, deleted_ids, find_documents, delete_by_ids=self._delete_by_ids
            )
        for name in TABLES if replaces_all else ():
            with lance_errors(f"deleting all rows of table `{name}`"):
                self._latest(name).delete("true")
            self.deleted = None
            commit_point(f"{name}-deleted")
        for name, rows, expected in (
            (DOCUMENTS, documents, expected_documents),
            (CHUNKS, chunks, expected_chunks),
        ):
            if rows is not None and expected:
                self._append(name, rows, expected)
            commit_point(f"{name}-added")
        versions = self.versions()
        self.tag(generation, versions)
        commit_point("tagged")
        return versions

    def write_fragments(self, name: str, rows: pa.RecordBatchReader, num_rows: int) -> Fragments:
        """Write so many rows for a :meth:`commit` to append; several processes may do so."""
        return write_fragments(self._dataset(name), name, self.schemas[name], rows, num_rows)

    def tag(self, generation: int, versions: Mapping[str, int]) -> None:
        """Tag the versions of a generation, so that no clean-up takes them."""
        tag = generation_tag(generation)
        with lance_errors("tagging the tables"):
            for name in TABLES:
                tags = self._dataset(name).tags
                if tag not in tags.list():
                    tags.create(tag, versions[name])
                elif tags.get_version(tag) != versions[name]:
                    tags.update(tag, versions[name])

    def tags(self, name: str, version: int) -> dict[str, int]:
        """Return tag name to the version it pins, read beside a version that opens.

        Raises :class:`DamageError` where an entry is no file: Lance would wait for a FIFO.
        """
        stored = self.layout.lance_folder / f"{name}.lance" / "_refs" / "tags"
        strays = [entry.name for entry in stored.iterdir() if not entry.is_file()] if stored.is_dir() else []
        if strays:
            raise DamageError(f"tag {strays[0]} of table `{name}` must be a file")
        return {tag: content["version"] for tag, content in self._dataset(name, version).tags.list().items()}

    def keep_only(self, generations: Iterable[int]) -> None:
        """Drop every other tag, and what neither a remaining tag nor the latest version needs."""
        kept = {generation_tag(number) for number in generations}
        with lance_errors("cleaning up old versions"):
            for name in TABLES:
                tags = self._dataset(name).tags
                for tag in sorted(set(tags.list()) - kept):
                    tags.delete(tag)
                # The lock makes us the only writer: files that no version names are a killed run's.
                self._dataset(name).cleanup_old_versions(
                    timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
                )

    def published_hashes(
        self, versions: Mapping[str, int], batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """Stream (doc_id, content_sha256) of the documents at the pinned version."""
        return self.scan(DOCUMENTS, ["doc_id", "content_sha256"], versions, batch_rows)

    def scan(
        self,
        table: str,
        columns: Sequence[str],
        versions: Mapping[str, int],
        batch_rows: int = SCAN_ROWS,
        *,
        fragments: Sequence[int] | None = None,
        span: slice | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Stream columns of a pinned version in stored order, in bounded memory.

        ``fragments`` and ``span``, a slice of the rows that count, are None for all.
        """
        with lance_errors(f"reading table `{table}`", damaged=True):
            dataset = self._dataset(table, versions[table])
            scanner = dataset.scanner(
                columns=list(columns),
                batch_size=batch_rows,
                fragments=None
                if fragments is None
                else [part for part in dataset.get_fragments() if part.fragment_id in fragments],
                offset=None if span is None else span.start,
                limit=None if span is None else span.stop - span.start,
                scan_in_order=True,
                batch_readahead=1,
                fragment_readahead=1,
                io_buffer_size=SCAN_BUFFER_BYTES,
            )
            yield from scanner.to_batches()

    @contextlib.contextmanager
    def _reading(self, action: str) -> Generator[None]:
        """Report what Lance raises where it reads stored rows as damage of this collection."""
        with self.layout.naming_damage(), lance_errors(action, damaged=True):
            yield

    def _latest(self, name: str) -> lancedb.table.Table:
        return self._database.open_table(name)

    def _dataset(self, name: str, version: int | None = None) -> lance.LanceDataset:
        return lance.dataset(str(self._path(name)), version=version)

    def _path(self, name: str) -> Path:
        return self.layout.lance_folder / f"{name}.lance"

    def _create(self, name: str) -> None:
        self._database.create_table(name, schema=self.schemas[name]).set_unenforced_primary_key(
            [PRIMARY_KEYS[name]]
        )

    def _recreate_if_used(self, name: str) -> None:
        with lance_errors(f"emptying table `{name}`"):
            if self._path(name).is_dir():
                stored = self._dataset(name)
                if stored.count_rows() == 0 and stored.schema.remove_metadata().equals(self.schemas[name]):
                    return
                self._database.drop_table(name)
            self._create(name)

    def _check_schemas(self, stored: Mapping[str, pa.Schema]) -> None:
        for name in TABLES:
            wanted, found = self.schemas[name], stored[name]
            for column in sorted(set(wanted.names) | set(found.names)):
                have = f"{found.field(column).type}" if column in found.names else "no such column"
                want = f"{wanted.field(column).type}" if column in wanted.names else "no such column"
                if have != want:
                    raise SchemaError(
                        f"column {column!r} must be as in collection {self.layout.name!r} ({have}), got "
                        f"{want}; "
                        "change the source or ingest into a new collection"
                    )

    def _delete_by_ids(self, name: str, ids: Sequence[str]) -> None:
        from lancedb.expr import col

        self._latest(name).delete(col("doc_id").isin(list(ids)))

    def _append(self, name: str, rows: pa.RecordBatchReader | Fragments, expected: int) -> None:
        before = self._dataset(name)
        fragments = rows if isinstance(rows, list) else self.write_fragments(name, rows, expected)
        commit_fragments(before, name, fragments)
        require_grown(name, expected, self._dataset(name).count_rows() - before.count_rows())

    def _compact(self, name: str, *, force: bool) -> None:
        """Merge the newest fragments in tiers, as segments are, or all of them.

        Positions are rows of a scan, so the order must stay. Lance scans fragments by id and gives rewritten
        ones new ids: so only a run that reaches to the last fragment may be rewritten.
        """
        with self._reading(f"compacting table `{name}`"):
            fragments = self._dataset(name).get_fragments()
            stored = [fragment.physical_rows for fragment in fragments]
            live = [fragment.physical_rows - fragment.num_deletions for fragment in fragments]
            first = 0 if force else first_to_merge(live, stored)
            if first is None:
                return
            self._dataset(name).optimize.compact_files(
                excluded_fragment_ids=[fragment.fragment_id for fragment in fragments[:first]],
                target_rows_per_fragment=sum(stored) + 1,  # none is large enough to be left out
                batch_size=COMPACTION_ROWS,
                num_threads=1,
                materialize_deletions_threshold=0.0,
            )


def _has_tokens(schema: pa.Schema) -> bool:
    return all(field.name in schema.names for field in TOKEN_FIELDS)


TEXT_ROWS = 64
"""A few texts at a time: one may be long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """The rows of ``fragments``, and of them those of ``spans``, of each table; None for all."""

    tables: LanceTables
    versions: Mapping[str, int]
    fragments: Mapping[str, Sequence[int]] | None = None
    spans: Mapping[str, slice] | None = None

    def scan(
        self, table: str, columns: Sequence[str], batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Stream columns of a table."""
        fragments = None if self.fragments is None else self.fragments[table]
        span = None if self.spans is None else self.spans[table]
        return self.tables.scan(table, columns, self.versions, batch_rows, fragments=fragments, span=span)

    def vectors(self, table: str) -> Iterator[Float32[np.ndarray, "N V"]]:
        """Stream the vectors of a table."""
        for batch in self.scan(table, ["vector"]):
            yield vectors_of(batch.column("vector"))

    def files(self, tables: Collection[str] = TABLES) -> Iterator[Path]:
        """Yield the files that scans of some tables read."""
        for table in tables:
            folder = self.tables.layout.lance_folder / f"{table}.lance"
            yield from small_table_files(self.tables.layout, {table: self.versions[table]})
            span = slice(0, sys.maxsize) if self.spans is None else self.spans[table]
            dataset = open_pinned_dataset(self.tables.layout.lance_folder, table, self.versions[table])
            end = 0
            for fragment in dataset.get_fragments():
                if self.fragments is not None and fragment.fragment_id not in self.fragments[table]:
                    continue
                begin, end = end, end + fragment.physical_rows - fragment.num_deletions
                if begin < span.stop and span.start < end:
                    yield from (folder / "data" / file.path for file in fragment.data_files())

    def texts(self) -> Iterator[list[str]]:
        """Stream the texts of the documents."""
        for batch in self.scan(DOCUMENTS, ["text"], TEXT_ROWS):
            yield batch.column("text").to_pylist()

    def titles(self) -> Iterator[list[str]]:
        """Stream the titles of the documents, empty ones of those that have none."""
        for batch in self.scan(DOCUMENTS, ["title"]):
            yield [title or "" for title in batch.column("title").to_pylist()]


def vectors_of(column: pa.FixedSizeListArray) -> Float32[np.ndarray, "N V"]:
    """View a column of fixed-size lists as a matrix, without a copy."""
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)
