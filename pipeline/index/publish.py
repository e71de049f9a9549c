"""From pinned Lance versions to a served generation: build aside, rename, move ``CURRENT`` last.

    .<n>.tmp/ built, files fsynced ─▶ MANIFEST.json ─▶ renamed to <n>/ ─▶ CURRENT replaced ─▶ older pruned

A crash before ``CURRENT`` moves leaves the old generation served and rubbish that ``recovery`` clears; a
crash after it leaves the new one served. Everything here runs under the collection's lock. Ingest, repair,
compaction and deletion all publish through :func:`publish_generation`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point, storage_errors
from cairn.pipeline.errors import IntegrityError, StorageError
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.files import (
    keep_only,
    list_lance_files,
    write_copies,
)
from cairn.pipeline.index.layout import (
    CollectionLayout,
    check_generation_files,
    read_manifest,
)
from cairn.pipeline.index.names import KEPT_GENERATIONS, SIDE_FILES, SPARSE_ARROW, TOKENS_ARROW, Current
from cairn.pipeline.index.rows import LanceTables, StoredRows
from cairn.pipeline.index.segments.assembly import Assembly
from cairn.pipeline.index.segments.segment import open_rows
from cairn.pipeline.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    PartitionRecord,
    SegmentRecord,
    record_file,
)
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import SPARSE_FIELDS, TOKEN_FIELDS, ProgressListener, silent_progress

if TYPE_CHECKING:
    import lance

log = logging.getLogger(__name__)

COMMIT_POINTS = (
    "strays-removed",
    "compacted",
    "documents-deleted",
    "chunks-deleted",
    "documents-added",
    "chunks-added",
    "positions-written",
    "passages-written",
    "token-vectors-written",
    "documents-index-written",
    "chunks-index-written",
    "segments-assembled",
    "side-files-copied",
    "lance-files-recorded",
    "manifest-written",
    "copies-written",
    "generation-renamed",
    "current-replaced",
    "old-generations-pruned",
)
"""Every step a crash can fall on, in order, from the first write to Lance to the last clean-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationFacts:
    """What a manifest says that the tables do not: who published, with which model, context and settings.

    ``side_files`` maps :data:`SIDE_FILES` to the files they are copied from. The other
    fields are the manifest's.
    """

    run_id: str
    side_files: Mapping[str, Path]
    fingerprints: Mapping[str, str]
    settings: Mapping[str, Any]
    context_documents: int
    context_cluster_sizes: tuple[int, ...]
    documents_at_context: int
    encode_tokens_per_second: float
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, layout: CollectionLayout, manifest: Manifest, run_id: str) -> GenerationFacts:
        """Carry over what an existing generation says of itself, for a publication that encodes nothing."""
        folder = layout.generation_folder(manifest.generation)
        # Without its codebook a collection is served without token vectors.
        lost = {name for name, _ in check_generation_files(layout, manifest, names=[LATE_NAME])}
        side_files = {
            name: folder / name for name in SIDE_FILES if name in manifest.files and name not in lost
        }
        told: dict[str, Any] = {**_told(manifest), "run_id": run_id}
        return cls(side_files=side_files, **told)


def _told(source: GenerationFacts | Manifest) -> dict[str, Any]:
    """Return what facts and the manifest say alike."""
    names = [each.name for each in fields(GenerationFacts) if each.name != "side_files"]
    return {name: getattr(source, name) for name in names}


