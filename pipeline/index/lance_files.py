"""The files a pinned Lance version consists of, with their hashes: Lance itself checksums nothing.

Lance files never change once written, so a hash taken at publication holds for ever; a new generation only
hashes what is new. Recording also fsyncs, which Lance does not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from cairn.pipeline.durable import fsync_file, fsync_folder, json_bytes, storage_errors
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import LANCE_FILES, SMALL_FOLDERS
from cairn.pipeline.manifest import FileRecord, record_file

KEPT_TYPES = frozenset({"manifest", "data file", "deletion file"})
"""Transaction files are only read while a commit races another; a writer of ours never does."""
MANIFEST_SUFFIX = ".manifest"

LanceFiles = dict[str, FileRecord]
"""Path below ``lance/`` to what the file must be."""


def list_lance_files(layout: CollectionLayout, versions: Mapping[str, int]) -> list[str]:
    """Return the paths below ``lance/`` that these table versions read, sorted."""
    import lance  # takes a second of a process, which status can do without

    paths: set[str] = set()
    for table, version in versions.items():
        dataset = lance.dataset(str(layout.lance_folder / f"{table}.lance"), version=version)
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


def small_table_files(layout: CollectionLayout, versions: Mapping[str, int]) -> list[Path]:
    """Return the paths of what these table versions consist of, but for their rows and indexes."""
    names = list_lance_files(layout, versions)
    return [layout.lance_folder / name for name in names if name.split("/")[1] in SMALL_FOLDERS]


def record_lance_files(
    layout: CollectionLayout, versions: Mapping[str, int], known: Mapping[str, FileRecord]
) -> LanceFiles:
    """Hash and fsync every file of these versions.

    A file in ``known`` keeps its record, if it has the same size or a worker wrote it to the store.
    """
    records: LanceFiles = {}
    folders: set[Path] = set()
    for name in list_lance_files(layout, versions):
        path = layout.lance_folder / name
        record = known.get(name)
        is_here = layout.replica is None or layout.replica.worker_files.record_of(path) is None
        if record is None or (is_here and record.size_bytes != path.stat().st_size):
            fsync_file(path)
            folders.add(path.parent)
            record = record_file(path)
        records[name] = record
    for folder in sorted(folders):
        fsync_folder(folder)
    return records


def write_lance_files(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the records into the folder of a generation that is being built, and flushed as a whole."""
    content = {name: asdict(record) for name, record in records.items()}
    (folder / LANCE_FILES).write_bytes(json_bytes(content))


def read_lance_files(folder: Path) -> LanceFiles:
    """Read the records of a generation; a damaged list raises :class:`DamageError`."""
    try:
        raw = json.loads((folder / LANCE_FILES).read_bytes())
        return {name: FileRecord(**record) for name, record in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamageError(f"{LANCE_FILES} of generation {folder.name} cannot be read") from error


def damaged_lance_files(
    layout: CollectionLayout, records: Mapping[str, FileRecord], *, check_hashes: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield (path below ``lance/``, what is wrong) for each recorded file that is missing or changed."""
    for name, record in records.items():
        with storage_errors(f"reading {name}"):
            problem = record.problem(layout.lance_folder / name, check_hash=check_hashes)
        if problem is not None:
            yield name, problem


def damaged_rows(
    layout: CollectionLayout, records: Mapping[str, FileRecord], suspects: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the damaged files of a table that a reader can find: rows are measured, the rest is hashed.

    ``suspects`` are hashed, too.
    """
    small = small_files(records)
    for is_hashed in (False, True):
        looked_at = {
            name: record
            for name, record in records.items()
            if is_hashed == (name in small or name in suspects)
        }
        yield from damaged_lance_files(layout, looked_at, check_hashes=is_hashed)


def small_files(records: Mapping[str, FileRecord]) -> LanceFiles:
    """Return the records of version manifests and deletion files: they decide which rows there are."""
    return {name: record for name, record in records.items() if name.split("/")[1] in SMALL_FOLDERS}
