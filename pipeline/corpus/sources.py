"""Where the corpus lies: files, folders, globs and URIs become one sorted list of files with their formats.

First step of stage 1. A file's format is told by its suffix; one without a known suffix that is named
outright is looked at: it may be Parquet. Formats may stand side by side in a folder. ``key=value`` folders
below a source become partition values.

One rule lists local folders, buckets and fsspec. What cannot be read has a fault and does not end the
listing; what is left out is counted by its reason (:class:`LeftOut`). A local folder is read once, however
many links lead to it, so a link back into its own folder adds nothing. Names that start with ``.``,
``node_modules`` and Cairn's own collections are never entered; tables in names that start with ``_`` are
leftovers of their writers, documents in such names are read.

A folder that is a table becomes the data files that its latest version names (``formats.tables``). It is told
by what its writers keep in it: ``_delta_log``, ``_versions``, or ``metadata`` with files ``….metadata.json``;
such a file alone is a table of Iceberg, too. A folder with a table of Delta or Iceberg below it is refused:
listing would find the files of deleted rows, too.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import fsspec
import pyarrow as pa
from cairn.pipeline.corpus.formats import FORMAT_OF, PARQUET, READABLE
from cairn.pipeline.corpus.formats.file_kind import HEAD, kind_of, other_kind
from cairn.pipeline.corpus.formats.format import (
    Format,
    SourceFile,
    TablePart,
    is_utf8,
    require_answer,
    suffix_of,
)
from cairn.pipeline.corpus.formats.rows import AS_LINES, GivenRowsFormat
from cairn.pipeline.corpus.formats.tables import TableFormat, TableKind, memory_part, open_parts
from cairn.pipeline.errors import (
    SourceError,
    first_line,
)
from fsspec.utils import glob_translate
from pyarrow.fs import FileSelector, FileSystem, FileType, FSSpecHandler, LocalFileSystem, PyFileSystem

_TABLE: Final = TableFormat()
_METADATA_SUFFIX: Final = ".metadata.json"
_MARKS: Final[Mapping[TableKind, str]] = {
    "Delta": "_delta_log",
    "Lance": "_versions",
    "Iceberg": "metadata",
}
_IN_TABLE: Final = re.compile(r"(.*)/(?:_delta_log(?:/|$)|metadata/[^/]*\.metadata\.json$)")
_VERSION: Final = re.compile(r"v?(\d+)\b")
_DATASET_FILES: Final = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
_NOT_UTF8: Final = "its name must be UTF-8; rename it"
_SHOWN_NAMES: Final = 3
_SHOWN_REASONS: Final = 6
_COLLECTION: Final = ({"CURRENT", "generations"}, {".lock", "lance"}, {".lock", "pending"})
"""What stands in the folder of a collection: after its first ingest, and before its end."""
HIDDEN: Final = "hidden"
NODE_MODULES: Final = "node_modules"
COLLECTIONS: Final = "collections of Cairn"
_UNTOLD: Final = frozenset({HIDDEN, NODE_MODULES, COLLECTIONS})
"""What no one expects to be read: it is counted, and no warning names it."""
UNDERSCORED: Final = "tables in names that start with _"
OUTSIDE: Final = "links out of the folders that may be read"
_BUCKET_SCHEMES: Final = ("s3", "gs", "gcs")
_HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """A table or rows of Python values in memory in the place of a path.

    ``name`` is what the rows have as their source file.
    """

    table: pa.Table | Sequence[Mapping[str, Any]]
    name: str = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedSource:
    """A source of which only what lies below the ``allowed`` folders is read, wherever links in it lead.

    Stores have no links and are not bounded.
    """

    source: str
    allowed: tuple[str, ...]

    def folders(self) -> tuple[str, ...]:
        """Return the local folders that are allowed, with no links in their paths."""
        paths = (
            FileSystem.from_uri(each)[1] if each.startswith("file://") else each for each in self.allowed
        )
        return tuple(os.path.realpath(path) for path in paths if "://" not in path)


Source = str | TableSource | BoundedSource
"""A path, a glob, a URI, or a table or rows in memory."""


class LeftOut:
    """The files and folders that are no source, counted by why, with the first names of each."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._names: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        """Note one; of a folder, all that it holds."""
        self.counts[reason] += 1
        names = self._names.setdefault(reason, [])
        if len(names) < _SHOWN_NAMES:
            names.append(name)

    def warnings(self) -> Iterator[str]:
        """Say what was left out, but for what no one expects to be read."""
        told = [(count, reason) for reason, count in self.counts.items() if reason not in _UNTOLD]
        if not told:
            return
        # Tables first: a file of another suffix was seldom meant.
        told.sort(key=lambda each: (not each[1].startswith("tables"), -each[0], each[1]))
        parts = [f"{count:,} {reason} ({self._shown(reason)})" for count, reason in told[:_SHOWN_REASONS]]
        more = f", and {len(told) - _SHOWN_REASONS} kinds more" if len(told) > _SHOWN_REASONS else ""
        yield f"left out: {', '.join(parts)}{more}"

    def _shown(self, reason: str) -> str:
        names = self._names[reason]
        return ", ".join(names) + (", …" if self.counts[reason] > len(names) else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A name in a folder, and why it cannot be read if it cannot; ``OUTSIDE`` where it must not."""

    path: str
    is_folder: bool = False
    is_link: bool = False
    fault: str | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Root:
    """A source as given, split into the folder or file that exists and the glob components below it."""

    filesystem: FileSystem
    path: str
    name: str
    pattern: tuple[str, ...] = ()
    bounds: tuple[str, ...] | None = None

    @property
    def source(self) -> str:
        """What was named."""
        return "/".join((self.name.rstrip("/") or "/", *self.pattern))

    def file(self, entry: _Entry) -> SourceFile:
        relative = _shown(_relative(entry.path, self.path))
        folders = [part.split("=", 1) for part in relative.split("/")[:-1] if "=" in part]
        partitions = tuple(
            (unquote(key), None if value == _HIVE_NULL else unquote(value)) for key, value in folders
        )
        return SourceFile(
            filesystem=self.filesystem,
            path=entry.path,
            name=self.shown(entry.path),
            source=self.source,
            relative=relative or entry.name,
            partitions=partitions,
            fault=entry.fault,
            format=format_of(entry.path) or PARQUET,
        )

    def shown(self, path: str) -> str:
        """Return a path below as the user would call it."""
        below = _shown(_relative(path, self.path))
        return f"{self.name.rstrip('/')}/{below}" if below else self.name

    def is_outside(self, path: str) -> bool:
        """Tell whether a path leads out of the bounds."""
        if self.bounds is None or not isinstance(self.filesystem, LocalFileSystem):
            return False
        place = Path(os.path.realpath(path))
        return not any(map(place.is_relative_to, self.bounds))

    def children(self, folder: str) -> list[_Entry]:
        """List a folder, sorted; links out of the bounds are neither files nor folders."""
        return [
            replace(entry, is_folder=False, fault=OUTSIDE)
            if entry.is_link and self.is_outside(entry.path)
            else entry
            for entry in _children(self.filesystem, folder)
        ]

    def table_files(self, path: str) -> list[SourceFile]:
        """Return the parts of the table at a path, none where there is no table."""
        found = _table_kind(self.filesystem, path)
        if found is None:
            return []
        name = self.shown(path)
        if self.bounds is not None and isinstance(self.filesystem, LocalFileSystem):
            link = next(_links_below(path), None)
            if link is not None:  # its library follows it
                raise SourceError(f"{found} table {name} must have no links, got {self.shown(link)}")
        try:
            parts = open_parts(found, _location(self.filesystem, path, name, found), name)
        except SourceError as error:
            if not isinstance(self.filesystem, LocalFileSystem):
                require_answer(name, error.__cause__ or error)
            raise
        if path.endswith(_METADATA_SUFFIX):  # each version has another, of the same data files
            path, name = (each.rpartition("/metadata/")[0] or each for each in (path, name))
        places = [f"{each.rstrip('/')}/" for each in (path, name)]
        return [
            _part_file(self.filesystem, places[0] + part.name, places[1] + part.name, self.source, part)
            for part in parts
        ]


