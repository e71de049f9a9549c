"""Documents that are written one by one, as rows: checked as an ingest checks them, and joined for one.

A document comes as JSON has it, or in a file that was sent, which is read as an ingest reads it from its
folder: one of a kind that is a document gives one, a table gives one a row. What cannot be read is named:
pages and rows beside the others, or the whole file. A row has the types of the collection's columns, and its
hash.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import FAULT, batch_of, learned_column, parse_type
from cairn.pipeline.corpus.formats import READABLE
from cairn.pipeline.corpus.quarantine import place_in_file
from cairn.pipeline.corpus.scan import Scan, read_checked, scan_sources
from cairn.pipeline.corpus.schema import ColumnError, too_many_columns
from cairn.pipeline.corpus.sources import TableSource, format_of
from cairn.pipeline.corpus.staging import SAME_ID, guess_told
from cairn.pipeline.errors import DocumentsRefusedError, SourceError, UsageError
from cairn.pipeline.types import GIVEN_VECTORS, RESERVED_COLUMNS, staged_schema

SOURCE_NAME: Final = "http"
"""What documents that came by themselves have as their source file; those of a file have its name."""
_OWN: Final = ("doc_id", "title", "text")
OURS: Final = ("content_sha256", "source_file", GIVEN_VECTORS)
"""Columns of staged rows that documents do not bring."""
HIDDEN_IDS: Final = (".", "..")
HIDDEN_ID: Final = "the id must not be . or .., which clients take out of an address"
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="zstd")
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
Documents = Sequence[Row] | pa.Table
"""A table has ``doc_id``, ``title``, ``text``, ``query`` and a column for each name of metadata."""


class Stored(Protocol):
    """What a writer reads of the published documents."""

    def read(self, doc_id: str) -> pa.Table | None:
        """Return a document as a table of one row, as it is staged."""
        ...

    def present(self, doc_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that there are."""
        ...

    def fields(self) -> Sequence[pa.Field[Any]]:
        """Return the metadata columns."""
        ...

    def matching(self, filters: Mapping[str, Any]) -> list[str]:
        """Return the ids of documents that match a filter tree."""
        ...


def with_values(rows: pa.Table, values: Mapping[str, Any], fields: Iterable[pa.Field[Any]]) -> pa.Table:
    """Return staged rows as documents that all have these values of JSON, beside the columns that there are.

    Columns that are null throughout are left out. Raises :class:`DocumentsRefusedError` where a value does
    not fit its column.
    """
    types = {field.name: field.type for field in fields}
    columns = {
        name: (pa.field(name, rows[name].type), rows[name]) for name in rows.schema.names if name not in OURS
    }
    for name, value in values.items():
        field, column, fault = learned_column(name, [value], types.get(name))
        if fault is not None:
            raise _refused([(0, fault)])
        columns[name] = field, pa.chunked_array([pa.repeat(column[0], len(rows))])
    kept = [each for each in columns.values() if each[0].metadata or each[1].null_count < len(rows)]
    return pa.table([column for _, column in kept], pa.schema([field for field, _ in kept]))


def changed_row(row: pa.Table, changes: Mapping[str, Any], fields: Sequence[pa.Field[Any]]) -> pa.Table:
    """Return a document with other metadata, None takes a value away; see :func:`with_values`."""
    _require_columns([{"doc_id": "", "metadata": changes}], fields)
    return with_values(row, changes, fields)


def typed_documents(
    documents: Sequence[Row], types: Mapping[str, str], fields: Sequence[pa.Field[Any]]
) -> pa.Table:
    """Return documents of JSON as a table whose columns have these types, the others those of their values.

    Raises :class:`DocumentsRefusedError` where a value does not fit its type.
    """
    rows = [{**dict.fromkeys(types), **each["metadata"]} for each in documents]
    _require_columns([{**each, "metadata": row} for each, row in zip(documents, rows, strict=True)], fields)
    batch = batch_of(rows, {name: parse_type(name, text) for name, text in types.items()}, ())
    told = [(place, fault) for place, fault in enumerate(batch.column(FAULT).to_pylist()) if fault]
    if told:  # none of them is of a column that `cairn retype` could change
        raise _refused([(place, fault.partition(" ")[2].partition("; ")[0]) for place, fault in told])
    own = {name: pa.array([each[name] for each in documents], pa.string()) for name in _OWN}
    columns = [(pa.field(name, column.type), column) for name, column in own.items()]
    columns += [(batch.schema.field(name), batch.column(name)) for name in types]
    for name in [each for each in dict.fromkeys(chain.from_iterable(rows)) if each not in types]:
        field, column, _ = learned_column(name, [row.get(name) for row in rows])
        columns += [] if pa.types.is_null(field.type) and not field.metadata else [(field, column)]
    return pa.table([column for _, column in columns], pa.schema([field for field, _ in columns]))


def kept_documents(documents: Documents) -> Sequence[Row] | str:
    """Return documents as JSON keeps them: a table as a stream of Arrow in base64."""
    if isinstance(documents, Sequence):
        return documents
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, documents.schema, options=_COMPRESSED) as writer:
        writer.write_table(documents)
    return base64.b64encode(sink.getvalue()).decode()


def documents_of(kept: Sequence[Row] | str) -> Documents:
    """Return the documents that :func:`kept_documents` kept."""
    return pa.ipc.open_stream(base64.b64decode(kept)).read_all() if isinstance(kept, str) else kept


