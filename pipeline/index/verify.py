"""Find every fault of a stored collection: wrong bytes, missing versions, rows that do not fit together.

Reads everything once (hashes of all generation and Lance files, ids and spans and text lengths of the served
tables) and changes nothing. It takes no lock, so that a collection can be checked while it is written; what a
writer prunes meanwhile may then be reported, and a second look settles it.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.durable import is_locked, storage_errors, write_json
from cairn.pipeline.errors import CairnError, DamageError, IntegrityError, StorageError
from cairn.pipeline.index.current import Current
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_files import MANIFEST_SUFFIX, damaged_lance_files
from cairn.pipeline.index.lance_index import CHUNKS, DOCUMENTS, LanceTables, lance_errors
from cairn.pipeline.index.layout import CollectionLayout, generation_tag
from cairn.pipeline.index.names import CLUSTERS_ARROW, CONTEXT_ARROW
from cairn.pipeline.index.stored_files import (
    SIZES,
    check_generation_files,
    find_lance_files,
    read_manifest,
    twice_stored,
)
from cairn.pipeline.manifest import MANIFEST_NAME, Manifest
from cairn.pipeline.types import ProgressListener, silent_progress

Part = Literal["current", "lock", "manifest", "copies", "derived", "side", "lance", "rows", "store", "losses"]
"""What is damaged.

``derived`` files can be made again from Lance; ``side`` files (context, clusters) and Lance cannot. Of the
small files that are there twice, ``copies``, one is mended by the other.

