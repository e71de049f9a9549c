"""What is a table, told by what its writers keep in its folder, and how it is opened.

    Delta      a folder ``_delta_log``
    Lance      a folder ``_versions``
    Iceberg    a folder ``metadata`` with files ``….metadata.json``, or one such file

A library is imported once a table of its format is a source. Libraries reach a store by the usual environment
variables of its vendor: what a source's URI says beside bucket and path is for Arrow alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Final, Literal

from cairn.pipeline.corpus.listing import children, is_utf8
from cairn.pipeline.corpus.tables.part import TablePart
from cairn.pipeline.errors import CairnError, SourceError, extra_missing, is_panic
from pyarrow.fs import FileSystem, FileType, LocalFileSystem

TableFormat = Literal["Delta", "Iceberg", "Lance"]
METADATA_SUFFIX: Final = ".metadata.json"
_MARKS: Final[Mapping[TableFormat, str]] = {
    "Delta": "_delta_log",
    "Lance": "_versions",
    "Iceberg": "metadata",
}
_SHOWN_CHARACTERS: Final = 300
_BRANCH: Final = re.compile(r"\s*\n\s*(?:\x1b\[\d+m|↳)*\s*")
"""What stands between a sentence and its cause where deltalake draws them as a tree."""


def table_format(filesystem: FileSystem, path: str) -> TableFormat | None:
    """Say which format a folder or a file is a table of, if it is one."""
    if not is_utf8(path):  # Arrow cannot be asked for it; listing says what is wrong with its name
        return None
    if filesystem.get_file_info(path).type == FileType.File:
        return "Iceberg" if path.endswith(METADATA_SUFFIX) else None
    folders = filesystem.get_file_info([f"{path}/{mark}" for mark in _MARKS.values()])
    for found, folder in zip(_MARKS, folders, strict=True):
        if folder.type == FileType.Directory and (found != "Iceberg" or _metadata_files(filesystem, path)):
            return found
    return None


def parts_of(filesystem: FileSystem, path: str, name: str, found: TableFormat) -> Sequence[TablePart]:
    """Open a table and return its parts; ``name`` is how the user would call it.

    Raises :class:`ConfigError` where its library is not installed, and :class:`SourceError` where the table
    cannot be opened.
    """
    scheme = "" if isinstance(filesystem, LocalFileSystem) else f"{name.partition('://')[0]}://"
    try:
        match found:
            case "Delta":
                from cairn.pipeline.corpus.tables.delta import delta_parts

                return delta_parts(scheme + path)
            case "Lance":
                from cairn.pipeline.corpus.tables.lance import lance_parts

                return lance_parts(scheme + path)
            case "Iceberg":
                from cairn.pipeline.corpus.tables.iceberg import iceberg_parts, newest_metadata

                if not path.endswith(METADATA_SUFFIX):
                    path = f"{path}/metadata/{newest_metadata(_metadata_files(filesystem, path))}"
                return iceberg_parts(scheme + path)
    except ModuleNotFoundError as error:
        package = "pyiceberg" if found == "Iceberg" else "deltalake"
        raise extra_missing(
            error, what=f"{found} table {name}", module=package, package=package, extra=found.lower()
        ) from error
    except CairnError:
        raise
    except BaseException as error:
        cause = _cause_of(error)
        raise SourceError(f"{found} table {name} must be one that can be opened, got: {cause}") from error


@contextlib.contextmanager
def damage_raised() -> Generator[None]:
    """Raise :class:`ValueError` for what a library raises in the block, in one line.

    A file that is gone or may not be read is told as usual.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except BaseException as error:
        raise ValueError(_cause_of(error)) from error


def _cause_of(error: BaseException) -> str:
    """Return what a library says, in one line; each raises errors of its own.

    What is no error of a library, such as an interrupt, is raised as it is.
    """
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    return (_BRANCH.sub(": ", str(error).strip()) or type(error).__name__)[:_SHOWN_CHARACTERS]


def _metadata_files(filesystem: FileSystem, path: str) -> list[str]:
    """Return the names of the metadata files of a table of Iceberg, none where it is no such table."""
    found = children(filesystem, f"{path}/{_MARKS['Iceberg']}")
    return [entry.name for entry in found if entry.name.endswith(METADATA_SUFFIX)]
