"""What Lance lost, told document by document, and the rest of a table kept.

Lance stores rows in fragments, each with files of its own. A fragment with a damaged file is given up; the
documents with a row in one, in either table, are lost. Position files say which documents these are, without
reading a damaged file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import lance
import numpy as np
import pyarrow as pa
from cairn.pipeline.index.lance_errors import lance_errors
from cairn.pipeline.index.lance_files import MANIFEST_SUFFIX
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CHUNKS_ARROW, DELETED_BITS, DOCUMENTS_ARROW, CollectionLayout
from cairn.pipeline.index.segments.joined_columns import StoredColumns
from cairn.pipeline.index.stored_files import check_generation_files
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """What has to be given up of a generation: fragments by table, and the documents with rows in them."""

    fragments: Mapping[str, tuple[int, ...]]
    lost: tuple[str, ...]


def plan_salvage(layout: CollectionLayout, manifest: Manifest, damaged: Set[str]) -> Salvage | None:
    """Return what is lost with damaged files of Lance, given by their path below ``lance/``.

    None where a file is not one fragment's alone, or the position files are damaged, too.
    """
    is_pinned = all(name.startswith(tuple(f"{table}.lance/" for table in TABLES)) for name in damaged)
    if not is_pinned or any(name.endswith(MANIFEST_SUFFIX) for name in damaged):
        return None
    position_files = (DOCUMENTS_ARROW, CHUNKS_ARROW, DELETED_BITS)
    names = [record.name + name for record in manifest.segments for name in position_files]
    if check_generation_files(layout, manifest, names=names):
        return None
    columns = StoredColumns(layout.generation_folder(manifest.generation), manifest)
    owners = {DOCUMENTS: np.arange(manifest.documents), CHUNKS: columns.chunk_documents}
    explained: set[str] = set()
    fragments: dict[str, tuple[int, ...]] = {}
    positions = [np.empty(0, np.int64)]
    for table in TABLES:
        given_up: list[int] = []
        for fragment_id, files, first, last in _fragments(layout, table, manifest.lance_versions[table]):
            explained |= files & damaged
            if files & damaged:
                given_up.append(fragment_id)
                positions.append(owners[table][first:last])
        fragments[table] = tuple(given_up)
    if explained != damaged:
        return None
    lost = columns.doc_ids.take(pa.array(np.unique(np.concatenate(positions))))
    return Salvage(fragments=fragments, lost=tuple(lost.to_pylist()))


def _fragments(
    layout: CollectionLayout, table: str, version: int
) -> Iterator[tuple[int, frozenset[str], int, int]]:
    """Yield the id, the files, and the first and last row of a scan of each fragment."""
    folder = f"{table}.lance"
    with lance_errors(f"reading the fragments of table `{table}`", damaged=True):
        first = 0
        for fragment in lance.dataset(str(layout.lance_folder / folder), version=version).get_fragments():
            deletions = fragment.deletion_file()
            paths = [f"data/{file.path}" for file in fragment.data_files()]
            paths += [] if deletions is None else [str(deletions)]
            last = first + fragment.physical_rows - fragment.num_deletions
            yield fragment.fragment_id, frozenset(f"{folder}/{path}" for path in paths), first, last
            first = last


def give_up(layout: CollectionLayout, tables: LanceTables, salvage: Salvage) -> None:
    """Drop the damaged fragments from the latest versions; the other rows of lost documents stay for now."""
    tables.drop_text_indexes()
    for table, fragments in salvage.fragments.items():
        if fragments:
            uri = str(layout.lance_folder / f"{table}.lance")
            operation = lance.LanceOperation.Delete(
                updated_fragments=[], deleted_fragment_ids=list(fragments), predicate="damaged"
            )
            with lance_errors(f"dropping damaged rows of table `{table}`"):
                lance.LanceDataset.commit(uri, operation, read_version=lance.dataset(uri).version)
