"""The files of a generation: its manifest, second copies of the small ones, and whether all are as recorded.

    generations/<n>/copies/  MANIFEST.json, lance_files.json, context.arrow, clusters.arrow, deleted.bits, …
                             documents.lance/ and chunks.lance/: _versions/…, _deletions/…

A copy must have the hash that its original must have, so it needs no record of its own. Readers take the one
of the two that is whole, and every writer mends one by the other. Vector and word files are not copied, since
they are made again from Lance; rows of Lance have no second copy. Nothing is opened here.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.durable import clear_way, fsync_file, fsync_folder, replacing, storage_errors
from cairn.pipeline.errors import DamageError, IntegrityError
from cairn.pipeline.index.lance_files import read_lance_files, small_files
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import COPIES, LANCE_FILES, SMALL_FOLDERS, is_copied
from cairn.pipeline.index.segments.segment import needed_files
from cairn.pipeline.index.tables import TABLES
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.manifest import MANIFEST_NAME, FileRecord, Manifest, record_file


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a generation and what it must be; ``label`` names the copy, or the original as ``name``."""

    label: str
    name: str
    record: FileRecord
    path: Path


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


def whole_copy(layout: CollectionLayout, number: int, name: str, record: FileRecord | None) -> Path | None:
    """Return the copy of a generation's file, None where there is none that is whole.

    Files of Lance are named by their path below ``lance/``.
    """
    path = layout.generation_folder(number) / COPIES / name
    return path if record is not None and record.problem(path) is None else None


def require_copies(
    layout: CollectionLayout,
    number: int,
    records: Mapping[str, FileRecord],
    damaged: Iterable[tuple[str, str]],
) -> dict[str, str]:
    """Return what is wrong with each damaged file; one without a whole copy raises :class:`DamageError`."""
    found = dict(damaged)
    for name, problem in found.items():
        if whole_copy(layout, number, name, records.get(name)) is None:
            raise DamageError(f"{name} of generation {number} {problem}")
    return found


def write_copies(layout: CollectionLayout, folder: Path) -> None:
    """Copy the small files of a generation that has just been built in ``folder``, and flush the folder."""
    sources = {path.name: path for path in folder.iterdir() if is_copied(path.name)}
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


def twice_stored(layout: CollectionLayout, manifest: Manifest) -> Iterator[StoredFile]:
    """Yield the small files of a generation and their copies.

    Those of Lance are left out while neither list of them is whole.
    """
    folder = layout.generation_folder(manifest.generation)
    records = {MANIFEST_NAME: record_file(find_manifest(layout, manifest.generation)[1])}
    records |= {name: record for name, record in manifest.files.items() if is_copied(name)}
    try:
        small = small_files(find_lance_files(layout, manifest))
    except DamageError:
        small = {}
    for name, record in {**records, **small}.items():
        original = (layout.lance_folder if name in small else folder) / name
        yield StoredFile(label=name, name=name, record=record, path=original)
        yield StoredFile(label=f"{COPIES}/{name}", name=name, record=record, path=folder / COPIES / name)


def mend_files(layout: CollectionLayout, manifest: Manifest, *, all_files: bool = False) -> list[str]:
    """Replace damaged files by whole ones, from wherever these stand; return the files mended.

    Looks at the small files that are there twice, or at all files of the generation.
    """
    number, mended = manifest.generation, list[str]()
    with storage_errors(f"mending generation {number} of {layout.name!r}", layout.folder):
        files = list(twice_stored(layout, manifest))
        if all_files:
            folder = layout.generation_folder(number)
            files += [
                StoredFile(label=name, name=name, record=record, path=folder / name)
                for name, record in manifest.files.items()
                if not is_copied(name)
            ]
        for file in files:
            if file.record.problem(file.path) is None:
                continue
            source = _find_whole(layout, file)
            if source is not None:
                clear_way(file.path)
                with replacing(file.path) as temporary:
                    shutil.copyfile(source, temporary)
                mended.append(file.label)
    return mended


def _find_whole(layout: CollectionLayout, file: StoredFile) -> Path | None:
    """Return where the content of a file is whole: its other copy, or what another generation has of it."""
    folders = [layout.generation_folder(number) for number in reversed(layout.generation_numbers())]
    places = [layout.lance_folder, *folders, *(folder / COPIES for folder in folders)]
    return next(
        (place / file.name for place in places if file.record.problem(place / file.name) is None), None
    )


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
