"""A collection in an object store, and this machine's copy of it.

Everything else works on the copy as on any local collection.

    s3://bucket/prefix/NAME/                          the copy's folder
      CURRENT        which generations there are  ──▶ CURRENT, REMOTE
      files/<sha256> every file of theirs, once   ──▶ generations/<n>/, lance/
      LEASE          who is writing
  pending/       encoded shards of runs that are not published
      runs/, quarantine/

A file never changes under its name, so nothing can be torn: :meth:`Replica.push` uploads what is new and then
swaps ``CURRENT``, which succeeds only if no one else has swapped it since this copy was brought up to date. A
reader pulls what ``CURRENT`` names and checks every hash. Files that no generation needs are removed a day
later, by the store's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Final

from cairn.pipeline import durable
from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import CairnError, CollectionBusyError, DamageError, IntegrityError, TryAgainError
from cairn.pipeline.index.current import KEPT_GENERATIONS, Current, Pointer, RemoteGeneration
from cairn.pipeline.index.lease import LEASE_KEY, Lease
from cairn.pipeline.index.names import COPIES, LANCE_FILES, copied_name
from cairn.pipeline.index.object_folder import TRANSFERS, ObjectFolder, StoredObject
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.index.worker_files import WorkerFiles, key_of
from cairn.pipeline.manifest import MANIFEST_NAME, FileRecord, record_file

CURRENT_KEY: Final = "CURRENT"
REMOTE_NAME: Final = "REMOTE"
"""In the copy's folder: which ``CURRENT`` of the store the copy is of."""

KEPT_SECONDS: Final = 24 * 3_600.0
"""How long a file outlives its last generation in the store: longer than any reader takes to pull it."""
REUSED_SECONDS: Final = KEPT_SECONDS / 2
"""How old a file of no generation may be to count as uploaded.

An interrupted upload goes on, and none of its files is about to go.
"""
REFRESH_SECONDS: Final = 1.0
"""How old a reader's knowledge of ``CURRENT`` may be: one small request each time."""
RECORD_FOLDERS: Final = ("runs", "quarantine", "origins")

REPLICA_POINTS: Final = (
    "store-files-written",
    "store-current-swapped",
    "copy-files-pulled",
    "copy-generation-renamed",
    "copy-current-replaced",
)

Records = dict[str, FileRecord]
"""Path in the copy's folder to what the file must be."""


