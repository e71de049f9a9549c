"""What a commit changed in the tables, told by Lance itself: deleted rows, and fragments that were added.

Two versions without a compaction between them share their fragments, whose rows keep their ids. So only
fragments with another deletion file are read, and of them only row ids. Not even these are read where the
commit knows which rows it deleted, and Lance counts as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lance
import numpy as np
from cairn.pipeline.index.lance_delete import DeletedDocuments
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS, lance_errors, open_pinned_dataset
from jaxtyping import Int64, UInt64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChange:
    """``deleted`` are documents by their row in a scan of the version before, ascending.

    ``added`` maps each table to the fragments that hold the new rows, which end every scan, and
    ``num_added`` to how many rows those are.
    """

    deleted: Int64[np.ndarray, " D"]
    added: Mapping[str, tuple[int, ...]]
    num_added: Mapping[str, int]


def rows_changed(
    layout: CollectionLayout,
    before: Mapping[str, int],
    after: Mapping[str, int],
    known: DeletedDocuments | None = None,
) -> RowChange | None:
    """Compare two versions of the tables; None where fragments were rewritten between them.

    ``known`` is what the commit deleted, if it began with the version before.
    """
    added: dict[str, tuple[int, ...]] = {}
    num_added: dict[str, int] = {}
    deleted = [np.empty(0, np.int64)]
    with lance_errors("comparing two versions of the tables", damaged=True):
        for table in (DOCUMENTS, CHUNKS):
            old, new = (
                open_pinned_dataset(layout.lance_folder, table, each[table]) for each in (before, after)
            )
            left = {fragment.fragment_id: fragment for fragment in new.get_fragments()}
            first = 0
            for fragment in old.get_fragments():
                same = left.pop(fragment.fragment_id, None)
                if same is not None and _data(same) != _data(fragment):
                    return None
                num_rows = fragment.physical_rows - fragment.num_deletions
                if table == DOCUMENTS:
                    own = _known_rows(known, old.version, first, num_rows)
                    deleted.append(first + _gone(old, fragment, new, same, own))
                first += num_rows
            newest = max((fragment.fragment_id for fragment in old.get_fragments()), default=-1)
            if any(number <= newest for number in left):
                return None
            added[table] = tuple(sorted(left))
            num_added[table] = sum(
                fragment.physical_rows - fragment.num_deletions for fragment in left.values()
            )
    return RowChange(deleted=np.concatenate(deleted), added=added, num_added=num_added)


def _data(fragment: lance.LanceFragment) -> list[str]:
    return [file.path for file in fragment.data_files()]


def _known_rows(
    known: DeletedDocuments | None, version: int, first: int, num_rows: int
) -> Int64[np.ndarray, " _"] | None:
    """Return which rows of a fragment a commit deleted, None where it does not know them."""
    if known is None or known.version != version:
        return None
    return known.rows[slice(*np.searchsorted(known.rows, (first, first + num_rows)).tolist())] - first


def _gone(
    old: lance.LanceDataset,
    fragment: lance.LanceFragment,
    new: lance.LanceDataset,
    same: lance.LanceFragment | None,
    known: Int64[np.ndarray, " _"] | None,
) -> Int64[np.ndarray, " _"]:
    """Return which of a fragment's rows are not in the new version: ``known`` ones, if they are as many."""
    if same is None:
        return np.arange(fragment.physical_rows - fragment.num_deletions)
    if same.deletion_file() == fragment.deletion_file():
        return np.empty(0, np.int64)
    if known is not None and len(known) == same.num_deletions - fragment.num_deletions:
        return known
    return np.flatnonzero(~np.isin(_row_ids(old, fragment), _row_ids(new, same), assume_unique=True))


def _row_ids(dataset: lance.LanceDataset, fragment: lance.LanceFragment) -> UInt64[np.ndarray, " _"]:
    scanner = dataset.scanner(columns=[], with_row_id=True, fragments=[fragment], scan_in_order=True)
    return scanner.to_table().column("_rowid").to_numpy()
