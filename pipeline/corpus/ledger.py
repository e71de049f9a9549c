"""One exact table of ids and content digests: what is published, encoded, and seen by this run.

Stage 1, the memory of incremental ingest, in SQLite because it must outgrow memory. What is published stands
in the record (``source_record``), which is attached and looked up by the ids that a run meets. The table of
the run itself is scratch: it has no journal, is never synced, and an older one is deleted on opening. It
holds no text. It decides nothing about what is stored; the committer acts on the lists it gives.

A file is passed over where the record has it with the same identity and the same key, and no row of an
earlier file takes one of its documents. The key names all that its rows are read by: the release, the
settings of the corpus, the columns that all files agreed on, the values of its folders, and the id of a file
that is a document. A run that went through is recorded in one transaction. Files that it did not name stay in
the record, unless it took over or deleted one of their documents.

    encoded    digest of what a killed run left encoded in pending
    shard      the last encoded shard that holds it
    state      how this run met the id: not yet, only in a quarantined row, with the published content, new,
               changed, or with other content than the published, which lies encoded
    digest     the content it was met with
    file       the file it was met in
    owner      the file that the record has for it
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import pyarrow as pa
from cairn.pipeline import durable
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.quarantine import REJECTED_SCHEMA, Reason, reason_counts, rejected_rows
from cairn.pipeline.corpus.scan import Scan
from cairn.pipeline.corpus.source_record import (
    BUSY_SECONDS,
    CACHE_KIB,
    LIST_ROWS,
    create_tables,
    digest_of,
    recorded_files,
    sqlite_errors,
)
from cairn.pipeline.errors import TryAgainError
from jaxtyping import Int8

NO_FILE: Final = 0
"""The number of a file that is not told from others."""
MAX_REJECTED: Final = 10_000
"""A file with more quarantined rows is not kept, so the record does not grow with them."""
REJECTED_ROWS: Final = 8_192
UNSEEN, PRESENT, UNCHANGED, NEW, CHANGED, ENCODED, DUPLICATE = range(7)
"""States of an id. From UNCHANGED on a good row has been met, and :meth:`Ledger.classify` gives them.

ENCODED is new or changed content whose vectors already lie in pending; DUPLICATE is a further row of an id.
"""

_SCRATCH: Final = f"""
    CREATE TABLE main.documents (
        doc_id TEXT PRIMARY KEY, encoded BLOB, shard INTEGER,
        state INTEGER NOT NULL DEFAULT {UNSEEN}, digest BLOB, file INTEGER, owner INTEGER
    ) WITHOUT ROWID;
    CREATE TABLE main.deleted (doc_id TEXT PRIMARY KEY) WITHOUT ROWID;
    CREATE TABLE main.unread (number INTEGER PRIMARY KEY);
    CREATE TABLE main.read_files (
        number INTEGER PRIMARY KEY, path TEXT, identity TEXT, key TEXT, num_rows INTEGER, schema BLOB, is_kept
    );
    CREATE TABLE main.rejected (file INTEGER, row_index INTEGER, doc_id TEXT, reason TEXT, detail TEXT);
    CREATE TEMP VIEW met AS SELECT * FROM main.documents WHERE state >= {UNCHANGED};
    CREATE TEMP VIEW vanished AS
        SELECT published.doc_id AS doc_id
        FROM (
            SELECT {NO_FILE} AS number
            UNION SELECT number FROM record.files WHERE number NOT IN (SELECT number FROM main.unread)
        ) AS files
        CROSS JOIN record.documents AS published ON published.file = files.number
        LEFT JOIN main.documents AS seen ON seen.doc_id = published.doc_id
        WHERE coalesce(seen.state, {UNSEEN}) = {UNSEEN};
"""  # noqa: S608 (constants of this file)
"""``unread`` and ``read_files`` are the files of this run by their number in the record.

