"""The state of a collection, read from its manifest and one mapped column without opening an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.errors import CollectionNotFoundError, DamageError, ModelError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import TOKENS_ARROW
from cairn.pipeline.index.segments.joined import StoredColumns
from cairn.pipeline.index.stored_files import read_manifest
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.token_vectors.projection import LATE_NAME, load_token_projection


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
    cluster_ids = stored_columns(layout, manifest).cluster_ids
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
        "segments": [
            {
                "name": record.name,
                "documents": record.live_documents,
                "chunks": record.live_chunks,
                "deleted_documents": record.deleted_documents,
                "kinds": {name: description["kind"] for name, description in record.indexes.items()},
            }
            for record in manifest.segments
        ],
        "merge": _merge(manifest),
        "disk_bytes": _disk_bytes(layout.folder),
        "encoder": dict(manifest.settings["encoder"]),
        "settings": dict(manifest.settings),
        "fingerprints": dict(manifest.fingerprints),
        "token_vectors": _token_vectors(layout, manifest),
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


def _merge(manifest: Manifest) -> dict[str, int] | None:
    """Count the segments, and their chunks, that the next publication of a document would merge."""
    live = [record.live_chunks for record in manifest.segments]
    first = tiers.first_to_merge([*live, 1], [*(record.chunks for record in manifest.segments), 1])
    if manifest.chunks < tiers.WHOLE_CHUNKS:
        first = 0
    if first is None or len(live) == 1:
        return None
    return {"segments": len(live) - first, "chunks": sum(live[first:])}


def _token_vectors(layout: CollectionLayout, manifest: Manifest) -> dict[str, int] | None:
    """Describe the token vectors, None for a collection without."""
    names = [segment.name + TOKENS_ARROW for segment in manifest.segments]
    names = [name for name in names if name in manifest.files]
    if LATE_NAME not in manifest.files or not names:
        return None
    with layout.naming_damage():
        try:
            projection = load_token_projection(layout.generation_folder(manifest.generation) / LATE_NAME)
        except ModelError as error:
            raise DamageError(f"{LATE_NAME} cannot be read") from error
    return {
        "dims": len(projection.rms_V),
        "bits": projection.bits,
        "pool_tokens": projection.pool_tokens,
        "bytes": sum(manifest.files[name].size_bytes for name in names),
    }


def stored_columns(layout: CollectionLayout, manifest: Manifest) -> StoredColumns:
    """Map what is known of each document of a generation."""
    with layout.naming_damage():
        return StoredColumns(layout.generation_folder(manifest.generation), manifest)


def _disk_bytes(folder: Path) -> int:
    """Add the sizes of all files; one with two names, in two generations, counts once."""
    with storage_errors("measuring the collection"):
        files = (path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())
