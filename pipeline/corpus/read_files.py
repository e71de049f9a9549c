"""Which files of a run are read, and what the record keeps of them at its end.

A file is passed over where the record has it with the same identity and the same key. The key names all that
its rows are read by: the release, the settings of the corpus, the columns that all files agreed on, the
values of its folders, and the id of a file that is a document.
A file is read after all where a row of an earlier file takes one of its documents.

A run that went through is recorded in one transaction. Files that it did not name stay in the record, unless
it took over or deleted one of their documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.ledger import NO_FILE, UNCHANGED, Ledger
from cairn.pipeline.corpus.quarantine import REJECTED_SCHEMA, Reason, reason_counts, rejected_rows
from cairn.pipeline.corpus.scan import Scan
from cairn.pipeline.corpus.source_record import recorded_files
from cairn.pipeline.durable import commit_point
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.version import installed_version

MAX_REJECTED: Final = 10_000
"""A file with more quarantined rows is not kept, so the record does not grow with them."""
REJECTED_ROWS: Final = 8_192

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


class ReadFiles:
    """The files of a scan, one after the other: each is passed over, or read and then kept or not."""

    def __init__(self, ledger: Ledger, scan: Scan, config: CorpusConfig) -> None:
        self.passed_over: list[int] = []
        """Places in ``scan.files`` of those that are not read."""
        self._ledger = ledger
        self._scan = scan
        self._keys = _keys(scan, config)
        self._num_rejected = 0
        self._is_whole = True
        with ledger.errors():
            recorded = recorded_files(ledger.connection, "record", [file.address for file in scan.files])
            (last,) = ledger.connection.execute("SELECT max(number) FROM record.files").fetchone()
        self._numbers: list[int] = []
        for place, file in enumerate(scan.files):
            known = recorded.get(file.address)
            self._numbers.append(known.number if known else (last or NO_FILE) + 1 + place)
            now = (scan.identities[place], self._keys[place])
            if known and (known.identity, known.key) == now:
                ledger.to_pass.add(known.number)

    def passes_over(self, place: int) -> bool:
        """Say whether the next file is passed over; the rows that follow are of this file otherwise."""
        ledger, number = self._ledger, self._numbers[place]
        if number in ledger.to_pass:
            ledger.to_pass.remove(number)
            ledger.unread.add(number)
            with ledger.errors():
                ledger.connection.execute("INSERT INTO main.unread VALUES (?)", (number,))
            self.passed_over.append(place)
            return True
        ledger.file, ledger.has_lost = number, False
        self._num_rejected, self._is_whole = 0, True
        return False

    def rejected(self, place: int) -> Iterator[pa.RecordBatch]:
        """Yield the quarantined rows of a file that is passed over, as when it was read."""
        query = (
            "SELECT row_index, doc_id, reason, detail FROM record.rejected WHERE file = ? ORDER BY row_index"
        )
        with self._ledger.errors():
            cursor = self._ledger.connection.execute(query, (self._numbers[place],))
            while rows := cursor.fetchmany(REJECTED_ROWS):
                indices, *texts = zip(*rows, strict=True)
                ids, reasons, details = (pa.array(each, pa.string()) for each in texts)
                yield rejected_rows(self._scan.files[place].name, indices, reasons, details, ids)

    def doubt(self) -> None:
        """Note that rows of the file being read may be lost or stand in others; it is read each time."""
        self._is_whole = False

    def reject(self, rejected: pa.RecordBatch) -> None:
        """Keep quarantined rows of the file that is being read."""
        self._num_rejected += rejected.num_rows
        self._is_whole &= Reason.DAMAGED_ROWS not in reason_counts(rejected)
        if rejected.num_rows and self._is_whole and self._num_rejected <= MAX_REJECTED:
            columns = [rejected.column(name).to_pylist() for name in REJECTED_SCHEMA.names[1:]]
            rows = ((self._ledger.file, *row) for row in zip(*columns, strict=True))
            with self._ledger.errors():
                self._ledger.connection.executemany("INSERT INTO main.rejected VALUES (?, ?, ?, ?, ?)", rows)

    def end(self, place: int, num_rows: int) -> None:
        """Note that a file of so many rows was read to its end."""
        scan, ledger = self._scan, self._ledger
        identity = scan.identities[place]
        schema = scan.schemas[place].remove_metadata().serialize().to_pybytes()
        is_kept = (
            identity is not None
            and self._is_whole
            and not ledger.has_lost
            and self._num_rejected <= MAX_REJECTED
        )
        row = (ledger.file, scan.files[place].address, identity, self._keys[place], num_rows)
        with ledger.errors():
            ledger.connection.execute(
                "INSERT INTO main.read_files VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, schema, is_kept)
            )


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
    commit_point("sources-recorded")


def _keys(scan: Scan, config: CorpusConfig) -> list[str]:
    shared: dict[str, Any] = {
        "release": installed_version(),
        "settings": asdict(config),
        "metadata": scan.schema_fingerprint,
    }
    common = fingerprint(**shared)
    return [
        fingerprint(
            common=common,
            columns=columns,
            folders=file.partitions,
            doc_id=file.doc_id(config) if file.format.is_document else None,
        )
        for file, columns in zip(scan.files, scan.columns, strict=True)
    ]