Files that the ``store`` lacks are written to it again from a copy that is whole. ``losses`` are
documents that a repair gave up before it was stopped, and has named to no one.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: where it is, and a sentence about it without advice.

    ``generation`` is None when ``CURRENT`` itself is at fault.
    """

    generation: int | None
    part: Part
    file: str
    sentence: str


def verify_collection(layout: CollectionLayout, progress: ProgressListener = silent_progress) -> list[Fault]:
    """Return every fault of every generation that stands, the served one's first.

    An empty list means none was found.
    """
    layout.require_exists()
    layout.refresh()
    current, problems = read_current(layout)
    served = None if current is None else current.served
    numbers = sorted(kept_generations(layout, current), key=lambda number: (number != served, -number))
    for done, number in enumerate(numbers):
        progress("verify", done, len(numbers), "generations")
        problems += verify_generation(layout, number, check_rows=number == served)
    progress("verify", len(numbers), len(numbers), "generations")
    return problems + _lock_problems(layout) + store_problems(layout, served) + _loss_problems(layout)


def read_current(layout: CollectionLayout) -> tuple[Current | None, list[Fault]]:
    """Return the content of ``CURRENT`` and its problems.

    The content is None where the file is missing or damaged, or the generation it serves does not exist.
    """

    def problem(sentence: str) -> Fault:
        return Fault(generation=None, part="current", file="CURRENT", sentence=sentence)

    try:
        current = layout.current()
    except IntegrityError as error:
        return None, [problem(error.fault)]
    named = [] if current is None else list(current.manifests)
    gone = [number for number in named if number not in layout.generation_numbers()]
    problems = [problem(f"CURRENT must name generations that stand, got {number}") for number in gone]
    return (None if current is None or current.served in gone else current), problems


def kept_generations(layout: CollectionLayout, current: Current | None) -> list[int]:
    """Return the generations that count: those ``CURRENT`` names, all that stand where it is damaged.

    Others were never served, or the next writer removes them.
    """
    standing = layout.generation_numbers()
    return standing if current is None else [number for number in standing if number in current.manifests]


def _lock_problems(layout: CollectionLayout) -> list[Fault]:
    try:
        is_locked(layout.lock_path)
    except StorageError as error:
        return [Fault(generation=None, part="lock", file=layout.lock_path.name, sentence=str(error))]
    return []


def _loss_problems(layout: CollectionLayout) -> list[Fault]:
    losses = read_losses(layout)
    if losses is None:
        return []
    sentence = f"a repair that did not end gave up {len(losses.doc_ids)} document(s){losses.caveat}"
    return [Fault(generation=None, part="losses", file=LOSSES_NAME, sentence=sentence)]


def store_problems(layout: CollectionLayout, served: int | None) -> list[Fault]:
    """Return what is wrong in an object store with the generation it serves.

    Of a collection in a folder there is nothing to find.
    """
    if layout.replica is None:
        return []
    try:
        found = layout.replica.problems()
    except IntegrityError as error:
        return [Fault(generation=served, part="store", file="CURRENT", sentence=str(error))]
    where = layout.replica.uri
    return [
        Fault(generation=served, part="store", file=name, sentence=f"{name} {problem} in {where}")
        for name, problem in found.items()
    ]


def verify_generation(layout: CollectionLayout, number: int, *, check_rows: bool) -> list[Fault]:
    """Return the faults of one generation.

    Manifest, files, Lance files, tag and, if asked and nothing else is wrong, every row.
    """
    problems: list[Fault] = []

    def add(part: Part, found: Iterable[tuple[str, str]]) -> None:
        try:
            for file, sentence in found:
                problems.append(Fault(generation=number, part=part, file=file, sentence=sentence))
        except CairnError as error:
            problems.append(Fault(generation=number, part=part, file="lance", sentence=error.fault))

    try:
        manifest = read_manifest(layout, number)
    except IntegrityError as error:
        add("manifest", [(MANIFEST_NAME, error.fault)])
        return problems
    for name, problem in check_generation_files(layout, manifest):
        is_side = name in (CONTEXT_ARROW, CLUSTERS_ARROW)
        add("side" if is_side else "derived", [(name, f"{name} of generation {number} {problem}")])
    add("copies", _copy_problems(layout, manifest))
    add("lance", _lance_problems(layout, manifest))
    if check_rows and not problems:
        add("rows", _row_problems(layout, number))
    return problems


def _copy_problems(layout: CollectionLayout, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Look at second copies, and at the manifest, whose copy may have been read in its place."""
    for each in twice_stored(layout, manifest):
        is_looked_at = each.label != each.name or each.name == MANIFEST_NAME
        if is_looked_at and (problem := each.record.problem(each.path)) is not None:
            yield each.label, f"{each.label} of generation {manifest.generation} {problem}"


def _lance_problems(layout: CollectionLayout, manifest: Manifest) -> Iterator[tuple[str, str]]:
    number = manifest.generation
    try:
        damaged = list(damaged_lance_files(layout, find_lance_files(layout, manifest)))
    except DamageError:
        damaged = []  # what the list says is damaged, itself
    for name, problem in damaged:
        yield name, f"{name}, which generation {number} reads, {problem}"
    if any(name.endswith(MANIFEST_SUFFIX) for name, _ in damaged):
        return  # Lance panics over some damaged versions
    tables = LanceTables.open(layout, manifest.lance_versions)
    for name, version in manifest.lance_versions.items():
        with lance_errors(f"opening version {version} of table `{name}`", damaged=True):
            num_rows = tables.count_rows(name, manifest.lance_versions)
        expected = manifest.documents if name == DOCUMENTS else manifest.chunks
        if num_rows != expected:
            yield name, f"table `{name}` must hold {expected} rows at version {version}, got {num_rows}"
        with lance_errors(f"reading the tags of table `{name}`", damaged=True):
            tagged = tables.tags(name, version).get(generation_tag(number))
        if tagged != version:
            yield name, f"tag {generation_tag(number)} of table `{name}` must pin version {version}"


