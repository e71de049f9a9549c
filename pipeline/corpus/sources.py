"""Where the corpus lies: files, folders, globs and URIs become one sorted list of files with their formats.

First step of stage 1. Nothing is opened here but folders. A file's format is told by its suffix; one without
a known suffix that is named outright is taken for Parquet. A folder or a glob is read as the first of
``KINDS`` that it holds, so that a note beside Parquet files is not taken for a document.
:mod:`cairn.pipeline.corpus.listing` says which names are left out. ``key=value`` folders below a source
become partition values. A folder that is a table of Lance, Delta or Iceberg becomes the data files that its
latest version names (:mod:`cairn.pipeline.corpus.tables`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import unquote, urlsplit, urlunsplit

import fsspec
import pyarrow as pa
from cairn.pipeline.corpus.listing import Entry, children, files_below, is_hidden, is_utf8, shown
from cairn.pipeline.corpus.tables.part import TablePart
from cairn.pipeline.corpus.tables.tables import METADATA_SUFFIX, parts_of, table_format
from cairn.pipeline.errors import SourceError, TryAgainError
from pyarrow.fs import FileSystem, FileType, FSSpecHandler, LocalFileSystem, PyFileSystem

FormatName = Literal["parquet", "table", "table_part", "arrow", "json_lines", "csv", "text", "html"]

SUFFIXES: Mapping[str, FormatName] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".csv": "csv",
    ".tsv": "csv",
    ".md": "text",
    ".markdown": "text",
    ".txt": "text",
    ".html": "html",
    ".htm": "html",
}
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""What may follow the suffix of JSON lines and CSV."""
DOCUMENTS: frozenset[FormatName] = frozenset({"text", "html"})
"""Formats whose files are a document each; its id is the file's ``relative``."""
KINDS: Sequence[frozenset[FormatName]] = (
    frozenset({"parquet"}),
    frozenset({"arrow"}),
    frozenset({"json_lines"}),
    frozenset({"csv"}),
    DOCUMENTS,
)
READABLE = ".parquet, .arrow, .jsonl, .csv, .md, .txt, .html"
"""The suffixes that a sentence names."""
INFERRED: frozenset[FormatName] = frozenset({"json_lines", "csv"})
"""Formats whose files have no types of their own."""
_DATASET_FILES = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
SHOWN_TABLES = 3
BUCKET_SCHEMES = ("s3", "gs", "gcs")
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

