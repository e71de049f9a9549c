"""The manifest of a generation, and whether its files are what the manifest says; nothing is opened."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.durable import clear_way, fsync_file, fsync_folder, replacing, storage_errors
from cairn.pipeline.errors import DamageError, IntegrityError
from cairn.pipeline.index.lance_files import read_lance_files, small_files
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import (
    CLUSTERS_ARROW,
    CONTEXT_ARROW,
    COPIED_FILES,
    COPIES,
    LANCE_FILES,
    SMALL_FOLDERS,
)
from cairn.pipeline.index.segments.segment import needed_files
from cairn.pipeline.index.tables import TABLES
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.manifest import COPIES_VERSION, MANIFEST_NAME, FileRecord, Manifest, record_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """How closely the files of a generation are looked at when it is opened.

    ``hashes`` = False trusts sizes alone. ``verify`` hashes what this machine has hashed before, and the rows
    of documents in Lance, which else are not hashed but for ``suspects``: paths below ``lance/``.
    """

    hashes: bool = True
    verify: bool = False
    suspects: Collection[str] = ()


HASHES: Final = Checks()
SIZES: Final = Checks(hashes=False)
"""For files that this process has just hashed, or of which little is read."""


def check_generation_files(
    layout: CollectionLayout,
    manifest: Manifest,
    check_hashes: bool = True,
    *,
    names: Collection[str] | None = None,
    verified: VerifiedFiles | None = None,
) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for each file of a generation that does not match its manifest.

    ``names`` are the files to look at, None is all; what ``verified`` knows of is not hashed again.
    """
    verified = verified or VerifiedFiles(None)
    folder = layout.generation_folder(manifest.generation)
    problems: list[tuple[str, str]] = []
    for name, record in manifest.files.items():
        if names is not None and name not in names:
            continue
        if Path(name).name != name:
            problems.append((name, "is not a name inside the folder"))
            continue
        with storage_errors(f"reading {name} of generation {manifest.generation}"):
            problem = record.problem(folder / name, check_hash=False)
            if problem is None and check_hashes and not verified.has_sha256(folder / name, record.sha256):
                problem = "does not match its SHA-256"
        if problem is not None:
            problems.append((name, problem))
    needed = {name for record in manifest.segments for name in needed_files(record)}
    missing = {LANCE_FILES, *needed} - set(manifest.files)
    return problems + [(name, "is not in the manifest") for name in sorted(missing)]


def read_manifest(layout: CollectionLayout, number: int) -> Manifest:
    """Read a generation's manifest or its copy, checked against the hash in ``CURRENT``.

    One that speaks of another number raises :class:`IntegrityError`.
    """
    with layout.naming_damage():
        manifest, _ = find_manifest(layout, number)
    if manifest.generation != number or set(manifest.lance_versions) != set(TABLES):
        raise layout.damaged(
            f"the manifest of generation {number} must describe it and the tables {', '.join(TABLES)}"
        )
    return manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedFile:
    """A small file, and what it and its copy must be."""

    name: str
    record: FileRecord
    original: Path
    copy: Path

    def mend(self) -> str | None:
        """Replace the damaged one of the two by the whole one; return its name, None where none was."""
        original, copy = (self.record.problem(path) for path in (self.original, self.copy))
        if (original is None) == (copy is None):
            return None
        source, target = (self.copy, self.original) if copy is None else (self.original, self.copy)
        clear_way(target)
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
        return self.name if copy is None else f"{COPIES}/{self.name}"


def write_copies(layout: CollectionLayout, folder: Path) -> None:
    """Copy the small files of a generation that has just been built in ``folder``, and flush the folder."""
    sources = {name: folder / name for name in (MANIFEST_NAME, *COPIED_FILES) if (folder / name).is_file()}
    sources |= {name: layout.lance_folder / name for name in small_files(read_lance_files(folder))}
    folders: set[Path] = set()
    for name, source in sources.items():
        path = folder / COPIES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        fsync_file(path)
        folders |= set(Path(COPIES, name).parents)
    for each in folders:
        fsync_folder(folder / each)


