"""What a collection was made from: which files were read, and which document stands in which of them.

A SQLite database beside the generations, of this machine alone. It holds for one generation, which it names
by the hash of its manifest. Whatever publishes another one, here or elsewhere, makes it worthless, and so
does a kill between a publication and the transaction that follows it. Then it is made again from the tables,
and no file counts as read.

    state      its format, and the manifest it holds for
    documents  id, digest of the published content, and the file that holds it, 0 where none is known
    files      path, identity, what its rows were read by, how many they are, schema
    rejected   the quarantined rows of these files

Each good row of such a file is a published document. Files that were damaged, or of which a row lost to one
of another file, are not kept and so read each time. A transaction costs what changed.

Where each indexed document came from stands in a Parquet file a run, of the rows that the run indexed: the
id, the digest of the content, and the row in the source file, counted from 0. The source file itself is a
column of the stored documents. A run may be killed before it publishes, and then another one indexes its
rows, and lists them, too: the newest file with the id and the content tells. The files grow with what
changes, not with the corpus, and only :func:`find_origin` reads them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.corpus.formats.format import Footer
from cairn.pipeline.errors import StorageError

RECORD_FORMAT: Final = "4"
DIGEST_HEX_DIGITS: Final = 32
"""Half of a SHA-256 is kept.