class Replica:
    """The store's side of one collection; ``folder`` is the copy.

    Callers hold the copy's lock while they pull or push.
    """

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri = uri
        self._folder = folder
        self._store = ObjectFolder(uri)
        self.worker_files = WorkerFiles(self._store, folder)
        self.complaint: str | None = None
        """Why the copy may be behind the store, None where it is up to date."""
        self._seen: StoredObject | None = None
        self._looked_seconds = -REFRESH_SECONDS

    @contextlib.contextmanager
    def writing(self, name: str) -> Generator[None]:
        """Hold the lease and an up-to-date copy during the block; upload records of runs at its end."""
        with Lease(self._store, name).held():
            self.pull()
            self.worker_files.clear()
            try:
                yield
            finally:
                with contextlib.suppress(CairnError):  # what was published stands; the next run uploads them
                    self._upload_records()

    def is_published(self) -> bool:
        """Say whether the store has the collection."""
        return self._store.read(CURRENT_KEY) is not None

    def is_being_written(self, name: str) -> bool:
        """Say whether a writer of any machine holds the lease."""
        return Lease(self._store, name).is_held()

    def is_due(self) -> bool:
        """Say whether it is time to look at the store again; asked, it counts as having looked."""
        before, now = self._looked_seconds, time.monotonic()
        is_due = now - before >= REFRESH_SECONDS
        self._looked_seconds = now if is_due else before
        return is_due

    def pull(self) -> None:
        """Bring the copy to what the store serves, and to nothing else; one that is of it stays as it is."""
        self._seen = found = self._store.read(CURRENT_KEY)
        if found is None:
            if (self._folder / CURRENT_KEY).exists():
                raise IntegrityError(
                    f"{self.uri} must have what {self._folder} is a copy of, got no CURRENT; "
                    "restore it there, or remove the copy to begin again"
                )
            return
        pointer = Pointer.of(found.content, self.uri)
        if self._copied_token() == pointer.token:
            return
        with durable.storage_errors(f"copying {self.uri}"):
            self._pull(pointer)

    def push(self, number: int) -> None:
        """Upload a generation of the copy and let the store serve it.

        Raises :class:`CollectionBusyError` where another writer was faster: nothing is served of this one
        then.
        """
        before = Pointer.of(self._seen.content, self.uri) if self._seen else None
        new = self._generation(number)
        older = [each for each in (before.generations if before else ()) if each.generation < number]
        pointer = Pointer(token=secrets.token_hex(16), generations=(new, *older[:1]))
        self._upload(self._records(new))
        commit_point("store-files-written")
        content = pointer.to_bytes()
        self._swap(content, pointer.token)
        commit_point("store-current-swapped")
        if self.has_all(number):
            self._note(pointer)
        with contextlib.suppress(TryAgainError, DamageError):  # the next writer does it
            self._sweep()

    def remove(self) -> None:
        """Remove the collection from the store, what says that there is one first."""
        self._store.delete([CURRENT_KEY])
        self._store.delete(key for key in self._store.list("") if key != LEASE_KEY)

    def has_all(self, number: int) -> bool:
        """Tell whether the copy has every file of a generation, and leaves none to the store."""
        return all((self._folder / path).is_file() for path in self._records(self._generation(number)))

    def published_files(self) -> Records:
        """Return every file of the generation that the store served when it was read last."""
        kept = self._kept_generations()
        return self._records(kept[0]) if kept else {}

    def sha256_of(self, number: int) -> str | None:
        """Return the hash of a generation's manifest, None where the store did not name it."""
        named = (each for each in self._kept_generations() if each.generation == number)
        return next((each.manifest.sha256 for each in named), None)

    def problems(self) -> dict[str, str]:
        """Read every file of the served generation in the store.

        Return what is wrong by the path of the file.
        """
        found = self._store.read(CURRENT_KEY)
        if found is None:
            return {CURRENT_KEY: "is missing"}
        stored = self._store.list("files")

        def problem(record: FileRecord) -> str | None:
            size = stored[key_of(record)][0] if key_of(record) in stored else None
            if size != record.size_bytes:
                return "is missing" if size is None else f"must have {record.size_bytes} bytes, got {size}"
            return None if self._store.is_intact(key_of(record), record) else "does not match its SHA-256"

        records = self._records(Pointer.of(found.content, self.uri).served)
        with ThreadPoolExecutor(TRANSFERS) as pool:
            problems = zip(records, pool.map(problem, records.values()), strict=True)
            return {path: sentence for path, sentence in sorted(problems) if sentence is not None}

    def restore(self, number: int, paths: Iterable[str]) -> None:
        """Write files of the served generation that the store has lost or changed to the store again."""
        records = self._records(self._generation(number))
        self._store.delete(key_of(records[path]) for path in paths if path in records)
        self.push(number)

    def _generation(self, number: int) -> RemoteGeneration:
        folder = self._folder / f"generations/{number:08d}"
        tags = sorted(self._folder.glob(f"lance/*.lance/_refs/tags/generation-{number}.json"))
        return RemoteGeneration(
            generation=number,
            manifest=record_file(folder / MANIFEST_NAME),
            tags={path.relative_to(self._folder).as_posix(): record_file(path) for path in tags},
        )

    def _records(self, generation: RemoteGeneration) -> Records:
        """Return every file of a generation, by its manifest in the copy or, failing that, in the store."""
        manifest = json.loads(self._small(f"{generation.folder}/{MANIFEST_NAME}", generation.manifest))
        records = {
            f"{generation.folder}/{name}": FileRecord(**record) for name, record in manifest["files"].items()
        }
        lance_files = self._small(
            f"{generation.folder}/{LANCE_FILES}", records[f"{generation.folder}/{LANCE_FILES}"]
        )
        lance = {f"lance/{name}": FileRecord(**record) for name, record in json.loads(lance_files).items()}
        for path in (*records, *lance, *generation.tags):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise DamageError(f"a file of {self.uri} must lie in its collection, got {path!r}")
        manifests = {f"{generation.folder}/{MANIFEST_NAME}": generation.manifest}
        return {**manifests, **records, **lance, **generation.tags}

    def _small(self, path: str, record: FileRecord) -> bytes:
        local = self._folder / path
        if record.problem(local) is None:
            return local.read_bytes()
        found = self._store.read(key_of(record))
        if found is None or hashlib.sha256(found.content).hexdigest() != record.sha256:
            raise DamageError(
                f"{path} in {self.uri} {'is missing' if found is None else 'does not match its SHA-256'}"
            )
        return found.content

    def _upload(self, records: Records) -> None:
        files = {key_of(record): (self._folder / path, record) for path, record in records.items()}
        stored = self._store.list("files")
        kept: set[str] = set()
        for generation in self._kept_generations():
            with contextlib.suppress(DamageError):  # one that no machine can pull: nothing of it is relied on
                kept |= self._keys(generation)
        lease = self._store.read(LEASE_KEY)  # renewed a moment ago: the store's clock

        def is_there(key: str, path: Path, record: FileRecord) -> bool:
            size, modified_at = stored.get(key, (-1, None))
            if size != record.size_bytes or modified_at is None:
                return False
            is_new = lease and lease.modified_at - modified_at < timedelta(seconds=REUSED_SECONDS)
            return bool(is_new) or key in kept or not path.exists()  # a worker wrote it to the store alone

        missing = [(key, path) for key, (path, record) in files.items() if not is_there(key, path, record)]
        with durable.storage_errors(f"uploading to {self.uri}"), ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(lambda each: self._store.write(*each), missing))

    def _kept_generations(self) -> Sequence[RemoteGeneration]:
        return Pointer.of(self._seen.content, self.uri).generations if self._seen else ()

    def _keys(self, generation: RemoteGeneration) -> set[str]:
        return {key_of(record) for record in self._records(generation).values()}

    def _swap(self, content: bytes, token: str) -> None:
        try:
            is_swapped = self._store.swap(CURRENT_KEY, content, self._seen and self._seen.e_tag)
            unsure = None
        except TryAgainError as error:
            is_swapped, unsure = False, error
        found = self._store.read(CURRENT_KEY)
        # A reply may be lost, and the write repeated on the way: what stands there now decides.
        if not is_swapped and (found is None or token.encode() not in found.content):
            raise unsure or CollectionBusyError(
                f"{self.uri} was published by another run meanwhile; run the same command again, it goes "
                "on from there"
            )
        self._seen = found

    def _sweep(self) -> None:
        """Remove files of no generation that no reader counts on any more."""
        assert self._seen is not None
        kept = set().union(*map(self._keys, self._kept_generations()))
        oldest = self._seen.modified_at - timedelta(seconds=KEPT_SECONDS)
        self._store.delete(
            key
            for key, (_, modified_at) in {**self._store.list("files"), **self._store.list("pending")}.items()
            if key not in kept and modified_at < oldest
        )

    def _pull(self, pointer: Pointer) -> None:
        served = pointer.served
        records = self._records(served)
        target = self._folder / served.folder
        temporary = target.with_name(f".{target.name}.tmp")
        durable.remove_entry(temporary)
        temporary.mkdir(parents=True)
        previous = self._copied_number()
        downloads: list[tuple[str, Path, FileRecord]] = []
        verified = VerifiedFiles.of_this_machine()
        for path, record in records.items():
            local = self._folder / path
            if local.parent == target:
                local = temporary / local.name
                is_there = self._link(local, record, (served.generation, previous), verified)
            else:
                is_there = _is_whole(local, record, verified)
            if not is_there:
                downloads.append((key_of(record), local, record))
        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(lambda each: self._store.download(*each), downloads))
        for hint in self._folder.glob("lance/*.lance/_versions/latest_version_hint.json"):
            hint.unlink()  # of the versions that were here before
        self._write_copies(records, temporary)
        commit_point("copy-files-pulled")
        if not target.is_dir():
            durable.remove_entry(target)
        durable.put_in_place(temporary, target)
        commit_point("copy-generation-renamed")
        durable.clear_way(self._folder / CURRENT_KEY)
        durable.write_bytes(self._folder / CURRENT_KEY, self._current_of(served).to_bytes())
        self._note(pointer)
        commit_point("copy-current-replaced")
        self._prune(served.generation, previous)

    def _link(
        self, local: Path, record: FileRecord, numbers: Iterable[int | None], verified: VerifiedFiles
    ) -> bool:
        """Take a file from the first of these generations in which it is whole."""
        for number in numbers:
            path = self._folder / f"generations/{number or 0:08d}" / local.name
            if _is_whole(path, record, verified):
                local.hardlink_to(path)
                return True
        return False

    def _write_copies(self, records: Records, folder: Path) -> None:
        """Store the small files of a generation twice, as its publication does."""
        for path in records:
            name = copied_name(path)
            if name is not None:
                source = folder / name if path.startswith("generations/") else self._folder / path
                target = folder / COPIES / name
                target.parent.mkdir(parents=True, exist_ok=True)
                durable.write_bytes(target, source.read_bytes())

    def _prune(self, number: int, previous: int | None) -> None:
        """Leave two generations, for searches that still hold the one before, and of Lance what they need."""
        kept = {number} if previous is None or previous > number else {number, previous}
        files: set[str] = set()
        durable.clear_temporary(self._folder / "generations")
        for folder in list((self._folder / "generations").iterdir()):
            if folder.name.isdigit() and int(folder.name) not in kept:
                durable.remove_folder(folder)
            elif folder.name.isdigit():
                with contextlib.suppress(OSError, ValueError, AttributeError):  # a damaged one keeps nothing
                    files |= {f"lance/{name}" for name in json.loads((folder / LANCE_FILES).read_bytes())}
        tags = {f"generation-{each}.json" for each in kept}
        for path in (self._folder / "lance").rglob("*"):
            name = path.relative_to(self._folder).as_posix()
            is_tag = path.parent.name == "tags" and path.name in tags
            if path.is_file() and not is_tag and name not in files:
                path.unlink()

    def _copied_token(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads((self._folder / REMOTE_NAME).read_bytes())["token"]
        return None

    def _copied(self) -> Current | None:
        with contextlib.suppress(OSError):
            return Current.of((self._folder / CURRENT_KEY).read_bytes())
        return None

    def _copied_number(self) -> int | None:
        copied = self._copied()
        return None if copied is None else copied.served

    def _current_of(self, served: RemoteGeneration) -> Current:
        """Return what ``CURRENT`` of the copy is to say: this generation, and the one it served before."""
        copied = self._copied()
        before = {} if copied is None else copied.manifests
        older = {number: sha256 for number, sha256 in before.items() if number < served.generation}
        kept = list(older.items())[: KEPT_GENERATIONS - 1]
        return Current({served.generation: served.manifest.sha256, **dict(kept)})

    def _note(self, pointer: Pointer) -> None:
        durable.write_json(self._folder / REMOTE_NAME, {"token": pointer.token, "uri": self.uri})

    def _upload_records(self) -> None:
        for name in RECORD_FOLDERS:
            local = sorted((self._folder / name).glob("*")) if (self._folder / name).is_dir() else []
            stored = self._store.list(name) if local else {}
            for path in local:
                if f"{name}/{path.name}" not in stored:
                    self._store.write(f"{name}/{path.name}", path)


def _is_whole(path: Path, record: FileRecord, verified: VerifiedFiles) -> bool:
    return record.problem(path, check_hash=False) is None and verified.has_sha256(path, record.sha256)


log = logging.getLogger(__name__)

_out: dict[str, type[CairnError]] = {}
"""What is wrong with each store, by the address of its collection; all readers in a process share it."""


def note_outage(address: str, error: CairnError | None) -> None:
    """Note that reading a collection's store failed, or did not; another kind of error is news, too."""
    before = _out.pop(address, None)
    if error is not None:
        _out[address] = type(error)
        if before is not type(error):
            log.warning("replica.not_refreshed store=%s error=%s", address, error)
    elif before is not None:
        log.warning("replica.refreshed_again store=%s", address)