def _part_file(filesystem: FileSystem, path: str, name: str, source: str, part: TablePart) -> SourceFile:
    return SourceFile(
        filesystem=filesystem,
        path=path,
        name=name,
        source=source,
        relative=part.name,
        format=_TABLE,
        part=part,
    )


def resolve_sources(sources: Sequence[Source], left_out: LeftOut | None = None) -> tuple[SourceFile, ...]:
    """Find every file of the sources, ordered by path, each once.

    ``left_out`` takes the files of folders and globs that are not read.
    Raises :class:`SourceError` in one sentence when a source does not exist or holds no file to read.
    """
    if not sources:
        raise SourceError(
            "at least one source must be given, got none; name a file, a folder, a glob or a URI"
        )
    found: dict[tuple[str, str], SourceFile] = {}
    for place, source in enumerate(sources):
        if isinstance(source, TableSource):
            table, name = source.table, source.name
            is_arrow = isinstance(table, pa.Table)
            file = _part_file(
                LocalFileSystem(), str(place), name, name, memory_part(table if is_arrow else pa.table({}))
            )
            files = [file if is_arrow else replace(file, format=GivenRowsFormat(table))]
        elif isinstance(source, BoundedSource):
            files = _files_of(source.source, left_out or LeftOut(), source.folders())
        else:
            files = _files_of(source, left_out or LeftOut())
        for file in files:
            found.setdefault((file.path, file.address), file)
    return tuple(found[key] for key in sorted(found))


