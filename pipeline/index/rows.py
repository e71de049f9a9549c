"""The truth: LanceDB tables ``documents`` and ``chunks``, changed by one writer under the collection's lock.

Both tables hold the same documents in the same order, chunks by ordinal, and every later stage relies on that
order. A commit is a handful of Lance versions; none of them is visible to a reader before a generation pins
the last one. The next writer removes what a killed one committed, and never resumes it: an append committed
twice doubles rows. So the latest versions are those of the served generation when a commit begins.

Documents are deleted from both tables, a few by their places, others by their ids: by ids, Lance reads the
ids of all rows to find those of one document. The served generation says which rows of a scan its documents
are: each is then read with the address that Lance has for it, and must be of its document. Where one is not,
ids decide.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, and lancedb types a local table as its abstract parent:
# no type checker sees either.

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.durable import commit_point, remove_entry
from cairn.pipeline.errors import CairnError, IntegrityError, SchemaError
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.files import SCAN_BUFFER_BYTES, lance_errors, open_pinned_dataset, use_lance
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.index.tiers import first_to_merge
from cairn.pipeline.types import LINE_FIELD, SPARSE_FIELDS, TOKEN_FIELDS, chunks_schema, documents_schema
from jaxtyping import Float32
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata
from lance.fragment import write_fragments as write_lance_fragments

if TYPE_CHECKING:
    import lancedb.table


def _require_grown(name: str, expected: int, added: int) -> None:
    if added != expected:
        raise IntegrityError(
            f"table `{name}` must grow by {expected} rows, got {added}; run the same command again, "
            "nothing was published"
        )


def _checked(name: str, schema: pa.Schema, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Refuse missing columns and vectors that are not finite, which Lance silently accepts."""
    if rows.schema.names != schema.names:
        raise IntegrityError(
            f"rows of table `{name}` must have the columns {', '.join(schema.names)}, got "
            f"{', '.join(rows.schema.names)}"
        )
    for batch in rows:
        vectors = batch.column("vector")
        if vectors.null_count or pc.any(pc.invert(pc.is_finite(vectors.flatten()))).as_py():
            raise IntegrityError(
                f"vectors of table `{name}` must be finite numbers, got a null, NaN or infinity; the encoder "
                "is at fault, nothing was published"
            )
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


MAX_IDS_A_DELETE: Final = 1_000
"""Longer IN lists make Lance's planner the slowest part of a deletion."""
MAX_PLACED_DOCUMENTS: Final = 64
"""Each costs a third of a millisecond a table; reading all ids costs as much for one as for a thousand."""


Rows = Mapping[str, slice]
"""By table, the rows of a document in a scan."""
FindDocuments = Callable[[Sequence[str]], Mapping[str, Rows]]
"""Return the rows of those documents whose places are known."""


def _placed(
    before: Mapping[str, lance.LanceDataset], doc_ids: Sequence[str], find: FindDocuments
) -> dict[str, list[int]] | None:
    """Return the addresses of all rows of documents by table; None where one is not where it should be."""
    found = find(doc_ids)
    if set(found) != set(doc_ids):
        return None
    addresses: dict[str, list[int]] = {name: [] for name in TABLES}
    for doc_id, rows in found.items():
        for name in TABLES:
            own = _addresses(before[name], doc_id, rows[name])
            if own is None:
                return None
            addresses[name] += own
    return addresses


def _addresses(dataset: lance.LanceDataset, doc_id: str, rows: slice) -> list[int] | None:
    """Return the addresses of rows of a scan; None where one is not of the document."""
    num_rows = rows.stop - rows.start
    if not num_rows:
        return []
    found = dataset.scanner(
        columns=["doc_id"], with_row_address=True, offset=rows.start, limit=num_rows, scan_in_order=True
    ).to_table()
    if found.column("doc_id").to_pylist() != [doc_id] * num_rows:
        return None
    return found.column("_rowaddr").to_pylist()


PRIMARY_KEYS = {DOCUMENTS: "doc_id", CHUNKS: "chunk_id"}

SCAN_ROWS = 4_096
KEPT_BYTES: Final = 4 << 20
"""Of rows that a commit adds, what stays in memory: a server's publications read them seven times."""
COMPACTION_ROWS = 512
"""Rows a compaction holds at once: their text may be long."""

Versions = dict[str, int]
"""Table name to Lance version."""


