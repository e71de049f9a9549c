"""Files that are whole or absent: the one place that knows how bytes reach the disk.

Write to a temporary name, fsync the file, rename it, fsync the folder. Every step a crash could fall on is
announced with :func:`commit_point`, so that tests can kill the process exactly there. Source of the protocol:
SQLite's and Lance's, adapted to POSIX rename. A folder that holds something cannot be renamed over: the
kernel exchanges the two names, and the old one goes away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NoReturn

from cairn.pipeline.errors import DiskFullError, StorageError, TryAgainError
from safetensors import SafetensorError
from typing_extensions import Buffer

LOCK_ATTEMPTS: Final = 5
LOCK_PAUSE_SECONDS: Final = 0.01
FLUSHES: Final = 8
"""Files flushed side by side: sixteen took 79 ms so, and 130 ms one after another."""
TURN_SECONDS: Final = 60.0
"""How long a lock is waited for that its holder lets go of again and again."""
_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100
"""Linux: paths are relative to the working folder."""

_observers: list[Callable[[str], None]] = []


def observe_commit_points(observer: Callable[[str], None]) -> None:
    """Call ``observer(name)`` at every commit point from now on.

    Fault tests kill the process from inside it.
    """
    _observers.append(observer)


def commit_point(name: str) -> None:
    """Announce that everything before ``name`` has been done and nothing after it."""
    for observer in _observers:
        observer(name)


def raise_storage_error(error: OSError, action: str, below: Path | None = None) -> NoReturn:
    """Turn an operating-system error into the sentence a user can act on.

    ``action`` reads like "writing the FAISS files". A file below the folder ``below`` is named by
    its path in it.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DiskFullError(
            f"no space left while {action}; free some and run the same command again, finished work is kept"
        ) from error
    sentence = f"{action} failed: {error.strerror or error}"
    path = error.filename2 or error.filename
    if below is not None and path is not None and Path(os.fsdecode(path)).is_relative_to(below):
        sentence += f": {Path(os.fsdecode(path)).relative_to(below)}"
    raise StorageError(sentence) from error


@contextlib.contextmanager
def storage_errors(action: str, below: Path | None = None) -> Generator[None]:
    """Report any ``OSError`` of the block as a :class:`StorageError` or :class:`DiskFullError`.

    The arguments are those of :func:`raise_storage_error`.
    """
    try:
        yield
    except OSError as error:
        raise_storage_error(error, action, below)
    except SafetensorError as error:
        # Its writer hides the operating system's error in a sentence.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise_storage_error(OSError(int(number[1]), os.strerror(int(number[1]))), action)


def fsync_file(path: Path) -> None:
    """Flush a file that some library wrote to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_files(paths: Iterable[Path]) -> None:
    """Flush files, or folders, side by side: file systems write down together what waits together."""
    with ThreadPoolExecutor(FLUSHES) as flushing:
        for _ in flushing.map(fsync_file, paths):
            pass


def fsync_folder(path: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    fsync_file(path)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary name beside ``path``.

    On success it becomes ``path`` durably, on failure it is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fsync_file(temporary)
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Generator[Path]:
    """Yield a new folder beside ``path``.

    On success it takes the place of ``path`` and all it held, on failure it is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            fsync_file(entry)
        fsync_file(temporary)
        put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(new: Path, path: Path) -> None:
    """Rename a folder to ``path`` beside it.

    A reader sees the old folder or the new one, whole. Then the old one is removed.
    """
    if path.is_dir() and any(path.iterdir()):
        if not _exchange(new, path):
            # A file system without the exchange: for a moment there is neither.
            aside = new.with_name(f"{new.name}.old")
            path.rename(aside)
            new.rename(path)
            aside.rename(new)
        fsync_folder(path.parent)
        commit_point("folder.replaced")
        shutil.rmtree(new)
    else:
        new.replace(path)
    fsync_folder(path.parent)