def checked_rows(
    documents: Documents,
    corpus: CorpusConfig,
    fields: Sequence[pa.Field[Any]],
    source_file: str = SOURCE_NAME,
) -> tuple[pa.RecordBatch, Scan]:
    """Return documents as an ingest stages them beside the columns that there are, with its scan.

    Raises :class:`DocumentsRefusedError` for those that it would put into quarantine.
    """
    if isinstance(documents, pa.Table):
        table = documents
    else:
        _require_columns(documents, fields)
        table = [{name: each[name] for name in _OWN} | dict(each["metadata"]) for each in documents]
    scan = scan_sources([TableSource(table=table, name=source_file)], corpus, None, fields)
    faults: list[tuple[int, str]] = []
    batches = list(read_checked(scan, corpus))
    for batch in batches:
        places, details = batch.rejected.column("row_index"), batch.rejected.column("detail")
        faults += zip(places.to_pylist(), details.to_pylist(), strict=True)
        doc_ids = zip(batch.row_indices().tolist(), batch.rows.column("doc_id").to_pylist(), strict=True)
        faults += [(place, HIDDEN_ID) for place, doc_id in doc_ids if doc_id in HIDDEN_IDS]
    if faults:
        raise _refused(faults)
    return pa.Table.from_batches([batch.rows for batch in batches]).combine_chunks().to_batches()[0], scan


def _require_columns(documents: Sequence[Row], fields: Sequence[pa.Field[Any]]) -> None:
    """Refuse documents with an id twice, or with metadata that can be no columns."""
    faults: list[tuple[int, str]] = []
    seen: set[str] = set()
    names = {field.name for field in fields}
    new: set[str] = set()
    for place, document in enumerate(documents):
        reserved = sorted(RESERVED_COLUMNS & document["metadata"].keys())
        if reserved:
            faults.append((place, f"metadata must not have Cairn's own name {reserved[0]}"))
        if document["doc_id"] in seen:
            faults.append((place, "the id comes twice in this request"))
        seen.add(document["doc_id"])
        new |= document["metadata"].keys() - names
        if fault := too_many_columns(len(new), len(names)):
            faults.append((place, fault))
            break
    if faults:
        raise _refused(faults)


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
        TableSource(table=table.drop_columns([*OURS]).combine_chunks(), name=name)
        for name, table in tables.items()
    ]
    gone = [doc_id for doc_id, rows in newest.items() if rows is None]
    return sources or [TableSource(table=_EMPTY.empty_table(), name=SOURCE_NAME)], gone


def _refused(faults: Sequence[tuple[int, str]]) -> DocumentsRefusedError:
    sentence = f"documents must be storable, got {len(faults)} that are not: {faults[0][1]}"
    return DocumentsRefusedError(sentence, faults)


MAX_ROW_BYTES: Final = 512 << 20
"""Of all documents of a file in memory."""


class UnreadKindError(SourceError):
    """Files of this kind are not read, or not on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Documents, and what of their file was refused; a file that ``is_document`` gives no id of its own.

    ``rows`` are as an ingest stages them.
    """

    rows: pa.Table
    is_document: bool
    refused: Sequence[str]
    warnings: Sequence[str]


def rows_of_file(path: Path, corpus: CorpusConfig, fields: Sequence[pa.Field[Any]]) -> FileRows:
    """Read a file beside the metadata columns that there are; its name tells its kind.

    Raises :class:`SourceError` where nothing of it can be read; no sentence has its folder.
    """
    found = format_of(path.name)
    if found is None:  # and not looked at: the metadata of a table would name files of this machine
        suffix = path.suffix or "no suffix"
        raise UnreadKindError(f"a file must be of a kind that is read ({READABLE}), got {suffix}; convert it")
    if missing := found.missing():
        raise UnreadKindError(f"{path.suffix} needs another package on the server; {missing}")
    try:
        scan = scan_sources([str(path)], corpus, None, fields)
    except UsageError as error:
        told = error.in_file if isinstance(error, ColumnError) else str(error)
        raise SourceError(_without_folder(told, path)) from error
    batches: list[pa.RecordBatch] = []
    refused: list[str] = []
    doc_ids, encodings = set[str](), set[str]()
    num_bytes = 0
    for batch in read_checked(scan, corpus):
        num_bytes += batch.rows.nbytes
        if num_bytes > MAX_ROW_BYTES:
            raise SourceError(f"a file must have at most {MAX_ROW_BYTES >> 20} MiB of rows, got more; cut it")
        rejected = batch.rejected.to_pylist()
        told = [(row["row_index"] or 0, ": ".join([*place_in_file(row), row["detail"]])) for row in rejected]
        are_kept: list[bool] = []
        for place, doc_id in enumerate(batch.rows.column("doc_id").to_pylist()):
            fault = SAME_ID if doc_id in doc_ids else HIDDEN_ID if doc_id in HIDDEN_IDS else None
            if fault is not None:
                row_index = int(batch.row_indices()[place])
                told.append((row_index, f"row {row_index:,}: {fault}"))
            are_kept.append(fault is None)
            doc_ids.add(doc_id)
        batches.append(batch.rows.filter(pa.array(are_kept, pa.bool_())))
        refused += [sentence for _, sentence in sorted(told)]
        encodings |= {batch.encoding} if batch.encoding else set()
    rows = pa.Table.from_batches(batches, staged_schema(scan.metadata_fields))
    if not rows.num_rows:
        told = refused[0] if refused else "it has no rows"
        raise SourceError(f"{path.name} must hold a document, got none: {_without_folder(told, path)}")
    return FileRows(
        rows=rows,
        is_document=found.is_document,
        refused=[_without_folder(each, path) for each in refused],
        warnings=[
            *(_without_folder(each, path) for each in scan.warnings),
            *(guess_told(each, [path.name]) for each in encodings),
        ],
    )


def _without_folder(sentence: str, path: Path) -> str:
    return sentence.replace(f"{path.parent}/", "")