def _files_of(source: str, left_out: LeftOut, bounds: tuple[str, ...] | None = None) -> list[SourceFile]:
    if not source.strip():
        raise SourceError(f"a source must be a path, a glob or a URI, got {source!r}")
    root = replace(_root_of(source), bounds=bounds)
    if root.is_outside(root.path):
        raise SourceError(f"source {root.name} must lie in the folders that may be read, got another")
    try:
        return _listed(root, left_out)
    except (OSError, pa.ArrowException) as error:
        require_answer(root.name, error)
        raise SourceError(f"source {root.name} cannot be listed: {first_line(error)}") from error


def _listed(root: _Root, left_out: LeftOut) -> list[SourceFile]:
    filesystem = root.filesystem
    if isinstance(filesystem, LocalFileSystem):
        for place in map(Path, (root.path, *map(str, Path(root.path).parents))):
            if all((place / name).exists() for name in _COLLECTION[0]):
                raise SourceError(
                    f"{root.name} is of {place.name}, a collection of Cairn, which is no source; "
                    "name the files that it was made from"
                )
    if root.pattern:
        matches = [*_expand(root, root.path, root.pattern)]
        missing = f"no file that can be read ({READABLE}) matches {root.name}/{'/'.join(root.pattern)}"
    else:
        kind = filesystem.get_file_info(root.path).type
        if kind == FileType.NotFound:
            raise SourceError(f"source {root.name} does not exist; give a file, a folder, a glob or a URI")
        if kind == FileType.File:
            return root.table_files(root.path) or [_named_file(root)]
        matches = [_Entry(path=root.path, is_folder=True)]
        missing = f"folder {root.name} holds no file that can be read ({READABLE})"
    files = list[SourceFile]()
    for match in matches:
        if match.is_folder and match.fault is None:
            table = root.table_files(match.path)
            files += table or _kept(root, _files_below(root, match.path, left_out), left_out)
        else:  # a folder that could not be listed stands for the files in it
            files += _kept(root, [match], left_out)
    if files:
        return files
    folders = [match.path for match in matches if match.is_folder]
    tables = [name for folder in folders for name in _tables_in(filesystem, folder)]
    if tables:
        raise SourceError(
            f"{root.name} must be a table, got a folder of tables ({', '.join(tables[:_SHOWN_NAMES])}); name "
            f"one, as in {root.name.rstrip('/')}/{tables[0]}, or several by a glob"
        )
    hint = "a glob has *, ?, [ ] and **, and hidden files are never read" if root.pattern else "it is empty"
    if left_out.counts and not root.pattern:
        hint = f"what it holds is never read: {', '.join(sorted(left_out.counts))}"
    raise SourceError(f"{missing}; {next(left_out.warnings(), hint)}")


