"""Large files whose hash this machine has found right once: trusted while they stay as they were.

    file ─▶ (device, inode, size, time of the last write) ─▶ noted with this hash?  yes: right
                                                               no: hash it, and note it if right

Files of a generation are never written to again, so hashing gigabytes at every opening finds nothing that the
first time did not. What changes a file's content changes the time of its last write; a disk that loses bits
by itself does not, and ``cairn verify`` hashes everything. A file written within the last seconds is not
noted: a second write might bear the same time. Files below :data:`SMALLEST` are hashed each time.

Notes are a cache of one machine, a small file each: where they cannot be read or written, files are hashed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Final

from cairn.pipeline.durable import sha256_of_file
from cairn.pipeline.index.roots import cache_folder

SMALLEST: Final = 1 << 20
"""Bytes; a smaller file is hashed in a millisecond."""
SETTLED_SECONDS: Final = 2.0
"""Age of a last write from which on a file is noted; some file systems keep times in steps of two."""
KEPT_FILES: Final = 10_000
"""Past it all notes are forgotten: 40 MB at most."""


class VerifiedFiles:
    """What is noted of large files in a folder; without one, or where it is not believed, all are hashed."""

    def __init__(self, folder: Path | None, *, is_believed: bool = True) -> None:
        self._folder, self._is_believed = folder, is_believed

    @classmethod
    def of_this_machine(cls, *, is_believed: bool = True) -> VerifiedFiles:
        """Return what is noted in the cache folder, nothing where there is no place for one."""
        try:
            return cls(cache_folder() / "verified", is_believed=is_believed)
        except RuntimeError:
            return cls(None)

    def has_sha256(self, path: Path, sha256: str) -> bool:
        """Say whether a file has this hash, from what is noted of it or from its bytes."""
        found = path.stat()
        if self._folder is None or found.st_size < SMALLEST:
            return sha256_of_file(path) == sha256
        note = self._folder / f"{found.st_dev}-{found.st_ino}"
        said = f"{found.st_size} {found.st_mtime_ns} {sha256}"
        is_noted = False
        with contextlib.suppress(OSError):
            is_noted = note.read_bytes() == said.encode()
        if is_noted and self._is_believed:
            return True
        is_right = sha256_of_file(path) == sha256
        with contextlib.suppress(OSError):
            if is_noted and not is_right:
                note.unlink()
            # The time is that before reading: a write in the meantime has moved it on.
            if is_right and time.time() - found.st_mtime >= SETTLED_SECONDS:
                _write(note, said)
        return is_right


def _write(note: Path, said: str) -> None:
    """Write a note, which is never read half; it need not survive a power cut."""
    note.parent.mkdir(parents=True, exist_ok=True)
    if sum(1 for _ in note.parent.iterdir()) >= KEPT_FILES:
        shutil.rmtree(note.parent)
        note.parent.mkdir()
    temporary = note.with_name(f".{note.name}.{os.getpid()}.tmp")
    temporary.write_text(said, encoding="ascii")
    temporary.replace(note)