What was published from an unread file has not vanished.
"""
_RECORD_RUN: Final = """
    CREATE TEMP TABLE changed AS
        SELECT number FROM main.read_files
        UNION SELECT owner FROM met WHERE owner IN (SELECT number FROM record.files)
        UNION SELECT file FROM record.documents NATURAL JOIN main.deleted
            WHERE file IN (SELECT number FROM record.files)
        UNION SELECT number FROM record.files
            WHERE :has_deleted AND number NOT IN (SELECT number FROM main.unread);
    DELETE FROM record.documents WHERE :has_deleted AND doc_id IN (SELECT doc_id FROM vanished);
    DELETE FROM record.documents WHERE doc_id IN (SELECT doc_id FROM main.deleted);
    UPDATE main.documents SET file = 0
        WHERE file NOT IN (SELECT number FROM main.read_files WHERE is_kept);
    INSERT INTO record.documents (doc_id, published, file)
        SELECT doc_id, digest, file FROM met WHERE state != :unchanged OR file != owner
        ON CONFLICT (doc_id) DO UPDATE SET published = excluded.published, file = excluded.file;
    UPDATE record.documents AS published SET file = 0
        WHERE file IN (SELECT number FROM changed)
        AND NOT EXISTS (SELECT 1 FROM met WHERE met.doc_id = published.doc_id);
    CREATE INDEX IF NOT EXISTS record.by_file ON documents (file);
    DELETE FROM record.files WHERE number IN (SELECT number FROM changed);
    DELETE FROM record.rejected WHERE file IN (SELECT number FROM changed);
    INSERT INTO record.files
        SELECT number, path, identity, key, num_rows, schema FROM main.read_files WHERE is_kept;
    INSERT INTO record.rejected
        SELECT * FROM main.rejected WHERE file IN (SELECT number FROM main.read_files WHERE is_kept);
    UPDATE record.state SET value = :manifest WHERE name = 'manifest';
    COMMIT
"""
"""``changed`` are the files of which something was read, taken over by another file or deleted.

