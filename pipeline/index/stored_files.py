"""The manifest of a generation, and whether its files are what the manifest says; nothing is opened."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.durable import storage_errors
from cairn.pipeline.index.copied_names import LANCE_FILES
from cairn.pipeline.index.copies import find_manifest
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.segments.segment import needed_files
from cairn.pipeline.index.tables import TABLES
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.manifest import Manifest


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