@returning_freed_memory()
def publish_generation(
    layout: CollectionLayout,
    tables: LanceTables,
    versions: Mapping[str, int],
    facts: GenerationFacts,
    config: IndexConfig,
    progress: ProgressListener = silent_progress,
    *,
    shares: bool = False,
) -> Manifest:
    """Build, publish and serve the generation that pins these table versions; return its manifest.

    With ``shares`` the served generation shares the files of what the commit of the ``tables`` left as it
    was; without, every file is made again from the tables. The caller holds the lock, and has called
    :func:`prepare_writer`. Tables whose order or spans do not fit raise
    :class:`IntegrityError`; ``CURRENT`` then still names the old one.
    """
    with _publishing(layout, progress) as (number, folder):
        base = read_manifest(layout, number - 1) if shares and number > 1 else None
        optional = {
            TOKENS_ARROW: LATE_NAME in facts.side_files and tables.has(TOKEN_FIELDS),
            SPARSE_ARROW: tables.has(SPARSE_FIELDS),
        }
        has = [name for name, is_there in optional.items() if is_there]
        assembly = Assembly(layout, base, number, folder, config, optional=has)
        segments = assembly.build(StoredRows(tables=tables, versions=versions), progress)
        _copy_side_files(facts, folder)
        pinned = {name: tables.dataset(name, version) for name, version in versions.items()}
        known: Mapping[str, FileRecord] = {}
        with contextlib.suppress(IntegrityError):
            known = read_manifest(layout, number - 1).lance_files if number > 1 else {}
        lance_files = record_lance_files(layout, pinned, known)
        commit_point("lance-files-recorded")
        names = sorted(({path.name for path in folder.iterdir()} | assembly.hashed.keys()) - {MANIFEST_NAME})
        durable.fsync_files(folder / name for name in names if name not in assembly.hashed)
        return _write_manifest(
            layout,
            number,
            folder,
            facts,
            segments,
            {name: assembly.hashed.get(name) or record_file(folder / name) for name in names},
            versions=dict(versions),
            lance_files=lance_files,
            tokens=sum(open_rows(folder, record).num_tokens() for record in segments),
            vector_dim=tables.vector_dim,
        )


def publish_partitions(
    layout: CollectionLayout,
    partitions: Sequence[PartitionRecord],
    facts: GenerationFacts,
    progress: ProgressListener = silent_progress,
) -> Manifest:
    """Publish the generation that names these generations of partitions: the step that readers see.

    The caller holds the lock of the collection.
    """
    with _publishing(layout, progress) as (number, folder):
        _copy_side_files(facts, folder)
        durable.fsync_files(folder.iterdir())
        own = [
            # A worker on another machine may have published it into the store.
            layout.replica.manifest(record)
            if layout.replica
            else read_manifest(layout.partition(record), record.generation)
            for record in partitions
            if record.generation
        ]
        return _write_manifest(
            layout,
            number,
            folder,
            facts,
            tuple(segment for each in own for segment in each.segments),
            {name: record_file(folder / name) for name in sorted(facts.side_files)},
            versions={},
            lance_files={},
            tokens=sum(each.tokens for each in own),
            vector_dim=own[0].vector_dim,
            partitions=tuple(partitions),
        )


def _copy_side_files(facts: GenerationFacts, folder: Path) -> None:
    for name, source in facts.side_files.items():
        assert name in SIDE_FILES, name
        # Never linked: a second copy is what they are mended from.
        shutil.copyfile(source, folder / name)
    commit_point("side-files-copied")


def _write_manifest(
    layout: CollectionLayout,
    number: int,
    folder: Path,
    facts: GenerationFacts,
    segments: tuple[SegmentRecord, ...],
    files: Mapping[str, FileRecord],
    *,
    versions: Mapping[str, int],
    lance_files: Mapping[str, FileRecord],
    tokens: int,
    vector_dim: int,
    partitions: tuple[PartitionRecord, ...] = (),
) -> Manifest:
    """Write the manifest of a generation and its second copies."""
    manifest = Manifest(
        collection=layout.name,
        generation=number,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        lance_versions=versions,
        lance_files=lance_files,
        documents=sum(record.live_documents for record in segments),
        chunks=sum(record.live_chunks for record in segments),
        tokens=tokens,
        vector_dim=vector_dim,
        files=files,
        segments=segments,
        languages=dict(sum((Counter(record.languages) for record in segments), Counter())),
        partitions=partitions,
        **_told(facts),
    )
    manifest.write(folder)
    commit_point("manifest-written")
    write_copies(layout.lance_folder, folder, layout.copies_folder(number), lance_files)
    commit_point("copies-written")
    return manifest


@contextlib.contextmanager
def _publishing(
    layout: CollectionLayout, progress: ProgressListener = silent_progress
) -> Generator[tuple[int, Path]]:
    """Yield the number and the temporary folder of the next generation, which is served at the end.

    ``progress`` hears that the index is done as soon as it is served, before older ones are removed.
    """
    number = next_generation_number(layout)
    final = layout.generation_folder(number)
    folder = final.with_name(f".{final.name}.tmp")
    with layout.naming_damage(), storage_errors(f"publishing generation {number} of {layout.name!r}"):
        shutil.rmtree(folder, ignore_errors=True)
        durable.make_folder(folder)
        try:
            yield number, folder
        except BaseException:
            # A full disk must not stay full of a generation that no one will read.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if os.path.lexists(final):
            durable.remove_folder(final)
        folder.rename(final)
        durable.fsync_folder(layout.generations_folder)
        commit_point("generation-renamed")
        if layout.whole is None:  # else the collection will name it
            serve_generation(layout, number)
        commit_point("current-replaced")
        progress("index", 5, 5, "files")
        try:
            prune_generations(layout, number)
        except (OSError, StorageError, IntegrityError) as error:  # the next publication cleans up again
            log.warning("publish.not_cleaned_up collection=%s error=%s", layout.name, error)
        commit_point("old-generations-pruned")


