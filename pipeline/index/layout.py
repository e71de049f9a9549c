"""Where everything of a collection lies on disk, and who may write to it.

    <root>/<name>/  lance/ generations/<n>/ CURRENT .lock quarantine/ runs/ pending/

Knows names and the lock, no file's content but ``CURRENT``. A collection exists for readers once a generation stands in it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.config import DEFAULT_ROOT
from pipeline.durable import exclusive_lock, storage_errors
from pipeline.errors import CollectionBusyError, CollectionNotFoundError, ConfigError, DamageError

COLLECTION_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
GENERATION_FOLDER = re.compile(r"[0-9]{8}")

DOCUMENTS_FAISS = "documents.faiss"
CHUNKS_FAISS = "chunks.faiss"
DOCUMENTS_ARROW = "documents.arrow"
CHUNKS_ARROW = "chunks.arrow"
PASSAGES_ARROW = "passages.arrow"
CONTEXT_ARROW = "context.arrow"
CLUSTERS_ARROW = "clusters.arrow"
LANCE_FILES = "lance_files.json"


def resolve_root(root: Path | str) -> Path:
    """Return the root as an absolute folder; anything with a URI scheme is refused."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(root)):
        raise ConfigError(f"the root must be a local folder, got {str(root)!r}; mount or copy the storage and name its folder")
    return Path(root).resolve()


@dataclass(frozen=True, slots=True)
class CollectionLayout:
    """The paths of one collection; building one touches no file but checks the name and refuses a symlinked folder."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", resolve_root(self.root))
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"the root must be a folder, got the file {self.root.name!r}; give the folder collections are to live under")
        if not COLLECTION_NAME.fullmatch(self.name):
            raise ConfigError(
                f"a collection's name must match ^[a-z0-9][a-z0-9_-]{{0,62}}$, got {self.name[:80]!r}; "
                "use lower-case letters, digits, - and _"
            )
        if self.folder.is_symlink():
            raise ConfigError(f"the folder of collection {self.name!r} must not be a symbolic link; move the folder itself under the root")

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

    def generation_folder(self, number: int) -> Path:
        """The folder of a published generation."""
        return self.generations_folder / generation_name(number)

    def temporary_generation_folder(self, number: int) -> Path:
        """Where a generation is built before its rename."""
        return self.generations_folder / f".{generation_name(number)}.tmp"

    def generation_numbers(self) -> list[int]:
        """List the generations that stand complete or damaged, ascending; temporary folders do not count."""
        if not self.generations_folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.generations_folder.iterdir() if GENERATION_FOLDER.fullmatch(entry.name))

    def exists(self) -> bool:
        """Tell whether anything was ever published here; an unfinished first ingest does not count."""
        return self.current_path.exists() or bool(self.generation_numbers())

    def require_exists(self) -> None:
        """Raise :class:`CollectionNotFoundError`, naming the collections there are."""
        if not self.exists():
            known = ", ".join(list_collections(self.root)) or "none yet"
            raise CollectionNotFoundError(f"collection {self.name!r} must exist under the root; known collections: {known}")

    def current_generation_number(self) -> int | None:
        """Read ``CURRENT``; None where nothing was ever published.

        Generations without a readable ``CURRENT`` raise :class:`DamageError`.
        """
        try:
            content = self.current_path.read_bytes()
        except FileNotFoundError:
            if self.generation_numbers():
                raise self.damaged(f"collection {self.name!r} has generations but no CURRENT") from None
            return None
        name = content.decode("ascii", errors="replace").strip()
        if not GENERATION_FOLDER.fullmatch(name):
            raise self.damaged(f"CURRENT of collection {self.name!r} must name a generation, got {name[:40]!r}")
        return int(name)

    def command(self, verb: str) -> str:
        """Return the command line of a verb on this collection, for advice that works as it stands."""
        root = () if self.root == resolve_root(DEFAULT_ROOT) else ("--root", str(self.root))
        return shlex.join(["cairn", verb, self.name, *root])

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
        """Hold the collection for writing, making its folder if need be; raise :class:`CollectionBusyError` if another process does.

        The kernel drops the lock when the holder dies, so a killed run never leaves a stale one.
        """
        name = f"the lock of collection {self.name!r}"
        with storage_errors(f"opening {name}"):
            self.folder.mkdir(parents=True, exist_ok=True)

        def busy(by_whom: str) -> CollectionBusyError:
            return CollectionBusyError(f"collection {self.name!r} is being written by another run{by_whom}; try again when it has finished")

        with exclusive_lock(self.lock_path, name, busy):
            yield


def generation_name(number: int) -> str:
    """Return the folder name of a generation: eight digits."""
    return f"{number:08d}"


def generation_tag(number: int) -> str:
    """Return the Lance tag that keeps a generation's table versions alive."""
    return f"generation-{number}"


def list_collections(root: Path | str) -> list[str]:
    """List the collections that can be read under a root, by name."""
    folder = resolve_root(root)
    if not folder.is_dir():
        return []
    names = (
        entry.name for entry in folder.iterdir() if COLLECTION_NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    )
    return sorted(name for name in names if CollectionLayout(folder, name).exists())