128 bits tell two versions of a document apart, and the table stays in the cache twice as long.
"""
ORIGIN_SCHEMA: Final = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("content", pa.binary(DIGEST_HEX_DIGITS // 2), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
    ]
)
LIST_ROWS: Final = 1_000
CACHE_KIB: Final = 65_536
BUSY_SECONDS: Final = 30.0
"""How long a transaction waits for a dry run that copies the record."""

_TABLES: Final = """
    CREATE TABLE {0}.state (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE {0}.documents (
        doc_id TEXT PRIMARY KEY, published BLOB NOT NULL, file INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE {0}.files (
        number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, identity TEXT NOT NULL, key TEXT NOT NULL,
        num_rows INTEGER NOT NULL, schema BLOB NOT NULL
    );
    CREATE TABLE {0}.rejected (
        file INTEGER NOT NULL, row_index INTEGER NOT NULL, doc_id TEXT, reason TEXT NOT NULL,
        detail TEXT NOT NULL, PRIMARY KEY (file, row_index)
    ) WITHOUT ROWID;
"""


def digest_of(sha: str) -> bytes:
    """Return what is kept of a content hash."""
    return bytes.fromhex(sha[:DIGEST_HEX_DIGITS])


def create_tables(connection: sqlite3.Connection, database: str) -> None:
    """Make the tables of an empty record in an attached database."""
    connection.executescript(_TABLES.format(database))


def create_record(
    path: Path, manifest_sha256: str, hashes: Iterable[tuple[Sequence[str], Sequence[str]]]
) -> None:
    """Write the record of a generation of which no file is known, from its ids and content hashes."""
    with durable.storage_errors("recording what is published"):
        durable.clear_way(path)
        for side_file in _side_files(path):
            durable.remove_entry(side_file)
        with durable.replacing(path) as temporary, sqlite_errors():
            temporary.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")  # the whole file is flushed at the end
                connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
                create_tables(connection, "main")
                connection.execute("BEGIN")
                state = (("format", RECORD_FORMAT), ("manifest", manifest_sha256))
                connection.executemany("INSERT INTO state VALUES (?, ?)", state)
                for doc_ids, shas in hashes:
                    connection.executemany(
                        "INSERT INTO documents VALUES (?, ?, 0)",
                        zip(doc_ids, map(digest_of, shas), strict=True),
                    )
                connection.execute("COMMIT")


def holds_for(path: Path, manifest_sha256: str) -> bool:
    """Say whether a record is of the generation with this manifest; false of one that cannot be read."""
    try:
        with _opened(path) as connection:
            return dict(connection.execute("SELECT name, value FROM state")) == {
                "format": RECORD_FORMAT,
                "manifest": manifest_sha256,
            }
    except sqlite3.Error:
        return False


def carry_over(path: Path, before_sha256: str, after_sha256: str) -> None:
    """Let a record hold for a generation that has the same documents with the same content."""
    if not path.exists():
        return
    # Nothing is lost but time where this fails: the next ingest makes the record again.
    with contextlib.suppress(sqlite3.Error), _opened(path) as connection, connection:
        connection.execute(
            "UPDATE state SET value = ? WHERE name = 'manifest' AND value = ?", (after_sha256, before_sha256)
        )


def copy_record(path: Path, target: Path) -> None:
    """Copy a record as it is between two transactions; nothing is written where that fails."""
    try:
        with _opened(path) as source, contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    except sqlite3.Error:
        target.unlink(missing_ok=True)


def recorded_footers(path: Path, identities: Mapping[str, str | None]) -> dict[str, Footer]:
    """Return the footers of files, by path, that have the identity they had when they were read.

    Footers hold for a file, whatever generation the record is of. A record that cannot be read gives none.
    """
    found: dict[str, Footer] = {}
    try:
        with _opened(path) as connection:
            (record_format,) = connection.execute("SELECT value FROM state WHERE name = 'format'").fetchone()
            if record_format != RECORD_FORMAT:
                return {}
            for file in recorded_files(connection, "main", [*identities]).values():
                if file.identity == identities[file.path]:
                    schema = pa.ipc.read_schema(pa.py_buffer(file.schema))
                    found[file.path] = Footer(schema=schema, num_rows=file.num_rows)
    except (sqlite3.Error, TypeError, pa.ArrowException):
        return {}
    return found


class RecordedFile(NamedTuple):
    """A file as it was when it was read; ``key`` names what its rows were read by."""

    number: int
    path: str
    identity: str
    key: str
    num_rows: int
    schema: bytes


def recorded_files(
    connection: sqlite3.Connection, database: str, paths: Sequence[str]
) -> dict[str, RecordedFile]:
    """Return what is known of files, by path."""
    found: dict[str, RecordedFile] = {}
    for start in range(0, len(paths), LIST_ROWS):
        part = paths[start : start + LIST_ROWS]
        marks = ",".join("?" * len(part))
        query = (
            "SELECT number, path, identity, key, num_rows, schema "  # noqa: S608 (question marks only)
            f"FROM {database}.files WHERE path IN ({marks})"
        )
        found |= {file.path: file for file in map(RecordedFile._make, connection.execute(query, part))}
    return found


def _side_files(path: Path) -> list[Path]:
    """Return what SQLite reads beside a database."""
    return [path.with_name(f"{path.name}{suffix}") for suffix in ("-journal", "-wal")]


@contextlib.contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection]:
    """Open a record that stands; none is made. SQLite would wait for a FIFO."""
    if any(os.path.lexists(entry) and not entry.is_file() for entry in (path, *_side_files(path))):
        raise sqlite3.DatabaseError(f"{path.name} and its journal must be files")
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)) as connection:
        yield connection


@contextlib.contextmanager
def sqlite_errors() -> Generator[None]:
    """Report what SQLite raises as a :class:`StorageError`, a full disk as :class:`DiskFullError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # SQLite reports a full disk as text, not as an errno.
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            durable.raise_storage_error(
                OSError(errno.ENOSPC, "No space left on device"), "writing the ledger"
            )
        raise StorageError(f"writing the ledger failed: {error}; run the same command again") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run that indexed a document, and the row it read it from, counted from 0."""

    run_id: str
    row_index: int


def find_origin(folder: Path, doc_id: str, content_sha256: str) -> Origin | None:
    """Return the last run that indexed a document with this content; None where no file tells.

    A file that cannot be read is passed over.
    """
    asked: Any = [("doc_id", "=", doc_id), ("content", "=", digest_of(content_sha256))]
    for path in sorted(folder.glob("*.parquet"), key=_age, reverse=True):
        with contextlib.suppress(pa.ArrowException, OSError):
            for row in pq.read_table(path, columns=["row_index"], filters=asked).column(0).to_pylist():
                return Origin(run_id=path.stem, row_index=row)
    return None


def _age(path: Path) -> tuple[str, int]:
    """Order runs by the second in their name, those of one second by when they wrote."""
    return path.stem.partition("-")[0], path.stat().st_mtime_ns
