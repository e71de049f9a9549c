"""The two tables of a collection by name, and one of them opened for reading at a pinned version.

LanceDB is imported only where a table of its own is opened: it takes a second and a half of a process, more
than all else that a search without a filter loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import lance

from pipeline.index.layout import CollectionLayout

if TYPE_CHECKING:
    import lancedb

DOCUMENTS, CHUNKS = "documents", "chunks"
TABLES: Final = (DOCUMENTS, CHUNKS)
TEXT_INDEX_COLUMNS: Final = ("text", "title")


def open_pinned_dataset(layout: CollectionLayout, name: str, version: int) -> lance.LanceDataset:
    """Open a table as Lance has it, at a version; one that is gone raises :class:`IntegrityError`."""
    try:
        return lance.dataset(str(layout.lance_folder / f"{name}.lance"), version=version)
    except (ValueError, RuntimeError, OSError) as error:
        raise layout.damaged(f"version {version} of table `{name}` cannot be opened") from error


def open_pinned_table(layout: CollectionLayout, name: str, version: int) -> lancedb.table.Table:
    """Open a table as LanceDB has it, at a version; LanceDB's own errors pass."""
    import lancedb  # as the module says

    table = lancedb.connect(str(layout.lance_folder)).open_table(name)
    table.checkout(version)
    return table
