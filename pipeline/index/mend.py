"""Mend what a collection can lose without losing a row, before a writer begins.

    a file that another generation has, too    ─▶ copied from there
    the bits of deleted documents              ─▶ made again from the table of documents
    Lance's tags                               ─▶ written again, as the manifests pin them
    versions that no generation pins           ─▶ removed where they are broken

No row and no published version is touched. Every writer mends under the lock (``publish.prepare_writer``),
and ``repair`` begins with it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import lance
from cairn.pipeline.durable import clear_way, make_folder, remove_entry, replacing
from cairn.pipeline.errors import IntegrityError, is_panic
from cairn.pipeline.index.lance_errors import LANCE_ERRORS, lance_errors
from cairn.pipeline.index.layout import CollectionLayout, generation_tag
from cairn.pipeline.index.segments.deleted import write_deleted
from cairn.pipeline.index.stand_ins import deleted_again
from cairn.pipeline.index.stored_files import check_generation_files, read_manifest
from cairn.pipeline.index.tables import TABLES
from cairn.pipeline.manifest import Manifest

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
