"""Stored files as they were recorded: those of Lance, second copies, and hashes this machine has seen.

Files of a generation are never written to again either, so hashing gigabytes at every opening finds nothing
that the first time did not:

    file ─▶ (device, inode, size, time of the last write) ─▶ noted with this hash?  yes: right
                                                               no: hash it, and note it if right

What changes a file's content changes the time of its last write; a disk that loses bits by itself does not,
and ``cairn verify`` hashes everything. A file written within the last seconds is not noted: a second write
might bear the same time. Notes are a cache of one machine: where they cannot be read, files are hashed.

Lance is imported where a table is opened. LanceDB itself is used by writers alone: importing it takes a
second and a half of a process, more than all else that a search loads.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cairn.pipeline.durable import (
    make_folder,
    raise_storage_error,
    remove_entry,
    sha256_of_file,
    storage_errors,
)
from cairn.pipeline.errors import CairnError, DamageError, StorageError, UsageError, first_line, is_panic
from cairn.pipeline.index.names import SMALL_FOLDERS, cache_folder, is_copied
from cairn.pipeline.manifest import FileRecord

if TYPE_CHECKING:
    import lance

LANCE_ERRORS: Final = (OSError, RuntimeError, ValueError)
"""What Lance and LanceDB raise: they have no exceptions of their own that can be relied on."""

SCAN_BUFFER_BYTES: Final = 16 << 20
"""Of a scan, what Lance may read ahead: it is up to 2 GiB by default."""

READ_TOGETHER_BYTES: Final = 128 << 10
"""Rows of a column so near to one another are read at once: of short values, most of a table's."""