def find_manifest(layout: CollectionLayout, number: int) -> tuple[Manifest, Path]:
    """Return the manifest of a generation and where it is whole: in its place, or among the copies."""
    folder, sha256 = layout.generation_folder(number), layout.manifest_sha256(number)
    try:
        return Manifest.read(folder, sha256), folder / MANIFEST_NAME
    except DamageError as damage:
        try:
            return Manifest.read(folder / COPIES, sha256), folder / COPIES / MANIFEST_NAME
        except IntegrityError:
            raise damage from None


def whole_copy(layout: CollectionLayout, number: int, name: str, record: FileRecord | None) -> Path | None:
    """Return the copy of a generation's file, None where there is none that is whole.

    Files of Lance are named by their path below ``lance/``.
    """
    path = layout.generation_folder(number) / COPIES / name
    return path if record is not None and record.problem(path) is None else None


def lost_for_good(layout: CollectionLayout, name: str) -> str | None:
    """Return what to do about a damaged context or clusters, None where some generation has it whole.

    A repair needs one generation that has; nothing else can be made into them.
    """
    if name not in (CONTEXT_ARROW, CLUSTERS_ARROW):
        return None
    for number in layout.generation_numbers():
        with contextlib.suppress(IntegrityError):
            record = find_manifest(layout, number)[0].files.get(name)
            if record is None or record.problem(layout.generation_folder(number) / name) is None:
                return None
            if whole_copy(layout, number, name, record) is not None:
                return None
    return (
        f"no generation of {layout.name!r} has {name} or its second copy whole; "
        "move the collection's folder away and ingest the sources again"
    )


def find_lance_files(layout: CollectionLayout, manifest: Manifest) -> Mapping[str, FileRecord]:
    """Return the records of Lance's files, by the list in its place or by its copy.

    Where neither is whole, raises :class:`DamageError`.
    """
    number, record = manifest.generation, manifest.files[LANCE_FILES]
    folder = layout.generation_folder(number)
    problem = record.problem(folder / LANCE_FILES)
    if problem is None:
        return read_lance_files(folder)
    if whole_copy(layout, number, LANCE_FILES, record) is None:
        raise DamageError(f"{LANCE_FILES} of generation {number} {problem}")
    return read_lance_files(folder / COPIES)


def copied_files(layout: CollectionLayout, manifest: Manifest) -> Iterator[CopiedFile]:
    """Yield the small files of a generation; none of an earlier release's that has no copies.

    Those of Lance are left out while neither list of them is whole.
    """
    folder = layout.generation_folder(manifest.generation)
    if manifest.format_version < COPIES_VERSION and not os.path.lexists(folder / COPIES):
        return
    records = {MANIFEST_NAME: record_file(find_manifest(layout, manifest.generation)[1])}
    records |= {name: manifest.files[name] for name in COPIED_FILES if name in manifest.files}
    for name, record in records.items():
        yield CopiedFile(name=name, record=record, original=folder / name, copy=folder / COPIES / name)
    try:
        small = small_files(find_lance_files(layout, manifest))
    except DamageError:
        return
    for name, record in small.items():
        original = layout.lance_folder / name
        yield CopiedFile(name=name, record=record, original=original, copy=folder / COPIES / name)


def mend_copied(layout: CollectionLayout, manifest: Manifest) -> list[str]:
    """Mend originals by their copies and copies by their originals; return the files mended."""
    with storage_errors(f"mending generation {manifest.generation} of {layout.name!r}", layout.folder):
        mended = [each.mend() for each in copied_files(layout, manifest)]
    return [name for name in mended if name is not None]


def link_table(
    layout: CollectionLayout, number: int, table: str, records: Mapping[str, FileRecord], reader: object
) -> Path:
    """Make a database of links to a table's files, to whichever is whole of its small ones.

    It holds one version, so that LanceDB, which opens the latest version of a table first, finds no other.
    It goes when ``reader`` does.
    """
    database = Path(tempfile.mkdtemp(prefix="cairn-table-"))
    weakref.finalize(reader, shutil.rmtree, database, ignore_errors=True)
    stored, links = layout.lance_folder / f"{table}.lance", database / f"{table}.lance"
    links.mkdir()
    for entry in stored.iterdir():
        if entry.name not in SMALL_FOLDERS:
            (links / entry.name).symlink_to(entry)
    for name, record in small_files(records).items():
        path = layout.lance_folder / name
        copy = None if record.problem(path) is None else whole_copy(layout, number, name, record)
        (database / name).parent.mkdir(exist_ok=True)
        (database / name).symlink_to(copy or path)
    return database
