"""Where everything of a collection lies on disk, who may write to it, and whether its files are as recorded.

    <root>/<name>/  lance/  generations/<n>/  CURRENT  .lock  pending/  sources.sqlite  quarantine/  runs/
                    origins/  copies/<n>/: the small files of a generation and of its table versions again
                    partitions/<name>/: each such a folder itself, in place of lance/

A collection exists for readers once a generation stands in it. Under an ``s3://`` root these are the paths of
this machine's copy; see ``replica``.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from cairn.pipeline import durable
from cairn.pipeline.config import DEFAULT_ROOT
from cairn.pipeline.durable import (
    exclusive_lock,
    is_locked,
    raise_storage_error,
    read_bytes,
    storage_errors,
)
from cairn.pipeline.errors import (
    CollectionBusyError,
    CollectionNotFoundError,
    ConfigError,
    DamageError,
    IntegrityError,
    StorageError,
    TryAgainError,
)
from cairn.pipeline.index.files import has_sha256, is_small
from cairn.pipeline.index.names import (
    CLUSTERS_ARROW,
    CONTEXT_ARROW,
    COPIES,
    GENERATION_FOLDER,
    TABLES,
    Current,
    generation_name,
    is_copied,
    needed_files,
    resolve_root,
    store_uri,
)
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.replica import Replica, note_outage
from cairn.pipeline.manifest import (
    COLLECTION_NAME,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    PartitionRecord,
    record_file,
)

FirstIngest = Literal["building", "empty", "unfinished", "damaged"]
FIRST_INGEST: dict[FirstIngest, str] = {
    "building": "its first ingest has not finished yet; try again when it has",
    "empty": "it was created without a document; write some to it",
    "unfinished": "its first ingest was stopped, or indexed no row; run `cairn ingest` again, which goes on",
    "damaged": "what stands in the place of its lock cannot be opened, or is no file; remove `.lock` from it",
}
"""What to do about a collection of which nothing is published, by what became of its first ingest."""


class _Below:
    """A path below a collection's folder."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, layout: CollectionLayout, _owner: type) -> Path:
        return layout.folder.joinpath(*self._names)