_STORE_ERROR = re.compile(
    r"AWS Error (?!ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_|RESOURCE_NOT_FOUND)"
    r"|^(?!.*//169\.254\.).*, after \d+ retries",
    re.DOTALL,
)
"""What Arrow and libraries of tables say when a store could not answer, and not what it answered.

Addresses from 169.254 on are those of machines in a cloud that give out keys: there are none then.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """A table in memory in the place of a path; ``name`` is what its rows have as their source file."""

    table: pa.Table
    name: str = "memory"


Source = str | TableSource
"""A path, a glob, a URI, or a table in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file to read, a part of a table, or a table in memory, which has no identity and no path.

    ``name`` is how the user would call it, ``source`` the file, folder or glob that was named, ``relative``
    its path below that, ``partitions`` its ``key=value`` folders, outermost first. A file with a ``fault``
    cannot be opened.
    """

    filesystem: FileSystem
    path: str
    name: str
    source: str
    relative: str = ""
    partitions: tuple[tuple[str, str | None], ...] = ()
    fault: str | None = None
    format: FormatName = "parquet"
    table: pa.Table | None = None
    part: TablePart | None = None

    @property
    def address(self) -> str:
        """The path with its file system: what tells two files apart, however the user named them."""
        return f"{self.format if self.table is not None else self.filesystem.type_name}:{self.path}"

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
        _require_answer(self.name, error)
        try:
            self.filesystem.get_file_info(self.path)
        except OSError as unreachable:
            raise _no_answer(self.name, unreachable) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Root:
    """A source as given, split into the folder or file that exists and the glob components below it."""

    filesystem: FileSystem
    path: str
    name: str
    pattern: tuple[str, ...] = ()

    def file(self, entry: Entry) -> SourceFile:
        relative = shown(_relative(entry.path, self.path))
        folders = [part.split("=", 1) for part in relative.split("/")[:-1] if "=" in part]
        partitions = tuple(
            (unquote(key), None if value == HIVE_NULL else unquote(value)) for key, value in folders
        )
        return SourceFile(
            filesystem=self.filesystem,
            path=entry.path,
            name=f"{self.name.rstrip('/')}/{relative}" if relative else self.name,
            source="/".join((self.name.rstrip("/") or "/", *self.pattern)),
            relative=relative or entry.name,
            partitions=partitions,
            fault=entry.fault,
            format=_format_of(entry.path) or "parquet",
        )

    def table_files(self, path: str) -> list[SourceFile]:
        """Return the parts of the table at a path, none where there is no table."""
        found = table_format(self.filesystem, path)
        if found is None:
            return []
        below = shown(_relative(path, self.path))
        name = f"{self.name.rstrip('/')}/{below}" if below else self.name
        try:
            parts = parts_of(self.filesystem, path, name, found)
        except SourceError as error:
            if not isinstance(self.filesystem, LocalFileSystem):
                _require_answer(name, error.__cause__ or error)
            raise
        if path.endswith(METADATA_SUFFIX):  # each version has another, of the same data files
            path, name = (each.rpartition("/metadata/")[0] or each for each in (path, name))
        return [
            SourceFile(
                filesystem=self.filesystem,
                path=f"{path.rstrip('/')}/{part.name}",
                name=f"{name.rstrip('/')}/{part.name}",
                source="/".join((self.name.rstrip("/") or "/", *self.pattern)),
                relative=part.name,
                format="table_part",
                part=part,
            )
            for part in parts
        ]


def resolve_sources(sources: Sequence[Source], unread: Counter[str] | None = None) -> tuple[SourceFile, ...]:
    """Find every file of the sources, ordered by path, each once.

    ``unread`` counts, by suffix, the files of folders and globs that are of no kind or of another one.
    Raises :class:`SourceError` in one sentence when a source does not exist or holds no file to read.
    """
    if not sources:
        raise SourceError(
            "at least one source must be given, got none; name a file, a folder, a glob or a URI"
        )
    found: dict[tuple[str, str], SourceFile] = {}
    for place, source in enumerate(sources):
        files = _resolve_one(source, unread) if isinstance(source, str) else [_in_memory(source, place)]
        for file in files:
            found.setdefault((file.address.removesuffix(file.path), file.path), file)
    return tuple(found[key] for key in sorted(found, key=lambda key: (key[1], key[0])))


def _in_memory(source: TableSource, place: int) -> SourceFile:
    return SourceFile(
        filesystem=LocalFileSystem(),
        path=str(place),
        name=source.name,
        source=source.name,
        format="table",
        table=source.table,
    )


def _resolve_one(source: str, unread: Counter[str] | None) -> list[SourceFile]:
    if not source.strip():
        raise SourceError(f"a source must be a path, a glob or a URI, got {source!r}")
    root = _root_of(source)
    files, entries = list[SourceFile](), list[Entry]()
    try:
        if root.pattern:
            matches = [*_expand(root.filesystem, root.path, root.pattern)]
            missing = f"no file that can be read ({READABLE}) matches {root.name}/{'/'.join(root.pattern)}"
        else:
            kind = root.filesystem.get_file_info(root.path).type
            if kind == FileType.NotFound:
                raise SourceError(
                    f"source {root.name} does not exist; give a file, a folder, a glob or a URI"
                )
            if kind == FileType.File:
                return root.table_files(root.path) or [root.file(Entry(path=root.path))]
            matches = [Entry(path=root.path, is_folder=True)]
            missing = f"folder {root.name} holds no file that can be read ({READABLE})"
        for match in matches:
            table = root.table_files(match.path) if match.is_folder and match.fault is None else []
            files += table
            entries += () if table else _below(root.filesystem, match)
    except (OSError, pa.ArrowException) as error:
        _require_answer(root.name, error)
        raise SourceError(f"source {root.name} cannot be listed: {_first_line(error)}") from error
    kept = _of_one_kind(entries)
    if unread is not None:
        read = {entry.path for entry in kept}
        others = [entry for entry in entries if entry.path not in read and not _is_of_a_dataset(entry)]
        unread.update(PurePosixPath(entry.name).suffix or entry.name for entry in others)
    files += map(root.file, kept)
    if not files:
        tables = [
            name for match in matches if match.is_folder for name in _tables_in(root.filesystem, match.path)
        ]
        if tables:
            raise SourceError(
                f"{root.name} must be a table, got a folder of tables "
                f"({', '.join(tables[:SHOWN_TABLES])}); name one, as in "
                f"{root.name.rstrip('/')}/{tables[0]}, or several by a glob"
            )
        raise SourceError(f"{missing}; hidden files and names that start with _ are skipped")
    return files


def _tables_in(filesystem: FileSystem, folder: str) -> list[str]:
    """Return the names of the tables in a folder, such as the databases of LanceDB have."""
    entries = [entry for entry in children(filesystem, folder) if entry.is_folder and entry.path != folder]
    return sorted(entry.name for entry in entries if table_format(filesystem, entry.path))


def _root_of(source: str) -> _Root:
    if "://" in source:
        return _root_of_uri(source)
    if not is_utf8(source):
        raise SourceError(f"the name of a source must be UTF-8, got {shown(source)}; rename it")
    # A name that exists is taken literally, so that "[draft] a.parquet" needs no escaping.
    fixed, pattern = (source, ()) if os.path.lexists(source) else _split_magic(source)
    path = Path(os.path.abspath(fixed or ".")).as_posix()  # noqa: PTH100 (Path.resolve would follow links and change the user's names)
    return _Root(filesystem=LocalFileSystem(), path=path, name=fixed or ".", pattern=pattern)


def _root_of_uri(uri: str) -> _Root:
    fixed, pattern = _split_magic(uri)
    parts = urlsplit(fixed)
    name = urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
    )  # no credentials in names and logs
    if parts.scheme in BUCKET_SCHEMES and not parts.netloc:
        raise SourceError(f"source {uri!r} must name a bucket; write {parts.scheme}://BUCKET/FOLDER")
    try:
        filesystem, path = FileSystem.from_uri(fixed)
    except (pa.ArrowException, OSError, ValueError) as arrow_error:
        try:
            fsspec_filesystem, path = fsspec.core.url_to_fs(fixed)
        except (ValueError, ImportError, OSError) as error:
            # Both errors may quote the URI, and the URI may hold a password: no cause is kept.
            causes = f"{_first_line(arrow_error)}; {_first_line(error)}".replace(fixed, name)
            raise SourceError(
                f"source {name} must be a URI that Arrow or fsspec can open: {causes}"
            ) from None
        filesystem = PyFileSystem(FSSpecHandler(fsspec_filesystem))
    return _Root(filesystem=filesystem, path=str(path).rstrip("/") or "/", name=name, pattern=pattern)


def _split_magic(path: str) -> tuple[str, tuple[str, ...]]:
    """Split before the first component that holds a wildcard."""
    parts = path.rstrip("/").split("/")
    for index, part in enumerate(parts):
        if part and any(character in part for character in "*?["):
            fixed = "/".join(parts[:index])
            return (fixed or "/") if path.startswith("/") else fixed, tuple(parts[index:])
    return path, ()


def _expand(filesystem: FileSystem, folder: str, pattern: tuple[str, ...]) -> Iterator[Entry]:
    """Yield what a glob matches below ``folder``; only folders that can match are listed."""
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        for entry in files_below(filesystem, folder):
            if entry.is_folder or _matches(tuple(_relative(entry.path, folder).split("/")), pattern):
                yield entry
        return
    for entry in children(filesystem, folder):
        if entry.path == folder:
            yield entry
            continue
        if not fnmatchcase(entry.name, head) or (is_hidden(entry.name) and not is_hidden(head)):
            continue
        if not rest:
            yield entry
        elif entry.is_folder:
            yield from _expand(filesystem, entry.path, rest)


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return (len(pattern) == 1 and bool(parts)) or any(
            _matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1)
        )
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _below(filesystem: FileSystem, match: Entry) -> Iterator[Entry]:
    """Yield the files that a folder holds, or the file itself when it is one.

    A folder that could not be listed stands for the files in it.
    """
    is_listed = match.is_folder and match.fault is None
    yield from files_below(filesystem, match.path) if is_listed else (match,)


def _of_one_kind(entries: Sequence[Entry]) -> list[Entry]:
    """Return the files of the first kind there is; folders that could not be listed stay."""
    held = {_format_of(entry.path) for entry in entries if not entry.is_folder}
    kind = next((kind for kind in KINDS if kind & held), frozenset[FormatName]())
    return [entry for entry in entries if entry.is_folder or _format_of(entry.path) in kind]


def _is_of_a_dataset(entry: Entry) -> bool:
    """Whether Hugging Face datasets keep this file beside the rows."""
    return entry.name in _DATASET_FILES or entry.name.startswith("cache-")


def _format_of(path: str) -> FormatName | None:
    name = path.rpartition("/")[2].lower()
    plain = next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), name)
    found = SUFFIXES.get("." + plain.rpartition(".")[2]) if "." in plain else None
    if found == "arrow" and name.startswith("cache-"):
        return None  # what Hugging Face datasets keep beside a dataset
    return found if plain == name or found in INFERRED else None


def _relative(path: str, folder: str) -> str:
    return path[len(folder) :].lstrip("/")


def _require_answer(name: str, error: BaseException) -> None:
    if _STORE_ERROR.search(str(error)):
        raise _no_answer(name, error) from error


def _no_answer(name: str, error: BaseException) -> TryAgainError:
    return TryAgainError(
        f"the store of source {name} does not answer: {_first_line(error)}; run the same command again "
        "when it does"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
