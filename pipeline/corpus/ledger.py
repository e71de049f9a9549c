"""One exact table of ids and content digests: what is published, encoded, and seen by this run.

Stage 1, the memory of incremental ingest, in SQLite because it must outgrow memory. The file is scratch: each
run fills it from the start, so it has no journal, is never synced, and an older one is deleted on opening. It
holds no text. It decides nothing about what is stored; the committer acts on the lists it gives.

    published  digest in the served generation
    encoded    digest of what a killed run left encoded in pending
    shard      the last encoded shard that holds it
    state      how this run met the id: not yet, with the published content, with the encoded content,
               with other content, or only in a quarantined row
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Int8

from pipeline import durable
from pipeline.errors import StorageError

NEW, CHANGED, UNCHANGED, DUPLICATE, ENCODED = range(5)
"""Codes of :meth:`Ledger.classify`.

ENCODED is new or changed content whose vectors already lie in pending.
"""

LIST_ROWS = 1_000
CACHE_KIB = 65_536
DIGEST_HEX_DIGITS = 32
"""Half of a SHA-256 is kept.

128 bits tell two versions of a document apart, and the table stays in the cache twice as long.
"""

_UNSEEN, _SEEN_PUBLISHED, _SEEN_ENCODED, _SEEN_OTHER, _PRESENT = range(5)
_STATES = {NEW: _SEEN_OTHER, CHANGED: _SEEN_OTHER, UNCHANGED: _SEEN_PUBLISHED, ENCODED: _SEEN_ENCODED}
_UPSERT = (
    "INSERT INTO documents (doc_id, {0}) VALUES (?, ?) ON CONFLICT (doc_id) DO UPDATE SET {0} = excluded.{0}"
)
_UPSERT_ENCODED = (
    "INSERT INTO documents (doc_id, encoded, shard) VALUES (?, ?, ?) "
    "ON CONFLICT (doc_id) DO UPDATE SET encoded = excluded.encoded, shard = excluded.shard"
)
_MARK_PRESENT = f"UPDATE documents SET state = {_PRESENT} WHERE doc_id = ? AND state = {_UNSEEN}"  # noqa: S608 (constants of this file)


class Ledger:
    """Ids with the digests of their published, encoded and seen content.

    Load first, then classify; the lists are complete once every row of the corpus has been classified.
    """

    def __init__(self, path: Path) -> None:
        with durable.storage_errors("creating the ledger"):
            path.parent.mkdir(parents=True, exist_ok=True)
            for stale in (path, path.with_name(f"{path.name}-journal"), path.with_name(f"{path.name}-wal")):
                stale.unlink(missing_ok=True)
        with _sqlite_errors():
            self._connection = sqlite3.connect(path, isolation_level=None)
            for pragma in (
                "journal_mode = OFF",
                "synchronous = OFF",
                "locking_mode = EXCLUSIVE",
                "temp_store = MEMORY",
                f"cache_size = -{CACHE_KIB}",
            ):
                self._connection.execute(f"PRAGMA {pragma}")
            columns = (
                "doc_id TEXT PRIMARY KEY, published BLOB, encoded BLOB, shard INTEGER, state "
                "INTEGER NOT NULL DEFAULT 0"
            )
            self._connection.execute(f"CREATE TABLE documents ({columns}) WITHOUT ROWID")
            self._connection.execute("BEGIN")
        self._has_published = False

    def load_published(self, batches: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
        """Record (doc_ids, content_sha256) of the served generation."""
        for doc_ids, shas in batches:
            self._has_published |= bool(doc_ids)
            with _sqlite_errors():
                self._connection.executemany(
                    _UPSERT.format("published"), zip(doc_ids, map(_digest, shas), strict=True)
                )

    def load_encoded(self, shard: int, doc_ids: Sequence[str], shas: Sequence[str]) -> None:
        """Record what an interrupted run left encoded in a shard of pending.

        Ascending, a later shard supersedes.
        """
        with _sqlite_errors():
            self._connection.executemany(
                _UPSERT_ENCODED,
                ((doc_id, _digest(sha), shard) for doc_id, sha in zip(doc_ids, shas, strict=True)),
            )

    def classify(self, doc_ids: Sequence[str], shas: Sequence[str]) -> Int8[np.ndarray, " N"]:
        """Compare rows in scan order with what is known and remember them.

        The first row of an id wins, later ones are DUPLICATE.
        """
        codes = np.empty(len(doc_ids), np.int8)
        met: dict[str, int] = {}
        with _sqlite_errors():
            known = self._known(doc_ids)
            for row, (doc_id, sha) in enumerate(zip(doc_ids, shas, strict=True)):
                published, encoded, state = known.get(doc_id, (None, None, _UNSEEN))
                if doc_id in met or state not in (_UNSEEN, _PRESENT):
                    codes[row] = DUPLICATE
                    continue
                digest = _digest(sha)
                if published == digest:
                    code = UNCHANGED
                elif encoded == digest:
                    code = ENCODED
                else:
                    code = NEW if published is None else CHANGED
                codes[row] = code
                met[doc_id] = _STATES[code]
            # In id order the B-tree is walked, not jumped in.
            self._connection.executemany(_UPSERT.format("state"), sorted(met.items()))
        return codes

    def mark_present(self, doc_ids: Sequence[str]) -> None:
        """Remember ids of quarantined rows.

        A document whose new version is bad has not vanished from the source.
        """
        if not self._has_published:
            return  # nothing can vanish, and a file may hold millions of bad rows
        with _sqlite_errors():
            self._connection.executemany(_MARK_PRESENT, ((doc_id,) for doc_id in doc_ids))

    def _known(self, doc_ids: Sequence[str]) -> dict[str, tuple[bytes | None, bytes | None, int]]:
        found: dict[str, tuple[bytes | None, bytes | None, int]] = {}
        for start in range(0, len(doc_ids), LIST_ROWS):
            part = doc_ids[start : start + LIST_ROWS]
            marks = ",".join("?" * len(part))
            query = f"SELECT doc_id, published, encoded, state FROM documents WHERE doc_id IN ({marks})"  # noqa: S608 (question marks only)
            found.update(
                (doc_id, (published, encoded, state))
                for doc_id, published, encoded, state in self._connection.execute(query, part)
            )
        return found

    def replaced_ids(self) -> Iterator[list[str]]:
        """Yield published ids whose content changed, ordered.

        Their published rows must go when the new ones come.
        """
        return self._list(f"published IS NOT NULL AND state IN ({_SEEN_ENCODED}, {_SEEN_OTHER})")

    def vanished_ids(self) -> Iterator[list[str]]:
        """Yield published ids that the source no longer holds, ordered.

        True only of a corpus that was read whole.
        """
        return self._list(f"published IS NOT NULL AND state = {_UNSEEN}")

    def current_in_shard(self, shard: int) -> Iterator[list[str]]:
        """Yield the ids whose rows in an encoded shard are to be committed.

        Met with that content, held by no later shard.
        """
        return self._list(f"shard = {shard:d} AND state = {_SEEN_ENCODED}")

    def _list(self, condition: str) -> Iterator[list[str]]:
        with _sqlite_errors():
            cursor = self._connection.execute(
                f"SELECT doc_id FROM documents WHERE {condition} ORDER BY doc_id"  # noqa: S608 (constants of this file)
            )
            while rows := cursor.fetchmany(LIST_ROWS):
                yield [doc_id for (doc_id,) in rows]

    def close(self) -> None:
        """Let go of the file; it is scratch and may be deleted."""
        self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digest(sha: str) -> bytes:
    return bytes.fromhex(sha[:DIGEST_HEX_DIGITS])


@contextlib.contextmanager
def _sqlite_errors() -> Generator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        # SQLite reports a full disk as text, not as an errno.
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            durable.raise_storage_error(
                OSError(errno.ENOSPC, "No space left on device"), "writing the ledger"
            )
        raise StorageError(f"writing the ledger failed: {error}; run the same command again") from error