def _named_file(root: _Root) -> SourceFile:
    """Return a file that is named outright; one of an unknown suffix must be Parquet."""
    suffix = PurePosixPath(root.path).suffix
    found = format_of(root.path)
    if found is not None and (missing := found.missing()):
        raise SourceError(f"{root.name} cannot be read: reading {suffix} needs another package; {missing}")
    if suffix and found is None:
        with root.filesystem.open_input_stream(root.path, compression=None) as stream:
            head = stream.read(HEAD)
        if kind_of(head) not in PARQUET.kinds:
            hint = f"write JSON as {AS_LINES}" if suffix == ".json" else "convert it to one"
            hint = other_kind(head, suffix) or hint
            raise SourceError(
                f"{root.name} must be of a kind that is read ({READABLE}), got {suffix}; {hint}"
            )
    return root.file(_Entry(path=root.path))


def _kept(root: _Root, entries: Iterable[_Entry], left_out: LeftOut) -> Iterator[SourceFile]:
    """Yield the files that are read, and note the others."""
    for entry in entries:
        found = None if entry.is_folder else format_of(entry.path)
        below = _relative(entry.path, root.path).split("/")
        asked = root.pattern[0][:1] if root.pattern else ""
        is_marked = any(part.startswith("_") for part in below) and asked != "_"
        if entry.fault == OUTSIDE:
            left_out.add(OUTSIDE, root.shown(entry.path))
        elif found is not None and (missing := found.missing()):
            left_out.add(f"{PurePosixPath(entry.name).suffix.lower()} ({missing})", root.shown(entry.path))
        elif entry.is_folder or (found and (found.is_document or not is_marked)):
            yield root.file(entry)
        elif found is not None:
            left_out.add(UNDERSCORED, root.shown(entry.path))
        elif not _is_of_a_dataset(entry):
            suffix = PurePosixPath(entry.name).suffix.lower()
            left_out.add(suffix or "without a suffix", root.shown(entry.path))


def _tables_in(filesystem: FileSystem, folder: str) -> list[str]:
    """Return the names of the tables in a folder, such as the databases of LanceDB have."""
    entries = [entry for entry in _children(filesystem, folder) if entry.is_folder and entry.path != folder]
    return sorted(entry.name for entry in entries if _table_kind(filesystem, entry.path))


def _root_of(source: str) -> _Root:
    if "://" in source:
        return _root_of_uri(source)
    if not is_utf8(source):
        raise SourceError(f"the name of a source must be UTF-8, got {_shown(source)}; rename it")
    # A name that exists is taken literally, so that "[draft] a.parquet" needs no escaping.
    fixed, pattern = (source, ()) if os.path.lexists(source) else _split_magic(source)
    path = Path(os.path.abspath(fixed or ".")).as_posix()  # noqa: PTH100 (Path.resolve would follow links and change the user's names)
    return _Root(filesystem=LocalFileSystem(), path=path, name=fixed or ".", pattern=pattern)


def _root_of_uri(uri: str) -> _Root:
    fixed, pattern = _split_magic(uri)
    scheme, _, rest = fixed.partition("://")
    host, slash, key = rest.partition("/")
    name = f"{scheme}://{host.rpartition('@')[2]}{slash}{key}"  # no credentials in names and logs
    if scheme in _BUCKET_SCHEMES and not host:
        raise SourceError(f"source {uri!r} must name a bucket; write {scheme}://BUCKET/FOLDER")
    try:
        if scheme in _BUCKET_SCHEMES:  # a key may hold blanks, # and %: it is taken as stores print it
            filesystem, bucket = FileSystem.from_uri(f"{scheme}://{host}")
            path = f"{bucket}/{key}"
        else:
            filesystem, path = FileSystem.from_uri(fixed)
    except (pa.ArrowException, OSError, ValueError) as arrow_error:
        try:
            fsspec_filesystem, path = fsspec.core.url_to_fs(fixed)
        except (ValueError, ImportError, OSError) as error:
            # Both errors may quote the URI, and the URI may hold a password: no cause is kept.
            causes = f"{first_line(arrow_error)}; {first_line(error)}".replace(fixed, name)
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


