"""What a folder of a source holds: one rule for local folders, buckets and fsspec.

Below :mod:`cairn.pipeline.corpus.sources`. What cannot be read has a fault and does not end the listing. A
local folder is read once, however many links lead to it, so a link back into its own folder adds nothing.
Names that start with ``.`` or ``_`` are markers and leftovers of other writers: nothing below them is listed.
A folder with a table of Delta or Iceberg in it is refused: listing would find the files of deleted rows, too.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.errors import SourceError
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

_IN_TABLE: Final = re.compile(r"(.*)/(?:_delta_log(?:/|$)|metadata/[^/]*\.metadata\.json$)")
NOT_UTF8 = "its name must be UTF-8; rename it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A name in a folder, and why it cannot be read if it cannot."""

    path: str
    is_folder: bool = False
    is_link: bool = False
    fault: str | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


def children(filesystem: FileSystem, folder: str) -> list[Entry]:
    """List a folder, sorted; one that is missing holds nothing.

    A local folder that cannot be listed stands for itself, with its fault.
    """
    if isinstance(filesystem, LocalFileSystem):
        try:
            found = [_local(entry) for entry in os.scandir(folder)]
        except FileNotFoundError:
            found = []
        except OSError as error:
            return [Entry(path=folder, is_folder=True, fault=f"it cannot be listed: {error.strerror}")]
    else:
        found = [
            Entry(path=info.path, is_folder=info.type == FileType.Directory)
            for info in filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
        ]
    return sorted(found, key=lambda entry: entry.path)


def files_below(filesystem: FileSystem, folder: str) -> Iterator[Entry]:
    """Yield every file below a folder, and every name below it that cannot be read.

    Raises :class:`SourceError` where a table of Delta or Iceberg lies below it.
    """
    if not isinstance(filesystem, LocalFileSystem):
        for info in filesystem.get_file_info(FileSelector(folder, recursive=True)):
            _refuse_table(folder, info.path)
            if info.type == FileType.File and not any(
                map(is_hidden, info.path[len(folder) :].lstrip("/").split("/"))
            ):
                yield Entry(path=info.path)
        return
    seen = {_identity(folder)}
    waiting = deque([folder])
    links = deque[str]()  # after what stands in the folder itself, which keeps its own name
    while waiting or links:
        current = (waiting or links).popleft()
        for entry in children(filesystem, current):
            _refuse_table(folder, entry.path)
            if is_hidden(entry.name) and entry.path != current:
                continue
            if not entry.is_folder or entry.fault is not None:
                yield entry
            elif entry.is_link:
                links.append(entry.path)
            else:
                seen.add(_identity(entry.path))
                waiting.append(entry.path)
        while not waiting and links:
            if (identity := _identity(links[0])) not in seen:
                seen.add(identity)
                break
            links.popleft()


def _refuse_table(folder: str, path: str) -> None:
    if found := _IN_TABLE.match(path, len(folder)):
        table = shown(path[: found.end(1)])
        raise SourceError(
            f"a folder of files must hold no table of Delta or Iceberg, got {table}; name the table itself, "
            "or several by a glob"
        )


def is_hidden(name: str) -> bool:
    """Whether a name is one that sources leave out."""
    return name.startswith((".", "_"))


def is_utf8(path: str) -> bool:
    """Whether a path of this machine can be written as text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(path: str) -> str:
    """Make a path of this machine printable: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


def _local(entry: os.DirEntry[str]) -> Entry:
    is_link = entry.is_symlink()
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        fault = "it is a link that leads nowhere" if is_link else f"it is gone: {error.strerror}"
        return Entry(path=entry.path, fault=fault)
    if stat.S_ISDIR(mode):
        return Entry(path=entry.path, is_folder=True, is_link=is_link)
    if not stat.S_ISREG(mode):
        return Entry(path=entry.path, fault="it is neither a file nor a folder")
    return Entry(path=entry.path, fault=None if is_utf8(entry.path) else NOT_UTF8)


def _identity(folder: str) -> tuple[int, int]:
    try:
        found = Path(folder).stat()
    except OSError:
        return (-1, hash(folder))
    return found.st_dev, found.st_ino