def next_generation_number(layout: CollectionLayout) -> int:
    """Return the number the next publication will have; the first one's rows are there already."""
    is_first = layout.whole is None and not (layout.current_path.exists() or layout.generation_numbers())
    return 1 if is_first else (layout.current_generation_number() or 0) + 1


def prune_generations(layout: CollectionLayout, newest: int) -> None:
    """Remove all but the newest generation and the one before it, with what only they read."""
    standing = layout.generation_numbers()
    kept = [number for number in standing if number <= newest][-KEPT_GENERATIONS:]
    remove_generations(layout, [number for number in standing if number not in kept])
    remove_strays(layout, kept)


def remove_strays(layout: CollectionLayout, numbers: Sequence[int]) -> None:
    """Remove rows and partitions that none of these generations reads: what a killed run left, too.

    The newest must be whole; an older one that cannot be read is no way back.
    """
    read: set[str] = set()
    partitions: set[str] = set()
    for number in numbers:
        try:
            manifest = read_manifest(layout, number)
        except IntegrityError:
            if number == numbers[-1]:
                raise
        else:
            read |= manifest.lance_files.keys()
            partitions |= {record.name for record in manifest.partitions}
    for entry in list(layout.partitions_folder.iterdir()) if layout.partitions_folder.is_dir() else ():
        if entry.name not in partitions:
            durable.remove_entry(entry)
    if read:
        keep_only(layout.lance_folder, read)
    else:
        durable.remove_entry(layout.lance_folder)


def remove_generations(layout: CollectionLayout, numbers: Sequence[int]) -> None:
    """Remove generations that are not served: ``CURRENT`` first names them no more, then their folders go."""
    current = layout.current()
    if current is not None and not current.manifests.keys().isdisjoint(numbers):
        left = {number: sha256 for number, sha256 in current.manifests.items() if number not in numbers}
        durable.write_bytes(layout.current_path, Current(left).to_bytes())
    for number in numbers:
        if layout.generation_folder(number).is_dir():
            durable.remove_folder(layout.generation_folder(number), flushes=False)
        durable.remove_entry(layout.copies_folder(number))


def serve_generation(layout: CollectionLayout, number: int) -> None:
    """Point ``CURRENT`` at a generation that stands whole: the one step that changes what readers see.

    In an object store that is the store's ``CURRENT``; the copy follows, if it has all files of it.
    """
    if layout.replica is not None:
        layout.replica.push(number)
    current = _current_with(layout, number)
    for newer in layout.generation_numbers():
        if newer > number:  # given up
            durable.remove_folder(layout.generation_folder(newer))
    durable.clear_way(layout.current_path)
    durable.write_bytes(layout.current_path, current.to_bytes())


def _current_with(layout: CollectionLayout, served: int) -> Current:
    """Return what ``CURRENT`` says when a generation is served; a hash once recorded is carried over.

    The file may have been damaged since.
    """
    try:
        before = layout.current()
    except IntegrityError:
        before = None
    recorded = {} if before is None else before.manifests
    standing = [number for number in layout.generation_numbers() if number <= served]
    manifests: dict[int, str] = {}
    for number in reversed(standing[-KEPT_GENERATIONS:]):
        path = layout.generation_folder(number) / MANIFEST_NAME
        if path.is_file():
            manifests[number] = recorded.get(number) or record_file(path).sha256
    return Current(manifests)


def record_lance_files(
    layout: CollectionLayout, tables: Mapping[str, lance.LanceDataset], known: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """Hash and fsync every file that these versions read; Lance does neither.

    A file in ``known`` keeps its record, if it has the same size.
    """
    records: dict[str, FileRecord] = {}
    new: list[Path] = []
    for name in list_lance_files(tables):
        path = layout.lance_folder / name
        record = known.get(name)
        if record is None or record.size_bytes != path.stat().st_size:
            new.append(path)
            record = record_file(path)
        records[name] = record
    durable.fsync_files(dict.fromkeys(each for path in new for each in (path, path.parent)))
    return records