@contextlib.contextmanager
def lance_errors(action: str, *, damaged: bool = False) -> Generator[None]:
    """Report what Lance raises in the block as a :class:`CairnError`.

    ``damaged`` says that stored files, not the disk, are to blame.
    """
    try:
        yield
    except LANCE_ERRORS as error:
        if isinstance(error, CairnError):
            raise
        code = re.search(r"os error (\d+)", str(error))
        if code is not None:
            raise_storage_error(OSError(int(code.group(1)), os.strerror(int(code.group(1)))), action)
        if damaged:
            raise DamageError(f"{action} failed: the stored files do not fit together") from error
        said = re.sub(r"/\S+", "…", first_line(error))
        raise StorageError(f"{action} failed inside LanceDB: {said}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise DamageError(f"{action} failed: LanceDB gave up on what is stored", verb="verify") from error


_process: int | None = None
"""The process that was the first to use Lance, None before any has."""


def use_lance() -> None:
    """Raise :class:`UsageError` in a process forked from one that has used Lance.

    Lance's threads do not outlive a fork: the child would end by a segmentation fault, or wait for ever.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    if _process != os.getpid():
        raise UsageError(
            "this process was forked from one that had used collections, which LanceDB does not survive: "
            "start processes by `spawn` or `forkserver`, or use collections only after the fork"
        )


MANIFEST_SUFFIX: Final = ".manifest"
NEWEST_VERSION: Final = 2**64 - 1
_MANIFEST: Final = "_versions/{:020d}" + MANIFEST_SUFFIX
"""Lance names the manifest of version v by the newest minus v: the newest is listed first."""


def open_pinned_dataset(database: Path, name: str, version: int) -> lance.LanceDataset:
    """Open a table as Lance has it, at a version; one that is gone raises DamageError."""
    import lance

    use_lance()
    folder = database / f"{name}.lance"
    try:
        # Lance would wait for a FIFO in the place of a version's manifest.
        if not (folder / _MANIFEST.format(NEWEST_VERSION - version)).is_file():
            raise FileNotFoundError
        return lance.dataset(str(folder), version=version, block_size=READ_TOGETHER_BYTES)
    except LANCE_ERRORS as error:
        raise DamageError(f"version {version} of table `{name}` cannot be opened") from error


KEPT_TYPES = frozenset({"manifest", "data file", "deletion file"})
"""Transaction files are only read while a commit races another; a writer of ours never does."""


def list_lance_files(tables: Mapping[str, lance.LanceDataset]) -> list[str]:
    """Return the paths below ``lance/`` that these table versions read, sorted."""
    paths: set[str] = set()
    for table, dataset in tables.items():
        version = dataset.version
        for batch in dataset.tracked_files(min_version=version):
            rows = zip(
                batch.column("version").to_pylist(),
                batch.column("path").to_pylist(),
                batch.column("type").to_pylist(),
                strict=True,
            )
            paths.update(
                f"{table}.lance/{path}" for at, path, kind in rows if at == version and kind in KEPT_TYPES
            )
    return sorted(paths)


def damaged_lance_files(
    lance_folder: Path, records: Mapping[str, FileRecord], hashed: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (path below ``lance/``, what is wrong) for each recorded file that is missing or changed.

    Only those in ``hashed`` are hashed, and what decides which rows there are; None is all.
    """
    for name, record in records.items():
        is_hashed = hashed is None or is_small(name) or name in hashed
        with storage_errors(f"reading {name}"):
            problem = record.problem(lance_folder / name, check_hash=is_hashed)
        if problem is not None:
            yield name, problem


def is_small(name: str) -> bool:
    """Tell whether a file of Lance is a version's manifest or a deletion file: which rows there are."""
    return name.split("/")[1] in SMALL_FOLDERS


def write_copies(lance_folder: Path, folder: Path, copies: Path, lance_files: Iterable[str]) -> None:
    """Store the small files of a generation that was built in ``folder`` a second time.

    They are not flushed: what a power cut leaves of one is made again from the first, before the next write.
    """
    sources = {path.name: path for path in folder.iterdir() if is_copied(path.name)}
    sources |= {name: lance_folder / name for name in lance_files if is_small(name)}
    make_folder(copies.parent)
    remove_entry(copies)
    for name, source in sources.items():
        path = copies / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


def keep_only(lance_folder: Path, kept: Collection[str]) -> None:
    """Remove what is none of these files from the tables: versions and rows that nothing reads.

    Lance can write to them afterwards: what stands in the place of a folder is replaced by one.
    """
    for folder in list(lance_folder.glob("*.lance/*")):
        make_folder(folder)
    for path in list(lance_folder.glob("*.lance/*/*")):
        if path.relative_to(lance_folder).as_posix() not in kept:
            remove_entry(path)


SMALLEST: Final = 1 << 20
"""Bytes; a smaller file is hashed in a millisecond."""
SETTLED_SECONDS: Final = 2.0
"""Age of a last write from which on a file is noted; some file systems keep times in steps of two."""
KEPT_FILES: Final = 10_000
"""Past it all notes are forgotten: 40 MB at most."""


def has_sha256(path: Path, sha256: str, *, believes_notes: bool = True) -> bool:
    """Say whether a file has this hash, from what this machine has noted of it or from its bytes."""
    found = path.stat()
    if found.st_size < SMALLEST:
        return sha256_of_file(path) == sha256
    try:
        note = cache_folder() / "verified" / f"{found.st_dev}-{found.st_ino}"
    except RuntimeError:  # there is no place for notes
        return sha256_of_file(path) == sha256
    said = f"{found.st_size} {found.st_mtime_ns} {sha256}"
    is_noted = False
    with contextlib.suppress(OSError):
        is_noted = note.read_bytes() == said.encode()
    if is_noted and believes_notes:
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
    """Write a note; of one that is read half, or cut by a power failure, the file is hashed again."""
    note.parent.mkdir(parents=True, exist_ok=True)
    if sum(1 for _ in note.parent.iterdir()) >= KEPT_FILES:
        shutil.rmtree(note.parent)
        note.parent.mkdir()
    note.write_text(said, encoding="ascii")
