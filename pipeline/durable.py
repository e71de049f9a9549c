"""Files that are whole or absent: the one place that knows how bytes reach the disk.

Write to a temporary name, fsync the file, rename it, fsync the folder. Every step a crash could fall on is announced with
:func:`commit_point`,
so that tests can kill the process exactly there. Source of the protocol: SQLite's and Lance's, adapted to POSIX rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import DiskFullError, StorageError

_observers: list[Callable[[str], None]] = []


def observe_commit_points(observer: Callable[[str], None]) -> None:
    """Call ``observer(name)`` at every commit point from now on; fault tests kill the process from inside it."""
    _observers.append(observer)


def commit_point(name: str) -> None:
    """Announce that everything before ``name`` has been done and nothing after it."""
    for observer in _observers:
        observer(name)


def raise_storage_error(error: OSError, action: str) -> NoReturn:
    """Turn an operating-system error into the sentence a user can act on; ``action`` reads like "writing the FAISS files"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DiskFullError(f"no space left while {action}; free some and run the same command again, finished work is kept") from error
    raise StorageError(f"{action} failed: {error.strerror or error}") from error


@contextlib.contextmanager
def storage_errors(action: str) -> Generator[None]:
    """Report any ``OSError`` of the block as a :class:`StorageError` or :class:`DiskFullError`."""
    try:
        yield
    except OSError as error:
        raise_storage_error(error, action)


def fsync_file(path: Path) -> None:
    """Flush a file that some library wrote to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    fsync_file(path)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary name beside ``path``; on success it becomes ``path`` durably, on failure it is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fsync_file(temporary)
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file durably and atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write JSON durably and atomically, keys sorted, one trailing newline."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def sha256_of_file(path: Path) -> str:
    """Return the lower-case hex SHA-256 of a file, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