@dataclass(frozen=True, slots=True)
class CollectionLayout:
    """The paths of one collection.

    Building one touches no file; it checks the name and refuses a symbolic link. ``replica`` is the
    collection in the object store that the folder is a copy of, None where the root is a folder.
    """

    root: Path
    name: str
    replica: Replica | None = field(default=None, compare=False)
    pinned: Current | None = field(default=None, compare=False)
    """What a partition serves, in the place of a ``CURRENT``: the manifest of the collection says it."""
    whole: CollectionLayout | None = field(default=None, compare=False)
    """The collection that this is a partition of."""

    def __post_init__(self) -> None:
        assert store_uri(self.root) is None, "CollectionLayout.at opens a root in an object store"
        object.__setattr__(self, "root", self.root.resolve())
        with storage_errors("reading the root"):
            standing = next(each for each in (self.root, *self.root.parents) if each.exists())
            is_taken = not standing.is_dir()
        if is_taken:
            what, advice = f"the root must be a folder, got the file {standing.name!r}", "give a folder"
            if self.whole is not None:
                what = f"partitions/ of collection {self.whole.name!r} must be a folder, got a file"
                advice = f"remove it and run `{self.whole.command('repair')}`"
            raise ConfigError(f"{what}; {advice}")
        if not COLLECTION_NAME.fullmatch(self.name):
            raise ConfigError(
                f"a collection's name must match ^[a-z0-9][a-z0-9_-]{{0,62}}$, got {self.name[:80]!r}; "
                "use lower-case letters, digits, - and _"
            )
        with storage_errors("reading the root"):
            is_link = self.folder.is_symlink()
        if is_link:
            what, advice = f"the folder of collection {self.name!r}", "put the folder itself in its place"
            if self.whole is not None:
                what = f"partitions/{self.name} of collection {self.whole.name!r}"
                advice += f", or remove the link and run `{self.whole.command('repair')}`"
            raise ConfigError(f"{what} must not be a symbolic link; {advice}")

    @classmethod
    def at(cls, root: Path | str, name: str, parts: range | None = None) -> CollectionLayout:
        """Return the paths of a collection under a root: a folder, or one in an object store.

        Of an object store ``parts`` alone are copied, see :class:`~cairn.pipeline.index.replica.Replica`.
        """
        uri = store_uri(root)
        layout = cls(resolve_root(root), name)
        if uri is None:
            return layout
        return replace(layout, replica=Replica(f"{uri}/{name}", layout.folder, parts))

    @property
    def folder(self) -> Path:
        """The collection's own folder."""
        return self.root / self.name

    def partition(self, record: PartitionRecord) -> CollectionLayout:
        """Return a partition's folder; what the collection names of it is served there."""
        pinned = Current({record.generation: record.sha256}) if record.generation else None
        return CollectionLayout(self.partitions_folder, record.name, pinned=pinned, whole=self)

    lance_folder = _Below("lance")
    """The LanceDB database: tables ``documents`` and ``chunks``."""
    partitions_folder = _Below("partitions")
    """The partitions of a collection that has several, by their names."""
    generations_folder = _Below("generations")
    """One folder a published generation."""
    copies_root = _Below(COPIES)
    """Second copies of small files, one folder a generation."""
    current_path = _Below("CURRENT")
    """The file that names the served generation's folder."""
    lock_path = _Below(".lock")
    """What a writer holds with flock; the holder's pid is written in it."""
    writes_path = _Below("writes.log")
    """Writes that a server has acknowledged, until they are published."""
    writes_lock_path = _Below(".writes.lock")
    """Held by the server that takes writes."""
    quarantine_folder = _Below("quarantine")
    """Refused rows, one Parquet file a run."""
    runs_folder = _Below("runs")
    """One JSON report a run, ``RUN_ID.json``."""
    origins_folder = _Below("origins")
    """The rows that each run indexed, one Parquet file a run."""
    sources_path = _Below("sources.sqlite")
    """The record of the files that were ingested on this machine."""
    pending_folder = _Below("pending")
    """Work of a run that is not published yet."""
    pending_path = _Below("pending", "PENDING.json")
    """What the pending work belongs to."""
    ledger_path = _Below("pending", "ledger.sqlite")
    """The SQLite ledger of the pending run."""
    staged_folder = _Below("pending", "staged")
    """Checked rows waiting to be encoded, ``NNNNNN.parquet``."""
    encoded_folder = _Below("pending", "encoded")
    """Encoded shards, ``documents-NNNNNN.parquet`` and ``chunks-NNNNNN.parquet``."""
    pending_context_path = _Below("pending", CONTEXT_ARROW)
    """The context drawn by the pending run."""
    pending_clusters_path = _Below("pending", CLUSTERS_ARROW)
    """The centroids trained by the pending run."""

    def quarantine_path(self, run_id: str) -> Path:
        """The refused rows of one run."""
        return self.quarantine_folder / f"{run_id}.parquet"

    def generation_folder(self, number: int) -> Path:
        """The folder of a published generation."""
        return self.generations_folder / generation_name(number)

    def copies_folder(self, number: int) -> Path:
        """The second copies of a generation's small files."""
        return self.copies_root / generation_name(number)

    def generation_numbers(self) -> list[int]:
        """List the generations that stand complete or damaged, ascending; temporary folders do not count."""
        if not self.generations_folder.is_dir():
            return []
        return sorted(
            int(entry.name)
            for entry in self.generations_folder.iterdir()
            if GENERATION_FOLDER.fullmatch(entry.name)
        )

    def exists(self) -> bool:
        """Tell whether anything was ever published here; an unfinished first ingest does not count.

        A folder that cannot be read raises :class:`StorageError`.
        """
        with storage_errors(f"reading collection {self.name!r}"):
            stands = self.current_path.exists() or self._has_generations()
        return stands or (self.replica is not None and self.replica.is_published())

    def _has_generations(self) -> bool:
        """Tell whether generations stand here, or stood: rows that no first ingest left are of lost ones.

        A copy of an object store is what the store says, and a partition has no first ingest of its own.
        """
        if self.generation_numbers():
            return True
        if self.replica is not None:
            return False
        if self.whole is not None:
            return bool(self._copied_numbers())
        has_rows = self.lance_folder.is_dir() or self.partitions_folder.is_dir()
        is_first = self.pending_folder.is_dir() and not self._builds_on_a_generation()
        return has_rows and (not is_first or bool(self._copied_numbers() - {1}))

    def _builds_on_a_generation(self) -> bool:
        """Tell whether the pending work says so."""
        try:
            content: Any = json.loads(read_bytes(self.pending_path))
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and content.get("base") is not None

    def _copied_numbers(self) -> set[int]:
        """Return the generations of which second copies stand."""
        entries = self.copies_root.iterdir() if self.copies_root.is_dir() else ()
        return {int(entry.name) for entry in entries if entry.name.isdigit()}

    def first_ingest(self) -> FirstIngest | None:
        """Tell what became of the first ingest of a collection of which nothing is published.

        None where none ever began.
        """
        try:
            is_held = is_locked(self.lock_path)
        except StorageError:
            return "damaged"
        if is_held or (self.replica is not None and self.replica.is_being_written(self.name)):
            return "building"
        if self.writes_path.exists():
            return "empty"
        return "unfinished" if self.lock_path.exists() else None

    def is_begun(self) -> bool:
        """Tell whether there is a collection: one that is published, was created, or is being ingested."""
        return self.exists() or self.first_ingest() is not None

    def require_exists(self) -> None:
        """Raise :class:`CollectionNotFoundError` where nothing is published.

        The message names the collections there are, or says why there is nothing of this one yet.
        """
        if not self.exists():
            begun = self.first_ingest()
            if begun is not None:
                raise CollectionNotFoundError(
                    f"collection {self.name!r} must have a published generation, got none: "
                    f"{FIRST_INGEST[begun]}"
                )
            known = ", ".join(list_collections(self.root)) or "none yet"
            raise CollectionNotFoundError(
                f"collection {self.name!r} must exist under {self.place}, got none; known collections: "
                f"{known}"
            )

    @property
    def place(self) -> str:
        """The root as an absolute path or a URI."""
        return str(self.root) if self.replica is None else self.replica.uri.rpartition("/")[0]

    def refresh(self, wanted: int | None = None) -> None:
        """Bring a copy of an object store up to date; does nothing for a collection in a folder.

        The copy is held only where the store serves something else. Where the store does not answer or is
        damaged, or another process of this machine holds the copy then, it is read as it is, and the replica
        has a complaint; one that lacks generation ``wanted`` is not read, and the error raised. The log says
        so once, and once when it is over.
        """
        if self.replica is None or not self.replica.is_due():
            return
        if not self.folder.exists() and not self.replica.is_published():
            return  # a lock made here would stand for a first ingest that was stopped
        has_parts = bool(self.replica.parts)

        def waits() -> bool:  # not for the end of a publication, which waits for this reader to take it up
            return has_parts or not self.current_path.exists()

        try:
            if self.replica.is_behind():
                with self.copy_lock(waits, COPY_SECONDS):
                    self.replica.pull()
            self.replica.complaint = None
            note_outage(self.replica.uri, None)
        except (TryAgainError, IntegrityError) as error:
            if not self.current_path.exists() or not (wanted is None or self.replica.has(wanted)):
                raise
            if isinstance(error, CollectionBusyError) and is_locked(self.writes_lock_path):
                return  # this machine's server publishes, on a copy that it has brought up to date
            self.replica.complaint = f"this machine's copy is served as it is: {error}"
            note_outage(self.replica.uri, error)

    def current(self) -> Current | None:
        """Read ``CURRENT``; None where nothing was ever published.

        Generations without a readable ``CURRENT`` raise :class:`DamageError`.
        """
        if self.pinned is not None or self.whole is not None:
            return self.pinned
        try:
            content = read_bytes(self.current_path)
        except FileNotFoundError:
            if self._has_generations():
                raise self.damaged(f"collection {self.name!r} has rows but no CURRENT") from None
            return None
        except PermissionError as error:
            raise_storage_error(error, f"reading collection {self.name!r}")
        except OSError as error:
            fault = f"CURRENT of collection {self.name!r} cannot be read: {error.strerror}"
            raise self.damaged(fault) from error
        found = Current.of(content)
        if found is None:
            shown = content[:40].decode("ascii", errors="replace")
            raise self.damaged(f"CURRENT of collection {self.name!r} must name a generation, got {shown!r}")
        return found

    def current_generation_number(self) -> int | None:
        """Return the served generation; see :meth:`current`."""
        found = self.current()
        return None if found is None else found.served

    def kept_generations(self) -> list[int]:
        """List what ``CURRENT`` names, ascending.

        All that left something, where it is damaged or names none of them: an older one was put back. Of a
        partition all but what its collection never came to name.
        """
        standing = {*self.generation_numbers(), *self._copied_numbers()}
        if self.whole is not None:
            served = () if self.pinned is None else (self.pinned.served,)
            return sorted({*served, *(each for each in standing if each < max(served, default=0))})
        with contextlib.suppress(DamageError):
            current = self.current()
            if current is None or not standing or not standing.isdisjoint(current.manifests):
                return [] if current is None else sorted(current.manifests)
        return sorted(standing)

    def manifest_sha256(self, number: int) -> str | None:
        """Return the hash that ``CURRENT`` records for a manifest; None of others, or where it is damaged."""
        try:
            found = self.current()
        except DamageError:
            return None
        return None if found is None else found.manifests.get(number)

    def hash_of_manifest(self, number: int) -> str:
        """Return the hash of a generation's manifest, which ``CURRENT`` names."""
        known = self.manifest_sha256(number)
        assert known, f"generation {number} was published"
        return known

    def record(self, generation: int) -> PartitionRecord:
        """Return what a collection is to name of this partition."""
        sha256 = record_file(self.generation_folder(generation) / MANIFEST_NAME).sha256
        return PartitionRecord(name=self.name, generation=generation, sha256=sha256)

    def command(self, verb: str, *words: str) -> str:
        """Return the command line of a verb on this collection, for advice that works as it stands.

        ``words`` stand in the place of the collection's name.
        """
        if self.whole is not None:
            return self.whole.command(verb, *words)
        root = () if self.root == resolve_root(DEFAULT_ROOT) else ("--root", self.place)
        return shlex.join(["cairn", verb, *(words or (self.name,)), *root])

    def damaged(self, fault: str, verb: Literal["repair", "verify"] = "repair") -> DamageError:
        """Return the error of damage found in this collection."""
        error = DamageError(fault, verb=verb)
        error.command = self.command(verb)
        return error

    @contextlib.contextmanager
    def naming_damage(self) -> Generator[None]:
        """Let damage that the block finds say which collection it is in."""
        try:
            yield
        except DamageError as error:
            error.command = error.command or self.command(error.verb)
            raise

    def only_server(self) -> contextlib.AbstractContextManager[None]:
        """Hold the collection as the server that takes its writes; make its folder if need be.

        Raises :class:`CollectionBusyError` where another one does.
        """

        def busy(by_whom: str) -> CollectionBusyError:
            return CollectionBusyError(
                f"collection {self.name!r} must be written and removed by one server, got another "
                f"one{by_whom}; ask that one, or stop it"
            )

        with storage_errors(f"opening the log of collection {self.name!r}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            durable.fsync_folder(self.root)
        return exclusive_lock(self.writes_lock_path, "the lock of the writes", busy)

    @contextlib.contextmanager
    def writer_lock(self, *, takes_turns: bool = True, copies: bool = True) -> Generator[None]:
        """Hold the collection for writing; make its folder if need be.

        Raises :class:`CollectionBusyError` if another process writes it; one that is a server, which takes
        writes and publishes them in turns, is waited for if ``takes_turns``, and so is a reader that brings
        the copy of an object store up to date. The kernel drops the lock when the holder dies, so a killed
        run never leaves a stale one. In an object store others wait for the lease of a killed run to expire;
        the copy is up to date inside the block, unless it is not to be.
        """

        def waits() -> bool:
            is_read = self.replica is not None and not self.replica.is_being_written(self.name)
            return is_read or (takes_turns and is_locked(self.writes_lock_path))

        with (
            self.copy_lock(waits),
            contextlib.nullcontext()
            if self.replica is None
            else self.replica.writing(self.name, copies=copies),
        ):
            yield

    def copy_lock(
        self, waits: Callable[[], bool] = lambda: False, seconds: float = durable.TURN_SECONDS
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the folder on this machine: of a collection in an object store, the copy alone."""
        name = f"the lock of collection {self.name!r}"
        with storage_errors(f"opening {name}"):
            self.folder.mkdir(parents=True, exist_ok=True)

        def busy(by_whom: str) -> CollectionBusyError:
            return CollectionBusyError(
                f"collection {self.name!r} is being written by another run{by_whom}; try again when it "
                "has finished"
            )

        return exclusive_lock(self.lock_path, name, busy, waits, seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """How closely the files of a generation are looked at when it is opened.

    ``hashes`` = False trusts sizes alone. ``verify`` hashes what this machine has hashed before, and the rows
    of documents in Lance, which else are not hashed but for ``suspects``: paths below ``lance/``. With
    ``skips_lost`` partitions that are damaged are left out and named, unless all are.
    """

    hashes: bool = True
    verify: bool = False
    suspects: Collection[str] = ()
    skips_lost: bool = False


COPY_SECONDS: Final = 300.0
"""How long a reader without a copy of what it wants waits while another process of this machine copies."""
HASHES: Final = Checks()
SIZES: Final = Checks(hashes=False)
"""For files that this process has just hashed, or of which little is read."""


def read_manifest(layout: CollectionLayout, number: int) -> Manifest:
    """Read a generation's manifest, or its second copy, checked against the hash in ``CURRENT``.

    One that speaks of another number raises :class:`IntegrityError`.
    """
    with layout.naming_damage():
        return _find_manifest(layout, number)[0]


def _find_manifest(layout: CollectionLayout, number: int) -> tuple[Manifest, Path]:
    sha256, damage = layout.manifest_sha256(number), list[DamageError]()
    for folder in (layout.generation_folder(number), layout.copies_folder(number)):
        try:
            manifest = Manifest.read(folder, sha256)
            tables = set() if manifest.partitions else set(TABLES)
            if manifest.generation == number and set(manifest.lance_versions) == tables:
                return manifest, folder / MANIFEST_NAME
            raise layout.damaged(
                f"the manifest of generation {number} must describe it and the tables {', '.join(TABLES)}"
            )
        except DamageError as error:
            damage.append(error)
    raise damage[0]


def twice_stored(
    layout: CollectionLayout, manifest: Manifest
) -> Iterator[tuple[str, FileRecord, Path, Path]]:
    """Yield name, record, place and second copy of each small file of a generation."""
    number = manifest.generation
    folder, copies = layout.generation_folder(number), layout.copies_folder(number)
    records = {MANIFEST_NAME: record_file(_find_manifest(layout, number)[1])}
    records |= {name: record for name, record in manifest.files.items() if is_copied(name)}
    for name, record in records.items():
        yield name, record, folder / name, copies / name
    for name, record in manifest.lance_files.items():
        if is_small(name):
            yield name, record, layout.lance_folder / name, copies / name


def wholes(layout: CollectionLayout, manifest: Manifest) -> Iterator[tuple[CollectionLayout, Manifest]]:
    """Yield the folders of rows that a generation consists of, with their manifests.

    That is the collection itself, or each of its partitions that ever had a document.
    """
    if not manifest.partitions:
        yield layout, manifest
    for record in manifest.filled:
        own = layout.partition(record)
        with layout.naming_damage():
            yield own, _find_manifest(own, record.generation)[0]


def check_generation_files(
    layout: CollectionLayout,
    manifest: Manifest,
    check_hashes: bool = True,
    *,
    names: Collection[str] | None = None,
    believes_notes: bool = False,
) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for each file of a generation that does not match its manifest.

    ``names`` are the files to look at, None is all; with ``believes_notes`` what this machine has hashed is
    not hashed again.
    """
    folder = layout.generation_folder(manifest.generation)
    problems: list[tuple[str, str]] = []
    for name, record in manifest.files.items():
        if names is not None and name not in names:
            continue
        with storage_errors(f"reading {name} of generation {manifest.generation}"):
            problem = record.problem(folder / name, check_hash=False)
            if problem is None and check_hashes:
                is_right = has_sha256(folder / name, record.sha256, believes_notes=believes_notes)
                problem = None if is_right else "does not match its SHA-256"
        if problem is not None:
            problems.append((name, problem))
    needed = {name for record in manifest.segments for name in needed_files(record)}
    missing = set[str]() if manifest.partitions else needed - set(manifest.files)
    return problems + [(name, "is not in the manifest") for name in sorted(missing)]


def list_collections(root: Path | str) -> list[str]:
    """List the collections that can be read under a root, by name."""
    return [name for name, begun in list_states(root).items() if begun is None]


def list_states(root: Path | str) -> dict[str, FirstIngest | None]:
    """Return the collections that were begun, by name.

    None of a published one, else what became of its first ingest; ``damaged`` where it cannot be read.
    """
    states: dict[str, FirstIngest | None] = {}
    for layout in _layouts(root):
        try:
            is_published = layout.exists()
        except StorageError:
            states[layout.name] = "damaged"
            continue
        begun = None if is_published else layout.first_ingest()
        if is_published or begun is not None:
            states[layout.name] = begun
    return states


def _layouts(root: Path | str) -> list[CollectionLayout]:
    uri, folder = store_uri(root), resolve_root(root)
    with storage_errors("reading the root"):
        entries = list(folder.iterdir()) if folder.is_dir() else []
        names = {entry.name for entry in entries if entry.is_dir() and not entry.is_symlink()}
    if uri is not None:  # of the copies only those count of which nothing is published yet
        copies = [CollectionLayout(folder, name) for name in names if COLLECTION_NAME.fullmatch(name)]
        created = {
            each.name for each in copies if each.writes_path.exists() and not each.current_path.exists()
        }
        names = {*ObjectFolder(uri).folders(), *created}
    return [CollectionLayout.at(root, name) for name in sorted(names) if COLLECTION_NAME.fullmatch(name)]
