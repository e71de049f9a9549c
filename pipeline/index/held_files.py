"""Mapped files of an opened generation, watched while they are read."""

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
        self._records = dict(records)
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for name in records:
            try:
                self._descriptors[name] = os.open(folder / name, os.O_RDONLY)
            except OSError as error:
                raise DamageError(f"{name} cannot be read") from error
        self._written_ns = {name: os.fstat(file).st_mtime_ns for name, file in self._descriptors.items()}

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


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