def remove_entry(path: Path) -> None:
    """Remove what stands at a path, of whatever kind, or nothing; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_way(path: Path) -> None:
    """Let a file be written where something else stands: a folder of its name, or a file for its folder.

    Makes the folders it is to lie in. A link in place of one of these stays: it may lead to a disk that is
    not mounted.
    """
    make_folder(path.parent)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, also where a file or a link to itself stands in the way."""
    standing = next(entry for entry in (path, *path.parents) if os.path.lexists(entry))
    if not standing.is_dir():
        if standing.is_symlink() and not _is_loop(standing):
            fault = "a link that leads to no folder stands here; mount its disk, or remove the link"
            raise FileExistsError(errno.EEXIST, fault, str(standing))
        standing.unlink()
    path.mkdir(parents=True, exist_ok=True)


def _is_loop(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def remove_folder(path: Path, *, flushes: bool = True) -> None:
    """Remove a folder, or what stands in its place.

    It is first renamed to a temporary name, so that no reader finds half of it. Killed in between, this
    leaves ``.name.removed.tmp``, which :func:`clear_temporary` removes. Without ``flushes``, a power cut may
    bring some of it back under its name: for what no one believes by its name.
    """
    aside = path.with_name(f".{path.name}.removed.tmp")
    remove_entry(aside)
    path.rename(aside)
    if flushes:
        fsync_folder(path.parent)
    commit_point("folder.set-aside")
    remove_entry(aside)


def clear_temporary(folder: Path) -> None:
    """Remove what killed writers left in a folder under temporary names; the caller holds its lock."""
    for leftover in folder.glob(".*.tmp"):
        remove_entry(leftover)


def _exchange(one: Path, other: Path) -> bool:
    """Give each path what stood at the other in one step; False where libc or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def read_bytes(path: Path) -> bytes:
    """Read a file; a FIFO, a device or a folder in its place is refused, and never waited for."""
    with open(path, "rb", opener=_open_file) as stream:
        return stream.read()


def _open_file(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", path)
    return descriptor


def write_bytes(path: Path, content: Buffer) -> None:
    """Write bytes, or what holds some, durably and atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def json_bytes(value: Any) -> bytes:
    """Return JSON as files hold it: keys sorted, one trailing newline."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write JSON durably and atomically."""
    write_bytes(path, json_bytes(value))


def sha256_of_file(path: Path) -> str:
    """Return the lower-case hex SHA-256 of a file, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def exclusive_lock(
    path: Path,
    name: str,
    busy: Callable[[str], TryAgainError],
    waits: Callable[[], bool] = lambda: False,
    seconds: float = TURN_SECONDS,
) -> Generator[None]:
    """Hold a lock file during the block; it is made if need be.

    Where another process holds it, raises ``busy(" (process 7)")``, or ``busy("")`` if its id is unknown;
    while ``waits``, after so many ``seconds``. The kernel drops the lock when the holder dies, so a killed
    process never leaves it behind. ``name`` reads like "the lock of the scheduler".
    """
    with storage_errors(f"opening {name}"):
        descriptor = _open_lock(path, os.O_RDWR | os.O_CREAT)
    owner = os.getpid()
    try:
        if not _take(descriptor, waits, seconds):
            holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
            raise busy(f" (process {holder})" if holder.isdigit() else "")
        with storage_errors(f"writing {name}"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        if os.getpid() == owner:  # a child has the file open, too, until it runs another program
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Tell whether a process holds a lock file; a missing one is held by none."""
    with storage_errors(f"looking at {path.name}"):
        try:
            descriptor = _open_lock(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for an instant, which `_take` waits out
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # and no longer where a child has the file open
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _open_lock(path: Path, flags: int) -> int:
    """Open a lock file; a link, a FIFO or a folder in its place is refused, and never waited for."""
    return _open_file(str(path), flags | os.O_NOFOLLOW)


def _take(descriptor: int, waits: Callable[[], bool], seconds: float) -> bool:
    """Take a lock, unless another process holds it for longer than :func:`is_locked` does.

    A killed process lets go of its locks one after the other: what ``waits`` looks at may be free before.
    """
    until = time.monotonic() + seconds
    attempts = 0
    while attempts < LOCK_ATTEMPTS:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            attempts = 0 if time.monotonic() < until and waits() else attempts + 1
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return True
    return False
