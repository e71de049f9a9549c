"""Bring a damaged collection back to something whole, losing as little as possible.

    files that stand whole elsewhere, tags of Lance    ─▶ mended where they lie
    only derived files damaged                         ─▶ made again from the rows in Lance, and published
    folder or manifest of the newest generation lost   ─▶ derived again from the rows that Lance's tags pin
    files damaged in a store                           ─▶ written to it again from this machine's copy
    anything else                                      ─▶ CURRENT returns to the newest whole generation
    rows of Lance damaged, no generation whole         ─▶ published without the documents that lost rows
    nothing of that possible                           ─▶ refused: the rows must be ingested again

Damage is found by ``verify``. Derived files are a cache of the rows: none is repaired, all are made again.
Documents that are lost, or are older than before, are named one by one. ``LOST.json`` in the collection's
folder records them from before the first step that gives up a document until the repair has ended, so that
the repair after one that was killed still names them.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.durable import (
    clear_temporary,
    remove_entry,
    remove_folder,
    storage_errors,
    write_bytes,
)
from cairn.pipeline.errors import CairnError, DamageError, IntegrityError, StorageError
from cairn.pipeline.index.lance_delete import id_batches
from cairn.pipeline.index.lance_files import MANIFEST_SUFFIX
from cairn.pipeline.index.lance_index import LanceTables, Versions
from cairn.pipeline.index.layout import CollectionLayout, generation_tag
from cairn.pipeline.index.names import CHUNKS_ARROW, DELETED_BITS, DOCUMENTS_ARROW
from cairn.pipeline.index.position_files import DOCUMENT_POSITIONS_SCHEMA, open_positions
from cairn.pipeline.index.publish import (
    GenerationFacts,
    mend_lance,
    next_generation_number,
    opens,
    prepare_writer,
    publish_generation,
    remove_generations,
    serve_generation,
)
from cairn.pipeline.index.segments.joined import StoredColumns
from cairn.pipeline.index.segments.segment import segment_files
from cairn.pipeline.index.stored_files import check_generation_files, mend_files, read_manifest
from cairn.pipeline.index.tables import (
    CHUNKS,
    DOCUMENTS,
    LANCE_ERRORS,
    TABLES,
    lance_errors,
    open_pinned_dataset,
)
from cairn.pipeline.index.verify import (
    Fault,
    Losses,
    losses_path,
    read_current,
    read_losses,
    record_losses,
    store_problems,
    verify_generation,
)
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import TOKEN_FIELDS, ProgressListener, silent_progress

REPAIR_RUN_ID = "repair"
NOTHING_TO_REPAIR = "; nothing to repair"


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """What a repair found and did; ``generation`` is served now, ``action`` is a sentence.

    ``lost`` are the ids of documents that are gone, or are served in an older version than before.
    """

    generation: int
    action: str
    problems: tuple[Fault, ...]
    lost: tuple[str, ...] = ()


def index_config_of(settings: Mapping[str, Any]) -> IndexConfig:
    """Return the index settings that a manifest's resolved settings carry."""
    return IndexConfig(**settings["index"])


def repair_collection(
    layout: CollectionLayout,
    progress: ProgressListener = silent_progress,
    *,
    keeps_all: bool = False,
    suspects: Collection[str] = (),
) -> RepairReport:
    """Repair under the lock.

    A whole collection is left as it is, a hopeless one raises :class:`IntegrityError`. So does one of which a
    row or a generation would be given up where the repair ``keeps_all``. Derived files among ``suspects``
    are made again though they are whole: another program is about to write into them.
    """
    layout.require_exists()
    _clear_lock(layout)
    with layout.writer_lock():
        mended = _mend_predecessors(layout)
        report = _restore(layout, _repair(layout, progress, keeps_all=keeps_all, suspects=suspects))
        report = _drop_damaged_predecessors(layout, _adding(report, mended) if mended else report)
        report = _naming_earlier_losses(layout, report)
        names = {problem.file for problem in report.problems}
        if LATE_NAME in names and LATE_NAME not in read_manifest(layout, report.generation).files:
            again = f"`cairn plan {layout.name} --apply --late` makes them again"
            report = _adding(report, f"; its token vectors are lost with {LATE_NAME}: {again}")
        with storage_errors("ending the repair"):
            losses_path(layout).unlink(missing_ok=True)
        return report


