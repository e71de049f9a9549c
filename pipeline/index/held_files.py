"""Files of an opened generation, watched while they are read: those that are mapped, and those of Lance."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import DamageError
from pipeline.manifest import FileRecord


class HeldFiles:
    """Mapped files, held open to notice when one is cut or written into.

    Reading a mapped part that was cut off would end the process. A file that was removed stays whole for its
    holder. A file that is missing when it is to be held raises :class:`DamageError`, as mapping it does, so
    that a reader that lost its generation starts over.
    """

    def __init__(self, folder: Path, records: Mapping[str, FileRecord]) -> None:
        self._folder, self._records = folder, dict(records)
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for name in records:
            try:
                self._descriptors[name] = os.open(folder / name, os.O_RDONLY)
            except OSError as error:
                raise DamageError(f"{name} cannot be read") from error
        self._written_ns = {name: os.fstat(file).st_mtime_ns for name, file in self._descriptors.items()}
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

        Costs a ``stat`` a file; one that was written into since is hashed again.
        """
        for name, descriptor in self._descriptors.items():
            found, size = os.fstat(descriptor), self._records[name].size_bytes
            if found.st_size < size:
                return name, f"must have {size:,} bytes, got {found.st_size:,}: it was cut while it was open"
            if found.st_mtime_ns != self._written_ns[name]:
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    file.seek(0)
                    if hashlib.file_digest(file, "sha256").hexdigest() != self._records[name].sha256:
                        return name, "was written into while it was open, and does not match its SHA-256"
                self._written_ns[name] = found.st_mtime_ns
        return None


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


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
