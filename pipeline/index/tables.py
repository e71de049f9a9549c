"""The two tables of a collection by name, and one of them opened for reading at a pinned version.

LanceDB is imported only where a table of its own is opened: it takes a second and a half of a process, more
than all else that a search without a filter loads. Lance is imported where a table is opened.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cairn.pipeline.durable import raise_storage_error
from cairn.pipeline.errors import CairnError, DamageError, StorageError, is_panic

if TYPE_CHECKING:
    import lance
    import lancedb


LANCE_ERRORS: Final = (OSError, RuntimeError, ValueError)
"""What Lance and LanceDB raise: they have no exceptions of their own that can be relied on."""


@contextlib.contextmanager
def lance_errors(action: str, *, damaged: bool = False) -> Generator[None]:
    """Report what Lance raises in the block as a :class:`CairnError`.

    ``damaged`` says that stored files, not the disk, are to blame.
    """
    try:
        yield
    except LANCE_ERRORS as error:
        if isinstance(error, CairnError):
            raise
        code = re.search(r"os error (\d+)", str(error))
        if code is not None:
            raise_storage_error(OSError(int(code.group(1)), os.strerror(int(code.group(1)))), action)
        if damaged:
            raise DamageError(f"{action} failed: the stored files do not fit together") from error
        raise StorageError(f"{action} failed inside LanceDB: {_first_line(error)}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise DamageError(f"{action} failed: LanceDB gave up on what is stored", verb="verify") from error


def _first_line(error: Exception) -> str:
    return re.sub(r"/\S+", "…", str(error).splitlines()[0] if str(error) else type(error).__name__)[:200]


DOCUMENTS, CHUNKS = "documents", "chunks"
TABLES: Final = (DOCUMENTS, CHUNKS)


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
