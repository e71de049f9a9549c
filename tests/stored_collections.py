"""What a reader can see of a collection, and whether two of them hold the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def stored(root: Path, collection: str = "c") -> dict[str, Any]:
    """Return everything a reader can see of a collection, by document."""
    import pyarrow as pa
    from cairn.pipeline.index.generation import open_generation
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.rows import LanceTables

    layout = CollectionLayout.at(root, collection)
    generation = open_generation(layout)
    versions = generation.manifest.lance_versions
    tables = LanceTables.open(layout, versions)

    def rows(table: str, *columns: str) -> list[dict[str, Any]]:
        return pa.Table.from_batches(tables.scan(table, [*columns], versions)).to_pylist()

    documents = rows("documents", "doc_id", "text", "content_sha256", "year", "cluster_id", "vector")
    found: dict[str, Any] = {row["doc_id"]: {**row, "chunks": []} for row in documents}
    assert len(found) == len(documents)
    for row in rows("chunks", "doc_id", "ordinal", "start_char", "end_char", "vector"):
        found[row["doc_id"]]["chunks"].append(row)
    return found


def sorted_rows(root: Path | str, collection: str = "c") -> pa.Table:
    """Return ids, texts and vectors of all documents, in the order of the ids."""
    from cairn.pipeline.collection import open_collection

    columns = ["doc_id", "text", "vector"]
    return open_collection(collection, root=root).documents.to_arrow(columns).sort_by("doc_id")


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Tell whether :func:`require_same` finds the same."""
    try:
        require_same(left, right)
    except AssertionError:
        return False
    return True


def require_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Same ids, content and spans; vectors equal up to the rounding that another batch brings."""
    import numpy as np

    assert sorted(left) == sorted(right)
    for doc_id, document in left.items():
        other = right[doc_id]
        for row, same in ((document, other), *zip(document["chunks"], other["chunks"], strict=True)):
            for name in ("content_sha256", "start_char", "end_char"):
                assert row.get(name) == same.get(name)
            assert np.allclose(row["vector"], same["vector"], atol=1e-5)
