"""Files that clients sent, and the collections they are attached to: a folder and a SQLite database.

    ROOT/.files/FILE_ID/NAME    the bytes of a file, whole or absent
    ROOT/.files/files.sqlite    files, stores (names that clients gave), attachments and their batches

A file is sent once and attached to any number of collections. An attachment is `in_progress` until its
documents are found by searches; a server that is started again goes on with those. What reads the files is
:mod:`cairn.pipeline.serve.file_ingestion`.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal

from cairn.pipeline import durable
from cairn.pipeline.corpus.schema import odd_name
from cairn.pipeline.corpus.source_record import sqlite_errors
from cairn.pipeline.errors import DocumentsRefusedError, StorageError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.serve.schemas import MAX_DOC_ID_CHARACTERS, Reply, Request
from cairn.pipeline.types import RESERVED_COLUMNS
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

FOLDER_NAME: Final = ".files"
FILE_PREFIX: Final = "file-"
NAME_BYTES: Final = 200
LEFTOVER_SECONDS: Final = 3_600
"""After which a folder without its entry is what a killed server has left: a file is kept sooner."""
_NOT_IN_NAMES: Final = re.compile(r"[\x00-\x1f\x7f]")
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, filename TEXT, purpose TEXT, num_bytes INTEGER,
    created_at INTEGER, expires_at INTEGER, owner TEXT);
CREATE TABLE IF NOT EXISTS attachments (
    number INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT, file_id TEXT, filename TEXT, doc_id TEXT,
    attributes TEXT, batch_id TEXT, created_at INTEGER, status TEXT, error_code TEXT, error_message TEXT,
    doc_ids TEXT, num_bytes INTEGER, warnings TEXT, UNIQUE (collection, file_id));
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, collection TEXT, created_at INTEGER);
CREATE TABLE IF NOT EXISTS stores (
    collection TEXT PRIMARY KEY, name TEXT, metadata TEXT, created_at INTEGER);
"""

_AS_JSON: Final = ("attributes", "doc_ids", "warnings")

Status = Literal["in_progress", "completed", "failed", "cancelled"]
ErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]


