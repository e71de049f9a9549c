"""Documents that are written one by one, as rows: checked as an ingest checks them, and joined for one.

A document comes as JSON has it. Its row has the types of the collection's columns, and its hash.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import Scan, read_checked, scan_sources
from cairn.pipeline.corpus.schema import too_many_columns
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.errors import DocumentsRefusedError
from cairn.pipeline.types import GIVEN_VECTORS, RESERVED_COLUMNS, Document

SOURCE_NAME: Final = "http"
"""What documents that came by themselves have as their source file; those of a file have its name."""
_OURS: Final = ("content_sha256", "source_file", GIVEN_VECTORS)
_EMPTY: Final = pa.schema(
    [
        ("doc_id", pa.string()),
        ("title", pa.string()),
        ("text", pa.large_string()),
        (GIVEN_VECTORS, pa.null()),
    ]
)

Row = Mapping[str, Any]
"""A document: ``doc_id``, ``title``, ``text`` and ``metadata``."""


class Stored(Protocol):
    """What a writer reads of the published documents."""

    def read(self, doc_id: str) -> Document | None:
        """Return a document."""
        ...

    def present(self, doc_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that there are."""
        ...

    def source_file(self, doc_id: str) -> str:
        """Return the source file of a document that there is."""
        ...

    def fields(self) -> Sequence[pa.Field[Any]]:
        """Return the metadata columns."""
        ...

    def matching(self, filters: Mapping[str, Any]) -> list[str]:
        """Return the ids of documents that match a filter tree."""
        ...


def staged_document(rows: pa.RecordBatch, place: int) -> Document:
    """Return the document of a staged row; neither its tokens nor its generation are known yet."""
    (row,) = rows.slice(place, 1).to_pylist()
    own = {name: row[name] for name in ("doc_id", "title", "text", "content_sha256")}
    metadata = {name: value for name, value in row.items() if name not in RESERVED_COLUMNS}
    return Document(**own, num_tokens=0, metadata=metadata, generation=0)


def row_of(document: Document, changes: Mapping[str, Any] = MappingProxyType({})) -> Row:
    """Return a document with other metadata, as JSON has it."""
    metadata = {**_plain(document.metadata), **changes}
    own = {"doc_id": document.doc_id, "title": document.title, "text": document.text}
    return {**own, "metadata": metadata}


def checked_rows(
    documents: Sequence[Row],
    corpus: CorpusConfig,
    fields: Sequence[pa.Field[Any]],
    source_file: str = SOURCE_NAME,
) -> tuple[pa.RecordBatch, Scan]:
    """Return documents as an ingest stages them beside the columns that there are, with its scan.

    Raises :class:`DocumentsRefusedError` for those that it would put into quarantine.
    """
    faults: list[tuple[int, str]] = []
    seen: set[str] = set()
    names = {field.name for field in fields}
    new: set[str] = set()
    for place, document in enumerate(documents):
        reserved = sorted(RESERVED_COLUMNS & document["metadata"].keys())
        if reserved:
            faults.append((place, f"metadata must not have Cairn's own name {reserved[0]}"))
        if document["doc_id"] in (".", ".."):
            faults.append((place, "the id must not be . or .., which clients take out of an address"))
        if document["doc_id"] in seen:
            faults.append((place, "the id comes twice in this request"))
        seen.add(document["doc_id"])
        new |= document["metadata"].keys() - names
        if fault := too_many_columns(len(new), len(names)):
            faults.append((place, fault))
            break
    if faults:
        raise _refused(faults)
    flat = [
        {name: document[name] for name in ("doc_id", "title", "text")} | dict(document["metadata"])
        for document in documents
    ]
    scan = scan_sources([TableSource(table=flat, name=source_file)], corpus, None, fields)
    batches = list(read_checked(scan, corpus))
    for batch in batches:
        places, details = batch.rejected.column("row_index"), batch.rejected.column("detail")
        faults += zip(places.to_pylist(), details.to_pylist(), strict=True)
    if faults:
        raise _refused(faults)
    return pa.Table.from_batches([batch.rows for batch in batches]).combine_chunks().to_batches()[0], scan


def last_rows(
    writes: Iterable[tuple[pa.RecordBatch | None, Sequence[str]]],
) -> tuple[list[TableSource], list[str]]:
    """Return what writes, each of rows and of ids to delete, leave: tables to ingest, and ids to delete.

    There is a table for each source file, and an empty one where there are no rows.
    """
    newest: dict[str, pa.RecordBatch | None] = {}
    for rows, deleted in writes:
        if rows is not None:
            doc_ids = rows.column("doc_id").to_pylist()
            newest.update({doc_id: rows.slice(row, 1) for row, doc_id in enumerate(doc_ids)})
        newest.update(dict.fromkeys(deleted))
    kept: dict[str, list[pa.Table]] = {}
    for rows in newest.values():
        if rows is not None:
            kept.setdefault(rows.column("source_file")[0].as_py(), []).append(pa.Table.from_batches([rows]))
    tables = {name: pa.concat_tables(found, promote_options="default") for name, found in kept.items()}
    sources = [
        TableSource(table=table.drop_columns([*_OURS]).combine_chunks(), name=name)
        for name, table in tables.items()
    ]
    gone = [doc_id for doc_id, rows in newest.items() if rows is None]
    return sources or [TableSource(table=_EMPTY.empty_table(), name=SOURCE_NAME)], gone


def _refused(faults: Sequence[tuple[int, str]]) -> DocumentsRefusedError:
    sentence = f"documents must be storable, got {len(faults)} that are not: {faults[0][1]}"
    return DocumentsRefusedError(sentence, faults)


def _plain(value: Any) -> Any:
    """Return a stored value as JSON has it, to be read back into the type of its column."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return f"{value:f}" if isinstance(value, Decimal) else value
