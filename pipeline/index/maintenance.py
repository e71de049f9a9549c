"""What keeps a collection in shape between ingests: compact and delete.

``verify`` and ``repair`` are named here, too. Compaction and deletion publish a new generation under the
lock; neither encodes anything, so the context and the clusters are carried over unchanged.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.corpus.source_record import carry_over
from cairn.pipeline.durable import remove_folder, storage_errors
from cairn.pipeline.errors import ConfigError, DamageError
from cairn.pipeline.index.aliases import read_aliases
from cairn.pipeline.index.lance_delete import PlacedDocument, id_batches
from cairn.pipeline.index.lance_files import damaged_lance_files
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CHUNKS_ARROW, DELETED_BITS, DOCUMENTS_ARROW
from cairn.pipeline.index.publish import (
    GenerationFacts,
    next_generation_number,
    prepare_writer,
    publish_generation,
)
from cairn.pipeline.index.repair import RepairReport, index_config_of, repair_collection
from cairn.pipeline.index.segments.parts import RunTasks
from cairn.pipeline.index.segments.segment import SegmentRows, open_rows
from cairn.pipeline.index.status import stored_columns
from cairn.pipeline.index.store_tasks import store_tasks
from cairn.pipeline.index.stored_files import check_generation_files, find_lance_files
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.index.verify import Fault, verify_collection
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.types import ProgressListener, silent_progress

__all__ = [
    "DeleteReport",
    "Fault",
    "RepairReport",
    "compact_collection",
    "delete_documents",
    "drop_collection",
    "repair_collection",
    "require_droppable",
    "verify_collection",
]


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

    With ``run_tasks``, workers write the segment of a large collection, as in an ingest.
    """
    layout.require_exists()
    with layout.writer_lock():
        manifest = _served(layout)
        require_whole_rows(layout, manifest)
        before_sha256 = layout.hash_of_manifest(manifest.generation)
        compacted = _republish(
            layout, manifest, (), progress, run_id="compact", compact=True, run_tasks=run_tasks
        )
        carry_over(layout.sources_path, before_sha256, layout.hash_of_manifest(compacted.generation))
        return compacted


def delete_documents(
    layout: CollectionLayout, doc_ids: Sequence[str], progress: ProgressListener = silent_progress
) -> DeleteReport:
    """Delete documents and their chunks; publish a new generation unless none of the ids is there."""
    layout.require_exists()
    with layout.writer_lock():
        manifest = _served(layout)
        wanted = list(dict.fromkeys(doc_ids))
        names = [record.name + DOCUMENTS_ARROW for record in manifest.segments]
        for name, problem in check_generation_files(layout, manifest, names=names):
            raise layout.damaged(f"{name} of generation {manifest.generation} {problem}")
        doc_ids = stored_columns(layout, manifest).doc_ids
        is_there = pc.is_in(pa.array(wanted, pa.large_string()), value_set=doc_ids).to_pylist()
        present = [doc_id for doc_id, there in zip(wanted, is_there, strict=True) if there]
        missing = tuple(doc_id for doc_id, there in zip(wanted, is_there, strict=True) if not there)
        if present:
            manifest = _republish(layout, manifest, present, progress, run_id="delete")
        return DeleteReport(deleted=len(present), missing=missing, generation=manifest.generation)


def drop_collection(layout: CollectionLayout) -> None:
    """Remove everything of a collection, also of one of which nothing is published yet.

    Raises what :func:`require_droppable` does, and :class:`CollectionBusyError` while it is being written. It
    is gone in one step.
    """
    require_droppable(layout)
    with layout.writer_lock(), storage_errors("removing the collection"):
        remove_folder(layout.folder)
        if layout.replica is not None:
            layout.replica.remove()


def require_droppable(layout: CollectionLayout) -> None:
    """Refuse a collection that is not there, or that another name answers from."""
    if layout.first_ingest() is None:
        layout.require_exists()
    for name, alias in read_aliases(layout.root).items():
        if alias.to == layout.name != name:
            raise ConfigError(
                f"collection {layout.name!r} must not answer for another name, got {name!r}; run "
                f"`{layout.command('switch', name, name)}` first"
            )


def require_whole_rows(layout: CollectionLayout, manifest: Manifest) -> None:
    """Raise :class:`DamageError` where a file of Lance is damaged: rewriting its rows would hide that."""
    with layout.naming_damage():
        for name, problem in damaged_lance_files(layout, find_lance_files(layout, manifest)):
            raise DamageError(f"{name} {problem}")


def _served(layout: CollectionLayout) -> Manifest:
    manifest = prepare_writer(layout)
    assert manifest is not None, "require_exists found a generation"
    return manifest


def _republish(
    layout: CollectionLayout,
    manifest: Manifest,
    deleted: Sequence[str],
    progress: ProgressListener,
    *,
    run_id: str,
    compact: bool = False,
    run_tasks: RunTasks | None = None,
) -> Manifest:
    tables = LanceTables.open(layout)
    tables.roll_back(manifest.lance_versions)
    since = tables.compact(force=compact)
    versions = tables.commit(
        generation=next_generation_number(layout),
        deleted_ids=id_batches(deleted),
        find_documents=partial(find_served, layout, manifest),
    )
    facts = GenerationFacts.of(layout, manifest, run_id)
    config = index_config_of(manifest.settings)
    return publish_generation(
        layout,
        tables,
        versions,
        facts,
        config,
        progress,
        None if compact else since,
        run_tasks=store_tasks(layout, run_tasks),
    )


def find_served(layout: CollectionLayout, served: Manifest, doc_ids: Sequence[str]) -> list[PlacedDocument]:
    """Return those of the documents that the generation has; none where a file of its rows is damaged."""
    suffixes = (DOCUMENTS_ARROW, CHUNKS_ARROW, DELETED_BITS)
    names = [record.name + suffix for record in served.segments for suffix in suffixes]
    verified = VerifiedFiles.of_this_machine()
    if check_generation_files(layout, served, names=names, verified=verified):
        return []
    folder = layout.generation_folder(served.generation)
    found: list[PlacedDocument] = []
    begins = {DOCUMENTS: 0, CHUNKS: 0}
    try:
        for record in served.segments:
            rows = open_rows(folder, record)
            found += _placed(rows, begins, doc_ids)
            begins[DOCUMENTS] += rows.deleted_documents.num_live
            begins[CHUNKS] += rows.deleted_chunks.num_live
    except DamageError:
        return []
    return found


def _placed(rows: SegmentRows, begins: dict[str, int], doc_ids: Sequence[str]) -> Iterator[PlacedDocument]:
    """Yield those documents of a segment that are not deleted; its rows begin at ``begins``."""
    own = rows.documents.column("doc_id")
    stored = np.flatnonzero(pc.is_in(own, value_set=pa.array(doc_ids, own.type)).to_numpy(False))
    stored = np.setdiff1d(stored, rows.deleted_documents.rows, assume_unique=True)
    first_chunks = rows.documents.column("chunk_offset").to_numpy()[stored]
    sizes = rows.documents.column("num_chunks").to_numpy()[stored]
    live = zip(
        stored.tolist(),
        (begins[DOCUMENTS] + rows.deleted_documents.live_of(stored)).tolist(),
        (begins[CHUNKS] + rows.deleted_chunks.live_of(first_chunks)).tolist(),
        sizes.tolist(),
        strict=True,
    )
    for place, document, chunk, num_chunks in live:
        places = {DOCUMENTS: slice(document, document + 1), CHUNKS: slice(chunk, chunk + num_chunks)}
        yield PlacedDocument(doc_id=own[place].as_py(), rows=places)
