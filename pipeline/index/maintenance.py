"""What keeps a collection in shape between ingests: compact, delete, report.

``verify`` and ``repair`` are named here, too. Compaction and deletion publish a new generation under the
lock; neither encodes anything, so the context and the clusters are carried over unchanged.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.durable import storage_errors
from pipeline.errors import CollectionNotFoundError
from pipeline.index.generation import read_manifest
from pipeline.index.lance_index import MAX_IDS_A_DELETE, LanceTables
from pipeline.index.layout import DOCUMENTS_ARROW, CollectionLayout
from pipeline.index.position_files import DOCUMENT_POSITIONS_SCHEMA, open_positions
from pipeline.index.publish import GenerationFacts, next_generation_number, prepare_writer, publish_generation
from pipeline.index.repair import RepairReport, index_config_of, repair_collection
from pipeline.index.verify import Problem, verify_collection
from pipeline.manifest import Manifest
from pipeline.types import ProgressListener, silent_progress

__all__ = [
    "DeleteReport",
    "Problem",
    "RepairReport",
    "collection_status",
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
        positions = _document_positions(layout, manifest.generation)
        is_there = pc.is_in(
            pa.array(wanted, pa.large_string()), value_set=positions.column("doc_id")
        ).to_pylist()
        present = [doc_id for doc_id, there in zip(wanted, is_there, strict=True) if there]
        missing = tuple(doc_id for doc_id, there in zip(wanted, is_there, strict=True) if not there)
        if present:
            manifest = _republish(layout, manifest, present, progress, run_id="delete")
        return DeleteReport(deleted=len(present), missing=missing, generation=manifest.generation)


def collection_status(layout: CollectionLayout) -> dict[str, Any]:
    """Return what is served, as JSON values; reads the manifest and one mapped column, checks no hash."""
    layout.require_exists()
    layout.refresh()
    served = layout.current_generation_number()
    if served is None:
        raise CollectionNotFoundError(
            f"collection {layout.name!r} must have a published generation; run an ingest"
        )
    manifest = read_manifest(layout, served)
    positions = _document_positions(layout, served)
    cluster_ids = positions.column("cluster_id").to_numpy()
    return {
        "collection": layout.name,
        "documents": manifest.documents,
        "chunks": manifest.chunks,
        "tokens": manifest.tokens,
        "generation": manifest.generation,
        "generations": layout.generation_numbers(),
        "created_at": manifest.created_at,
        "run_id": manifest.run_id,
        "vector_dim": manifest.vector_dim,
        "indexes": {name: dict(description) for name, description in manifest.indexes.items()},
        "disk_bytes": _disk_bytes(layout.folder),
        "encoder": dict(manifest.settings["encoder"]),
        "settings": dict(manifest.settings),
        "fingerprints": dict(manifest.fingerprints),
        "context": {
            "documents": manifest.context_documents,
            "fingerprint": manifest.fingerprints["context"],
            "cluster_sizes": list(manifest.context_cluster_sizes),
            "collection_documents": manifest.documents_at_context,
        },
        "cluster_sizes": np.bincount(cluster_ids, minlength=len(manifest.context_cluster_sizes)).tolist(),
        "encode_tokens_per_second": manifest.encode_tokens_per_second,
        "sources": list(manifest.sources),
    }


def _document_positions(layout: CollectionLayout, number: int) -> pa.RecordBatch:
    with layout.naming_damage():
        return open_positions(layout.generation_folder(number) / DOCUMENTS_ARROW, DOCUMENT_POSITIONS_SCHEMA)


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


def _disk_bytes(folder: Path) -> int:
    with storage_errors("measuring the collection"):
        return sum(
            path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
        )
