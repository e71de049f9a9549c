"""Mend what a collection can lose without losing a row, before a writer begins.

    a file that another generation has, too    ─▶ copied from there
    the bits of deleted documents              ─▶ made again from the table of documents
    Lance's tags                               ─▶ written again, as the manifests pin them
    versions that no generation pins           ─▶ removed where they are broken

No row and no published version is touched. Every writer mends under the lock (``publish.prepare_writer``),
and ``repair`` begins with it.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow.compute as pc
from cairn.pipeline.durable import clear_way, make_folder, remove_entry, replacing
from cairn.pipeline.errors import DamageError, IntegrityError, is_panic
from cairn.pipeline.index.layout import (
    ALL_TOKENS_ARROW,
    DELETED_BITS,
    DOCUMENTS_ARROW,
    TOKENS_ARROW,
    CollectionLayout,
    generation_tag,
)
from cairn.pipeline.index.position_files import open_document_positions
from cairn.pipeline.index.segments.segment import DeletedRows, bits_of, write_deleted
from cairn.pipeline.index.stored_files import check_generation_files, lost_for_good, read_manifest, whole_copy
from cairn.pipeline.index.tables import DOCUMENTS, LANCE_ERRORS, TABLES, lance_errors, open_pinned_dataset
from cairn.pipeline.manifest import FileRecord, Manifest, SegmentRecord

if TYPE_CHECKING:
    import lance


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
            if advice := lost_for_good(layout, name):
                raise IntegrityError(f"{name} of generation {number} {problem}; {advice}")
            raise DamageError(f"{name} of generation {number} {problem}")
    return found


def take_dispensable(manifest: Manifest, damaged: dict[str, str], *, without_tokens: bool) -> dict[str, str]:
    """Take the files out of ``damaged`` that need no copy, and return what is wrong with each."""
    dispensable = {record.name + DELETED_BITS for record in manifest.segments if record.deleted_documents}
    if without_tokens:
        dispensable |= {ALL_TOKENS_ARROW, *(record.name + TOKENS_ARROW for record in manifest.segments)}
    return {name: damaged.pop(name) for name in sorted(dispensable & damaged.keys())}


def damage_warning(
    layout: CollectionLayout, number: int, copied: Mapping[str, str], dispensed: Mapping[str, str]
) -> str | None:
    """Return a sentence for the user about the first damaged file, None where all are whole."""
    for name, problem in {**dispensed, **copied}.items():
        instead = "its second copy is read"
        if name in dispensed:
            is_bits = name.endswith(DELETED_BITS)
            instead = "it is made again from the tables" if is_bits else "searches go without token vectors"
        return str(layout.damaged(f"{name} of generation {number} {problem}: {instead}"))
    return None


def deleted_by_table(
    layout: CollectionLayout, manifest: Manifest, record: SegmentRecord, dataset: lance.LanceDataset
) -> DeletedRows:
    """Find the deleted documents of a segment by the ids that the table of documents has left of it.

    Rows of the table stand in the order of the segments. Where that does not give the bits of the manifest,
    :class:`DamageError` is raised.
    """
    before = manifest.segments[: manifest.segments.index(record)]
    begin = sum(each.live_documents for each in before)
    folder = layout.generation_folder(manifest.generation)
    doc_ids = open_document_positions(folder / (record.name + DOCUMENTS_ARROW)).column("doc_id")
    with lance_errors("reading the ids of documents", damaged=True):
        left = dataset.to_table(
            columns=["doc_id"], offset=begin, limit=record.live_documents, scan_in_order=True
        ).column("doc_id")
    is_left = pc.is_in(doc_ids, value_set=left.cast(doc_ids.type).combine_chunks())
    deleted = DeletedRows(len(doc_ids), np.flatnonzero(~is_left.to_numpy(zero_copy_only=False)))
    name = record.name + DELETED_BITS
    if hashlib.sha256(bits_of(deleted)).hexdigest() != manifest.files[name].sha256:
        raise DamageError(f"{name} of generation {manifest.generation} must be as the tables say")
    return deleted


def deleted_again(layout: CollectionLayout, manifest: Manifest, name: str) -> DeletedRows | None:
    """Return the rows that a damaged ``deleted.bits`` must mark.

    None for other files, and where the rows do not tell.
    """
    for record in manifest.segments:
        documents = record.name + DOCUMENTS_ARROW
        folder = layout.generation_folder(manifest.generation)
        if (
            name == record.name + DELETED_BITS
            and manifest.files[documents].problem(folder / documents) is None
        ):
            try:
                version = manifest.lance_versions[DOCUMENTS]
                dataset = open_pinned_dataset(layout.lance_folder, DOCUMENTS, version)
                return deleted_by_table(layout, manifest, record, dataset)
            except IntegrityError:
                return None
    return None


NEWEST_VERSION = 2**64 - 1
"""Lance names the manifest of version v by this minus v, in twenty digits: the newest is listed first."""


def mend_files(
    layout: CollectionLayout, manifest: Manifest, names: Collection[str] | None = None
) -> tuple[list[str], list[tuple[str, str]]]:
    """Replace damaged files of a generation by equal ones of another, or made again from the tables.

    Looks at ``names``, or at every file. Returns the files mended, and (file, what is wrong) for the others.
    """
    mended: list[str] = []
    left: list[tuple[str, str]] = []
    for name, problem in check_generation_files(layout, manifest, names=names):
        damaged = layout.generation_folder(manifest.generation) / name
        if (twin := _twin(layout, manifest, name)) is not None:
            clear_way(damaged)
            with replacing(damaged) as temporary:
                shutil.copyfile(twin, temporary)
        elif (deleted := deleted_again(layout, manifest, name)) is not None:
            clear_way(damaged)
            write_deleted(damaged, deleted)
        else:
            left.append((name, problem))
            continue
        mended.append(name)
    return mended, left


def _twin(layout: CollectionLayout, manifest: Manifest, name: str) -> Path | None:
    record = manifest.files.get(name)
    for number in reversed(layout.generation_numbers()):
        path = layout.generation_folder(number) / name
        if record is not None and number != manifest.generation and record.problem(path) is None:
            return path
    return None


def mend_lance(
    layout: CollectionLayout, generations: Collection[int], *, drop_unpinned: bool = False
) -> list[str]:
    """Let Lance open again where only what no generation reads is broken; return what was mended.

    ``generations`` keep their versions and tags; one whose manifest is damaged keeps nothing. Of the other
    versions those go that cannot be opened, or all: some open and still stop Lance's clean-up.
    """
    pinned: dict[int, Mapping[str, int]] = {}
    for number in generations:
        with contextlib.suppress(IntegrityError):
            pinned[number] = read_manifest(layout, number).lance_versions
    mended: list[str] = []
    for table in TABLES if pinned else ():
        folder = layout.lance_folder / f"{table}.lance"
        kept = {generation_tag(number): versions[table] for number, versions in pinned.items()}
        mended += [f"{table}.lance/{name}" for name in _remove_strays(folder)]
        for version, path in stored_versions(folder):
            if version not in kept.values() and (drop_unpinned or not opens(folder, version)):
                remove_entry(path)
                mended.append(f"{table}.lance/_versions/{path.name}")
        mended += [f"{table}.lance/_refs/tags/{tag}.json" for tag in _mend_tags(folder, kept)]
    return mended


def _remove_strays(folder: Path) -> list[str]:
    """Remove what is no file and no generation reads, but a commit would write to, or wait for."""
    entries = [folder / "_versions" / "latest_version_hint.json", *sorted(folder.glob("_transactions/*"))]
    strays = [path for path in entries if path.is_symlink() or (path.exists() and not path.is_file())]
    for path in strays:
        remove_entry(path)
    return [str(path.relative_to(folder)) for path in strays]


def stored_versions(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the versions of a table and their manifests."""
    for path in sorted((folder / "_versions").glob("*.manifest")):
        if path.stem.isdigit():
            number = int(path.stem)
            yield (NEWEST_VERSION - number if len(path.stem) == len(str(NEWEST_VERSION)) else number), path


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


def _mend_tags(folder: Path, kept: Mapping[str, int]) -> list[str]:
    """Write the tags that do not pin their version; return them."""
    opened = [version for version in kept.values() if opens(folder, version)]
    if not opened:
        return []
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
    wrong = [tag for tag, version in kept.items() if version in opened and stored.get(tag) != version]
    with lance_errors(f"tagging table `{folder.stem}`"):
        for tag in wrong:
            if tag in stored:
                tags.update(tag, kept[tag])
            else:
                tags.create(tag, kept[tag])
    return wrong
