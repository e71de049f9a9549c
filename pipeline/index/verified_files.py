"""Large files whose hash this machine has found right once: trusted while they stay as they were.

    file ─▶ (device, inode, size, time of the last write) ─▶ known with this hash?  yes: right
                                                               no: hash it, and remember it if right

Files of a generation are never written to again, so hashing gigabytes at every opening finds nothing that the
first time did not. What changes a file's content changes the time of its last write; a disk that loses bits
by itself does not, and ``cairn verify`` hashes everything. A file written within the last seconds is not
remembered: a second write might bear the same time. Files below :data:`SMALLEST` are hashed each time.

The database is a cache of one machine: where it cannot be read or written, files are hashed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final, Self

from cairn.pipeline.durable import sha256_of_file
from cairn.pipeline.index.roots import cache_folder

log = logging.getLogger(__name__)

SMALLEST: Final = 1 << 20
"""Bytes; a smaller file is hashed in a millisecond."""
SETTLED_SECONDS: Final = 2.0
"""Age of a last write from which on a file is remembered; some file systems keep times in steps of two."""
KEPT_FILES: Final = 100_000
"""Past it the half that was verified first is forgotten: 15 MB at most."""
BUSY_SECONDS: Final = 1.0

_SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS verified (
        file TEXT PRIMARY KEY, size INTEGER, written_ns INTEGER, sha256 TEXT, seen REAL
    ) WITHOUT ROWID
"""


class VerifiedFiles:
    """What is known of large files on this machine, kept in a database; to be closed.

    Without a path nothing is known, and every file is hashed. The database is opened at the first large file,
    made if need be, and made again where it is damaged. What is not ``is_believed`` is hashed, and noted or
    forgotten.
    """

    def __init__(self, path: Path | None, *, is_believed: bool = True) -> None:
        self._path, self._is_believed = path, is_believed
        self._opened: sqlite3.Connection | None = None

    @classmethod
    def of_this_machine(cls, *, is_believed: bool = True) -> VerifiedFiles:
        """Return what is known in the cache folder, nothing where there is no place for one."""
        try:
            return cls(cache_folder() / "verified.sqlite", is_believed=is_believed)
        except RuntimeError:
            return cls(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()

    def has_sha256(self, path: Path, sha256: str) -> bool:
        """Say whether a file has this hash, from what is known of it or from its bytes."""
        found = path.stat()
        if found.st_size < SMALLEST:
            return sha256_of_file(path) == sha256
        is_known = False
        with self._tried("read"):
            is_known = self._is_known(found, sha256)
        if is_known and self._is_believed:
            return True
        if sha256_of_file(path) != sha256:
            if is_known:
                with self._tried("written"):
                    self._forget(found)
            return False
        # The time is that before reading: a write in the meantime has moved it on.
        if time.time() - found.st_mtime >= SETTLED_SECONDS:
            with self._tried("written"):
                self._remember(found, sha256)
        return True

    def _is_known(self, found: os.stat_result, sha256: str) -> bool:
        database = self._database()
        if database is None:
            return False
        asked = "SELECT size, written_ns, sha256 FROM verified WHERE file = ?"
        row = database.execute(asked, (_identity(found),)).fetchone()
        return row == (found.st_size, found.st_mtime_ns, sha256)

    def _remember(self, found: os.stat_result, sha256: str) -> None:
        database = self._database()
        if database is None:
            return
        row = (_identity(found), found.st_size, found.st_mtime_ns, sha256, time.time())
        database.execute("INSERT OR REPLACE INTO verified VALUES (?, ?, ?, ?, ?)", row)
        (count,) = database.execute("SELECT count(*) FROM verified").fetchone()
        if count > KEPT_FILES:
            database.execute(
                "DELETE FROM verified WHERE file IN (SELECT file FROM verified ORDER BY seen LIMIT ?)",
                (count - KEPT_FILES // 2,),
            )

    def _forget(self, found: os.stat_result) -> None:
        database = self._database()
        if database is not None:
            database.execute("DELETE FROM verified WHERE file = ?", (_identity(found),))

    def _database(self) -> sqlite3.Connection | None:
        if self._opened is None and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._opened = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            self._opened.execute("PRAGMA synchronous = OFF")
            self._opened.execute(_SCHEMA)
        return self._opened

    @contextlib.contextmanager
    def _tried(self, what: str) -> Generator[None]:
        """Do without the database from here on where it fails during the block."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            log.debug("verified_files.not_%s error=%s", what, error)
            if self._opened is not None:
                self._opened.close()
            is_damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(
                error, sqlite3.OperationalError
            )
            if is_damaged and self._path is not None:
                self._path.unlink(missing_ok=True)
            self._opened = self._path = None


def _identity(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}"