A document that was published from one of them and not met stands in no file that is known: 0. A new record
has one file, 0, and gets its index once the documents have theirs.
"""
_UPSERT_ENCODED: Final = (
    "INSERT INTO main.documents (doc_id, encoded, shard) VALUES (?, ?, ?) "
    "ON CONFLICT (doc_id) DO UPDATE SET encoded = excluded.encoded, shard = excluded.shard"
)
_UPSERT_SEEN: Final = (
    "INSERT INTO main.documents (doc_id, state, digest, file, owner) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (doc_id) DO UPDATE SET state = excluded.state, digest = excluded.digest, "
    "file = excluded.file, owner = excluded.owner"
)
_MARK_PRESENT: Final = (
    "INSERT INTO main.documents (doc_id, state, owner) "  # noqa: S608 (constants of this file)
    f"SELECT doc_id, {PRESENT}, file FROM record.documents WHERE doc_id = ? "
    f"ON CONFLICT (doc_id) DO UPDATE SET state = {PRESENT}, owner = excluded.owner WHERE state = {UNSEEN}"
)


class Ledger:
    """Ids with the digests of their published, encoded and seen content.

    ``record`` is the record of the served generation; without one nothing is published. Load first, then
    classify; the lists are complete once every row of the corpus has been classified.

    A run names its files by :meth:`begin`. Then each, by its place, is passed over, or its rows are
    classified and its end is noted. A row whose id stands in a file that was passed over is a duplicate. One
    whose id stands in a file that is still to be passed over comes first: that file has to be read.
    """

    def __init__(self, path: Path, record: Path | None = None) -> None:
        self._file = NO_FILE
        self._unread: set[int] = set()
        self._to_pass: set[int] = set()
        self._num_rejected = 0
        self._is_whole = True
        self._record = record
        with durable.storage_errors("creating the ledger"):
            path.parent.mkdir(parents=True, exist_ok=True)
            for stale in (path, path.with_name(f"{path.name}-journal"), path.with_name(f"{path.name}-wal")):
                durable.remove_entry(stale)
        with self.errors():
            self.connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
            for pragma in (
                "main.journal_mode = OFF",
                "main.synchronous = OFF",
                "main.locking_mode = EXCLUSIVE",
                f"main.cache_size = -{CACHE_KIB}",
                "temp_store = MEMORY",
            ):
                self.connection.execute(f"PRAGMA {pragma}")
            self.connection.execute("ATTACH ? AS record", (":memory:" if record is None else str(record),))
            if record is None:
                create_tables(self.connection, "record")
            self.connection.execute("PRAGMA record.synchronous = FULL")
            self.connection.execute(f"PRAGMA record.cache_size = -{CACHE_KIB}")
            self.connection.executescript(_SCRATCH)
            self.connection.execute("BEGIN")
            (self._has_published,) = self.connection.execute(
                "SELECT EXISTS (SELECT 1 FROM record.documents)"
            ).fetchone()

    def begin(self, scan: Scan, config: CorpusConfig) -> None:
        """Look up which of the files of a scan are as they were when they were read."""
        self._files, self._keys = scan.files, scan.keys(config)
        with self.errors():
            recorded = recorded_files(self.connection, "record", [each.file.address for each in scan.files])
            (last,) = self.connection.execute("SELECT max(number) FROM record.files").fetchone()
        self._numbers: list[int] = []
        for place, each in enumerate(scan.files):
            known = recorded.get(each.file.address)
            self._numbers.append(known.number if known else (last or NO_FILE) + 1 + place)
            if known and (known.identity, known.key) == (each.identity, self._keys[place]):
                self._to_pass.add(known.number)

    def passes_over(self, place: int) -> bool:
        """Say whether the next file is passed over; the rows that follow are of this file otherwise."""
        number = self._numbers[place]
        if number in self._to_pass:
            self._to_pass.remove(number)
            self._unread.add(number)
            with self.errors():
                self.connection.execute("INSERT INTO main.unread VALUES (?)", (number,))
            return True
        self._file, self._num_rejected, self._is_whole = number, 0, True
        return False

    def rejected(self, place: int) -> Iterator[pa.RecordBatch]:
        """Yield the quarantined rows of a file that is passed over, as when it was read."""
        query = (
            "SELECT row_index, doc_id, reason, detail FROM record.rejected WHERE file = ? ORDER BY row_index"
        )
        with self.errors():
            cursor = self.connection.execute(query, (self._numbers[place],))
            while rows := cursor.fetchmany(REJECTED_ROWS):
                indices, *texts = zip(*rows, strict=True)
                ids, reasons, details = (pa.array(each, pa.string()) for each in texts)
                yield rejected_rows(self._files[place].file.name, indices, reasons, details, ids)

    def doubt(self) -> None:
        """Note that rows of the file being read may be lost or stand in others; it is read each time."""
        self._is_whole = False

    def reject(self, rejected: pa.RecordBatch) -> None:
        """Keep quarantined rows of the file that is being read."""
        self._num_rejected += rejected.num_rows
        self._is_whole &= self._num_rejected <= MAX_REJECTED
        self._is_whole &= Reason.DAMAGED_ROWS not in reason_counts(rejected)
        if rejected.num_rows and self._is_whole:
            columns = [rejected.column(name).to_pylist() for name in REJECTED_SCHEMA.names[1:]]
            rows = ((self._file, *row) for row in zip(*columns, strict=True))
            with self.errors():
                self.connection.executemany("INSERT INTO main.rejected VALUES (?, ?, ?, ?, ?)", rows)

    def end(self, place: int, num_rows: int) -> None:
        """Note that a file of so many rows was read to its end."""
        read, key = self._files[place], self._keys[place]
        is_kept = read.identity is not None and self._is_whole
        stored = read.footer.schema.remove_metadata().serialize().to_pybytes()
        row = (self._file, read.file.address, read.identity, key, num_rows, stored, is_kept)
        with self.errors():
            self.connection.execute("INSERT INTO main.read_files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def load_encoded(self, shard: int, doc_ids: Sequence[str], shas: Sequence[str]) -> None:
        """Record what an interrupted run left encoded in a shard of pending.

        Ascending, a later shard supersedes.
        """
        with self.errors():
            self.connection.executemany(
                _UPSERT_ENCODED,
                ((doc_id, digest_of(sha), shard) for doc_id, sha in zip(doc_ids, shas, strict=True)),
            )

    def classify(self, doc_ids: Sequence[str], shas: Sequence[str]) -> Int8[np.ndarray, " N"]:
        """Compare rows in scan order with what is known and remember them.

        The first row of an id wins, later ones are DUPLICATE.
        """
        codes = np.empty(len(doc_ids), np.int8)
        met: dict[str, tuple[str, int, bytes, int, int]] = {}
        with self.errors():
            published, seen = self._published(doc_ids), self._seen(doc_ids)
            for row, (doc_id, sha) in enumerate(zip(doc_ids, shas, strict=True)):
                before, owner = published.get(doc_id, (None, NO_FILE))
                encoded, state, winner = seen.get(doc_id, (None, UNSEEN, NO_FILE))
                if state >= UNCHANGED or owner in self._unread or doc_id in met:
                    codes[row] = DUPLICATE
                    is_another_files = owner in self._unread or winner != self._file
                    self._is_whole &= doc_id in met or not is_another_files
                    continue
                self._to_pass.discard(owner)
                digest = digest_of(sha)
                if before == digest:
                    code = UNCHANGED
                elif encoded == digest:
                    code = ENCODED
                else:
                    code = NEW if before is None else CHANGED
                codes[row] = code
                met[doc_id] = (doc_id, code, digest, self._file, owner)
            # In id order the B-tree is walked, not jumped in.
            self.connection.executemany(_UPSERT_SEEN, sorted(met.values()))
        return codes

    def mark_present(self, doc_ids: Sequence[str]) -> None:
        """Remember ids of quarantined rows.

        A document whose new version is bad has not vanished from the source.
        """
        if not self._has_published:
            return  # nothing can vanish, and a file may hold millions of bad rows
        with self.errors():
            self.connection.executemany(_MARK_PRESENT, ((doc_id,) for doc_id in doc_ids))

    def _published(self, doc_ids: Sequence[str]) -> dict[str, tuple[bytes, int]]:
        if not self._has_published:
            return {}
        query = "SELECT doc_id, published, file FROM record.documents WHERE doc_id IN"
        return {doc_id: (digest, file) for doc_id, digest, file in self._rows(query, doc_ids)}

    def _seen(self, doc_ids: Sequence[str]) -> dict[str, tuple[bytes | None, int, int]]:
        query = "SELECT doc_id, encoded, state, file FROM main.documents WHERE doc_id IN"
        return {doc_id: (encoded, state, file) for doc_id, encoded, state, file in self._rows(query, doc_ids)}

    def _rows(self, query: str, doc_ids: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(doc_ids), LIST_ROWS):
            part = doc_ids[start : start + LIST_ROWS]
            yield from self.connection.execute(f"{query} ({','.join('?' * len(part))})", part)

    def replaced_ids(self) -> Iterator[list[str]]:
        """Yield published ids whose content changed, ordered.

        Their published rows must go when the new ones come.
        """
        return self._list(
            f"SELECT doc_id FROM main.documents WHERE state IN ({CHANGED}, {ENCODED}) "  # noqa: S608 (numbers only)
            "AND doc_id IN (SELECT doc_id FROM record.documents) ORDER BY doc_id"
        )

    def vanished_ids(self) -> Iterator[list[str]]:
        """Yield published ids that the source no longer holds, ordered.

        True only of a corpus of which every file was read whole, now or before.
        """
        return self._list("SELECT doc_id FROM vanished ORDER BY doc_id")

    def delete(self, doc_ids: Iterable[str]) -> int:
        """Note published documents that are to be deleted; return how many there are.

        None of them may be met in the corpus of this run.
        """
        with self.errors():
            self.connection.executemany(
                "INSERT OR IGNORE INTO main.deleted SELECT doc_id FROM record.documents WHERE doc_id = ?",
                ((doc_id,) for doc_id in doc_ids),
            )
            (count,) = self.connection.execute("SELECT count(*) FROM main.deleted").fetchone()
        return count

    def deleted_ids(self) -> Iterator[list[str]]:
        """Yield the ids that :meth:`delete` noted, ordered."""
        return self._list("SELECT doc_id FROM main.deleted ORDER BY doc_id")

    def current_in_shard(self, shard: int) -> Iterator[list[str]]:
        """Yield the ids whose rows in an encoded shard are to be committed.

        Met with that content, held by no later shard.
        """
        return self._list(
            "SELECT doc_id FROM main.documents "  # noqa: S608 (numbers only)
            f"WHERE shard = {shard:d} AND state = {ENCODED} ORDER BY doc_id"
        )

    def _list(self, query: str) -> Iterator[list[str]]:
        with self.errors():
            cursor = self.connection.execute(query)
            while rows := cursor.fetchmany(LIST_ROWS):
                yield [doc_id for (doc_id,) in rows]

    @contextlib.contextmanager
    def errors(self) -> Generator[None]:
        """Report what SQLite raises in the block; a damaged record is removed, so that it is made again."""
        try:
            with sqlite_errors():
                yield
        except sqlite3.DatabaseError as error:
            if self._record is None or type(error) is not sqlite3.DatabaseError:
                raise
            self._record.unlink(missing_ok=True)
            raise TryAgainError(
                f"{self._record.name} is damaged ({error}) and was removed; run the same command again, it "
                "reads every file"
            ) from error

    def close(self) -> None:
        """Let go of the file; it is scratch and may be deleted."""
        self.connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record_run(ledger: Ledger, manifest_sha256: str, *, has_deleted: bool) -> None:
    """Let the record hold for what a run published, or for the same generation if nothing had to be.

    ``has_deleted`` says whether the vanished documents were deleted. Closes the ledger.
    """
    with ledger.errors():
        try:
            values = {"has_deleted": has_deleted, "manifest": manifest_sha256, "unchanged": UNCHANGED}
            for statement in _RECORD_RUN.split(";"):
                ledger.connection.execute(statement, values)
        finally:
            ledger.close()
    durable.commit_point("sources-recorded")