def _expand(root: _Root, folder: str, pattern: tuple[str, ...]) -> Iterator[_Entry]:
    """Yield what a glob matches below ``folder``; only folders that can match are listed."""
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        matches = re.compile(glob_translate("/".join(pattern))).match
        for entry in _files_below(root, folder):
            if entry.is_folder or matches(_relative(entry.path, folder)):
                yield entry
        return
    for entry in root.children(folder):
        if entry.path == folder:
            yield entry
            continue
        if not fnmatchcase(entry.name, head) or (_never_read(entry.name) and not head.startswith(".")):
            continue
        if not rest:
            yield entry
        elif entry.is_folder:
            yield from _expand(root, entry.path, rest)


def _is_of_a_dataset(entry: _Entry) -> bool:
    """Whether Hugging Face datasets keep this file beside the rows."""
    return entry.name in _DATASET_FILES or entry.name.startswith("cache-")


def format_of(path: str) -> Format | None:
    """Return the format that the name of a file tells, None where it tells none."""
    # Hugging Face datasets keep it beside one.
    is_cache = re.fullmatch(r"(.*/)?cache-[^/]*\.arrow", path, re.IGNORECASE)
    return None if is_cache else FORMAT_OF.get(suffix_of(path))


def _table_kind(filesystem: FileSystem, path: str) -> TableKind | None:
    """Say of which kind of table a folder or a file is, if it is one."""
    if not is_utf8(path):  # Arrow cannot be asked for it; listing says what is wrong with its name
        return None
    if filesystem.get_file_info(path).type == FileType.File:
        return "Iceberg" if path.endswith(_METADATA_SUFFIX) else None
    folders = filesystem.get_file_info([f"{path}/{mark}" for mark in _MARKS.values()])
    for found, folder in zip(_MARKS, folders, strict=True):
        if folder.type == FileType.Directory and (found != "Iceberg" or _metadata_files(filesystem, path)):
            return found
    return None


def _location(filesystem: FileSystem, path: str, name: str, kind: TableKind) -> str:
    """Return what a table's own library opens, of Iceberg the newest metadata file in its folder.

    Where two metadata files are the newest, one of them was never committed, and :class:`SourceError` is
    raised.
    """
    if kind == "Iceberg" and not path.endswith(_METADATA_SUFFIX):
        files = _metadata_files(filesystem, path)
        versions = [int(found[1]) if (found := _VERSION.match(each)) else -1 for each in files]
        newest = [each for each, version in zip(files, versions, strict=True) if version == max(versions)]
        if len(newest) > 1:
            raise SourceError(
                "one metadata file of an Iceberg table must be the newest, got "
                f"{' and '.join(newest[:2])}; name the one that its catalog names"
            )
        path = f"{path}/metadata/{newest[0]}"
    return path if isinstance(filesystem, LocalFileSystem) else f"{name.partition('://')[0]}://{path}"


def _metadata_files(filesystem: FileSystem, path: str) -> list[str]:
    """Return the names of the metadata files of a table of Iceberg, none where it is no such table."""
    found = _children(filesystem, f"{path}/{_MARKS['Iceberg']}")
    return [entry.name for entry in found if entry.name.endswith(_METADATA_SUFFIX)]


def _relative(path: str, folder: str) -> str:
    return path[len(folder) :].lstrip("/")


def _children(filesystem: FileSystem, folder: str) -> list[_Entry]:
    """List a folder, sorted; one that is missing holds nothing.

    A local folder that cannot be listed stands for itself, with its fault.
    """
    if isinstance(filesystem, LocalFileSystem):
        try:
            found = [_local(entry) for entry in os.scandir(folder)]
        except FileNotFoundError:
            found = []
        except OSError as error:
            return [_Entry(path=folder, is_folder=True, fault=f"it cannot be listed: {error.strerror}")]
    else:
        found = [
            _Entry(path=info.path, is_folder=info.type == FileType.Directory)
            for info in filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
        ]
    return sorted(found, key=lambda entry: entry.path)


