"""Bring a damaged collection back to something whole: what is derived is made again, what is lost is named.

    small files        ─▶ one of the two copies mends the other, before each write
    derived files      ─▶ made again from the rows in Lance, and published
    damaged rows       ─▶ published without the documents that lost rows
    none of that works ─▶ the rows of the generation before are published again
    files of a store   ─▶ written to it again from this machine's copy

Derived files are a cache of the rows. Whatever a repair does is one publication: killed before ``CURRENT``
moves, it has given up nothing, and the next one finds the same. Lost documents are named, in the log before
the publication. No record of read files counts with the new generation, so the next ingest of their sources
encodes them again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import lance
import numpy as np
import pyarrow as pa
from cairn.pipeline.durable import (
    clear_temporary,
    clear_way,
    commit_point,
    remove_entry,
    remove_folder,
    replacing,
    storage_errors,
    write_bytes,
)
from cairn.pipeline.errors import (
    CollectionNotFoundError,
    DamageError,
    IntegrityError,
    StorageError,
    UsageError,
)
from cairn.pipeline.index.files import (
    MANIFEST_SUFFIX,
    damaged_lance_files,
    lance_errors,
    open_pinned_dataset,
)
from cairn.pipeline.index.generation import stored_columns
from cairn.pipeline.index.layout import (
    Checks,
    CollectionLayout,
    check_generation_files,
    read_manifest,
    twice_stored,
    wholes,
)
from cairn.pipeline.index.names import (
    CHUNKS,
    DOCUMENTS,
    SIDE_FILES,
    TABLES,
    Current,
)
from cairn.pipeline.index.publish import (
    GenerationFacts,
    prune_generations,
    publish_generation,
    publish_partitions,
    remove_generations,
    remove_strays,
    serve_generation,
)
from cairn.pipeline.index.rows import LanceTables
from cairn.pipeline.index.verify import (
    Fault,
    find_faults,
    generation_faults,
    partitions_with_rows,
    store_problems,
    verify_generation,
)
from cairn.pipeline.manifest import MANIFEST_NAME, Manifest, PartitionRecord, record_file
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import ProgressListener, silent_progress

log = logging.getLogger(__name__)

REPAIR_RUN_ID = "repair"


@contextlib.contextmanager
def writing(layout: CollectionLayout) -> Generator[Manifest]:
    """Hold a collection that exists for writing, settled; yield the served generation's manifest."""
    layout.require_exists()
    with layout.writer_lock():
        manifest = prepare_writer(layout)
        assert manifest is not None, "require_exists found a generation"
        yield manifest


def prepare_writer(layout: CollectionLayout) -> Manifest | None:
    """Settle what a killed writer left; return the served generation's manifest, None before the first.

    A generation that stands whole is served, if only ``CURRENT`` was still to be moved. What no generation
    needs is removed, and what :func:`mend` can mend is mended. Damage that a publication would carry over
    raises :class:`DamageError`.
    """
    with storage_errors("clearing what an unfinished run left", layout.folder):
        clear_temporary(layout.generations_folder)
        _complete(layout)
        served = layout.current_generation_number()
        manifest = None
        if served is not None:
            manifest = read_manifest(layout, served)
            mend(layout)  # after the manifest: where `CURRENT` is another collection's, nothing is removed
            damaged = check_generation_files(layout, manifest, names=SIDE_FILES)
            # Lance waits for a FIFO in the place of a file of rows.
            for own, each in wholes(layout, manifest):
                damaged += damaged_lance_files(own.lance_folder, each.lance_files, ())
            for name, problem in damaged:
                raise layout.damaged(f"{name} of generation {served} {problem}")
        remove_strays(layout, layout.kept_generations())
    commit_point("strays-removed")
    return manifest


def _complete(layout: CollectionLayout) -> None:
    """Serve a generation that was published whole but for ``CURRENT``.

    Not an unfinished repair's, which would give something up that no one was told of. Where the generation
    before is gone, it was finished, and an older ``CURRENT`` was put back.
    """
    standing = layout.generation_numbers()
    is_first = not layout.current_path.exists() and layout.kept_generations() == [1]
    # Of a partition the collection's manifest decides, of a copy the store's `CURRENT`.
    if not standing or layout.whole is not None or (layout.replica is not None and not is_first):
        return
    served = 0 if is_first else layout.current_generation_number()
    if served is not None and standing[-1] > served:
        with contextlib.suppress(DamageError):
            manifest = read_manifest(layout, standing[-1])
            is_finished = manifest.run_id != REPAIR_RUN_ID or served not in standing
            if is_finished and not check_generation_files(layout, manifest):
                serve_generation(layout, standing[-1])
                if layout.replica is not None:
                    layout.replica.pull()  # what workers on other machines have published of it


def mend(layout: CollectionLayout) -> int:
    """Mend small files by their second copies; return how many.

    Folders of generations that ``CURRENT`` does not name are removed.
    """
    numbers = layout.kept_generations()
    with storage_errors(f"mending collection {layout.name!r}", layout.folder):
        for folder in (layout.generations_folder, layout.copies_root):
            for entry in folder.iterdir() if folder.is_dir() else ():
                if entry.name.isdigit() and int(entry.name) not in numbers:
                    remove_folder(entry)
        for number in numbers:
            folder = layout.generation_folder(number)
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                remove_entry(folder)
        return sum(_mend_files(layout, number) for number in numbers)


def _mend_files(layout: CollectionLayout, number: int) -> int:
    """Replace damaged small files of a generation by whole ones; return how many."""
    try:
        manifest = read_manifest(layout, number)
    except IntegrityError:
        return 0
    mended = 0
    for name, record, path, copy in twice_stored(layout, manifest):
        damaged = [each for each in (path, copy) if record.problem(each) is not None]
        if not damaged:
            continue
        places = [(layout, each) for each in layout.generation_numbers()]
        places += [(layout.partition(each), each.generation) for each in manifest.partitions]
        others = [own.generation_folder(each) / name for own, each in places]
        source = next((each for each in (path, copy, *others) if record.problem(each) is None), None)
        if source is None:
            continue
        for each in damaged:
            clear_way(each)
            with replacing(each) as temporary:
                shutil.copyfile(source, temporary)
            mended += 1
    return mended


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """What a repair found and did; ``generation`` is served now, ``action`` is a sentence.

    ``lost`` are the ids of documents that are gone.
    """

    generation: int
    action: str
    problems: tuple[Fault, ...]
    lost: tuple[str, ...] = ()


def repair_collection(
    layout: CollectionLayout, progress: ProgressListener = silent_progress, *, keeps_all: bool = False
) -> RepairReport:
    """Repair under the lock.

    A whole collection is left as it is, a hopeless one raises :class:`IntegrityError`. So does one of which a
    row or a generation would be given up where the repair ``keeps_all``.
    """
    layout.require_exists()
    _clear_lock(layout)
    with layout.writer_lock():
        with contextlib.suppress(DamageError):
            _complete(layout)
        _drop_foreign_current(layout)
        problems = find_faults(layout)
        if not problems:
            manifest = prepare_writer(layout)
            assert manifest is not None, "require_exists found a generation"
            action = f"generation {manifest.generation} is whole; nothing to repair"
            return RepairReport(generation=manifest.generation, action=action, problems=())
        number, action, lost = _repair(layout, problems, progress, keeps_all=keeps_all)
        if layout.whole is None:  # what the collection names of a partition stays until its manifest moves
            action += _drop_damaged_predecessors(layout, number)
        if layout.replica is not None and any(problem.part == "store" for problem in problems):
            lacking = [problem.file for problem in store_problems(layout, number)]
            layout.replica.restore(number, lacking)
            action += f"; {len(lacking)} file(s) were written to the store again"
        return RepairReport(generation=number, action=action, problems=tuple(problems), lost=lost)


def _clear_lock(layout: CollectionLayout) -> None:
    """Remove what stands in the place of the lock and is no file: no writer can hold that."""
    path = layout.lock_path
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        with storage_errors("removing what stands in the place of the lock"):
            remove_entry(path)


def _drop_foreign_current(layout: CollectionLayout) -> None:
    """Remove a ``CURRENT`` that names no manifest of this collection, where a generation stands whole.

    It is another collection's, or an older one. The repair is then that of a lost ``CURRENT``.
    """
    if layout.whole is not None or layout.replica is not None:  # these have what they serve told
        return
    try:
        current = layout.current()
        for number in () if current is None else current.manifests:
            with contextlib.suppress(IntegrityError):
                read_manifest(layout, number)
                return
    except DamageError:
        return
    for number in reversed(layout.generation_numbers()):
        path = layout.generation_folder(number) / MANIFEST_NAME
        if path.is_file():
            named = replace(layout, pinned=Current({number: record_file(path).sha256}))
            if {fault.part for fault in find_faults(named)} <= {"copies", "derived", "lock"}:
                with storage_errors("removing the CURRENT of another collection"):
                    remove_entry(layout.current_path)
                return


def _repair(
    layout: CollectionLayout, problems: Sequence[Fault], progress: ProgressListener, *, keeps_all: bool
) -> tuple[int, str, tuple[str, ...]]:
    """Serve what can be saved; return its generation, a sentence and the ids of lost documents."""
    numbers = layout.kept_generations()
    mended = mend(layout)
    with storage_errors(f"mending partitions of {layout.name!r}", layout.folder):
        for number in numbers:  # also of the generation before: only here is its manifests' hash known
            for record in partitions_with_rows(layout, number):
                mended += _mend_files(layout.partition(record), record.generation)
    for number in reversed(numbers):
        left = verify_generation(layout, number, check_rows=True)
        if any(problem.part == "manifest" for problem in left):
            continue
        manifest, is_newest = read_manifest(layout, number), number == numbers[-1]
        is_derived = all(problem.part in ("derived", "copies") for problem in left)
        salvage = None if is_derived else _plan_salvage(layout, manifest, left)
        if not is_derived and salvage is None:
            continue
        if keeps_all and not (is_newest and is_derived):
            break
        _name_in_current(layout, number)
        said: list[str] = []
        records, lost = manifest.partitions, () if salvage is None else salvage.doc_ids
        if records:
            records, said, lost = _repair_partitions(layout, manifest, progress, keeps_all=keeps_all)
        if is_newest and not left and records == manifest.partitions:
            action = f"generation {number} is whole"
            action += f"; {mended} file(s) were mended where they lay" if mended else ""
            is_named = all(problem.part != "current" for problem in problems)
            return number, action if is_named else f"{action}; CURRENT names it again", ()
        facts = GenerationFacts.of(layout, manifest, REPAIR_RUN_ID)
        if records:
            published = publish_partitions(layout, records, facts)
        else:
            older = [each for each in numbers if each <= number]
            published = _publish_again(layout, older, manifest, facts, salvage, progress)
        if is_newest:
            action = f"files of generation {number} were made again from its rows"
        else:
            action = f"the collection returned to generation {number}, published {manifest.created_at}"
        if salvage is not None:
            action += f", without the {len(lost)} document(s) whose rows are damaged"
        action += f", and published as generation {published.generation}"
        if not is_newest:
            said.append(
                f"which documents generation {numbers[-1]} had changed cannot be told, so ingest what "
                "changed last again with --reread"
            )
        if LATE_NAME in manifest.files and LATE_NAME not in published.files:
            again = f"`cairn plan {layout.name} --apply --late` makes them again"
            said.append(f"its token vectors are lost with {LATE_NAME}: {again}")
        return published.generation, "; ".join([action, *said]), lost
    if keeps_all:
        raise layout.damaged(problems[0].sentence)
    raise IntegrityError(
        f"collection {layout.name!r} has no generation that is whole: "
        f"{'; '.join(problem.sentence for problem in problems[:3])}; "
        "move its folder away and ingest the sources again"
    )


def _name_in_current(layout: CollectionLayout, number: int) -> None:
    """Write ``CURRENT`` again, as it is where it names the generation: servers look at it again.

    Else it names the newest that stands, which is given up by the publication that comes and not before.
    """
    if layout.whole is not None:
        return
    with storage_errors("naming the served generation again"):
        if layout.manifest_sha256(number) is not None:
            write_bytes(layout.current_path, layout.current_path.read_bytes())
        elif layout.replica is not None:
            serve_generation(layout, number)
        else:
            serve_generation(layout, max(number, *layout.generation_numbers()))


def _publish_again(
    layout: CollectionLayout,
    numbers: Sequence[int],
    manifest: Manifest,
    facts: GenerationFacts,
    salvage: _Salvage | None,
    progress: ProgressListener,
) -> Manifest:
    """Publish the rows of the last of some generations, every derived file made from them."""
    lost = () if salvage is None else salvage.doc_ids
    if lost:
        log.warning("repair.gives_up collection=%s documents=%s", layout.name, ",".join(lost))
    with storage_errors(f"returning {layout.name!r} to generation {manifest.generation}", layout.folder):
        remove_strays(layout, numbers)
    commit_point("strays-removed")
    tables = LanceTables.open(layout, manifest.lance_versions)
    if salvage is not None:
        _drop_fragments(layout, salvage)
    versions = tables.commit(deleted_ids=lost)
    return publish_generation(layout, tables, versions, facts, manifest.index_config, progress)


def _repair_partitions(
    layout: CollectionLayout, manifest: Manifest, progress: ProgressListener, *, keeps_all: bool
) -> tuple[tuple[PartitionRecord, ...], list[str], tuple[str, ...]]:
    """Repair each partition as a collection is; return what there is now, what was done and what is lost.

    A partition of which nothing can be saved is empty afterwards: the next ingest of its sources fills it.
    """
    records, said, lost = list(manifest.partitions), list[str](), list[str]()
    for place, record in enumerate(manifest.partitions):
        own = layout.partition(record)
        faults = verify_generation(own, record.generation, check_rows=True) if record.generation else []
        if not faults:
            continue
        try:
            _require_own(own, record)
            report = repair_collection(own, progress, keeps_all=keeps_all)
        except (IntegrityError, CollectionNotFoundError):
            if keeps_all:
                raise
            if not own.folder.is_dir():  # what stands in its place would stop the ingest that fills it
                remove_entry(own.folder)
            records[place] = PartitionRecord(name=record.name, is_lost=True)
            again = "ingest the sources again to fill it with `--reread`"
            said.append(f"partition {own.name} is lost ({faults[0].sentence}); {again}")
        else:
            records[place] = own.record(report.generation)
            said.append(f"partition {own.name}: {report.action}")
            lost += report.lost
    if not any(record.generation for record in records):
        raise IntegrityError(
            f"collection {layout.name!r} has no partition that is whole; move its folder away and ingest the "
            "sources again"
        )
    return tuple(records), said, tuple(lost)


def _require_own(own: CollectionLayout, record: PartitionRecord) -> None:
    """Refuse a folder of another partition or collection: its older rows would be taken for this one's."""
    assert own.whole is not None, "of a partition"
    number = record.generation
    paths = [folder / MANIFEST_NAME for folder in (own.generation_folder(number), own.copies_folder(number))]
    if own.whole.replica is None and all(path.is_file() for path in paths):
        first, second = (record_file(path).sha256 for path in paths)
        if first == second != record.sha256:
            raise UsageError(
                f"partitions/{own.name} of collection {own.whole.name!r} must be what the collection wrote, "
                "got the folder of another; put its own back, or move it away, and repair again"
            )


def _drop_damaged_predecessors(layout: CollectionLayout, number: int) -> str:
    """Remove older generations that could not be served; they would only be found damaged again."""
    older = [each for each in layout.kept_generations() if each < number]
    damaged = [each for each in older if generation_faults(layout, each, number)]
    if not damaged:
        return ""
    said = f"; generation {', '.join(map(str, damaged))}, which was damaged, is removed"
    try:
        with storage_errors(f"removing damaged generations of {layout.name!r}", layout.folder):
            remove_generations(layout, damaged)
            mend(layout)
            prune_generations(layout, number)
            for record in partitions_with_rows(layout, number):
                own = layout.partition(record)  # its older generations were those of what is removed
                remove_generations(own, [each for each in own.kept_generations() if each < record.generation])
                prune_generations(own, record.generation)
    except (StorageError, IntegrityError) as error:  # the repair is done, the next writer cleans up again
        return f"{said}, but {error}"
    return said


@dataclass(frozen=True, kw_only=True, slots=True)
class _Salvage:
    """What has to be given up of a generation: fragments by table, and the documents with rows in them."""

    fragments: Mapping[str, tuple[int, ...]]
    doc_ids: tuple[str, ...]


def _plan_salvage(layout: CollectionLayout, manifest: Manifest, left: Sequence[Fault]) -> _Salvage | None:
    """Return what is lost with damaged files of Lance.

    None where more is damaged, a file is not one fragment's alone, or the position files are damaged, too.
    """
    damaged = {problem.file for problem in left if problem.part == "lance"}
    is_rows = all(name.startswith(tuple(f"{table}.lance/" for table in TABLES)) for name in damaged)
    is_version = any(name.endswith(MANIFEST_SUFFIX) for name in damaged)
    if not is_rows or is_version or any(problem.part in ("side", "manifest", "rows") for problem in left):
        return None
    try:
        columns = stored_columns(layout, manifest, checks=Checks(verify=True))
    except DamageError:
        return None
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
    return _Salvage(fragments=fragments, doc_ids=tuple(lost.to_pylist()))


def _fragments(
    layout: CollectionLayout, table: str, version: int
) -> Iterator[tuple[int, frozenset[str], int, int]]:
    """Yield the id, the files, and the first and last row of a scan of each fragment."""
    with lance_errors(f"reading the fragments of table `{table}`", damaged=True):
        first = 0
        for fragment in open_pinned_dataset(layout.lance_folder, table, version).get_fragments():
            deletions = fragment.deletion_file()
            paths = [f"data/{file.path}" for file in fragment.data_files()]
            paths += [] if deletions is None else [str(deletions)]
            last = first + fragment.physical_rows - fragment.num_deletions
            yield fragment.fragment_id, frozenset(f"{table}.lance/{path}" for path in paths), first, last
            first = last


def _drop_fragments(layout: CollectionLayout, salvage: _Salvage) -> None:
    """Drop the damaged fragments from the latest versions; the other rows of lost documents stay for now."""
    for table, fragments in salvage.fragments.items():
        if fragments:
            uri = str(layout.lance_folder / f"{table}.lance")
            operation = lance.LanceOperation.Delete(
                updated_fragments=[], deleted_fragment_ids=list(fragments), predicate="damaged"
            )
            with lance_errors(f"dropping damaged rows of table `{table}`"):
                lance.LanceDataset.commit(uri, operation, read_version=lance.dataset(uri).version)