def _columns(attributes: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that no column of a collection can have."""
    reserved = sorted(RESERVED_COLUMNS & attributes.keys())
    told = [f"attributes must not have Cairn's own name {name}" for name in reserved]
    told += [f"an attribute is a column, and {odd}" for name in attributes if (odd := odd_name(name))]
    if told:
        raise PydanticCustomError("no_column", "{told}", {"told": told[0]})
    return attributes


Attributes = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64)],
        Annotated[str, Field(max_length=512)] | bool | int | float,
    ],
    Field(max_length=16, description="Values to filter by: columns of the collection."),
    AfterValidator(_columns),
]
FileId = Annotated[str, Field(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
DocumentId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_DOC_ID_CHARACTERS,
        description="An extension: the id that the document of the file is to have, else that of the file.",
    ),
]


class Chunking(Request):
    """How a file is cut: only ``auto``, since each search cuts passages as it is asked to."""

    type: Literal["auto"]


class NewVectorStoreFile(Request):
    """A file to put into a collection."""

    file_id: FileId
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None
    doc_id: DocumentId | None = None


class UploadedFile(Reply):
    """A file that was sent; `error`: no collection that it was put into could take it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed", "error"] = "processed"
    status_details: str | None = None
    owner: Annotated[str, Field(exclude=True)]
    """The id of the key that sent it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """A file in a collection, with its documents; ``doc_id`` is for one without an id of its own."""

    number: int
    collection: str
    file_id: str
    filename: str
    doc_id: str
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch_id: str | None
    created_at: int
    status: Status
    error_code: ErrorCode | None
    error_message: str | None
    doc_ids: Sequence[str]
    num_bytes: int
    warnings: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """What a client said of a collection."""

    name: str
    metadata: Mapping[str, str] | None
    created_at: int


class Uploads:
    """The files of a server; its calls come from any thread. The database is made by the first of them."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / FOLDER_NAME
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def path(self, file: UploadedFile) -> Path:
        """Return where the bytes of a file are."""
        return self._folder / file.id / file.filename

    def add(
        self, content: IO[bytes], filename: str, *, purpose: str, owner: str, seconds: int | None
    ) -> UploadedFile:
        """Keep the bytes of a file, for some seconds or until it is removed."""
        now = int(time.time())
        file_id = f"{FILE_PREFIX}{secrets.token_hex(12)}"
        name = file_name(filename)
        with (
            durable.storage_errors("keeping a file"),
            durable.replacing_folder(self._folder / file_id) as folder,
            (folder / name).open("wb") as kept,
        ):
            shutil.copyfileobj(content, kept, 1 << 20)
            num_bytes = kept.tell()
        self._run(
            "INSERT INTO files (id, filename, purpose, num_bytes, created_at, expires_at, owner)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file_id, name, purpose, num_bytes, now, None if seconds is None else now + seconds, owner),
        )
        return self._files("id = ?", file_id)[0]

    def file(self, file_id: str) -> UploadedFile | None:
        """Return a file that has not expired; one that is to be read yet does not."""
        return next(iter(self._files("id = ?", file_id)), None)

    def files(self) -> list[UploadedFile]:
        """Return all files that have not expired, oldest first."""
        return self._files("1")

    def _files(self, condition: str, *values: Any) -> list[UploadedFile]:
        found = self._run(
            f"SELECT id, filename, purpose, num_bytes AS bytes, created_at, expires_at, owner,"  # noqa: S608 - our own
            " (SELECT CASE WHEN MIN(status = 'failed') THEN MAX(error_message) END FROM attachments"
            " WHERE file_id = files.id) AS status_details FROM files"
            f" WHERE {condition} AND (expires_at IS NULL OR expires_at > ?"
            " OR id IN (SELECT file_id FROM attachments WHERE status = 'in_progress')) ORDER BY number",
            (*values, int(time.time())),
        )
        rows = ({**row, "status": "error" if row["status_details"] else "processed"} for row in found)
        return [UploadedFile.model_validate(row) for row in rows]

    def remove(self, file_id: str) -> None:
        """Remove a file; what it is attached to stays."""
        self._run("DELETE FROM files WHERE id = ?", (file_id,))
        with durable.storage_errors("removing a file"):
            durable.remove_entry(self._folder / file_id)

    def clear(self) -> None:
        """Remove expired files, what a killed server has left of one, and entries of gone collections."""
        for row in self._run("SELECT collection FROM attachments UNION SELECT collection FROM stores"):
            with contextlib.suppress(StorageError):  # one that cannot be read is there
                if not CollectionLayout.at(self._root, row["collection"]).is_begun():
                    self.forget(row["collection"])
        kept = {file.id for file in self.files()}
        for row in self._run("SELECT id FROM files"):
            if row["id"] not in kept:
                self.remove(row["id"])
        if not self._folder.is_dir():
            return
        with durable.storage_errors("removing files"):
            for entry in self._folder.iterdir():
                is_old = entry.is_dir() and entry.stat().st_mtime < time.time() - LEFTOVER_SECONDS
                if is_old and entry.name not in kept:
                    durable.remove_entry(entry)

    def attach(
        self, collection: str, asked: Sequence[NewVectorStoreFile], batch_id: str | None
    ) -> list[Attachment]:
        """Note that files go into a collection; one that is in it is read again.

        The new attachment has the documents of those it replaces: of the same file, or of the same id.
        Raises :class:`DocumentsRefusedError` that names the places of those that there are not.
        """
        found = [self.file(each.file_id) for each in asked]
        faults = [(place, "there is no such file") for place, file in enumerate(found) if file is None]
        if faults:
            raise DocumentsRefusedError("files must be there, got some that are not", faults)
        now = int(time.time())
        rows = [
            (
                collection,
                file.id,
                file.filename,
                each.doc_id or file.id,
                json.dumps(each.attributes or {}),
                batch_id,
                now,
            )
            for each, file in zip(asked, found, strict=True)
            if file is not None
        ]
        placed = (
            "INSERT INTO attachments (collection, file_id, filename, doc_id, attributes, batch_id,"
            " created_at, doc_ids, status, num_bytes, warnings)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'in_progress', 0, '[]')"
        )
        same = "FROM attachments WHERE collection = ? AND (file_id = ? OR doc_id = ?)"

        def note(connection: sqlite3.Connection) -> None:
            if batch_id is not None:
                connection.execute("INSERT INTO batches VALUES (?, ?, ?)", (batch_id, collection, now))
            for row in rows:
                replaced = (collection, row[1], row[3])
                before = connection.execute(f"SELECT doc_ids {same}", replaced).fetchall()
                doc_ids = [doc_id for each in before for doc_id in json.loads(each["doc_ids"])]
                connection.execute(f"DELETE {same}", replaced)
                connection.execute(placed, (*row, json.dumps(doc_ids)))

        self._write(note)
        ids = dict.fromkeys(each.file_id for each in asked)
        return [each for file_id in ids if (each := self.attachment(collection, file_id)) is not None]

    def attachment(self, collection: str, file_id: str) -> Attachment | None:
        """Return a file of a collection."""
        return next(iter(self._attachments("collection = ? AND file_id = ?", collection, file_id)), None)

    def attachments(self, collection: str) -> list[Attachment]:
        """Return the files of a collection, oldest first."""
        return self._attachments("collection = ?", collection)

    def batch(self, collection: str, batch_id: str) -> tuple[int, list[Attachment]] | None:
        """Return when a batch was made, and its files."""
        found = self._run(
            "SELECT created_at FROM batches WHERE id = ? AND collection = ?", (batch_id, collection)
        )
        return (found[0]["created_at"], self._attachments("batch_id = ?", batch_id)) if found else None

    def unfinished(self) -> list[Attachment]:
        """Return the files that are to be read yet."""
        return self._attachments("status = 'in_progress'")

    def of_file(self, file_id: str) -> list[Attachment]:
        """Return where a file is attached."""
        return self._attachments("file_id = ?", file_id)

    def _attachments(self, condition: str, *values: Any) -> list[Attachment]:
        found = self._run(
            f"SELECT * FROM attachments WHERE {condition} ORDER BY number",  # noqa: S608 - our own
            values,
        )
        rows = map(dict, found)
        return [Attachment(**{**row, **{name: json.loads(row[name]) for name in _AS_JSON}}) for row in rows]

    def note(self, attachment: Attachment, **columns: Any) -> None:
        """Note what became of a file that is in progress, or its documents before they are written."""
        self._set(columns, "number = ? AND status = 'in_progress'", attachment.number)

    def _set(self, columns: Mapping[str, Any], condition: str, *values: Any) -> None:
        kept = [json.dumps(value) if name in _AS_JSON else value for name, value in columns.items()]
        names = ", ".join(f"{name} = ?" for name in columns)
        self._run(f"UPDATE attachments SET {names} WHERE {condition}", (*kept, *values))  # noqa: S608 - our own

    def is_in_progress(self, attachment: Attachment) -> bool:
        """Tell whether a file is still to be written: it was neither taken out nor replaced."""
        return bool(self._attachments("number = ? AND status = 'in_progress'", attachment.number))

    def change(self, attachment: Attachment, attributes: Mapping[str, Any]) -> None:
        """Give a file of a collection other attributes."""
        self._set({"attributes": dict(attributes)}, "number = ?", attachment.number)

    def cancel(self, attachment: Attachment) -> tuple[list[str], list[Attachment]]:
        """Note that a file leaves a collection; return its documents, and the files that are read again."""
        cancelled = {"status": "cancelled", "error_code": None, "error_message": None}
        self._set(cancelled, "number = ?", attachment.number)
        doc_ids = (self._attachments("number = ?", attachment.number) or [attachment])[0].doc_ids
        return list(doc_ids), self.read_again(attachment, doc_ids)

    def read_again(self, attachment: Attachment, doc_ids: Sequence[str]) -> list[Attachment]:
        """Note that other files are to be read again which have some documents that this one leaves.

        Their text takes the place of what is deleted; a file that was removed cannot be read. Each gets a new
        number, which ends what is being written of it.
        """
        others = self._attachments(
            "collection = ? AND number <> ? AND status IN ('completed', 'in_progress')"
            " AND file_id IN (SELECT id FROM files)"
            " AND EXISTS (SELECT * FROM json_each(doc_ids) WHERE value IN (SELECT value FROM json_each(?)))",
            attachment.collection,
            attachment.number,
            json.dumps(list(doc_ids)),
        )
        for each in others:
            self._run(
                "UPDATE attachments SET status = 'in_progress',"
                " number = (SELECT MAX(number) + 1 FROM attachments) WHERE number = ?",
                (each.number,),
            )
        again = [self.attachment(each.collection, each.file_id) for each in others]
        return [each for each in again if each is not None]

    def detach(self, attachment: Attachment) -> None:
        """Forget that a file is in a collection, once its documents are deleted."""
        self._run("DELETE FROM attachments WHERE number = ?", (attachment.number,))

    def name_store(self, collection: str, store: Store) -> None:
        """Keep what a client says of a collection."""
        metadata = None if store.metadata is None else json.dumps(dict(store.metadata))
        values = (collection, store.name, metadata, store.created_at)
        self._run("INSERT OR REPLACE INTO stores VALUES (?, ?, ?, ?)", values)

    def store(self, collection: str) -> Store | None:
        """Return what a client said of a collection, None where none did."""
        found = self._run("SELECT name, metadata, created_at FROM stores WHERE collection = ?", (collection,))
        if not found:
            return None
        metadata = found[0]["metadata"]
        return Store(
            name=found[0]["name"],
            metadata=None if metadata is None else json.loads(metadata),
            created_at=found[0]["created_at"],
        )

    def forget(self, collection: str) -> None:
        """Forget what was attached to a collection that is removed."""

        def remove(connection: sqlite3.Connection) -> None:
            for table in ("attachments", "batches", "stores"):
                connection.execute(f"DELETE FROM {table} WHERE collection = ?", (collection,))  # noqa: S608 - our own

        if self._stands():
            self._write(remove)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def _stands(self) -> bool:
        return (self._folder / "files.sqlite").exists()

    def _run(self, statement: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        if statement.startswith("SELECT") and not self._stands():
            return []
        return self._write(lambda connection: connection.execute(statement, values).fetchall())

    def _write(self, change: Callable[[sqlite3.Connection], Any]) -> Any:
        with self._lock, sqlite_errors(), durable.storage_errors("opening the list of files"):
            if self._opened is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                opened = sqlite3.connect(self._folder / "files.sqlite", timeout=10.0, check_same_thread=False)
                opened.row_factory = sqlite3.Row
                opened.executescript(_TABLES)
                self._opened = opened
            with self._opened:  # a transaction
                return change(self._opened)


def file_name(sent: str) -> str:
    """Return the name that a file is kept by: the last part of what was sent, printable and not too long."""
    name = _NOT_IN_NAMES.sub("", sent.replace("\\", "/").rpartition("/")[2]).strip()
    if name in ("", ".", ".."):
        return "file"
    stem, dot, suffix = name.rpartition(".")
    suffix = (dot + suffix if stem else "")[-32:]
    stem = name[: len(name) - len(suffix)] if suffix else name
    room = NAME_BYTES - len(suffix.encode())
    return stem.encode()[:room].decode(errors="ignore") + suffix
