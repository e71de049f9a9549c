"""The state of a collection, read from its manifest and one mapped column without opening an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import stored_columns
from cairn.pipeline.index.layout import SIZES, CollectionLayout, read_manifest, wholes
from cairn.pipeline.index.names import SPARSE_ARROW, TOKENS_ARROW
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.token_vectors.codebook import load_token_coder
from cairn.pipeline.token_vectors.projection import LATE_NAME


def collection_status(layout: CollectionLayout) -> dict[str, Any]:
    """Return what is served, as JSON values; reads the manifest and one mapped column, checks no hash."""
    layout.require_exists()
    layout.refresh()
    served = layout.current_generation_number()
    assert served is not None, "require_exists found a generation"
    manifest = read_manifest(layout, served)
    own, sparse = list(wholes(layout, manifest)), manifest.encoder.sparse_model
    segments = manifest.segments
    cluster_ids = np.concatenate([stored_columns(*each, checks=SIZES).cluster_ids for each in own])
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
        "indexes": {
            name: {**described, "num_vectors": sum(each.indexes[name]["num_vectors"] for each in segments)}
            for name, described in manifest.indexes.items()
        },
        "segments": [
            {
                "name": record.name,
                "documents": record.live_documents,
                "chunks": record.live_chunks,
                "deleted_documents": record.deleted_documents,
                "kinds": {name: description["kind"] for name, description in record.indexes.items()},
            }
            for record in segments
        ],
        "merge": None if manifest.partitions else _merge(manifest),
        "partitions": [
            {"documents": each.documents, "chunks": each.chunks, "generation": each.generation}
            for _, each in own
        ],
        "disk_bytes": _disk_bytes(layout.folder),
        "encoder": dict(manifest.settings["encoder"]),
        "settings": dict(manifest.settings),
        "fingerprints": dict(manifest.fingerprints),
        "token_vectors": _token_vectors(layout, manifest, own),
        "sparse": None if sparse is None else {"model": sparse, "bytes": _size_of(SPARSE_ARROW, own)},
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


def _token_vectors(
    layout: CollectionLayout, manifest: Manifest, own: Sequence[tuple[CollectionLayout, Manifest]]
) -> dict[str, int] | None:
    """Describe the token vectors, None for a collection without."""
    size_bytes = _size_of(TOKENS_ARROW, own)
    if LATE_NAME not in manifest.files or not size_bytes:
        return None
    with layout.naming_damage():
        codebook = load_token_coder(layout.generation_folder(manifest.generation))
    return {
        "vector_bytes": codebook.vector_bytes,
        "bytes": size_bytes,
    }


def _size_of(file: str, own: Sequence[tuple[CollectionLayout, Manifest]]) -> int:
    """Add the sizes of a file of all segments that have it."""
    names = ((each, segment.name + file) for _, each in own for segment in each.segments)
    return sum(each.files[name].size_bytes for each, name in names if name in each.files)


def _disk_bytes(folder: Path) -> int:
    """Add the sizes of all files; one with two names, in two generations, counts once."""
    with storage_errors("measuring the collection"):
        files = (path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())
