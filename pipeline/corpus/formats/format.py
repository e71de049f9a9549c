"""What a source format is, the file it reads, and what it says of damage.

A format owns its facts: its suffixes, whether a file says of which type its columns are, whether it is a
document or a table, and how it is read. Damage raises one of ``DECODE_ERRORS``, or is an :class:`Undecoded`.
"""

from __future__ import annotations

import contextlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, Final, TypeVar, cast

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import Learned
from cairn.pipeline.corpus.formats.encodings import HEAD_BYTES, encoding_of
from cairn.pipeline.corpus.formats.file_kind import BZIP2, GZIP, HEAD, ZSTD, no_kind, other_kind
from cairn.pipeline.errors import (
    TryAgainError,
    first_line,
)
from pyarrow.fs import FileSystem, LocalFileSystem

_Item = TypeVar("_Item")

DECODE_ERRORS: Final = (pa.ArrowException, OSError, MemoryError, ValueError)
"""What Arrow raises on damaged bytes; ``MemoryError`` because a flipped size field asks for terabytes."""
PAGE_BREAK: Final = "\n\f\n"
"""What stands between two pages in the text of a document."""
HEADING_ID: Final = re.compile(r"(?<![ \t])[ \t]+\{:?[ \t]*[#.][^{}\n]*\}[ \t#]*$")
"""What generators of pages read as the address or classes of a heading, and do not show."""
COMPRESSED: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_PACKED: Final = {".gz": GZIP, ".zst": ZSTD, ".bz2": BZIP2}
MAX_COLUMNS: Final = 10_000
ENCODING: Final = b"encoding"
"""Metadata of the batches of a file whose encoding is a guess."""
_STORE_ERROR: Final = re.compile(
    r"AWS Error (?!ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_|RESOURCE_NOT_FOUND)"
    r"|^(?!.*//169\.254\.).*, after \d+ retries",
    re.DOTALL,
)
"""What Arrow and libraries of tables say when a store could not answer, and not what it answered.

Addresses from 169.254 on are those of machines in a cloud that give out keys: there are none then.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """What a file says of itself: its columns, and how many rows it has.

    ``fault`` says what of it cannot be read while its rows can; such a footer is not kept.
    """

    schema: pa.Schema
    num_rows: int
    fault: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecoded:
    """Rows that are in a file by its footer but not decoded.

    Such as a refused row group, or the rest of the file (``num_rows`` None). No rows: those that were read
    may have swallowed others, or others may be cut off, and ``detail`` says why.
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
    unit: ClassVar[str | None] = None
    """What the pages of a document are called, None where it has none."""
    kinds: ClassVar[tuple[str, ...]] = ()
    """What the first bytes of a file may say that it is, of the kinds of ``file_kind``."""

    def missing(self) -> str | None:
        """Say what to do before files can be read, None where they can."""
        return None

    @abstractmethod
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns and the number of rows; rows are not kept."""

    @abstractmethod
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the columns that ``types`` names, in batches of at most ``batch_rows`` rows.

        A type is what all files agreed on; columns may have others, which the checks make values of it.
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
    def is_named(self) -> bool:
        """Whether the user named the file or its table, and no folder or glob that it was found in."""
        return self.part is not None or self.name == self.source

    @property
    def address(self) -> str:
        """The path with its file system: what tells two files apart, however the user named them."""
        return f"{self.filesystem.type_name}:{self.path}"

    def doc_id(self, config: CorpusConfig) -> str:
        """Return the id of a document: its path below the source, on request with the source's name."""
        folder = PurePosixPath(self.path.removesuffix(self.relative)).name
        return f"{folder}/{self.relative}" if config.id_prefix and folder else self.relative

    def open(self) -> pa.NativeFile:
        """Open for random access; the caller closes it."""
        return self.filesystem.open_input_file(self.path)

    def open_stream(self) -> pa.NativeFile:
        """Open for reading from the start, decompressed as its suffix says; the caller closes it."""
        compression = COMPRESSED.get(PurePosixPath(self.path.lower()).suffix)
        return self.filesystem.open_input_stream(self.path, compression=compression)

    @property
    def suffix(self) -> str:
        """As :func:`suffix_of` tells it."""
        return suffix_of(self.path)

    def damage(self, error: BaseException) -> str:
        """Say in a phrase why the file cannot be read: it is of another kind, else what an error says."""
        packed = _PACKED.get(PurePosixPath(self.path.lower()).suffix)
        with contextlib.suppress(*DECODE_ERRORS):
            if self.part is None:
                with self.filesystem.open_input_stream(self.path, compression=None) as stream:
                    head = stream.read(HEAD)
                if told := no_kind(head, self.suffix, (packed,) if packed else self.format.kinds):
                    return told
        return damage_of(error)

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