def _clear_lock(layout: CollectionLayout) -> None:
    """Remove what stands in the place of the lock and is no file: no writer can hold that."""
    path = layout.lock_path
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        with storage_errors("removing what stands in the place of the lock"):
            remove_entry(path)


def _adding(report: RepairReport, said: str, problems: Sequence[Fault] = ()) -> RepairReport:
    action = report.action.removesuffix(NOTHING_TO_REPAIR) + said
    return replace(report, action=action, problems=(*report.problems, *problems))


def _naming_earlier_losses(layout: CollectionLayout, report: RepairReport) -> RepairReport:
    """Report what a repair that did not end gave up, unless the generation it began with is served still."""
    recorded = read_losses(layout)
    if recorded is None:
        return report
    sha256 = recorded.manifest_sha256
    if sha256 is not None and sha256 == layout.manifest_sha256(report.generation):
        return report
    unnamed = set(recorded.doc_ids) - set(report.lost)
    if unnamed:
        said = f"; {len(unnamed)} document(s) were lost by a repair that did not end"
        report = replace(_adding(report, said), lost=tuple(sorted({*report.lost, *unnamed})))
    return report if recorded.caveat in report.action else _adding(report, recorded.caveat)


def _restore(layout: CollectionLayout, report: RepairReport) -> RepairReport:
    """Write to the store what it has no more of the generation served now."""
    lacking = store_problems(layout, report.generation)
    if not lacking or layout.replica is None:
        return report
    layout.replica.restore(report.generation, [problem.file for problem in lacking])
    action = f"{len(lacking)} file(s) of generation {report.generation} were written to the store again"
    return replace(report, action=action, problems=(*report.problems, *lacking))


def _repair(
    layout: CollectionLayout, progress: ProgressListener, *, keeps_all: bool, suspects: Collection[str]
) -> RepairReport:
    current, problems = read_current(layout)
    served = _named_generation(layout) if current is None else current.served
    standing = [number for number in layout.generation_numbers() if served is None or number <= served]
    left: dict[int, list[Fault]] = {}
    for number in sorted(standing, reverse=True):
        found, left[number] = _mend(layout, number, check_rows=not suspects)
        if number == served:
            left[number] += _suspected(layout, number, suspects)
        problems += found
        is_derived = all(problem.part in ("derived", "copies") for problem in left[number])
        if keeps_all and (number != served or not is_derived):
            raise layout.damaged(problems[0].sentence)
        if number == served and len(problems) == len(found) and not left[number]:
            prepare_writer(layout)
            action = f"generation {number} is whole{NOTHING_TO_REPAIR}"
            if found:  # written again as it is, CURRENT makes servers look at the generation again
                write_bytes(layout.current_path, layout.current_path.read_bytes())
                action = f"{len(found)} fault(s) of generation {number} were mended where they lay"
            return RepairReport(generation=number, action=action, problems=tuple(found))
        if is_derived:
            before = read_manifest(layout, number)
            if served is not None and number < served and _has_lost_manifest(left.get(served)):
                derived = _derive_again(layout, served, before, problems, progress)
                if derived is not None:
                    return derived
            return _serve_again(layout, before, served, left[number], problems, progress)
    for number in sorted(standing, reverse=True):
        salvage = _plan_salvage(layout, number, left[number])
        if salvage is not None:
            return _publish_rest(layout, read_manifest(layout, number), served, salvage, problems, progress)
    raise IntegrityError(
        f"collection {layout.name!r} has no generation that is whole: "
        f"{'; '.join(problem.sentence for problem in problems[:3])}; "
        "move its folder away and ingest the sources again"
    )


def _mend(layout: CollectionLayout, number: int, *, check_rows: bool) -> tuple[list[Fault], list[Fault]]:
    """Return the faults of a generation, and those left after what costs no row has been mended.

    To check rows the files are mapped, which none must be that is about to be cut.
    """
    found = verify_generation(layout, number, check_rows=check_rows)
    if not found or any(problem.part == "manifest" for problem in found):
        return found, found
    with storage_errors(f"mending generation {number} of {layout.name!r}", layout.folder):
        mend_files(layout, read_manifest(layout, number), all_files=True)
        mend_lance(layout)
    return found, verify_generation(layout, number, check_rows=check_rows)


