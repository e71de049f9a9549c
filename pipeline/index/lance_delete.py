"""Documents deleted from both tables: a few by their places, others by their ids.

By ids, Lance reads the ids of all rows to find those of one document. The served generation says which rows
of a scan its documents are: each is then read with the address that Lance has for it, and must be of its
document. Where one is not, ids decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import lance
import numpy as np
from cairn.pipeline.durable import commit_point
from cairn.pipeline.index.tables import DOCUMENTS, TABLES
from jaxtyping import Int64

MAX_IDS_A_DELETE: Final = 1_000
"""Longer IN lists make Lance's planner the slowest part of a deletion."""
MAX_PLACED_DOCUMENTS: Final = 64
"""Each costs a third of a millisecond a table; reading all ids costs as much for one as for a thousand."""
_OFFSET_BITS: Final = 32
"""An address is the number of a fragment, and in its lower bits that of a row in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDocument:
    """A document, and by table its rows in a scan."""

    doc_id: str
    rows: Mapping[str, slice]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeletedDocuments:
    """Documents that were deleted since a version of their table: their rows in a scan of it, ascending."""

    version: int
    rows: Int64[np.ndarray, " D"]


FindDocuments = Callable[[Sequence[str]], Sequence[PlacedDocument]]
"""Return those of the documents whose places are known."""


def id_batches(doc_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut ids into lists that one deletion takes."""
    for start in range(0, len(doc_ids), MAX_IDS_A_DELETE):
        yield doc_ids[start : start + MAX_IDS_A_DELETE]


def delete_documents(
    open_latest: Callable[[str], lance.LanceDataset],
    deleted_ids: Iterable[Sequence[str]],
    find: FindDocuments | None,
    delete_by_ids: Callable[[str, Sequence[str]], None],
) -> DeletedDocuments | None:
    """Delete documents from the latest versions of both tables; return which, None where ids decided."""
    before = {name: open_latest(name) for name in TABLES}
    placed, is_known = _Placed(before), True
    for ids in deleted_ids:
        assert len(ids) <= MAX_IDS_A_DELETE, len(ids)
        if find is not None and placed.add(ids, find):
            continue
        is_known = False
        for name in TABLES:
            delete_by_ids(name, ids)
            commit_point(f"{name}-deleted")
    for name in TABLES:  # addresses stay what they are while rows are deleted by ids
        if placed.delete(open_latest(name), name):
            commit_point(f"{name}-deleted")
    return DeletedDocuments(version=before[DOCUMENTS].version, rows=placed.rows()) if is_known else None


class _Placed:
    """Documents to be deleted whose places in the tables ``before`` the commit are known."""

    def __init__(self, before: Mapping[str, lance.LanceDataset]) -> None:
        self._before = before
        self._documents: list[PlacedDocument] = []
        self._addresses: dict[str, list[int]] = {name: [] for name in TABLES}

    def add(self, doc_ids: Sequence[str], find: FindDocuments) -> bool:
        """Take documents in; False, and none is, where they are many or one is not where it should be."""
        if len(self._documents) + len(doc_ids) > MAX_PLACED_DOCUMENTS:
            return False
        found = find(doc_ids)
        if sorted(each.doc_id for each in found) != sorted(set(doc_ids)):
            return False
        addresses = {
            name: [_addresses(self._before[name], each.doc_id, each.rows[name]) for each in found]
            for name in TABLES
        }
        if any(each is None for own in addresses.values() for each in own):
            return False
        self._documents += found
        for name, own in addresses.items():
            self._addresses[name] += [address for each in own for address in each or ()]
        return True

    def rows(self) -> Int64[np.ndarray, " D"]:
        """Return the documents by their row in a scan of the version before, ascending."""
        return np.array(sorted(each.rows[DOCUMENTS].start for each in self._documents), np.int64)

    def delete(self, dataset: lance.LanceDataset, name: str) -> bool:
        """Delete their rows from the latest version of a table; say whether there were any."""
        rows: dict[int, list[int]] = {}
        for address in self._addresses[name]:
            rows.setdefault(address >> _OFFSET_BITS, []).append(address & ((1 << _OFFSET_BITS) - 1))
        if not rows:
            return False
        fragments = {fragment.fragment_id: fragment for fragment in dataset.get_fragments()}
        left = {number: fragments[number].delete_rows(rows[number]) for number in sorted(rows)}
        deletion = lance.LanceOperation.Delete(
            [fragment for fragment in left.values() if fragment is not None],
            [number for number, fragment in left.items() if fragment is None],
            f"{len(self._addresses[name])} rows by their addresses",
        )
        lance.LanceDataset.commit(dataset, deletion, read_version=dataset.version)
        return True


def _addresses(dataset: lance.LanceDataset, doc_id: str, rows: slice) -> list[int] | None:
    """Return the addresses of rows of a scan; None where one is not of the document."""
    num_rows = rows.stop - rows.start
    if not num_rows:
        return []
    found = dataset.scanner(
        columns=["doc_id"], with_row_address=True, offset=rows.start, limit=num_rows, scan_in_order=True
    ).to_table()
    if found.column("doc_id").to_pylist() != [doc_id] * num_rows:
        return None
    return found.column("_rowaddr").to_pylist()
