"""From pinned Lance versions to a served generation: build aside, rename, move ``CURRENT`` last.

    .<n>.tmp/ built, files fsynced ─▶ MANIFEST.json ─▶ renamed to <n>/ ─▶ CURRENT replaced ─▶ older pruned

A crash before ``CURRENT`` moves leaves the old generation served and rubbish that :func:`prepare_writer`
clears; a crash after it leaves the new one served. Everything here runs under the collection's lock. Ingest,
repair, compaction and deletion all publish through :func:`publish_generation`.

Every writer first mends, and ``repair`` begins with it: files that are stored twice (``stored_files``), tags
of Lance, which are written again as the manifests pin them, and broken versions that no generation pins,
which are removed. No row and no published version is lost by that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lance
from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import commit_point, make_folder, remove_entry, storage_errors
from cairn.pipeline.errors import DamageError, IntegrityError, StorageError, is_panic
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.current import KEPT_GENERATIONS, Current
from cairn.pipeline.index.lance_files import (
    damaged_lance_files,
    record_lance_files,
    small_files,
    write_lance_files,
)
from cairn.pipeline.index.lance_index import LanceTables, StoredRows
from cairn.pipeline.index.layout import CollectionLayout, generation_tag
from cairn.pipeline.index.names import SIDE_FILES
from cairn.pipeline.index.segments.assembly import Assembly
from cairn.pipeline.index.segments.parts import RunTasks
from cairn.pipeline.index.segments.segment import open_rows
from cairn.pipeline.index.stored_files import (
    check_generation_files,
    find_lance_files,
    mend_files,
    read_manifest,
    write_copies,
)
from cairn.pipeline.index.tables import LANCE_ERRORS, TABLES, lance_errors
from cairn.pipeline.manifest import MANIFEST_NAME, FileRecord, Manifest, record_file
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import ProgressListener, silent_progress

log = logging.getLogger(__name__)

COMMIT_POINTS = (
    "lance-rolled-back",
    "compacted",
    "documents-deleted",
    "chunks-deleted",
    "documents-added",
    "chunks-added",
    "tagged",
    "positions-written",
    "passages-written",
    "token-vectors-written",
    "documents-index-written",
    "chunks-index-written",
    "segments-merged",
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
        # Without its projection a collection is served without token vectors.
        lost = {name for name, _ in check_generation_files(layout, manifest, names=[LATE_NAME])}
        return cls(
            run_id=run_id,
            side_files={
                name: folder / name for name in SIDE_FILES if name in manifest.files and name not in lost
            },
            fingerprints=manifest.fingerprints,
            settings=manifest.settings,
            context_documents=manifest.context_documents,
            context_cluster_sizes=manifest.context_cluster_sizes,
            documents_at_context=manifest.documents_at_context,
            encode_tokens_per_second=manifest.encode_tokens_per_second,
            sources=manifest.sources,
        )


def prepare_writer(layout: CollectionLayout, *, gives_up_projection: bool = False) -> Manifest | None:
    """Settle what a killed writer left; return the served generation's manifest, None before the first.

    Temporary and never-served generations are removed, and what ``mend`` can mend is mended. A first
    publication killed just before ``CURRENT`` was written is completed: its folder is whole and nothing else
    is. Damage that a publication would carry over raises :class:`DamageError`. ``gives_up_projection`` lets a
    damaged token projection pass, which a repair leaves out.
    """
    with storage_errors("clearing what an unfinished run left", layout.folder):
        durable.clear_temporary(layout.generations_folder)
        if not layout.current_path.exists() and layout.generation_numbers() == [1]:
            manifest = read_manifest(layout, 1)
            if not check_generation_files(layout, manifest):
                serve_generation(layout, 1)
            elif layout.replica is not None:  # a store got the rest from workers; the work is pending still
                durable.remove_folder(layout.generation_folder(1))
        served = layout.current_generation_number()
        if served is None:
            return None
        manifest = read_manifest(layout, served)
        for number in layout.generation_numbers():
            if number > served:
                durable.remove_folder(layout.generation_folder(number))
        for number in layout.generation_numbers():
            with contextlib.suppress(IntegrityError):
                mend_files(layout, read_manifest(layout, number))
        _require_carried_over(layout, manifest, without={LATE_NAME} if gives_up_projection else set())
        mend_lance(layout)
        _mark_published(layout, served)
    return manifest


def _require_carried_over(layout: CollectionLayout, manifest: Manifest, without: set[str]) -> None:
    """Raise :class:`DamageError` for what a publication would carry over damaged."""
    damaged = check_generation_files(layout, manifest, names=set(SIDE_FILES) - without)
    with contextlib.suppress(DamageError):  # no hashes to compare: what is missing is found when it is read
        damaged += damaged_lance_files(layout, small_files(find_lance_files(layout, manifest)))
    for name, problem in damaged:
        raise layout.damaged(f"{name} of generation {manifest.generation} {problem}")


@returning_freed_memory()
def publish_generation(
    layout: CollectionLayout,
    tables: LanceTables,
    versions: Mapping[str, int],
    facts: GenerationFacts,
    config: IndexConfig,
    progress: ProgressListener = silent_progress,
    since: Mapping[str, int] | None = None,
    run_tasks: RunTasks | None = None,
    hashed: Mapping[str, FileRecord] | None = None,
) -> Manifest:
    """Build, publish and serve the generation that pins these table versions; return its manifest.

    ``since`` are the versions of the served generation's rows that the commit began with: what did not change
    since then is shared with it. None makes every file again from the tables. ``run_tasks`` has processes
    that write large segments; without, this one does. ``hashed`` are files of the tables whose hashes are
    known, by their paths below ``lance/``. The caller holds the lock, and has called :func:`prepare_writer`.
    Tables whose order or spans do not fit raise :class:`IntegrityError`; ``CURRENT`` then still names the old
    one.
    """
    served = layout.current_generation_number()
    number = (served or 0) + 1
    folder = layout.temporary_generation_folder(number)
    with layout.naming_damage(), storage_errors(f"publishing generation {number} of {layout.name!r}"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            known = {**_known_lance_files(layout), **(hashed or {})}
            manifest = _build(
                layout,
                tables,
                versions,
                facts,
                config,
                progress,
                number,
                folder,
                since,
                run_tasks,
                known,
            )
        except BaseException:
            # A full disk must not stay full of a generation that no one will read.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        final = layout.generation_folder(number)
        if os.path.lexists(final):
            durable.remove_folder(final)
        folder.rename(final)
        durable.fsync_folder(layout.generations_folder)
        commit_point("generation-renamed")
        serve_generation(layout, number)
        commit_point("current-replaced")
        if layout.replica is not None and not layout.replica.has_all(number):
            # Workers wrote the rest of it to the store. The next pull fetches that, and cleans up.
            durable.remove_folder(final)
            return manifest
        try:
            prune_generations(layout, tables)
        except (OSError, StorageError) as error:  # the publication stands, the next one cleans up again
            log.warning("publish.not_cleaned_up collection=%s error=%s", layout.name, error)
        commit_point("old-generations-pruned")
    return manifest


def next_generation_number(layout: CollectionLayout) -> int:
    """Return the number the next publication will have: what :meth:`LanceTables.commit` tags with."""
    return (layout.current_generation_number() or 0) + 1


def prune_generations(layout: CollectionLayout, tables: LanceTables) -> None:
    """Remove all but the served generation and the one before it, with the Lance versions only they held."""
    served = layout.current_generation_number()
    standing = layout.generation_numbers()
    kept = [number for number in standing if served is not None and number <= served][-KEPT_GENERATIONS:]
    remove_generations(layout, [number for number in standing if number not in kept])
    try:
        tables.keep_only(kept)
    except StorageError:  # a broken version of a generation that has just gone is in the way
        mend_lance(layout, drop_unpinned=True)
        tables.keep_only(kept)


def remove_generations(layout: CollectionLayout, numbers: Sequence[int]) -> None:
    """Remove generations that are not served: ``CURRENT`` first names them no more, then their folders go."""
    current = layout.current()
    if current is not None and not current.manifests.keys().isdisjoint(numbers):
        left = {number: sha256 for number, sha256 in current.manifests.items() if number not in numbers}
        durable.write_bytes(layout.current_path, Current(left).to_bytes())
    for number in numbers:
        durable.remove_folder(layout.generation_folder(number))


def serve_generation(layout: CollectionLayout, number: int) -> None:
    """Point ``CURRENT`` at a generation that stands whole: the one step that changes what readers see.

    In an object store that is the store's ``CURRENT``; the copy follows, if it has all files of it.
    """
    if layout.replica is not None:
        layout.replica.push(number)
        if not layout.replica.has_all(number):
            return
    current = _current_with(layout, number)
    for newer in layout.generation_numbers():
        if newer > number:  # given up
            layout.published_path(newer).unlink(missing_ok=True)
    durable.clear_way(layout.current_path)
    durable.write_bytes(layout.current_path, current.to_bytes())
    _mark_published(layout, number)


def _mark_published(layout: CollectionLayout, number: int) -> None:
    if layout.replica is None and not layout.published_path(number).exists():
        durable.write_bytes(layout.published_path(number), b"")


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


def _build(
    layout: CollectionLayout,
    tables: LanceTables,
    versions: Mapping[str, int],
    facts: GenerationFacts,
    config: IndexConfig,
    progress: ProgressListener,
    number: int,
    folder: Path,
    since: Mapping[str, int] | None,
    run_tasks: RunTasks | None,
    known: Mapping[str, FileRecord],
) -> Manifest:
    base = None if since is None or number == 1 else read_manifest(layout, number - 1)
    rows = StoredRows(tables=tables, versions=versions)
    has_tokens = LATE_NAME in facts.side_files and tables.has_tokens
    assembly = Assembly(layout, base, number, folder, config, has_tokens=has_tokens, run_tasks=run_tasks)
    segments = assembly.build(rows, since, progress)
    for name, source in facts.side_files.items():
        assert name in SIDE_FILES, name
        shutil.copyfile(source, folder / name)  # never linked: a second copy is what they are mended from
    commit_point("side-files-copied")
    write_lance_files(folder, record_lance_files(layout, versions, known))
    commit_point("lance-files-recorded")
    names = sorted(({path.name for path in folder.iterdir()} | assembly.hashed.keys()) - {MANIFEST_NAME})
    for name in names:
        if name not in assembly.hashed:
            durable.fsync_file(folder / name)
    manifest = Manifest(
        collection=layout.name,
        generation=number,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        run_id=facts.run_id,
        lance_tag=generation_tag(number),
        lance_versions=dict(versions),
        documents=sum(record.live_documents for record in segments),
        chunks=sum(record.live_chunks for record in segments),
        tokens=sum(open_rows(folder, record).num_tokens() for record in segments),
        vector_dim=tables.vector_dim,
        files={name: assembly.hashed.get(name) or record_file(folder / name) for name in names},
        fingerprints=dict(facts.fingerprints),
        settings=dict(facts.settings),
        segments=segments,
        context_documents=facts.context_documents,
        context_cluster_sizes=tuple(facts.context_cluster_sizes),
        documents_at_context=facts.documents_at_context,
        encode_tokens_per_second=facts.encode_tokens_per_second,
        sources=tuple(facts.sources),
    )
    manifest.write(folder)
    commit_point("manifest-written")
    write_copies(layout, folder)
    progress("index", 5, 5, "files")
    commit_point("copies-written")
    return manifest


def _known_lance_files(layout: CollectionLayout) -> Mapping[str, FileRecord]:
    """Hashes already taken: of the served generation, where its list is whole."""
    served = layout.current_generation_number()
    if served is None:
        return {}
    try:
        return find_lance_files(layout, read_manifest(layout, served))
    except IntegrityError:
        return {}


NEWEST_VERSION = 2**64 - 1
"""Lance names the manifest of version v by this minus v, in twenty digits: the newest is listed first."""


def mend_lance(layout: CollectionLayout, *, drop_unpinned: bool = False) -> None:
    """Mend versions and tags of the tables.

    Generations that stand keep their versions and tags; one whose manifest is damaged keeps nothing. Of the
    other versions those go that cannot be opened, or all: some open and still stop Lance's clean-up.
    """
    pinned: dict[int, Mapping[str, int]] = {}
    for number in layout.generation_numbers():
        with contextlib.suppress(IntegrityError):
            pinned[number] = read_manifest(layout, number).lance_versions
    for table in TABLES if pinned else ():
        folder = layout.lance_folder / f"{table}.lance"
        kept = {generation_tag(number): versions[table] for number, versions in pinned.items()}
        _remove_strays(folder)
        for version, path in _stored_versions(folder):
            if version not in kept.values() and (drop_unpinned or not opens(folder, version)):
                remove_entry(path)
        _mend_tags(folder, kept)


def opens(folder: Path, version: int) -> bool:
    """Tell whether Lance opens a version of the table in ``folder``."""
    try:
        lance.dataset(str(folder), version=version)
    except LANCE_ERRORS:
        return False
    except BaseException as error:
        if is_panic(error):
            return False
        raise
    return True


def _remove_strays(folder: Path) -> None:
    """Remove what is no file and no generation reads, but a commit would write to, or wait for."""
    for path in (folder / "_versions" / "latest_version_hint.json", *folder.glob("_transactions/*")):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            remove_entry(path)


def _stored_versions(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted((folder / "_versions").glob("*.manifest")):
        if path.stem.isdigit():
            number = int(path.stem)
            yield (NEWEST_VERSION - number if len(path.stem) == len(str(NEWEST_VERSION)) else number), path


def _mend_tags(folder: Path, kept: Mapping[str, int]) -> None:
    """Write the tags that do not pin their version."""
    opened = [version for version in kept.values() if opens(folder, version)]
    if not opened:
        return
    stored_tags = folder / "_refs" / "tags"
    make_folder(stored_tags)
    for path in stored_tags.iterdir():
        if not path.is_file():  # a link to nothing would be written through
            remove_entry(path)
    # Never through the latest version, which may be broken.
    tags = lance.dataset(str(folder), version=opened[0]).tags
    try:
        stored = {tag: content["version"] for tag, content in tags.list().items()}
    except LANCE_ERRORS:
        stored = {}
        for path in stored_tags.iterdir():
            path.unlink()
    with lance_errors(f"tagging table `{folder.stem}`"):
        for tag, version in kept.items():
            if version in opened and stored.get(tag) != version:
                (tags.update if tag in stored else tags.create)(tag, version)