class LanceTables:
    """Both tables of a collection, open for one writer or pinned scans.

    ``deleted_ids`` are the documents that the last commit deleted, ``num_added`` the rows of each table that
    it added, which end every scan.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        metadata_fields: Sequence[pa.Field],
        vector_dim: int,
        added: Sequence[pa.Field],
    ) -> None:
        self.layout = layout
        self.metadata_fields = tuple(metadata_fields)
        self.vector_dim = vector_dim
        self.deleted_ids = pa.array([], pa.large_string())
        self.num_added: dict[str, int] = dict.fromkeys(TABLES, 0)
        self._kept: dict[str, tuple[int, int, pa.Table]] = {}
        """The rows that the last commit added, where they are few: the version, and the row they begin at."""
        self._opened: dict[tuple[str, int | None], lance.LanceDataset] = {}
        """Tables by name and version, None is the latest: this is its one writer."""
        self.schemas = {
            DOCUMENTS: documents_schema(metadata_fields, vector_dim),
            CHUNKS: chunks_schema(vector_dim, added),
        }

    @functools.cached_property
    def _database(self) -> Any:
        import lancedb  # takes most of a second of a process, which an ingest without changes can do without

        use_lance()
        return lancedb.connect(str(self.layout.lance_folder))

    @classmethod
    def open(cls, layout: CollectionLayout, versions: Mapping[str, int]) -> LanceTables:
        """Open the tables that stand, taking the schema from pinned versions.

        A missing table raises :class:`IntegrityError`.
        """
        missing = [name for name in TABLES if not (layout.lance_folder / f"{name}.lance").is_dir()]
        if missing:
            raise layout.damaged(
                f"collection {layout.name!r} must have the tables {', '.join(TABLES)}, missing: "
                f"{', '.join(missing)}"
            )
        with layout.naming_damage(), lance_errors("opening the tables", damaged=True):
            opened: dict[tuple[str, int | None], lance.LanceDataset] = {
                (name, versions[name]): open_pinned_dataset(layout.lance_folder, name, versions[name])
                for name in TABLES
            }
            documents, chunks = (each.schema for each in opened.values())
        owned = set(documents_schema((), 1).names)
        metadata_fields = [field.remove_metadata() for field in documents if field.name not in owned]
        tables = cls(layout, metadata_fields, documents.field("vector").type.list_size, _added(chunks))
        tables._opened.update(opened)
        return tables

    @property
    def added(self) -> tuple[pa.Field, ...]:
        """Return the columns of ``chunks`` that only some collections have."""
        return _added(self.schemas[CHUNKS])

    def has(self, fields: Sequence[pa.Field]) -> bool:
        """Say whether ``chunks`` has these columns, which only some collections have."""
        return set(fields) <= set(self.added)

    @classmethod
    def open_or_create(
        cls,
        layout: CollectionLayout,
        metadata_fields: Sequence[pa.Field],
        vector_dim: int,
        *,
        added: Sequence[pa.Field] = (),
        versions: Mapping[str, int] | None = None,
    ) -> LanceTables:
        """Open the tables as the ``versions`` that are served, None makes them empty.

        ``added`` are the further columns of ``chunks`` of new ones. Another schema raises
        :class:`SchemaError` before anything is written; metadata columns may be further ones, which
        :meth:`add_metadata_columns` adds.
        """
        if versions is None:
            tables = cls(layout, metadata_fields, vector_dim, added)
            with lance_errors("creating the tables"):
                remove_entry(layout.lance_folder)
                for name in TABLES:
                    created = tables._database.create_table(name, schema=tables.schemas[name])
                    created.set_unenforced_primary_key([PRIMARY_KEYS[name]])
            return tables
        stored = cls.open(layout, versions)
        tables = cls(layout, metadata_fields, vector_dim, stored.added)
        tables._opened.update(stored._opened)
        tables._check_schemas(stored.schemas)
        return tables

    def versions(self) -> Versions:
        """Return the latest version of each table, published or not."""
        with lance_errors("reading the table versions"):
            return {name: self.dataset(name).version for name in TABLES}

    def count_rows(self, name: str, versions: Mapping[str, int]) -> int:
        """Count the rows of a table at its pinned version."""
        return self.dataset(name, versions[name]).count_rows()

    def add_token_columns(self) -> None:
        """Give ``chunks`` its columns for tokens, null in all rows, where it has none."""
        if not self.has(TOKEN_FIELDS):
            with lance_errors("adding columns to table `chunks`"):
                self._latest(CHUNKS).add_columns(list(TOKEN_FIELDS))
            self.schemas[CHUNKS] = chunks_schema(self.vector_dim, (*self.added, *TOKEN_FIELDS))

    @returning_freed_memory()
    def compact(self, *, force: bool = False) -> None:
        """Merge fragments where it is due. Rows keep their order, not their ids."""
        for name in TABLES:
            self._compact(name, force=force)
        commit_point("compacted")

    @returning_freed_memory()
    def commit(
        self,
        *,
        deleted_ids: Iterable[str] = (),
        find_documents: FindDocuments | None = None,
        replaces_all: bool = False,
        documents: pa.RecordBatchReader | None = None,
        chunks: pa.RecordBatchReader | None = None,
        expected_documents: int = 0,
        expected_chunks: int = 0,
    ) -> Versions:
        """Delete and append; return the versions that hold the result.

        ``find_documents`` says where documents stand in the latest version, so that a few are deleted without
        a look at all ids. ``replaces_all`` deletes every row instead. ``documents`` and ``chunks`` carry the
        same documents in the same order, each in ONE append. Row counts are checked after each write; a
        difference raises :class:`IntegrityError`.
        """
        with self.layout.naming_damage(), lance_errors("deleting documents from the tables", damaged=True):
            self._delete(deleted_ids, find_documents)
        for name in TABLES if replaces_all else ():
            with lance_errors(f"deleting all rows of table `{name}`"):
                self._latest(name).delete("true")
            commit_point(f"{name}-deleted")
        for name, rows, expected in (
            (DOCUMENTS, documents, expected_documents),
            (CHUNKS, chunks, expected_chunks),
        ):
            if rows is not None and expected:
                self._append(name, rows, expected)
                self.num_added[name] = expected
            commit_point(f"{name}-added")
        return self.versions()

    def scan(
        self,
        table: str,
        columns: Sequence[str],
        versions: Mapping[str, int],
        batch_rows: int = SCAN_ROWS,
        *,
        first: int = 0,
    ) -> Iterator[pa.RecordBatch]:
        """Stream columns of a pinned version in stored order from a row on, in bounded memory."""
        version, start, kept = self._kept.get(table, (None, None, None))
        if kept is not None and (version, start) == (versions[table], first):
            yield from kept.select(list(columns)).to_batches(max_chunksize=batch_rows)
            return
        with lance_errors(f"reading table `{table}`", damaged=True):
            scanner = self.dataset(table, versions[table]).scanner(
                columns=list(columns),
                batch_size=batch_rows,
                offset=first or None,
                scan_in_order=True,
                batch_readahead=1,
                fragment_readahead=1,
                io_buffer_size=SCAN_BUFFER_BYTES,
            )
            yield from scanner.to_batches()

    def _latest(self, name: str) -> lancedb.table.Table:
        """Open the latest version to change it."""
        self._opened.pop((name, None), None)
        return self._database.open_table(name)

    def dataset(self, name: str, version: int | None = None) -> lance.LanceDataset:
        """Return a table as Lance has it, at a version, None the latest; each is opened once."""
        use_lance()
        if (name, version) not in self._opened:
            self._opened[name, version] = lance.dataset(str(self._path(name)), version=version)
        return self._opened[name, version]

    def _commit(self, name: str, operation: lance.LanceOperation.BaseOperation) -> None:
        """Make the next version of a table."""
        before = self.dataset(name)
        after = lance.LanceDataset.commit(before, operation, read_version=before.version)
        self._opened[name, None] = self._opened[name, after.version] = after

    def _path(self, name: str) -> Path:
        return self.layout.lance_folder / f"{name}.lance"

    def add_metadata_columns(self) -> None:
        """Give ``documents`` the metadata columns that its latest version lacks, null in all rows."""
        known = self.dataset(DOCUMENTS).schema.names
        further = [field for field in self.metadata_fields if field.name not in known]
        if further:
            with lance_errors("adding columns to table `documents`"):
                self._latest(DOCUMENTS).add_columns(further)

    def rewritten(
        self, metadata_fields: Sequence[pa.Field], change: Callable[[pa.RecordBatch], pa.RecordBatch]
    ) -> LanceTables:
        """Write ``documents`` again with other metadata columns; ``change`` gives its rows, batch by batch.

        Raises what ``change`` raises; nothing has changed then.
        """
        new = LanceTables(
            self.layout,
            metadata_fields,
            self.vector_dim,
            self.added,
        )
        versions, schema = self.versions(), new.schemas[DOCUMENTS]
        num_rows = self.count_rows(DOCUMENTS, versions)
        rows = map(change, self.scan(DOCUMENTS, schema.names, versions, COMPACTION_ROWS))
        reader = pa.RecordBatchReader.from_batches(schema, rows)
        fragments = new._write_fragments(DOCUMENTS, reader, num_rows, replaces=True) if num_rows else []
        with lance_errors("writing table `documents` again"):
            before = self.dataset(DOCUMENTS)
            keys = {field.name: field.metadata for field in before.schema}
            whole = pa.schema([field.with_metadata(keys[field.name]) for field in schema])
            new._commit(DOCUMENTS, lance.LanceOperation.Overwrite(whole, fragments))
        return new

    def _check_schemas(self, stored: Mapping[str, pa.Schema]) -> None:
        further = {field.name for field in self.metadata_fields} - set(stored[DOCUMENTS].names)
        for name in TABLES:
            wanted, found = _types(self.schemas[name]), _types(stored[name])
            for column in sorted((wanted.keys() | found.keys()) - further):
                have, want = found.get(column, "no such column"), wanted.get(column, "no such column")
                if have != want:
                    raise SchemaError(
                        f"column {column!r} must be as in collection {self.layout.name!r} ({have}), got "
                        f"{want}; "
                        "change the source or ingest into a new collection"
                    )

    def _delete(self, deleted_ids: Iterable[str], find: FindDocuments | None) -> None:
        """Delete documents from both tables."""
        before = {name: self.dataset(name) for name in TABLES}
        deleted = [pa.array([], pa.large_string())]
        left = iter(deleted_ids)
        while ids := list(itertools.islice(left, MAX_IDS_A_DELETE)):
            deleted.append(pa.array(ids, pa.large_string()))
            is_few = len(ids) <= MAX_PLACED_DOCUMENTS
            # Addresses stay what they are while other rows are deleted.
            placed = _placed(before, ids, find) if find is not None and is_few else None
            if placed is None:
                self._delete_by_ids(ids)
                continue
            for name, addresses in placed.items():
                if addresses:
                    latest = self.dataset(name)
                    after = latest.checkout_version(latest.version)  # for others this one stays as it is
                    after.delete(f"_rowaddr IN ({', '.join(map(str, addresses))})")
                    self._opened[name, None] = self._opened[name, after.version] = after
                    commit_point(f"{name}-deleted")
        self.deleted_ids = pa.concat_arrays(deleted)

    def _delete_by_ids(self, ids: Sequence[str]) -> None:
        from lancedb.expr import col

        for name in TABLES:
            self._latest(name).delete(col("doc_id").isin(list(ids)))
            commit_point(f"{name}-deleted")

    def _append(self, name: str, rows: pa.RecordBatchReader, expected: int) -> None:
        """Append all of the rows or nothing, as fragments that one commit names."""
        num_before = self.dataset(name).count_rows()
        kept: list[pa.RecordBatch] = []
        fragments = self._write_fragments(name, rows, expected, kept)
        with lance_errors(f"appending to table `{name}`"):
            self._commit(name, lance.LanceOperation.Append(fragments))
        after = self.dataset(name)
        _require_grown(name, expected, after.count_rows() - num_before)
        if kept:
            self._kept[name] = after.version, num_before, pa.Table.from_batches(kept)

    def _write_fragments(
        self,
        name: str,
        rows: pa.RecordBatchReader,
        num_rows: int,
        kept: list[pa.RecordBatch] | None = None,
        *,
        replaces: bool = False,
    ) -> list[FragmentMetadata]:
        """Write so many rows beside those of a table, or in their place; ``kept`` takes them if few."""
        num_bytes = 0
        raised: list[CairnError] = []  # Lance hides what its source raises

        def checked() -> Iterator[pa.RecordBatch]:
            nonlocal num_bytes
            try:
                for batch in _checked(name, self.schemas[name], rows):
                    num_bytes += batch.nbytes
                    if kept is not None:
                        kept.append(batch)
                        if num_bytes > KEPT_BYTES:
                            kept.clear()
                    yield batch
            except CairnError as error:
                raised.append(error)
                raise

        reader = pa.RecordBatchReader.from_batches(self.schemas[name], checked())
        try:
            with lance_errors(f"writing fragments of table `{name}`"):
                fragments = write_lance_fragments(
                    reader,
                    self.dataset(name),
                    mode="overwrite" if replaces else "append",
                    max_rows_per_file=num_rows,
                )
        except CairnError:
            if raised:
                raise raised[0] from None
            raise
        assert isinstance(fragments, list), "no transaction was asked for"
        _require_grown(name, num_rows, sum(fragment.physical_rows for fragment in fragments))
        for path in (file.path for fragment in fragments for file in fragment.files):
            with lance_errors(f"reading back what was written for table `{name}`"):
                # Lance does not notice a file that was cut while it wrote it.
                file = LanceFileReader(str(self._path(name) / "data" / path), columns=["doc_id"])
                file.take_rows([file.metadata().num_rows - 1]).to_table()
        return fragments

    def _compact(self, name: str, *, force: bool) -> None:
        """Merge the newest fragments in tiers, as segments are, or all of them.

        Positions are rows of a scan, so the order must stay. Lance scans fragments by id and gives rewritten
        ones new ids: so only a run that reaches to the last fragment may be rewritten.
        """
        with self.layout.naming_damage(), lance_errors(f"compacting table `{name}`", damaged=True):
            fragments = self.dataset(name).get_fragments()
            stored = [fragment.physical_rows for fragment in fragments]
            live = [fragment.physical_rows - fragment.num_deletions for fragment in fragments]
            first = 0 if force else first_to_merge(live, stored)
            if first is None:
                return
            changed = self._opened[name, None]
            self._opened = {key: each for key, each in self._opened.items() if each is not changed}
            changed.optimize.compact_files(
                excluded_fragment_ids=[fragment.fragment_id for fragment in fragments[:first]],
                target_rows_per_fragment=sum(stored) + 1,  # none is large enough to be left out
                batch_size=COMPACTION_ROWS,
                num_threads=1,
                materialize_deletions_threshold=0.0,
            )


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _added(schema: pa.Schema) -> tuple[pa.Field, ...]:
    """Return the added columns that a table has, in its order."""
    known = {field.name: field for field in (LINE_FIELD, *TOKEN_FIELDS, *SPARSE_FIELDS)}
    return tuple(known[name] for name in schema.names if name in known)


TEXT_ROWS = 64
"""A few texts at a time: one may be long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """The rows of each table, from ``first`` on where it names one."""

    tables: LanceTables
    versions: Mapping[str, int]
    first: Mapping[str, int] = field(default_factory=dict[str, int])

    def scan(
        self, table: str, columns: Sequence[str], batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Stream columns of a table."""
        return self.tables.scan(table, columns, self.versions, batch_rows, first=self.first.get(table, 0))

    def has_new_columns(self) -> bool:
        """Tell whether the tables are to have metadata columns that these rows lack."""
        folder, version = self.tables.layout.lance_folder, self.versions[DOCUMENTS]
        known = open_pinned_dataset(folder, DOCUMENTS, version).schema.names
        return any(field.name not in known for field in self.tables.metadata_fields)

    def vectors(self, table: str) -> Iterator[Float32[np.ndarray, "N V"]]:
        """Stream the vectors of a table."""
        for batch in self.scan(table, ["vector"]):
            yield vectors_of(batch.column("vector"))

    def texts(self) -> Iterator[list[str]]:
        """Stream the texts of the documents."""
        for batch in self.scan(DOCUMENTS, ["text"], TEXT_ROWS):
            yield batch.column("text").to_pylist()

    def lines(self) -> Iterator[str] | None:
        """Stream the lines that describe chunks, "" for none; None where the collection has none."""
        if not self.tables.has([LINE_FIELD]):
            return None
        batches = self.scan(CHUNKS, [LINE_FIELD.name])
        return (line or "" for batch in batches for line in batch.column(0).to_pylist())

    def titles(self) -> Iterator[list[str]]:
        """Stream the titles of the documents, empty ones of those that have none."""
        for batch in self.scan(DOCUMENTS, ["title"]):
            yield [title or "" for title in batch.column("title").to_pylist()]


def vectors_of(column: pa.FixedSizeListArray) -> Float32[np.ndarray, "N V"]:
    """View a column of fixed-size lists as a matrix, without a copy."""
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)