def _suspected(layout: CollectionLayout, number: int, suspects: Collection[str]) -> list[Fault]:
    """Return problems of files of segments that are whole, but will not be for long."""
    if not suspects:
        return []
    files = {name for record in read_manifest(layout, number).segments for name in segment_files(record)}
    return [
        Fault(generation=number, part="derived", file=name, sentence=f"{name} is about to be written into")
        for name in sorted(files.intersection(suspects))
    ]


def _named_generation(layout: CollectionLayout) -> int | None:
    """Return the generation that ``CURRENT`` names, which may not stand; None where it says nothing."""
    try:
        return layout.current_generation_number()
    except IntegrityError:
        return None


def _has_lost_manifest(left: list[Fault] | None) -> bool:
    return left is None or any(problem.part == "manifest" for problem in left)


def _derive_again(
    layout: CollectionLayout,
    number: int,
    before: Manifest,
    problems: list[Fault],
    progress: ProgressListener,
) -> RepairReport | None:
    """Publish the rows of a generation whose manifest is lost; None where Lance does not hold them whole.

    ``before`` is the newest generation whose rows are whole. Until the publication ``CURRENT`` stays.
    """
    pinned = find_whole_rows(layout, number, before)
    if pinned is None:
        return None
    try:
        LanceTables.open(layout, pinned).roll_back(pinned)
        versions = LanceTables.open(layout).versions()
        with storage_errors(f"deriving generation {number} of {layout.name!r} again"):
            clear_temporary(layout.generations_folder)
            if os.path.lexists(layout.generation_folder(number)):
                remove_folder(layout.generation_folder(number))
        manifest = _publish(layout, before, versions, progress)
    except IntegrityError:
        return None
    action = (
        f"generation {number}, of which Lance holds every row, was derived again and published as "
        f"generation {manifest.generation}"
    )
    return RepairReport(generation=manifest.generation, action=action, problems=tuple(problems))


def _serve_again(
    layout: CollectionLayout,
    before: Manifest,
    served: int | None,
    own: list[Fault],
    problems: list[Fault],
    progress: ProgressListener,
) -> RepairReport:
    """Serve a generation whose rows are whole: undo in Lance what came after it, make derived files again."""
    number = before.generation
    losses = _losses(layout, before, served)
    if number == served and not any(problem.part == "current" for problem in problems):
        prepare_writer(layout, gives_up_projection=True)
        LanceTables.open(layout).roll_back(before.lance_versions)
    else:
        _return_to(layout, before)
    manifest = _publish(layout, before, LanceTables.open(layout).versions(), progress) if own else before
    if number != served:
        action = f"the collection returned to generation {number}, published {before.created_at}"
        action += losses.caveat
    elif own:
        action = (
            f"files of generation {number} were made again from its rows and published as "
            f"generation {manifest.generation}"
        )
    else:
        action = f"CURRENT names generation {number} again"
    return RepairReport(
        generation=manifest.generation, action=action, problems=tuple(problems), lost=losses.doc_ids
    )


def _publish_rest(
    layout: CollectionLayout,
    before: Manifest,
    served: int | None,
    salvage: Salvage,
    problems: list[Fault],
    progress: ProgressListener,
) -> RepairReport:
    """Publish a generation again without the documents whose rows are damaged."""
    losses = _losses(layout, before, served, salvage.lost)
    _return_to(layout, before)
    drop_fragments(layout, salvage)
    versions = LanceTables.open(layout).commit(
        generation=next_generation_number(layout), deleted_ids=id_batches(salvage.lost)
    )
    manifest = _publish(layout, before, versions, progress)
    action = (
        f"generation {before.generation} was published again as generation {manifest.generation}, without "
        f"the {len(salvage.lost)} document(s) whose rows are damaged{losses.caveat}"
    )
    return RepairReport(
        generation=manifest.generation, action=action, problems=tuple(problems), lost=losses.doc_ids
    )


