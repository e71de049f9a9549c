"""What a source format is, the file it reads, and what it says of damage.

Typed files, as Parquet, say what their columns are; those of other formats are learned by a first pass.
Damage raises one of ``DECODE_ERRORS``, or is an :class:`Undecoded`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, Final, TypeVar

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.errors import TryAgainError
from pyarrow.fs import FileSystem, LocalFileSystem

_Item = TypeVar("_Item")

DECODE_ERRORS: Final = (pa.ArrowException, OSError, MemoryError, ValueError)
"""What Arrow raises on damaged bytes; ``MemoryError`` because a flipped size field asks for terabytes."""
COMPRESSED: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_STORE_ERROR: Final = re.compile(
    r"AWS Error (?!ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_|RESOURCE_NOT_FOUND)"
    r"|^(?!.*//169\.254\.).*, after \d+ retries",
    re.DOTALL,
)
"""What Arrow and libraries of tables say when a store could not answer, and not what it answered.

Addresses from 169.254 on are those of machines in a cloud that give out keys: there are none then.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecoded:
    """Rows that are in a file by its footer but not decoded.

    Such as a refused row group, or the rest of the file (``num_rows`` None).
    """

    num_rows: int | None
    detail: str


class Format(ABC):
    """Reads files of one format, told by their ``suffixes``."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    is_typed: ClassVar[bool] = True
    """Whether files say of which type their columns are."""
    is_document: ClassVar[bool] = False
    """Whether a file is one document; its id is its path below the source."""
    is_compressible: ClassVar[bool] = False
    """Whether one of ``COMPRESSED`` may follow the suffix."""

    @abstractmethod
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns and the number of rows; rows are not kept."""

    @abstractmethod
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the columns that ``types`` names, in batches of at most ``batch_rows`` rows.

        A type is what all files agreed on: a format whose files have no types of their own makes values of
        it, others may leave them as they are.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """Rows of a table that stay as they are: changed rows of a later version are in other parts.

    ``name`` is its path below the table. ``identity`` differs from that of the same path with other rows;
    None where nothing tells. ``schema`` is that of the table, so files from before a column was added have
    it, too. ``read`` yields columns of its rows, in batches of about so many. Damage raises what the library
    does.
    """

    schema: pa.Schema
    read: Callable[[Sequence[str], int], Iterable[pa.RecordBatch]]
    count: Callable[[], int] | None = None
    name: str = ""
    identity: str | None = ""

    def num_rows(self) -> int:
        """Count the rows that are not deleted, by reading a column where no metadata tells."""
        if self.count is not None:
            return self.count()
        return sum(batch.num_rows for batch in self.read(self.schema.names[:1], 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file to read, or a part of a table.

    ``name`` is how the user would call it, ``source`` the file, folder or glob that was named, ``relative``
    its path below that, ``partitions`` its ``key=value`` folders, outermost first. A file with a ``fault``
    cannot be opened.
    """

    filesystem: FileSystem
    path: str
    name: str
    source: str
    format: Format
    relative: str = ""
    partitions: tuple[tuple[str, str | None], ...] = ()
    fault: str | None = None
    part: TablePart | None = None

    @property
    def address(self) -> str:
        """The path with its file system: what tells two files apart, however the user named them."""
        return f"{self.filesystem.type_name}:{self.path}"

    def open(self) -> pa.NativeFile:
        """Open for random access; the caller closes it."""
        return self.filesystem.open_input_file(self.path)

    def open_stream(self) -> pa.NativeFile:
        """Open for reading from the start, decompressed as its suffix says; the caller closes it."""
        compression = COMPRESSED.get(PurePosixPath(self.path.lower()).suffix)
        return self.filesystem.open_input_stream(self.path, compression=compression)

    def require_reachable(self, error: BaseException) -> None:
        """Raise :class:`TryAgainError` where an error of reading comes from a store that does not answer.

        The file may be whole.
        """
        is_told = isinstance(error, OSError) or self.part is not None
        if not is_told or isinstance(self.filesystem, LocalFileSystem):
            return
        require_answer(self.name, error)
        try:
            self.filesystem.get_file_info(self.path)
        except OSError as unreachable:
            raise _no_answer(self.name, unreachable) from error


def damage_reported(file: SourceFile, items: Iterator[_Item | Undecoded]) -> Iterator[_Item | Undecoded]:
    """End a stream that fails to decode with the damage.

    A fault of ours further on, or of a store, is not mistaken for one.
    """
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except DECODE_ERRORS as error:
            file.require_reachable(error)
            yield Undecoded(num_rows=None, detail=damage_of(error))
            return
        yield item


def damage_of(error: BaseException) -> str:
    """Say in a phrase what an error of reading says of a file."""
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    if isinstance(error, PermissionError):
        return "permission denied"
    return first_line(error)[:300]


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def require_answer(name: str, error: BaseException) -> None:
    """Raise :class:`TryAgainError` where an error says that a store could not answer."""
    if _STORE_ERROR.search(str(error)):
        raise _no_answer(name, error) from error


def _no_answer(name: str, error: BaseException) -> TryAgainError:
    return TryAgainError(
        f"the store of source {name} does not answer: {first_line(error)}; run the same command again "
        "when it does"
    )


def check_names(schema: pa.Schema) -> None:
    """Read every name and time zone once.

    A damaged one is not valid UTF-8 and raises here instead of half-way.
    """
    for field in schema:
        arrow_type = field.type
        while hasattr(arrow_type, "value_type"):
            arrow_type = arrow_type.value_type
        _ = field.name, arrow_type.tz if pa.types.is_timestamp(arrow_type) else None
