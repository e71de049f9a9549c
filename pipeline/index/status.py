"""The state of a collection, read from its manifest and one mapped column without opening an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.durable import storage_errors
from pipeline.errors import CollectionNotFoundError
from pipeline.index.generation import read_manifest
from pipeline.index.layout import DOCUMENTS_ARROW, CollectionLayout
from pipeline.index.position_files import DOCUMENT_POSITIONS_SCHEMA, open_positions


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
    positions = document_positions(layout, served)
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


def document_positions(layout: CollectionLayout, number: int) -> pa.RecordBatch:
    """Map what is known of each document of a generation."""
    with layout.naming_damage():
        return open_positions(layout.generation_folder(number) / DOCUMENTS_ARROW, DOCUMENT_POSITIONS_SCHEMA)


def _disk_bytes(folder: Path) -> int:
    with storage_errors("measuring the collection"):
        return sum(
            path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
        )
