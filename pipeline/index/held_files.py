"""Files of an opened generation, watched while they are read: those that are mapped, and those of Lance."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import threading
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.errors import DamageError
from cairn.pipeline.manifest import FileRecord

RELEASE_SECONDS: Final = 10.0
"""How long searches that were under way may read a file that another program wants to write into."""


class _Leases:
    """Whether files are leased when they are opened, and how often the kernel has asked for one back."""

    is_on = False
    asked_back = 0


def lease_held_files() -> None:
    """Lease files of generations that are opened from here on; to be called in the main thread.

    A program that is about to cut or write into a leased file waits until it is released, for 45 seconds at
    most, and SIGIO tells the holder (``fcntl(2)``, F_SETLEASE). Files of other users and those of file
    systems without leases are held without one.
    """

    def count(_number: int, _frame: Any) -> None:
        _Leases.asked_back += 1

    signal.signal(signal.SIGIO, count)
    _Leases.is_on = True


class HeldFiles:
    """Mapped files, held open to notice when one is cut or written into.

    Reading a mapped part that was cut off would end the process: a lease, see :func:`lease_held_files`, lets
    searches under way end first. A file that was removed stays whole for its holder. One that is missing when
    it is to be held, or open for writing elsewhere, raises :class:`DamageError`, as mapping a missing one
    does, so that a reader that lost its generation starts over. Of ``copied``, which have a second copy, one
    that is open for writing is not held, and stands in ``refused`` with what is wrong.
    """

    def __init__(self, folder: Path, records: Mapping[str, FileRecord], copied: Collection[str] = ()) -> None:
        self._folder, self._records = folder, dict(records)
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for name in records:
            try:
                self._descriptors[name] = os.open(folder / name, os.O_RDONLY)
            except OSError as error:
                raise DamageError(f"{name} cannot be read") from error
        self._asked_back, self._wanted = _Leases.asked_back, ""
        self._leased: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        for name, file in list(self._descriptors.items()) if _Leases.is_on else ():
            try:
                if _lease(file):
                    self._leased[name] = file
            except BlockingIOError:
                problem = "is open for writing in another program"
                if name not in copied:
                    raise DamageError(f"{name} {problem}") from None
                self.refused[name] = problem
                os.close(self._descriptors.pop(name))
        self._written_ns = {
            name: os.fstat(file).st_mtime_ns
            for name, file in self._descriptors.items()
            if name not in self._leased
        }
        self._entries = _stamp(folder)

    def moved_file(self) -> str | None:
        """Return a file whose name is no longer that of the file held, None where all are in their place.

        What is held stays whole. Costs a ``stat`` of the folder while nothing was put into it.
        """
        entries = _stamp(self._folder)
        if entries == self._entries:
            return None
        for name, descriptor in self._descriptors.items():
            found = _stamp(self._folder / name)
            if found is None or found[0] != os.fstat(descriptor).st_ino:
                return name
        self._entries = entries
        return None

    def damaged_file(self) -> tuple[str, str] | None:
        """Return a file that is no longer what it was and what is wrong with it, None where all are whole.

        Costs a ``stat`` a file without a lease; one that was written into since is hashed again. Nothing is
        written into a leased one without asking.
        """
        if self._asked_back != _Leases.asked_back:
            self._asked_back = _Leases.asked_back
            self._look_at_leases()
        if self._wanted:
            return self._wanted, "is about to be written into by another program"
        for name, written_ns in self._written_ns.items():
            descriptor, size = self._descriptors[name], self._records[name].size_bytes
            found = os.fstat(descriptor)
            if found.st_size < size:
                return name, f"must have {size:,} bytes, got {found.st_size:,}: it was cut while it was open"
            if found.st_mtime_ns != written_ns:
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    file.seek(0)
                    if hashlib.file_digest(file, "sha256").hexdigest() != self._records[name].sha256:
                        return name, "was written into while it was open, and does not match its SHA-256"
                self._written_ns[name] = found.st_mtime_ns
        return None

    @property
    def wanted_file(self) -> str:
        """A file that another program waits to write into, empty where there is none."""
        return self._wanted

    def _look_at_leases(self) -> None:
        wanted = [name for name, file in self._leased.items() if not _is_leased(file)]
        if wanted and not self._wanted:
            self._wanted = wanted[0]
            release = threading.Timer(RELEASE_SECONDS, _release, [self._descriptors])
            release.daemon = True
            release.start()


class WatchedFiles:
    """Files that are opened by their names for each read.

    One that was removed, replaced or written into is hashed again. ``damaged`` are those that were found so.
    """

    def __init__(self, folder: Path, records: Mapping[str, FileRecord]) -> None:
        self.records = dict(records)
        self.damaged: set[str] = set()
        self._folder = folder
        self._paths = {name: os.fspath(folder / name) for name in records}
        self._stamps = {name: _stamp(path) for name, path in self._paths.items()}

    def changed_file(self) -> tuple[str, str] | None:
        """Return a file that is no longer what it was and what is wrong with it, None where all are whole.

        Costs a ``stat`` a file.
        """
        for name, stamp in self._stamps.items():
            found = _stamp(self._paths[name])
            if found != stamp:
                problem = self._problem(name)
                if problem is not None:
                    return name, problem
                self._stamps[name] = found
        return None

    def damaged_file(self) -> tuple[str, str] | None:
        """Hash all files; return one that is damaged and what is wrong with it."""
        problems = [(name, problem) for name in self.records if (problem := self._problem(name)) is not None]
        return problems[0] if problems else None

    def _problem(self, name: str) -> str | None:
        problem = self.records[name].problem(self._folder / name)
        if problem is not None:
            self.damaged.add(name)
        return problem


def _stamp(path: Path | str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a third of the time of a Path
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _lease(descriptor: int) -> bool:
    """Lease a file; False where the kernel has no leases for it.

    One that is open for writing raises :class:`BlockingIOError`.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_leased(descriptor: int) -> bool:
    """Return whether a lease holds: one that the kernel asks back counts as gone."""
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def _release(descriptors: dict[str, int]) -> None:
    for descriptor in list(descriptors.values()):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _close(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