def _files_below(root: _Root, folder: str, left_out: LeftOut | None = None) -> Iterator[_Entry]:
    """Yield every file below a folder, and every name below it that cannot be read.

    Raises :class:`SourceError` where a table of Delta or Iceberg lies below it.
    """
    filesystem = root.filesystem

    def is_entered(path: str, reason: str | None) -> bool:
        if reason is not None and left_out is not None:
            left_out.add(reason, root.shown(path))
        return reason is None

    if not isinstance(filesystem, LocalFileSystem):
        found = filesystem.get_file_info(FileSelector(folder, recursive=True))
        paths = {info.path for info in found}
        folders = (path.removesuffix("/CURRENT") for path in paths if path.endswith("/CURRENT"))
        collections = {path for path in folders if f"{path}/generations" in paths}
        for info in found:
            _refuse_table(folder, info.path)
            parts = _relative(info.path, folder).split("/")
            reason = next(filter(None, map(_never_read, parts)), None)
            if any(info.path.startswith(f"{path}/") for path in collections):
                reason = COLLECTIONS
            if info.type == FileType.File and is_entered(info.path, reason):
                yield _Entry(path=info.path)
        return
    seen = {_identity(folder)}
    waiting = deque([folder])
    links = deque[str]()  # after what stands in the folder itself, which keeps its own name
    while waiting or links:
        current = (waiting or links).popleft()
        children = root.children(current)
        if current != folder and any(mark <= {entry.name for entry in children} for mark in _COLLECTION):
            is_entered(current, COLLECTIONS)
            continue
        for entry in children:
            _refuse_table(folder, entry.path)
            if entry.path != current and not is_entered(entry.path, _never_read(entry.name)):
                continue
            if not entry.is_folder or entry.fault is not None:
                yield entry
            elif entry.is_link:
                links.append(entry.path)
            else:
                seen.add(_identity(entry.path))
                waiting.append(entry.path)
        while not waiting and links:
            if (identity := _identity(links[0])) not in seen:
                seen.add(identity)
                break
            links.popleft()


def _refuse_table(folder: str, path: str) -> None:
    if found := _IN_TABLE.match(path, len(folder)):
        table = _shown(path[: found.end(1)])
        raise SourceError(
            f"a folder of files must hold no table of Delta or Iceberg, got {table}; name the table itself, "
            "or several by a glob"
        )


def _never_read(name: str) -> str | None:
    """Say why what has a name is never a source, None where it may be one."""
    # Office keeps a file of a name with ~$ beside each that is open.
    return HIDDEN if name.startswith((".", "~$")) else NODE_MODULES if name == NODE_MODULES else None


def _shown(path: str) -> str:
    """Make a path of this machine printable: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


def _local(entry: os.DirEntry[str]) -> _Entry:
    is_link = entry.is_symlink()
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        fault = "it is a link that leads nowhere" if is_link else f"it is gone: {error.strerror}"
        return _Entry(path=entry.path, is_link=is_link, fault=fault)
    if stat.S_ISDIR(mode):
        return _Entry(path=entry.path, is_folder=True, is_link=is_link)
    if not stat.S_ISREG(mode):
        return _Entry(path=entry.path, is_link=is_link, fault="it is neither a file nor a folder")
    return _Entry(path=entry.path, is_link=is_link, fault=None if is_utf8(entry.path) else _NOT_UTF8)


def _links_below(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder.rpartition("/metadata/")[0] or folder):
        paths = (f"{parent}/{name}" for name in (*folders, *files))
        yield from filter(os.path.islink, paths)


def _identity(folder: str) -> tuple[int, int]:
    try:
        found = Path(folder).stat()
    except OSError:
        return (-1, hash(folder))
    return found.st_dev, found.st_ino
