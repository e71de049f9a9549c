"""Where everything of a collection lies on disk, and who may write to it.

    <root>/<name>/  lance/ generations/<n>/ CURRENT .lock quarantine/ runs/ origins/ pending/ sources.sqlite

Knows names and the lock, no file's content but ``CURRENT``. A collection exists for readers once a generation
stands in it. Under an ``s3://`` root these are the paths of this machine's copy; see ``replica``.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cairn.pipeline.config import DEFAULT_ROOT
from cairn.pipeline.durable import exclusive_lock, is_locked, read_bytes, storage_errors
from cairn.pipeline.errors import (
    CollectionBusyError,
    CollectionNotFoundError,
    ConfigError,
    DamageError,
    IntegrityError,
    StorageError,
    TryAgainError,
)
from cairn.pipeline.index.current import GENERATION_FOLDER, PUBLISHED, Current, generation_name
from cairn.pipeline.index.names import CLUSTERS_ARROW, CONTEXT_ARROW
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.replica import Replica, note_outage
from cairn.pipeline.index.roots import resolve_root, store_uri
from cairn.pipeline.manifest import COLLECTION_NAME

FirstIngest = Literal["building", "unfinished", "damaged"]
FIRST_INGEST: dict[FirstIngest, str] = {
    "building": "its first ingest has not finished yet; try again when it has",
    "unfinished": "its first ingest was stopped or failed; run `cairn ingest` again: it goes on where it was",
    "damaged": "what stands in the place of its lock cannot be opened, or is no file; remove `.lock` from it",
}
"""What to do about a collection of which nothing is published, by what became of its first ingest."""


@dataclass(frozen=True, slots=True)
class CollectionLayout:
    """The paths of one collection.

    Building one touches no file; it checks the name and refuses a symbolic link. ``replica`` is the
    collection in the object store that the folder is a copy of, None where the root is a folder.
    """

    root: Path
    name: str
    replica: Replica | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert store_uri(self.root) is None, "CollectionLayout.at opens a root in an object store"
        object.__setattr__(self, "root", self.root.resolve())
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(
                f"the root must be a folder, got the file {self.root.name!r}; give the folder "
                "collections are to live under"
            )
        if not COLLECTION_NAME.fullmatch(self.name):
            raise ConfigError(
                f"a collection's name must match ^[a-z0-9][a-z0-9_-]{{0,62}}$, got {self.name[:80]!r}; "
                "use lower-case letters, digits, - and _"
            )
        if self.folder.is_symlink():
            raise ConfigError(
                f"the folder of collection {self.name!r} must not be a symbolic link; move the folder "
                "itself under the root"
            )

    @classmethod
    def at(cls, root: Path | str, name: str) -> CollectionLayout:
        """Return the paths of a collection under a root: a folder, or one in an object store."""
        uri = store_uri(root)
        layout = cls(resolve_root(root), name)
        if uri is None:
            return layout
        return replace(layout, replica=Replica(f"{uri}/{name}", layout.folder))

    @property
    def folder(self) -> Path:
        """The collection's own folder."""
        return self.root / self.name

    @property
    def lance_folder(self) -> Path:
        """The LanceDB database: tables ``documents`` and ``chunks``."""
        return self.folder / "lance"

    @property
    def generations_folder(self) -> Path:
        """One folder a published generation."""
        return self.folder / "generations"

    @property
    def current_path(self) -> Path:
        """The file that names the served generation's folder."""
        return self.folder / "CURRENT"

    @property
    def lock_path(self) -> Path:
        """What a writer holds with flock; the holder's pid is written in it."""
        return self.folder / ".lock"

    @property
    def quarantine_folder(self) -> Path:
        """Refused rows, one Parquet file a run."""
        return self.folder / "quarantine"

    @property
    def runs_folder(self) -> Path:
        """One JSON report a run."""
        return self.folder / "runs"

    @property
    def sources_path(self) -> Path:
        """The record of the files that were ingested on this machine."""
        return self.folder / "sources.sqlite"

    @property
    def pending_folder(self) -> Path:
        """Work of a run that is not published yet."""
        return self.folder / "pending"

    @property
    def pending_path(self) -> Path:
        """What the pending work belongs to."""
        return self.pending_folder / "PENDING.json"

    @property
    def ledger_path(self) -> Path:
        """The SQLite ledger of the pending run."""
        return self.pending_folder / "ledger.sqlite"

    @property
    def staged_folder(self) -> Path:
        """Checked rows waiting to be encoded, ``NNNNNN.parquet``."""
        return self.pending_folder / "staged"

    @property
    def encoded_folder(self) -> Path:
        """Encoded shards, ``documents-NNNNNN.parquet`` and ``chunks-NNNNNN.parquet``."""
        return self.pending_folder / "encoded"

    @property
    def pending_context_path(self) -> Path:
        """The context drawn by the pending run."""
        return self.pending_folder / CONTEXT_ARROW

    @property
    def pending_clusters_path(self) -> Path:
        """The centroids trained by the pending run."""
        return self.pending_folder / CLUSTERS_ARROW

    def quarantine_path(self, run_id: str) -> Path:
        """The refused rows of one run."""
        return self.quarantine_folder / f"{run_id}.parquet"

    def run_path(self, run_id: str) -> Path:
        """The report of one run."""
        return self.runs_folder / f"{run_id}.json"

    @property
    def origins_folder(self) -> Path:
        """The rows that each run indexed, one Parquet file a run."""
        return self.folder / "origins"

    def generation_folder(self, number: int) -> Path:
        """The folder of a published generation."""
        return self.generations_folder / generation_name(number)

    def published_path(self, number: int) -> Path:
        """What says that ``CURRENT`` has named a generation."""
        return self.generation_folder(number) / PUBLISHED

    def temporary_generation_folder(self, number: int) -> Path:
        """Where a generation is built before its rename."""
        return self.generations_folder / f".{generation_name(number)}.tmp"

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
        """Tell whether anything was ever published here; an unfinished first ingest does not count."""
        stands = self.current_path.exists() or bool(self.generation_numbers())
        return stands or (self.replica is not None and self.replica.is_published())

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
        return "unfinished" if self.lock_path.exists() else None

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
                f"collection {self.name!r} must exist under {self._place}, got none; known collections: "
                f"{known}"
            )

    @property
    def _place(self) -> str:
        """The root as an absolute path or a URI."""
        return str(self.root) if self.replica is None else self.replica.uri.rpartition("/")[0]

    def refresh(self) -> None:
        """Bring a copy of an object store up to date; does nothing for a collection in a folder.

        Where the store does not answer or is damaged, or a writer of this machine holds the copy, the copy is
        read as it is, and the replica has a complaint. The log says so once, and once when it is over.
        """
        if self.replica is None or not self.replica.is_due():
            return
        try:
            with self._copy_lock():
                self.replica.pull()
            self.replica.complaint = None
            note_outage(self.replica.uri, None)
        except (TryAgainError, IntegrityError) as error:
            if not self.current_path.exists():
                raise
            self.replica.complaint = f"this machine's copy is served as it is: {error}"
            note_outage(self.replica.uri, error)

    def current(self) -> Current | None:
        """Read ``CURRENT``; None where nothing was ever published.

        Generations without a readable ``CURRENT``, or with an older one than was published, raise
        :class:`DamageError`.
        """
        found = self._read_current()
        if found is None or self.replica is not None:  # of a copy, the store's counts
            return found
        newer = [number for number in self.generation_numbers() if number > found.served]
        published = [number for number in newer if self.published_path(number).exists()]
        if not published:
            return found
        if self._read_current() != found:  # published in between
            return self.current()
        raise self.damaged(
            f"CURRENT of collection {self.name!r} must name generation {published[-1]}, which was "
            f"published, got {found.served}"
        )

    def _read_current(self) -> Current | None:
        try:
            content = read_bytes(self.current_path)
        except FileNotFoundError:
            if self.generation_numbers():
                raise self.damaged(f"collection {self.name!r} has generations but no CURRENT") from None
            return None
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

    def manifest_sha256(self, number: int) -> str | None:
        """Return the hash that ``CURRENT`` records for a manifest; None of others, or where it is damaged."""
        try:
            found = self.current()
        except DamageError:
            return None
        return None if found is None else found.manifests.get(number)

    def hash_of_manifest(self, number: int) -> str:
        """Return the hash of a generation's manifest, which ``CURRENT`` here or in the store names."""
        known = self.manifest_sha256(number) or (self.replica and self.replica.sha256_of(number))
        assert known, f"generation {number} was published"
        return known

    def command(self, verb: str, *words: str) -> str:
        """Return the command line of a verb on this collection, for advice that works as it stands.

        ``words`` stand in the place of the collection's name.
        """
        root = () if self.root == resolve_root(DEFAULT_ROOT) else ("--root", self._place)
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

    @contextlib.contextmanager
    def writer_lock(self) -> Generator[None]:
        """Hold the collection for writing; make its folder if need be.

        Raises :class:`CollectionBusyError` if another process holds it. The kernel drops the lock when the
        holder dies, so a killed run never leaves a stale one. In an object store others wait for the lease of
        a killed run to expire; the copy is up to date inside the block.
        """
        with (
            self._copy_lock(),
            contextlib.nullcontext() if self.replica is None else self.replica.writing(self.name),
        ):
            yield

    def _copy_lock(self) -> contextlib.AbstractContextManager[None]:
        name = f"the lock of collection {self.name!r}"
        with storage_errors(f"opening {name}"):
            self.folder.mkdir(parents=True, exist_ok=True)

        def busy(by_whom: str) -> CollectionBusyError:
            return CollectionBusyError(
                f"collection {self.name!r} is being written by another run{by_whom}; try again when it "
                "has finished"
            )

        return exclusive_lock(self.lock_path, name, busy)


def generation_tag(number: int) -> str:
    """Return the Lance tag that keeps a generation's table versions alive."""
    return f"generation-{number}"


def list_collections(root: Path | str) -> list[str]:
    """List the collections that can be read under a root, by name."""
    return [layout.name for layout in _layouts(root) if layout.exists()]


def list_states(root: Path | str) -> dict[str, FirstIngest | None]:
    """Return the collections that were begun, by name.

    None of a published one, else what became of its first ingest.
    """
    states: dict[str, FirstIngest | None] = {}
    for layout in _layouts(root):
        is_published = layout.exists()
        begun = None if is_published else layout.first_ingest()
        if is_published or begun is not None:
            states[layout.name] = begun
    return states


def _layouts(root: Path | str) -> list[CollectionLayout]:
    uri, folder = store_uri(root), resolve_root(root)
    if uri is not None:
        names: Iterable[str] = ObjectFolder(uri).folders()
    elif folder.is_dir():
        names = (entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    else:
        return []
    return [CollectionLayout.at(root, name) for name in sorted(names) if COLLECTION_NAME.fullmatch(name)]
