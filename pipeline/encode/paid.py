"""What servers were paid for, kept on disk until it is published: no run asks for it twice."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from cairn.pipeline.corpus.source_record import sqlite_errors

PAID_NAME: Final = "paid.sqlite"

_Answer = TypeVar("_Answer")


class PaidAnswers:
    """Answers by the hash of what was asked, in SQLite: each is in the file before the next is waited for.

    A file that SQLite cannot read is begun again; without a path nothing is kept. Safe to use from several
    threads.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._file = None
        self._claimed: set[bytes] = set()
        self._is_released = threading.Condition()
        if path is None:
            return
        with sqlite_errors():
            try:
                self._file = _opened(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                    path.with_name(name).unlink(missing_ok=True)
                self._file = _opened(path)

    def answers(
        self,
        keys: Iterable[bytes],
        ask: Callable[[Sequence[bytes]], Mapping[bytes, _Answer]],
        read: Callable[[bytes], _Answer],
    ) -> dict[bytes, _Answer]:
        """Return the answer to each key: what was kept, what another thread asks for, the rest by ``ask``.

        ``ask`` keeps what it is answered; where it fails, a thread that waited for it asks by itself.
        """
        found: dict[bytes, _Answer] = {}
        left = list(dict.fromkeys(keys))
        while left:
            with self._is_released:
                own = [key for key in left if key not in self._claimed]
                self._claimed.update(own)
            try:
                found |= {key: read(content) for key, content in self.find(own).items()}
                missing = [key for key in own if key not in found]
                found |= ask(missing) if missing else {}
            finally:
                with self._is_released:
                    self._claimed.difference_update(own)
                    self._is_released.notify_all()
            left = [key for key in left if key not in found]
            with self._is_released:
                self._is_released.wait_for(lambda waited=frozenset(left): not waited & self._claimed)
        return found

    def find(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the answers there are."""
        found: dict[bytes, bytes] = {}
        with self._lock, sqlite_errors():
            if self._file is None:
                return found
            for key in keys:
                for (content,) in self._file.execute("SELECT content FROM answers WHERE key = ?", (key,)):
                    found[key] = content
        return found

    def keep(self, answers: Mapping[bytes, bytes]) -> None:
        """Keep answers; they outlive a kill of this process when this returns."""
        with self._lock, sqlite_errors():
            if self._file is not None:
                with self._file:
                    self._file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", [*answers.items()])

    def close(self) -> None:
        """Close the file; what is kept later is kept nowhere."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, content)")
        connection.execute("SELECT count(*) FROM (SELECT 1 FROM answers LIMIT 1)").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection
