"""What keeps a collection in shape between ingests: compact, retype columns, delete, other partitions.

All publish a new generation under the lock; none encodes anything, so the context and the clusters are
carried over unchanged.

Another number of partitions copies the rows, beside the searches of them:

    rows of the served generation ─▶ new folders, one a partition ─▶ one manifest that names them

A document's partition is its id's hash modulo their number, so a new partition takes its rows from a few old
ones. Killed before the manifest moves, it leaves folders that the next publication removes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import MAX_PARTITIONS, IndexConfig
from cairn.pipeline.corpus.columns import fitted, not_showable, parse_type
from cairn.pipeline.corpus.content_hash import content_hashes
from cairn.pipeline.corpus.source_record import carry_over
from cairn.pipeline.durable import remove_folder, storage_errors
from cairn.pipeline.errors import CairnError, ConfigError, DamageError, SchemaError, UsageError
from cairn.pipeline.index.aliases import other_names_of
from cairn.pipeline.index.files import damaged_lance_files
from cairn.pipeline.index.generation import stored_columns
from cairn.pipeline.index.layout import CollectionLayout, wholes
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS, partition_of
from cairn.pipeline.index.partitions import Change, RunTasks, by_partition, change_collection, new_records
from cairn.pipeline.index.publish import (
    GenerationFacts,
    next_generation_number,
    publish_generation,
    remove_generations,
    remove_strays,
)
from cairn.pipeline.index.recovery import writing
from cairn.pipeline.index.rows import LanceTables, Rows, StoredRows
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteReport:
    """What a deletion did: ``missing`` ids were not in the collection, ``generation`` is served now."""

    deleted: int
    missing: tuple[str, ...]
    generation: int


def compact_collection(
    layout: CollectionLayout,
    progress: ProgressListener = silent_progress,
    run_tasks: RunTasks | None = None,
) -> Manifest:
    """Merge small files and drop deleted rows for good; publish the same documents as a new generation.

    With ``run_tasks``, workers compact the partitions of a collection that has several.
    """
    with writing(layout) as manifest:
        before_sha256 = layout.hash_of_manifest(manifest.generation)
        changes = dict.fromkeys(_numbers(manifest), _compact)
        compacted = _change(layout, manifest, changes, "compact", progress, run_tasks)
        carry_over(layout.sources_path, before_sha256, layout.hash_of_manifest(compacted.generation))
        return compacted


def retype_columns(
    layout: CollectionLayout, types: Mapping[str, str], progress: ProgressListener = silent_progress
) -> Manifest:
    """Give metadata columns other types; publish the same documents so as a new generation.

    Types have Arrow's names, lists are ``list[TYPE]``. A value that does not fit its new type without loss
    raises :class:`SchemaError`.
    """
    parsed = {name: parse_type(name, text) for name, text in types.items()}
    with writing(layout) as manifest:
        changes = dict.fromkeys(_numbers(manifest), partial(_retype, types=parsed))
        return _change(layout, manifest, changes, "retype", progress)


def delete_documents(
    layout: CollectionLayout, doc_ids: Sequence[str], progress: ProgressListener = silent_progress
) -> DeleteReport:
    """Delete documents and their chunks; publish a new generation unless none of the ids is there."""
    with writing(layout) as manifest:
        wanted = list(dict.fromkeys(doc_ids))
        placed = by_partition(wanted, len(manifest.partitions) or 1)
        present = {
            number: [doc_id for doc_id in placed[number] if columns.position_of(doc_id) is not None]
            for number, whole in zip(_numbers(manifest), wholes(layout, manifest), strict=True)
            if number in placed
            for columns in (stored_columns(*whole),)
        }
        found = set(chain.from_iterable(present.values()))
        changes = {
            number: partial(_republish, deleted=doc_ids, run_id="delete")
            for number, doc_ids in present.items()
            if doc_ids
        }
        if changes:
            manifest = _change(layout, manifest, changes, "delete", progress)
        missing = tuple(doc_id for doc_id in wanted if doc_id not in found)
        return DeleteReport(deleted=len(found), missing=missing, generation=manifest.generation)


def _compact(layout: CollectionLayout, manifest: Manifest, progress: ProgressListener) -> Manifest:
    require_whole_rows(layout, manifest)
    return _republish(layout, manifest, progress, run_id="compact", compact=True)


def _retype(
    layout: CollectionLayout,
    manifest: Manifest,
    progress: ProgressListener,
    *,
    types: Mapping[str, pa.DataType],
) -> Manifest:
    require_whole_rows(layout, manifest)
    tables = LanceTables.open(layout, manifest.lance_versions)
    names = [field.name for field in tables.metadata_fields]
    unknown = [name for name in types if name not in names]
    if unknown:
        raise SchemaError(
            f"column {unknown[0]!r} must be a metadata column of collection {layout.name!r}, which has: "
            f"{', '.join(names) or 'none'}; name one of them"
        )
    fields = [field.with_type(types.get(field.name, field.type)) for field in tables.metadata_fields]
    tables = tables.rewritten(fields, partial(_retyped, types=types, metadata=names))
    facts = GenerationFacts.of(layout, manifest, "retype")
    return publish_generation(layout, tables, tables.versions(), facts, manifest.index_config, progress)


def _retyped(
    rows: pa.RecordBatch, types: Mapping[str, pa.DataType], metadata: Sequence[str]
) -> pa.RecordBatch:
    """Return rows with columns of other types, and with the hash that an ingest of them has then."""
    before = dict(zip(rows.schema.names, rows.columns, strict=True))
    after = dict(before)
    for name, target in types.items():
        after[name], bad = fitted(before[name], target)
        bad = not_showable(after[name]) if bad is None else bad
        if bad is not None and bad.any():
            place = int(np.argmax(bad))
            raise SchemaError(
                f"column {name!r} must hold {target} without loss in every document, got "
                f"{before[name][place].as_py()!r} in {before['doc_id'][place].as_py()!r}; correct it there, "
                "or choose another type"
            )
    content = ("title", "text", *metadata)
    old, new = (content_hashes({name: each[name] for name in content}) for each in (before, after))
    # Of a row with a query, which is not stored, the hash stays: it is encoded again where it comes again.
    hashes = [
        now if stored == then else stored
        for stored, then, now in zip(before["content_sha256"].to_pylist(), old, new, strict=True)
    ]
    after["content_sha256"] = pa.array(hashes, pa.string())
    schema = pa.schema([field.with_type(after[field.name].type) for field in rows.schema])
    return pa.RecordBatch.from_arrays([*after.values()], schema=schema)


def _numbers(manifest: Manifest) -> list[int]:
    """Return the partitions that have rows; the one of a collection without partitions is 0."""
    if not manifest.partitions:
        return [0]
    return [number for number, record in enumerate(manifest.partitions) if record.generation]


def _change(
    layout: CollectionLayout,
    manifest: Manifest,
    changes: Mapping[int, Change],
    run_id: str,
    progress: ProgressListener,
    run_tasks: RunTasks | None = None,
) -> Manifest:
    """Publish changes of the folders of rows as one generation."""
    if not manifest.partitions:
        return changes[0](layout, manifest, progress)
    facts = GenerationFacts.of(layout, manifest, run_id)
    return change_collection(layout, manifest.partitions, changes, facts, progress, run_tasks)


def drop_collection(layout: CollectionLayout) -> None:
    """Remove everything of a collection, also of one of which nothing is published yet.

    Raises what :func:`require_droppable` does, and :class:`CollectionBusyError` while it is being written,
    or a server holds it that takes its writes. It is gone in one step.
    """
    require_droppable(layout)
    with (
        layout.only_server(),
        layout.writer_lock(takes_turns=False, copies=False),
        storage_errors("removing the collection"),
    ):
        if layout.replica is not None:
            layout.replica.remove()  # first: a reader that follows the store would copy it once more
        remove_folder(layout.folder)


def require_droppable(layout: CollectionLayout) -> None:
    """Refuse a collection that is not there, or that another name answers from."""
    if layout.first_ingest() is None:
        layout.require_exists()
    for name in other_names_of(layout.root, layout.name):
        raise ConfigError(
            f"collection {layout.name!r} must not answer for another name, got {name!r}; run "
            f"`{layout.command('switch', name, name)}` first"
        )


def require_whole_rows(layout: CollectionLayout, manifest: Manifest) -> None:
    """Raise :class:`DamageError` where a file of Lance is damaged: rewriting its rows would hide that."""
    with layout.naming_damage():
        for name, problem in damaged_lance_files(layout.lance_folder, manifest.lance_files):
            raise DamageError(f"{name} {problem}")


def _republish(
    layout: CollectionLayout,
    manifest: Manifest,
    progress: ProgressListener,
    *,
    run_id: str,
    deleted: Sequence[str] = (),
    compact: bool = False,
) -> Manifest:
    tables = LanceTables.open(layout, manifest.lance_versions)
    tables.compact(force=compact)
    versions = tables.commit(
        deleted_ids=deleted,
        find_documents=partial(find_served, layout, manifest),
    )
    facts = GenerationFacts.of(layout, manifest, run_id)
    return publish_generation(
        layout, tables, versions, facts, manifest.index_config, progress, shares=not compact
    )


def find_served(layout: CollectionLayout, served: Manifest, doc_ids: Sequence[str]) -> dict[str, Rows]:
    """Return the rows of those documents that the generation has; none where a file of them is damaged."""
    try:
        columns = stored_columns(layout, served)
    except DamageError:
        return {}
    found: dict[str, Rows] = {}
    for doc_id in doc_ids:
        position = columns.position_of(doc_id)
        if position is not None:
            first, end = columns.chunk_offsets[position : position + 2].tolist()
            found[doc_id] = {DOCUMENTS: slice(position, position + 1), CHUNKS: slice(first, end)}
    return found


def repartition(
    layout: CollectionLayout, num_partitions: int, progress: ProgressListener = silent_progress
) -> Manifest:
    """Cut a collection into so many partitions and publish that; one that has as many is left as it is."""
    if not 1 <= num_partitions <= MAX_PARTITIONS:
        raise ConfigError(f"there must be 1 to {MAX_PARTITIONS:,} partitions, got {num_partitions:,}")
    with writing(layout) as base:
        if num_partitions == (len(base.partitions) or 1):
            return base
        facts = GenerationFacts.of(layout, base, "repartition")
        index = {**base.settings["index"], "partitions": num_partitions}
        facts = replace(facts, settings={**base.settings, "index": index})
        sources = _sources(layout, base)
        before_sha256 = layout.hash_of_manifest(base.generation)
        step = math.gcd(len(sources), num_partitions)
        documents_P, chunks_P = (_count(sources, table, num_partitions) for table in (DOCUMENTS, CHUNKS))
        if not documents_P.any():
            raise UsageError(
                f"collection {layout.name!r} must hold documents to be cut into other partitions, got none; "
                f"drop it, and ingest with `--partitions {num_partitions}`"
            )
        copies = {
            number: partial(
                _copy,
                sources=sources[number % step :: step],
                number=number,
                num_documents=int(documents_P[number]),
                num_chunks=int(chunks_P[number]),
                facts=facts,
            )
            for number in range(num_partitions)
        }
        try:
            if num_partitions == 1:
                # The new table takes the place of one that only generations before this one read.
                older = [number for number in layout.kept_generations() if number != base.generation]
                remove_generations(layout, older)
                manifest = copies[0](layout, None, progress)
            else:
                records = new_records(num_partitions, next_generation_number(layout))
                filled = {number: copy for number, copy in copies.items() if documents_P[number]}
                manifest = change_collection(layout, records, filled, facts, progress)
        except BaseException:
            # A full disk must not stay full of copies that no one will read.
            with suppress(OSError, CairnError):
                remove_strays(layout, layout.generation_numbers())
            raise
        carry_over(layout.sources_path, before_sha256, layout.hash_of_manifest(manifest.generation))
        return manifest


def _sources(layout: CollectionLayout, base: Manifest) -> list[StoredRows | None]:
    """Return the rows of each partition, None of one that has none."""
    rows = {}
    for own, each in wholes(layout, base):
        require_whole_rows(own, each)  # copies would hide what is damaged
        tables = LanceTables.open(own, each.lance_versions)
        rows[own.name] = StoredRows(tables=tables, versions=each.lance_versions)
    names = [record.name for record in base.partitions] or [layout.name]
    return [rows.get(name) for name in names]


def _count(sources: Sequence[StoredRows | None], table: str, num_partitions: int) -> Int64[np.ndarray, " P"]:
    """Count the rows that each new partition is to have."""
    counts_P = np.zeros(num_partitions, np.int64)
    for rows in sources:
        for batch in () if rows is None else rows.scan(table, ["doc_id"]):
            counts_P += np.bincount(_partitions(batch, num_partitions), minlength=num_partitions)
    return counts_P


def _partitions(batch: pa.RecordBatch, num_partitions: int) -> Int64[np.ndarray, " N"]:
    """Return the partition of each row's document."""
    doc_ids: list[str] = batch.column("doc_id").to_pylist()
    return np.array([partition_of(doc_id, num_partitions) for doc_id in doc_ids], np.int64)


def _copy(
    layout: CollectionLayout,
    _base: Manifest | None,
    progress: ProgressListener,
    *,
    sources: Sequence[StoredRows | None],
    number: int,
    num_documents: int,
    num_chunks: int,
    facts: GenerationFacts,
) -> Manifest:
    """Copy the rows of a new partition and publish them."""
    config = IndexConfig(**facts.settings["index"])
    stored = next(rows.tables for rows in sources if rows is not None)
    tables = LanceTables.open_or_create(layout, stored.metadata_fields, stored.vector_dim, added=stored.added)

    def reader(table: str) -> pa.RecordBatchReader:
        schema = tables.schemas[table]
        rows = (
            batch.filter(pa.array(_partitions(batch, config.partitions) == number)).cast(schema)
            for source in sources
            if source is not None
            for batch in source.scan(table, schema.names)
        )
        return pa.RecordBatchReader.from_batches(schema, rows)

    versions = tables.commit(
        documents=reader(DOCUMENTS),
        chunks=reader(CHUNKS),
        expected_documents=num_documents,
        expected_chunks=num_chunks,
    )
    return publish_generation(layout, tables, versions, facts, config, progress)