def _publish(
    layout: CollectionLayout, before: Manifest, versions: Versions, progress: ProgressListener
) -> Manifest:
    """Publish rows with what a generation says of itself; every derived file is made from them."""
    tables = LanceTables.open(layout)
    tables.tag(next_generation_number(layout), versions)
    facts = GenerationFacts.of(layout, before, REPAIR_RUN_ID)
    return publish_generation(layout, tables, versions, facts, index_config_of(before.settings), progress)


def _return_to(layout: CollectionLayout, manifest: Manifest) -> None:
    """Serve a generation again and undo in Lance what came after it."""
    number = manifest.generation
    with storage_errors(f"returning {layout.name!r} to generation {number}", layout.folder):
        serve_generation(layout, number)
        remove_generations(layout, [newer for newer in layout.generation_numbers() if newer > number])
        mend_lance(layout, drop_unpinned=True)
    LanceTables.open(layout).roll_back(manifest.lance_versions)


def _mend_predecessors(layout: CollectionLayout) -> str:
    """Mend the generations before the newest; return what to add to the report."""
    said = ""
    for number in layout.generation_numbers()[:-1]:
        with contextlib.suppress(IntegrityError):
            mended = mend_files(layout, read_manifest(layout, number), all_files=True)
            said += f"; of generation {number}, {len(mended)} file(s) were mended" if mended else ""
    return said


def _drop_damaged_predecessors(layout: CollectionLayout, report: RepairReport) -> RepairReport:
    """Remove older generations that could not be served any more; they would only be found damaged again."""
    older = [number for number in layout.generation_numbers() if number < report.generation]
    found = {number: verify_generation(layout, number, check_rows=False) for number in older}
    damaged = [number for number, problems in found.items() if problems]
    for number in damaged:
        said = f"; generation {number}, which was damaged, is removed"
        report = _adding(report, said, found[number])
    if damaged:
        try:
            with storage_errors(f"removing damaged generations of {layout.name!r}", layout.folder):
                remove_generations(layout, damaged)
                mend_lance(layout, drop_unpinned=True)
            LanceTables.open(layout).keep_only(layout.generation_numbers())
        except (StorageError, IntegrityError) as error:  # the repair is done, the next writer cleans up again
            report = _adding(report, f", but {error}")
    return report


def _losses(
    layout: CollectionLayout, before: Manifest, served: int | None, given_up: Sequence[str] = ()
) -> Losses:
    """Return and record what is lost by serving an older generation, and without ``given_up``."""
    newest = served or max(*layout.generation_numbers(), newest_tagged(layout, before))
    losses = losses_since(layout, newest, before)
    losses = replace(losses, doc_ids=tuple(sorted({*losses.doc_ids, *given_up})))
    record_losses(layout, losses)
    return losses


def _plan_salvage(layout: CollectionLayout, number: int, own: list[Fault]) -> Salvage | None:
    if any(problem.part not in ("derived", "copies", "lance") for problem in own):
        return None
    damaged = {problem.file for problem in own if problem.part == "lance"}
    return plan_salvage(layout, read_manifest(layout, number), damaged)


def losses_since(layout: CollectionLayout, newest: int, manifest: Manifest) -> Losses:
    """Return the documents that generation ``newest`` holds and this one does not, or in another version."""
    nothing = Losses(generation=newest, manifest_sha256=layout.manifest_sha256(newest))
    if newest == manifest.generation:
        return nothing
    for contents in (_content_hashes, _stored_contents):
        try:
            after = contents(layout, newest, manifest)
            before = contents(layout, manifest.generation, manifest)
        except CairnError:  # the damage is there
            continue
        joined = after.join(before, "doc_id", join_type="left outer", right_suffix="_before")
        is_same = pc.fill_null(pc.equal(joined.column("version"), joined.column("version_before")), False)
        changed = joined.filter(pc.invert(is_same)).column("doc_id").to_pylist()
        return replace(nothing, doc_ids=tuple(sorted(changed)))
    return replace(nothing, is_complete=False)