def suffix_of(path: str) -> str:
    """Return what the name of a file ends with, both endings of one that is compressed, such as `.csv.gz`."""
    name = PurePosixPath(f"_{path.rpartition('/')[2].lower()}")  # also of a name that is nothing else
    return "".join(name.suffixes[-2:]) if name.suffix in COMPRESSED else name.suffix


def learned_footer(file: SourceFile, learned: Learned, counts: Iterable[int]) -> Footer:
    """Return the footer of what a pass has learned while it yielded numbers of rows.

    A pass that fails has met the beginning of the file, and the rest counts as one row, which reading it
    quarantines. Where nothing was met, the error is raised: the file is damaged. So is one with more than
    ``MAX_COLUMNS`` columns, whose names and types would all be kept in memory: :class:`ValueError`.
    """
    num_rows = 0
    try:
        for count in counts:
            num_rows += count
            if len(learned.types) > MAX_COLUMNS:
                break
    except DECODE_ERRORS as error:
        file.require_reachable(error)
        if not learned.types:
            raise
        num_rows += 1
    if len(learned.types) > MAX_COLUMNS:
        raise ValueError(f"a file must have at most {MAX_COLUMNS} columns, got more")
    return Footer(schema=learned.schema(), num_rows=num_rows)


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


def batched(
    file: SourceFile,
    rows: Iterator[tuple[_Item, int] | Undecoded],
    make: Callable[[Sequence[_Item]], pa.RecordBatch],
    config: CorpusConfig,
) -> Iterator[pa.RecordBatch | Undecoded]:
    """Yield rows, given with their sizes, as batches; those in front of damage are kept."""
    pending, size_bytes = list[_Item](), 0
    for item in damage_reported(file, rows):
        if not isinstance(item, Undecoded):
            pending.append(item[0])
            size_bytes += item[1]
        is_full = len(pending) == config.batch_rows or size_bytes >= config.batch_bytes
        if pending and (is_full or isinstance(item, Undecoded)):
            yield make(pending)
            pending, size_bytes = [], 0
        if isinstance(item, Undecoded):
            yield item
    if pending:
        yield make(pending)


@contextlib.contextmanager
def opened_text(
    file: SourceFile, *, newline: str | None, guesses: bool
) -> Generator[tuple[bytes, io.TextIOWrapper]]:
    """Open a text of Unicode, or of an encoding that is a guess; give its first bytes and the whole."""
    with file.open_stream() as stream:
        buffered = io.BufferedReader(cast("io.RawIOBase", stream), HEAD_BYTES)
        head = buffered.peek(HEAD_BYTES)
        if told := other_kind(head, file.suffix, file.format.kinds):
            raise ValueError(told)
        encoding, is_guess = encoding_of(head)
        is_wide = encoding.startswith(("utf-16", "utf-32"))
        if is_guess and not guesses and not is_wide:
            encoding = "utf-8-sig"
        errors = "replace" if is_wide else "surrogateescape"
        with io.TextIOWrapper(buffered, encoding, errors, newline=newline) as text:
            yield head, text


class LongLineError(Exception):
    """A line is longer than may be."""


class TextLines:
    """The lines of a text, with the number of the last one, and those of the row that is being read.

    A line that is too long raises :class:`LongLineError`, and the next one is read behind it. A row that is
    too long, as where a quote does not close, raises :class:`ValueError`.
    """

    def __init__(self, text: io.TextIOWrapper, limit: int) -> None:
        self.number = 0
        self.of_row: list[str] = []
        self._text, self._limit, self._size = text, limit, 0

    def begin_row(self) -> None:
        """Forget the lines of the row before."""
        self.of_row, self._size = [], 0

    def __iter__(self) -> TextLines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._limit)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) == self._limit and not line.endswith(("\n", "\r")):
            while (rest := self._text.readline(self._limit)) and not rest.endswith(("\n", "\r")):
                pass
            raise LongLineError(f"has more than {self._limit} characters")
        self._size += len(line)
        if self._size > self._limit:
            first = self.number - len(self.of_row)
            raise ValueError(
                f"a quote that opens in line {first} does not close within {self._limit} characters"
            )
        self.of_row.append(line)
        return line


def damage_of(error: BaseException) -> str:
    """Say in a phrase what an error of reading says of a file."""
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    if isinstance(error, PermissionError):
        return "permission denied"
    return first_line(error)


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


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogate, as names of this machine have for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
