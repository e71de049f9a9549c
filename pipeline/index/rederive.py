"""The rows of a generation whose folder or manifest is lost: Lance may still hold them, pinned by its tags.

What the folder alone held (settings, context, hashes of Lance's files) is taken from the generation before.
So its rows count as whole only if all can be read, and if documents that neither generation changed show that
both were encoded alike.
"""

from __future__ import annotations

import lance
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import IntegrityError, StorageError
from cairn.pipeline.index.lance_errors import lance_errors
from cairn.pipeline.index.lance_index import LanceTables, Versions
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.losses import content_hashes_at, tagged_versions
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.types import TOKEN_FIELDS

COMPARED_DOCUMENTS = 16
"""A context drawn again changes every vector, so that a few documents tell."""


def find_whole_rows(layout: CollectionLayout, number: int, before: Manifest) -> Versions | None:
    """Return the versions a lost generation pinned; None where they are not whole, or encoded otherwise.

    ``before`` is an older generation, whose rows are whole.
    """
    try:
        versions = tagged_versions(layout, number, before)
        _read_all(layout, versions)
        return versions if _is_encoded_alike(layout, versions, before) else None
    except (IntegrityError, StorageError):
        return None


def _read_all(layout: CollectionLayout, versions: Versions) -> None:
    tables = LanceTables.open(layout, versions)
    for table in TABLES:
        for batch in tables.scan(table, tables.schemas[table].names, versions):
            with lance_errors(f"reading table `{table}`", damaged=True):
                batch.validate(full=True)


def _is_encoded_alike(layout: CollectionLayout, versions: Versions, before: Manifest) -> bool:
    """Compare the vectors and codes of some documents that are the same in both generations."""
    now, then = content_hashes_at(layout, versions), content_hashes_at(layout, dict(before.lance_versions))
    both = now.join(then, ["doc_id", "version"], join_type="inner")
    doc_ids = both.column("doc_id").slice(0, COMPARED_DOCUMENTS).to_pylist()
    if not doc_ids:
        return False
    pinned = (versions, before.lance_versions)
    columns = {DOCUMENTS: ["doc_id", "vector"], CHUNKS: ["chunk_id", "vector"]}
    if all(LanceTables.open(layout, each).has_tokens for each in pinned):
        columns[CHUNKS] += [field.name for field in TOKEN_FIELDS]
    return all(
        _rows(layout, table, versions[table], names, doc_ids).equals(
            _rows(layout, table, before.lance_versions[table], names, doc_ids)
        )
        for table, names in columns.items()
    )


def _rows(
    layout: CollectionLayout, table: str, version: int, columns: list[str], doc_ids: list[str]
) -> pa.Table:
    """Return columns of the rows of some documents, in the order of the first column."""
    with lance_errors(f"reading table `{table}`", damaged=True):
        dataset = lance.dataset(str(layout.lance_folder / f"{table}.lance"), version=version)
        rows = dataset.to_table(columns=columns, filter=pc.field("doc_id").isin(doc_ids))
    return rows.sort_by(columns[0]).combine_chunks()
