"""What tells two states of a source file apart without reading it.

    local file       size, inode, time of the last write, time of the last change of its status
    object store     size and ETag, one request a file
    fsspec           size and ETag, or size and time, by what the file system says
    part of a table  what its table says of it, and the table's columns
    none of these    no identity: the file is read each time

An identity is taken before the file is read, so a write in between shows at the next ingest. A file that was
touched within the last seconds has none, as in git's index: a second write might leave the same times. A
program that sets back the clock of the machine can deceive it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.manifest import fingerprint
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

SETTLED_SECONDS: Final = 2.0
"""Age from which times tell two writes apart; some file systems keep times in steps of two seconds."""
REQUESTS: Final = 16
"""Requests to a store at a time."""
_TAGS: Final = ("etag", "content_md5", "md5hash")
_TIMES: Final = ("mtime", "last_modified", "lastmodified", "modified", "updated")


def file_identities(files: Sequence[SourceFile]) -> list[str | None]:
    """Return the identity of each file, None where it has none or does not answer."""
    if all(isinstance(file.filesystem, LocalFileSystem) for file in files):
        return [_identity(file) for file in files]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(_identity, files))


def _identity(file: SourceFile) -> str | None:
    if file.part is not None:
        identity = file.part.identity
        return None if identity is None else fingerprint(part=identity, schema=str(file.part.schema))
    if isinstance(file.filesystem, LocalFileSystem):
        return _local_identity(file.path)
    try:
        if isinstance(file.filesystem, PyFileSystem):
            handler = file.filesystem.handler
            return _told_identity(handler.fs.info(file.path)) if isinstance(handler, FSSpecHandler) else None
        with file.open() as stream:
            told = {name: bytes(value).decode() for name, value in stream.metadata().items()}
            return _told_identity({**told, "size": stream.size()})
    except Exception:  # noqa: BLE001 (each file system raises its own; reading the file will say what is wrong)
        return None


def _local_identity(path: str) -> str | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    if max(found.st_mtime, found.st_ctime) > time.time() - SETTLED_SECONDS:
        return None
    return f"{found.st_size} {found.st_ino} {found.st_mtime_ns} {found.st_ctime_ns}"


def _told_identity(told: Mapping[str, Any]) -> str | None:
    """Return the identity of what a file system says of a file."""
    lower = {name.lower(): value for name, value in told.items() if value}
    tag = next((lower[name] for name in _TAGS if name in lower), None)
    if tag is None:
        written: Any = next((lower[name] for name in _TIMES if name in lower), None)
        seconds = written.timestamp() if isinstance(written, datetime) else written
        if not isinstance(seconds, int | float) or seconds > time.time() - SETTLED_SECONDS:
            return None
        tag = f"{seconds:f}"
    return f"{lower.get('size', 0)} {tag}"