def newest_tagged(layout: CollectionLayout, beside: Manifest) -> int:
    """Return the newest generation that Lance's tags know, 0 where they cannot be read.

    They are read ``beside`` the versions of a generation.
    """
    prefix = generation_tag(0).removesuffix("0")
    try:
        tags = LanceTables.open(layout, beside.lance_versions).tags(
            DOCUMENTS, beside.lance_versions[DOCUMENTS]
        )
    except (CairnError, *LANCE_ERRORS):
        return 0
    numbers = [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def tagged_versions(layout: CollectionLayout, number: int, beside: Manifest) -> Versions:
    """Return the versions that Lance's tags pin for a generation, whose manifest may be gone.

    The tags are read ``beside`` the versions of another generation. Raises :class:`DamageError` where they
    name none that opens.
    """
    tables = LanceTables.open(layout, beside.lance_versions)
    versions: Versions = {}
    for table in TABLES:
        with lance_errors(f"reading the tags of table `{table}`", damaged=True):
            version = tables.tags(table, beside.lance_versions[table]).get(generation_tag(number))
        if version is None or not opens(layout.lance_folder / f"{table}.lance", version):
            raise DamageError(f"no version of table `{table}` is tagged {generation_tag(number)}")
        versions[table] = version
    return versions


def _content_hashes(layout: CollectionLayout, number: int, beside: Manifest) -> pa.Table:
    try:
        versions = dict(read_manifest(layout, number).lance_versions)
    except IntegrityError:
        versions = tagged_versions(layout, number, beside)
    return content_hashes_at(layout, versions)


def content_hashes_at(layout: CollectionLayout, versions: Versions) -> pa.Table:
    """Return ``doc_id`` and ``version``, a hash of the content, of each document at pinned versions."""
    columns = ["doc_id", "content_sha256"]
    with lance_errors("reading table `documents`", damaged=True):
        dataset = open_pinned_dataset(layout.lance_folder, DOCUMENTS, versions[DOCUMENTS])
        return dataset.to_table(columns=columns).rename_columns(["doc_id", "version"])


def _stored_contents(layout: CollectionLayout, number: int, _: Manifest) -> pa.Table:
    """Read from the position files what the manifest and Lance would tell if they were whole."""
    parts: list[pa.Table] = []
    for path in sorted(layout.generation_folder(number).glob(f"*{DOCUMENTS_ARROW}")):
        documents = open_positions(path, DOCUMENT_POSITIONS_SCHEMA)
        table = pa.table(
            {"doc_id": documents.column("doc_id").cast(pa.string()), "version": documents.column("content")}
        )
        bits = path.with_name(path.name.removesuffix(DOCUMENTS_ARROW) + DELETED_BITS)
        if bits.exists():
            deleted = np.unpackbits(np.frombuffer(bits.read_bytes(), np.uint8), bitorder="little")
            if len(deleted) >= table.num_rows:
                table = table.filter(pa.array(deleted[: table.num_rows] == 0))
        parts.append(table)
    if not parts:
        raise DamageError(f"generation {number} has no position files")
    return pa.concat_tables(parts)


COMPARED_DOCUMENTS = 16
"""A context drawn again changes every vector, so that a few documents tell."""


def find_whole_rows(layout: CollectionLayout, number: int, before: Manifest) -> Versions | None:
    """Return the versions a lost generation pinned; None where they are not whole, or encoded otherwise.

    ``before`` is an older generation, whose rows are whole.
    """
    try:
        versions = tagged_versions(layout, number, before)
        _read_all(layout, versions)
        return versions if _is_encoded_alike(layout, versions, before) else None
    except (IntegrityError, StorageError):
        return None


def _read_all(layout: CollectionLayout, versions: Versions) -> None:
    tables = LanceTables.open(layout, versions)
    for table in TABLES:
        for batch in tables.scan(table, tables.schemas[table].names, versions):
            with lance_errors(f"reading table `{table}`", damaged=True):
                batch.validate(full=True)


def _is_encoded_alike(layout: CollectionLayout, versions: Versions, before: Manifest) -> bool:
    """Compare the vectors and codes of some documents that are the same in both generations."""
    now, then = content_hashes_at(layout, versions), content_hashes_at(layout, dict(before.lance_versions))
    both = now.join(then, ["doc_id", "version"], join_type="inner")
    doc_ids = both.column("doc_id").slice(0, COMPARED_DOCUMENTS).to_pylist()
    if not doc_ids:
        return False
    pinned = (versions, before.lance_versions)
    columns = {DOCUMENTS: ["doc_id", "vector"], CHUNKS: ["chunk_id", "vector"]}
    if all(LanceTables.open(layout, each).has_tokens for each in pinned):
        columns[CHUNKS] += [field.name for field in TOKEN_FIELDS]
    return all(
        _rows(layout, table, versions[table], names, doc_ids).equals(
            _rows(layout, table, before.lance_versions[table], names, doc_ids)
        )
        for table, names in columns.items()
    )


def _rows(
    layout: CollectionLayout, table: str, version: int, columns: list[str], doc_ids: list[str]
) -> pa.Table:
    """Return columns of the rows of some documents, in the order of the first column."""
    with lance_errors(f"reading table `{table}`", damaged=True):
        dataset = lance.dataset(str(layout.lance_folder / f"{table}.lance"), version=version)
        rows = dataset.to_table(columns=columns, filter=pc.field("doc_id").isin(doc_ids))
    return rows.sort_by(columns[0]).combine_chunks()


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """What has to be given up of a generation: fragments by table, and the documents with rows in them."""

    fragments: Mapping[str, tuple[int, ...]]
    lost: tuple[str, ...]


def plan_salvage(layout: CollectionLayout, manifest: Manifest, damaged: Set[str]) -> Salvage | None:
    """Return what is lost with damaged files of Lance, given by their path below ``lance/``.

    None where a file is not one fragment's alone, or the position files are damaged, too.
    """
    is_pinned = all(name.startswith(tuple(f"{table}.lance/" for table in TABLES)) for name in damaged)
    if not is_pinned or any(name.endswith(MANIFEST_SUFFIX) for name in damaged):
        return None
    position_files = (DOCUMENTS_ARROW, CHUNKS_ARROW, DELETED_BITS)
    names = [record.name + name for record in manifest.segments for name in position_files]
    if check_generation_files(layout, manifest, names=names):
        return None
    columns = StoredColumns(layout.generation_folder(manifest.generation), manifest)
    owners = {DOCUMENTS: np.arange(manifest.documents), CHUNKS: columns.chunk_documents}
    explained: set[str] = set()
    fragments: dict[str, tuple[int, ...]] = {}
    positions = [np.empty(0, np.int64)]
    for table in TABLES:
        given_up: list[int] = []
        for fragment_id, files, first, last in _fragments(layout, table, manifest.lance_versions[table]):
            explained |= files & damaged
            if files & damaged:
                given_up.append(fragment_id)
                positions.append(owners[table][first:last])
        fragments[table] = tuple(given_up)
    if explained != damaged:
        return None
    lost = columns.doc_ids.take(pa.array(np.unique(np.concatenate(positions))))
    return Salvage(fragments=fragments, lost=tuple(lost.to_pylist()))


def _fragments(
    layout: CollectionLayout, table: str, version: int
) -> Iterator[tuple[int, frozenset[str], int, int]]:
    """Yield the id, the files, and the first and last row of a scan of each fragment."""
    folder = f"{table}.lance"
    with lance_errors(f"reading the fragments of table `{table}`", damaged=True):
        first = 0
        for fragment in lance.dataset(str(layout.lance_folder / folder), version=version).get_fragments():
            deletions = fragment.deletion_file()
            paths = [f"data/{file.path}" for file in fragment.data_files()]
            paths += [] if deletions is None else [str(deletions)]
            last = first + fragment.physical_rows - fragment.num_deletions
            yield fragment.fragment_id, frozenset(f"{folder}/{path}" for path in paths), first, last
            first = last


def drop_fragments(layout: CollectionLayout, salvage: Salvage) -> None:
    """Drop the damaged fragments from the latest versions; the other rows of lost documents stay for now."""
    for table, fragments in salvage.fragments.items():
        if fragments:
            uri = str(layout.lance_folder / f"{table}.lance")
            operation = lance.LanceOperation.Delete(
                updated_fragments=[], deleted_fragment_ids=list(fragments), predicate="damaged"
            )
            with lance_errors(f"dropping damaged rows of table `{table}`"):
                lance.LanceDataset.commit(uri, operation, read_version=lance.dataset(uri).version)
