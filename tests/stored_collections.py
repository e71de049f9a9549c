"""What a reader can see of a collection, and whether two of them hold the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def stored(root: Path, collection: str = "c") -> dict[str, Any]:
    """Return everything a reader can see of a collection, by document."""
    import pyarrow as pa
    from cairn.pipeline.index.generation import open_generation
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.rows import LanceTables

    layout = CollectionLayout.at(root, collection)
    generation = open_generation(layout)
    tables = LanceTables.open(layout, generation.manifest.lance_versions)
    documents = pa.Table.from_batches(
        tables.scan(
            "documents",
            ["doc_id", "text", "content_sha256", "year", "cluster_id", "vector"],
            generation.manifest.lance_versions,
        )
    )
    chunks = pa.Table.from_batches(
        tables.scan(
            "chunks",
            ["doc_id", "ordinal", "start_char", "end_char", "vector"],
            generation.manifest.lance_versions,
        )
    )
    found: dict[str, Any] = {row["doc_id"]: {**row, "chunks": []} for row in documents.to_pylist()}
    assert len(found) == documents.num_rows
    for row in chunks.to_pylist():
        found[row["doc_id"]]["chunks"].append(row)
    return found


def require_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Same ids, content and spans; vectors equal up to the rounding that another batch brings."""
    import numpy as np

    assert sorted(left) == sorted(right)
    for doc_id, document in left.items():
        other = right[doc_id]
        assert document["content_sha256"] == other["content_sha256"]
        assert np.allclose(document["vector"], other["vector"], atol=1e-5)
        spans = [
            [(chunk["start_char"], chunk["end_char"]) for chunk in side["chunks"]]
            for side in (document, other)
        ]
        assert spans[0] == spans[1]
        assert np.allclose(
            [chunk["vector"] for chunk in document["chunks"]],
            [chunk["vector"] for chunk in other["chunks"]],
            atol=1e-5,
        )