def _row_problems(layout: CollectionLayout, number: int) -> Iterator[tuple[str, str]]:
    """Compare the rows of the pinned tables with the position files.

    Order, counts, spans that cover each text whole, unique ids.
    """
    generation = open_generation(layout, number, checks=SIZES)
    versions = generation.manifest.lance_versions
    tables = LanceTables.open(layout, versions)
    doc_ids, offsets, ends = generation.doc_ids, generation.chunk_offsets, generation.chunk_ends
    position = 0
    for batch in tables.scan(DOCUMENTS, ["doc_id", "text"], versions):
        last = position + batch.num_rows
        same_ids = doc_ids.slice(position, batch.num_rows).equals(
            batch.column("doc_id").cast(pa.large_string())
        )
        if not same_ids:
            yield DOCUMENTS, f"documents {position} to {last} must stand in the order of the position file"
        covered = np.where(
            offsets[position + 1 : last + 1] > offsets[position:last],
            ends[offsets[position + 1 : last + 1] - 1] if len(ends) else 0,
            0,
        )
        uncovered = np.flatnonzero(covered != pc.utf8_length(batch.column("text")).to_numpy())
        for row in uncovered:
            yield (
                CHUNKS,
                f"the chunks of document {doc_ids[position + int(row)].as_py()!r} must cover its text whole",
            )
        position = last
    repeated = len(doc_ids) - pc.count_distinct(doc_ids).as_py()
    if repeated:
        yield DOCUMENTS, f"doc_id must be unique, got {repeated} repeated"
    position = 0
    for batch in tables.scan(CHUNKS, ["start_char", "end_char"], versions):
        last = position + batch.num_rows
        starts, stops = batch.column("start_char").to_numpy(), batch.column("end_char").to_numpy()
        if not (
            np.array_equal(generation.chunk_starts[position:last], starts)
            and np.array_equal(ends[position:last], stops)
        ):
            yield CHUNKS, f"chunks {position} to {last} must have the spans of the position file"
        position = last


LOSSES_NAME = "LOST.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Documents that are gone or older than in ``generation``, the newest there was.

    ``manifest_sha256`` is what ``CURRENT`` says of that generation. ``is_complete`` is False where the
    documents that it changed cannot be told.
    """

    generation: int
    manifest_sha256: str | None
    doc_ids: tuple[str, ...] = ()
    is_complete: bool = True

    @property
    def caveat(self) -> str:
        """Return what to add to a sentence about the repair, empty where every document is named."""
        if self.is_complete:
            return ""
        return (
            f"; which documents generation {self.generation} had changed cannot be told, so ingest what "
            "changed last again with --reread"
        )


def losses_path(layout: CollectionLayout) -> Path:
    """Return where a repair at work records what it gives up."""
    return layout.folder / LOSSES_NAME


def read_losses(layout: CollectionLayout) -> Losses | None:
    """Return what a repair that did not end gave up; None where there was none."""
    path = losses_path(layout)
    with storage_errors(f"reading {LOSSES_NAME}"):
        if not path.is_file():
            return None
        content = path.read_bytes()
    try:
        stored = json.loads(content)
        return Losses(
            generation=int(stored["generation"]),
            manifest_sha256=stored["manifest_sha256"],
            doc_ids=tuple(map(str, stored["doc_ids"])),
            is_complete=bool(stored["is_complete"]),
        )
    except (ValueError, KeyError, TypeError):
        newest = max(layout.generation_numbers(), default=0)
        return Losses(generation=newest, manifest_sha256=None, is_complete=False)


def record_losses(layout: CollectionLayout, losses: Losses) -> None:
    """Write down what is about to be given up, with what an earlier repair recorded; whole on disk after."""
    earlier = read_losses(layout)
    if earlier is not None:
        losses = replace(
            earlier,
            doc_ids=tuple(sorted({*losses.doc_ids, *earlier.doc_ids})),
            is_complete=losses.is_complete and earlier.is_complete,
        )
    if losses.doc_ids or not losses.is_complete:
        with storage_errors(f"writing {LOSSES_NAME}"):
            write_json(losses_path(layout), asdict(losses))
