"""Find every fault of a stored collection: wrong bytes, missing versions, rows that do not fit together.

Reads everything once (hashes of all generation and Lance files, ids and spans and text lengths of the served
tables) and changes nothing. It takes no lock, so that a collection can be checked while it is written; what a
writer prunes meanwhile may then be reported, and a second look settles it.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.durable import is_locked
from cairn.pipeline.errors import CairnError, DamageError, IntegrityError, StorageError
from cairn.pipeline.index.files import MANIFEST_SUFFIX, damaged_lance_files, lance_errors
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import (
    SIZES,
    CollectionLayout,
    check_generation_files,
    read_manifest,
    twice_stored,
)
from cairn.pipeline.index.names import CHUNKS, CLUSTERS_ARROW, CONTEXT_ARROW, COPIES, DOCUMENTS
from cairn.pipeline.index.rows import LanceTables
from cairn.pipeline.manifest import MANIFEST_NAME, Manifest, PartitionRecord

Part = Literal["current", "lock", "manifest", "copies", "derived", "side", "lance", "rows", "store"]
"""What is damaged.

``derived`` files can be made again from Lance; ``side`` files (context, clusters) and Lance cannot. Of the
small files that are there twice, ``copies``, one is mended by the other.

Files that the ``store`` lacks are written to it again from a copy that is whole.
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


def verify_collection(layout: CollectionLayout) -> list[Fault]:
    """Return every fault of every generation that stands, the served one's first.

    An empty list means none was found. A collection of another release, which is no fault that a repair
    mends, raises :class:`IntegrityError`.
    """
    layout.require_exists()
    layout.refresh()
    return find_faults(layout)


def find_faults(layout: CollectionLayout) -> list[Fault]:
    """Return what :func:`verify_collection` does of a collection that exists, as it is on this machine."""
    problems: list[Fault] = []
    served = None
    try:
        served = layout.current_generation_number()
    except IntegrityError as error:
        problems.append(Fault(generation=None, part="current", file="CURRENT", sentence=error.fault))
    numbers = sorted(layout.kept_generations(), key=lambda number: (number != served, -number))
    for number in numbers:
        problems += generation_faults(layout, number, served)
    return problems + _lock_problems(layout) + store_problems(layout, served)


def generation_faults(layout: CollectionLayout, number: int, served: int | None) -> list[Fault]:
    """Return the faults of a generation and of its partitions; every row is read of the one that is served.

    Of the partitions of an earlier one those are looked at that it alone names, and that still stand: a
    change of a partition prunes them before the collection names the change.
    """
    faults = verify_generation(layout, number, check_rows=number == served)
    shared = () if number == served else partitions_with_rows(layout, served)
    for record in partitions_with_rows(layout, number):
        own = layout.partition(record)
        if record in shared or (number != served and record.generation not in own.generation_numbers()):
            continue
        for fault in verify_generation(own, record.generation, check_rows=number == served):
            faults.append(replace(fault, file=f"{own.folder.relative_to(layout.folder)}/{fault.file}"))
    return faults


def partitions_with_rows(layout: CollectionLayout, number: int | None) -> list[PartitionRecord]:
    """Return the partitions of a generation that have rows; none where its manifest is at fault."""
    try:
        return [] if number is None else read_manifest(layout, number).filled
    except IntegrityError:
        return []


def _lock_problems(layout: CollectionLayout) -> list[Fault]:
    try:
        is_locked(layout.lock_path)
    except StorageError as error:
        return [Fault(generation=None, part="lock", file=layout.lock_path.name, sentence=str(error))]
    return []


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

    Manifest, files, Lance files and, if asked and nothing else is wrong, every row.
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
    except DamageError as error:
        add("manifest", [(MANIFEST_NAME, error.fault)])
        return problems
    for name, problem in check_generation_files(layout, manifest):
        is_side = name in (CONTEXT_ARROW, CLUSTERS_ARROW)
        add("side" if is_side else "derived", [(name, f"{name} of generation {number} {problem}")])
    add("copies", _copy_problems(layout, manifest))
    if manifest.partitions:
        return problems
    add("lance", _lance_problems(layout, manifest))
    if check_rows and not problems:
        add("rows", _row_problems(layout, number))
    return problems


def _copy_problems(layout: CollectionLayout, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Look at second copies, and at the manifest, whose copy may have been read in its place."""
    for name, record, path, copy in twice_stored(layout, manifest):
        looked_at = {f"{COPIES}/{name}": copy, **({name: path} if name == MANIFEST_NAME else {})}
        for label, each in looked_at.items():
            problem = record.problem(each)
            if problem is not None:
                yield label, f"{label} of generation {manifest.generation} {problem}"


def _lance_problems(layout: CollectionLayout, manifest: Manifest) -> Iterator[tuple[str, str]]:
    number = manifest.generation
    damaged = list(damaged_lance_files(layout.lance_folder, manifest.lance_files))
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
