"""What keeps a collection in shape between ingests: compact and delete.

``verify`` and ``repair`` are named here, too. Compaction and deletion publish a new generation under the
lock; neither encodes anything, so the context and the clusters are carried over unchanged.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.index.lance_index import MAX_IDS_A_DELETE, LanceTables
from pipeline.index.layout import CollectionLayout
from pipeline.index.publish import GenerationFacts, next_generation_number, prepare_writer, publish_generation
from pipeline.index.repair import RepairReport, index_config_of, repair_collection
from pipeline.index.status import document_positions
from pipeline.index.verify import Problem, verify_collection
from pipeline.manifest import Manifest
from pipeline.types import ProgressListener, silent_progress

__all__ = [
    "DeleteReport",
    "Problem",
    "RepairReport",
    "compact_collection",
    "delete_documents",
    "repair_collection",
    "verify_collection",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteReport:
    """What a deletion did: ``missing`` ids were not in the collection, ``generation`` is served now."""

    deleted: int
    missing: tuple[str, ...]
    generation: int


def compact_collection(layout: CollectionLayout, progress: ProgressListener = silent_progress) -> Manifest:
    """Merge small files and drop deleted rows for good; publish the same documents as a new generation."""
    layout.require_exists()
    with layout.writer_lock():
        return _republish(layout, _served(layout), (), progress, run_id="compact", compact=True)


def delete_documents(
    layout: CollectionLayout, doc_ids: Sequence[str], progress: ProgressListener = silent_progress
) -> DeleteReport:
    """Delete documents and their chunks; publish a new generation unless none of the ids is there."""
    layout.require_exists()
    with layout.writer_lock():
        manifest = _served(layout)
        wanted = list(dict.fromkeys(doc_ids))
        positions = document_positions(layout, manifest.generation)
        is_there = pc.is_in(
            pa.array(wanted, pa.large_string()), value_set=positions.column("doc_id")
        ).to_pylist()
        present = [doc_id for doc_id, there in zip(wanted, is_there, strict=True) if there]
        missing = tuple(doc_id for doc_id, there in zip(wanted, is_there, strict=True) if not there)
        if present:
            manifest = _republish(layout, manifest, present, progress, run_id="delete")
        return DeleteReport(deleted=len(present), missing=missing, generation=manifest.generation)


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
) -> Manifest:
    tables = LanceTables.open(layout)
    tables.roll_back(manifest.lance_versions)
    versions = tables.commit(
        generation=next_generation_number(layout), deleted_ids=_batches(deleted), compact=compact
    )
    facts = GenerationFacts.of(layout, manifest, run_id)
    return publish_generation(layout, tables, versions, facts, index_config_of(manifest.settings), progress)


def _batches(doc_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(doc_ids), MAX_IDS_A_DELETE):
        yield doc_ids[start : start + MAX_IDS_A_DELETE]
