"""The two tables of a collection by name, and one of them opened for reading at a pinned version.

LanceDB is imported only where a table of its own is opened: it takes a second and a half of a process, more
than all else that a search without a filter loads. Lance is imported where a table is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.lance_errors import LANCE_ERRORS

if TYPE_CHECKING:
    import lance
    import lancedb

DOCUMENTS, CHUNKS = "documents", "chunks"
TABLES: Final = (DOCUMENTS, CHUNKS)
TEXT_INDEX_COLUMNS: Final = ("text", "title")


def open_pinned_dataset(database: Path, name: str, version: int) -> lance.LanceDataset:
    """Open a table of a LanceDB folder as Lance has it, at a version; one that is gone raises DamageError."""
    import lance

    try:
        return lance.dataset(str(database / f"{name}.lance"), version=version)
    except LANCE_ERRORS as error:
        raise DamageError(f"version {version} of table `{name}` cannot be opened") from error


def open_pinned_table(database: Path, name: str, version: int) -> lancedb.table.Table:
    """Open a table as LanceDB has it, at a version; LanceDB's own errors pass, also of the latest version."""
    import lancedb  # as the module says

    return lancedb.connect(str(database)).open_table(name, version=version)
