"""Let Lance open again where only what no generation reads is broken; no row and no version is lost.

    Lance's tags                          ─▶ written again, as the manifests pin them
    versions that no generation pins      ─▶ removed where they are broken

Every writer mends under the lock (``publish.prepare_writer``), and ``repair`` begins with it. Files that are
stored twice are mended by ``stored_files``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import lance
from cairn.pipeline.durable import make_folder, remove_entry
from cairn.pipeline.errors import IntegrityError, is_panic
from cairn.pipeline.index.layout import CollectionLayout, generation_tag
from cairn.pipeline.index.stored_files import read_manifest
from cairn.pipeline.index.tables import LANCE_ERRORS, TABLES, lance_errors

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
