"""A collection in an object store, and this machine's copy of it.

Everything else works on the copy as on any local collection.

    s3://bucket/prefix/NAME/                          the copy's folder
      CURRENT        which generations there are  ──▶ CURRENT
      files/<sha256> every file of theirs, once   ──▶ generations/<n>/, lance/, partitions/
      LEASE          who is writing
      runs/, quarantine/, origins/

A file never changes under its name, so nothing can be torn: :meth:`Replica.push` uploads what is new and then
swaps ``CURRENT``, which succeeds only if no one else has swapped it since this copy was brought up to date. A
reader pulls what ``CURRENT`` names and checks every hash. Files that no generation needs are removed once
they are a day old, by the store's clock: a reader that misses one begins again with what ``CURRENT`` names.

No kernel drops the writer's lease with its holder: it expires, and a holder renews it in time. It saves two
writers from doing the same work, and nothing else hangs on it: the swap that only one writer can win decides,
whatever its clock and its lease say.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cairn.pipeline import durable
from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import CairnError, CollectionBusyError, DamageError, IntegrityError, TryAgainError
from cairn.pipeline.index.files import has_sha256, keep_only, write_copies
from cairn.pipeline.index.names import (
    COPIES,
    KEPT_GENERATIONS,
    LEASE_KEY,
    Current,
    generation_name,
)
from cairn.pipeline.index.object_folder import TRANSFERS, ObjectFolder, StoredObject
from cairn.pipeline.manifest import MANIFEST_NAME, FileRecord, Manifest, PartitionRecord, record_file


def key_of(record: FileRecord) -> str:
    """Return the name of a file in the store."""
    return f"files/{record.sha256}"


def _read(found: StoredObject, uri: str) -> Current:
    """Read what ``CURRENT`` in the store says; a damaged one raises :class:`IntegrityError`."""
    current = Current.of(found.content)
    if current is None:
        raise IntegrityError(
            f"CURRENT of {uri} must name its generations, got other content; bring back the object's last "
            "version, or remove the collection there and ingest it again"
        )
    return current


LEASE_SECONDS: Final = 60.0
"""How long others wait for a writer that was killed."""
RENEWALS: Final = 3
"""Times a lease is renewed before it would expire."""


class Lease:
    """A lease on one collection, held inside ``with``."""

    def __init__(self, store: ObjectFolder, name: str) -> None:
        self._store = store
        self._name = name
        self._token = secrets.token_hex(8)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Hold the lease during the block; raise :class:`CollectionBusyError` where another writer does."""
        self._acquire()
        released = threading.Event()
        renewing = threading.Thread(target=self._renew, args=[released], name="cairn-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            released.set()
            renewing.join()
            self._release()

    def is_held(self) -> bool:
        """Tell whether a writer holds the lease now."""
        return _holder(self._store.read(LEASE_KEY)) is not None

    def _acquire(self) -> None:
        found = self._store.read(LEASE_KEY)
        holder = _holder(found)
        if holder is not None:
            raise CollectionBusyError(
                f"collection {self._name!r} is being written by another run ({holder[0]}); try again "
                "when it has finished, "
                f"or after {holder[1]:%H:%M:%S} UTC should it have been killed"
            )
        try:
            is_mine, unsure = self._store.swap(LEASE_KEY, self._content(), found and found.e_tag), None
        except TryAgainError as error:
            is_mine, unsure = False, error
        if not is_mine and self._own() is None:  # a reply may be lost, and the write repeated on the way
            raise unsure or CollectionBusyError(
                f"collection {self._name!r} is being written by another run; try again when it has finished"
            )

    def _content(self) -> bytes:
        until = datetime.now(UTC) + timedelta(seconds=LEASE_SECONDS)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"token": self._token, "holder": holder, "until": until.isoformat()}).encode()

    def _own(self) -> StoredObject | None:
        found = self._store.read(LEASE_KEY)
        return found if found is not None and self._token.encode() in found.content else None

    def _renew(self, released: threading.Event) -> None:
        while not released.wait(LEASE_SECONDS / RENEWALS):
            with contextlib.suppress(
                TryAgainError
            ):  # the next renewal may get through; should none, others may write, and one of us wins
                own = self._own()
                if own is None:
                    return
                self._store.swap(LEASE_KEY, self._content(), own.e_tag)  # the next look tells what came of it

    def _release(self) -> None:
        with contextlib.suppress(TryAgainError):  # it expires
            if self._own() is not None:
                self._store.delete([LEASE_KEY])


def _holder(found: StoredObject | None) -> tuple[str, datetime] | None:
    """Return who holds the lease, and until when; None where no one does now."""
    try:
        content: Any = json.loads(found.content) if found else {}
        until = datetime.fromisoformat(content["until"])
        return (str(content["holder"]), until) if datetime.now(UTC) < until else None
    except (ValueError, TypeError, KeyError):
        return None


CURRENT_KEY: Final = "CURRENT"
PARTITIONS: Final = "partitions"
KEPT_SECONDS: Final = 24 * 3_600.0
"""How old a file of no generation is when it is removed: most readers pull files that are newer."""
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

    A reader may want some ``parts`` alone: of the partitions that have rows, by their numbers. What the copy
    has of others stays as long as it is used. Callers hold the copy's lock while they pull or push.
    """

    def __init__(self, uri: str, folder: Path, parts: range | None = None) -> None:
        self.uri, self.parts = uri, parts
        self._folder = folder
        self._store = ObjectFolder(uri)
        self.complaint: str | None = None
        """Why the copy may be behind the store, None where it is up to date."""
        self._seen: StoredObject | None = None
        self._looked_seconds = -REFRESH_SECONDS

    @contextlib.contextmanager
    def writing(self, name: str, *, copies: bool) -> Generator[None]:
        """Hold the lease during the block, and an up-to-date copy if asked; upload records at its end."""
        with Lease(self._store, name).held():
            if copies:
                self.pull()
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

    def is_behind(self) -> bool:
        """Say whether the store serves something else than the copy, which need not be held for this."""
        return self._is_behind(self._store.read(CURRENT_KEY))

    def _is_behind(self, found: StoredObject | None) -> bool:
        if found is None:
            if (self._folder / CURRENT_KEY).exists():
                raise IntegrityError(
                    f"{self.uri} must have what {self._folder} is a copy of, got no CURRENT; "
                    "restore it there, or remove the copy to begin again"
                )
            return False
        current, copied = _read(found, self.uri), self._copied()
        served = current.served, current.manifests[current.served]
        # A store that was set back to an older generation is followed, too.
        is_copied = copied is not None and (copied.served, copied.manifests[copied.served]) == served
        path = f"{_folder_of(served[0])}/{MANIFEST_NAME}"
        return not is_copied or not self._has_parts(self._small(path, served[1]))

    def pull(self) -> None:
        """Bring the copy to what the store serves, and to nothing else; one that is of it stays as it is."""
        self._seen = found = self._store.read(CURRENT_KEY)
        if not self._is_behind(found):
            return
        assert found is not None, "else it is not behind"
        with durable.storage_errors(f"copying {self.uri}"):
            try:
                self._pull(_read(found, self.uri))
            except DamageError:  # files of a generation that was replaced meanwhile may be gone
                self._seen = newer = self._store.read(CURRENT_KEY)
                if newer is None or newer.content == found.content:
                    raise
                self._pull(_read(newer, self.uri))

    def has(self, number: int) -> bool:
        """Tell whether the copy has a generation with the partitions that are wanted, be it damaged."""
        try:
            return self._has_parts(durable.read_bytes(self._folder / _folder_of(number) / MANIFEST_NAME))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, KeyError):
            return True

    def _has_parts(self, manifest: bytes) -> bool:
        """Tell whether the copy has the manifests, which come last, of the partitions that are wanted."""
        wanted = _wanted(json.loads(manifest), self.parts)
        return all((self._folder / _manifest_of(record)[0]).exists() for record in wanted)

    def push(self, number: int) -> None:
        """Upload a generation of the copy and let the store serve it.

        Raises :class:`CollectionBusyError` where another writer was faster: nothing is served of this one
        then.
        """
        sha256 = record_file(self._folder / _folder_of(number) / MANIFEST_NAME).sha256
        current = _followed(number, sha256, self._kept())
        self._upload(self._records(number, sha256))
        commit_point("store-files-written")
        self._swap(current.to_bytes())
        commit_point("store-current-swapped")
        with contextlib.suppress(TryAgainError, DamageError):  # the next writer does it
            self._sweep()

    def manifest(self, record: PartitionRecord) -> Manifest:
        """Read a partition's manifest, from the store where another machine has published it."""
        return Manifest.of(self._small(*_manifest_of(record)), generation_name(record.generation))

    def upload(self, record: PartitionRecord) -> None:
        """Upload a generation of a partition, which a generation of the collection may then name."""
        self._upload(self._records(record.generation, record.sha256, _base_of(record)))
        commit_point("partition-uploaded")

    def remove(self) -> None:
        """Remove the collection from the store, what says that there is one first."""
        self._store.delete([CURRENT_KEY])
        self._store.delete(key for key in self._store.list("") if key != LEASE_KEY)

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

        current = _read(found, self.uri)
        records = self._records(current.served, current.manifests[current.served])
        with ThreadPoolExecutor(TRANSFERS) as pool:
            problems = zip(records, pool.map(problem, records.values()), strict=True)
            return {path: sentence for path, sentence in sorted(problems) if sentence is not None}

    def restore(self, number: int, paths: Iterable[str]) -> None:
        """Write files of the served generation that the store has lost or changed to the store again."""
        records = self._records(number, record_file(self._folder / _folder_of(number) / MANIFEST_NAME).sha256)
        self._store.delete(key_of(records[path]) for path in paths if path in records)
        self.push(number)

    def _records(self, number: int, sha256: str, base: str = "", *, parts: range | None = None) -> Records:
        """Return every file of a generation, by its manifest in the copy or, failing that, in the store.

        ``base`` is the folder of a partition, whose files are among those of its collection, but for those
        that are not among ``parts``.
        """
        folder = base + _folder_of(number)
        content = self._small(f"{folder}/{MANIFEST_NAME}", sha256)
        manifest = json.loads(content)
        records = {f"{folder}/{name}": FileRecord(**record) for name, record in manifest["files"].items()}
        named = manifest["lance_files"].items()
        records |= {f"{base}lance/{name}": FileRecord(**record) for name, record in named}
        for record in _wanted(manifest, parts):
            records |= self._records(record.generation, record.sha256, _base_of(record))
        for path in records:
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise DamageError(f"a file of {self.uri} must lie in its collection, got {path!r}")
        records[f"{folder}/{MANIFEST_NAME}"] = FileRecord(size_bytes=len(content), sha256=sha256)
        return records

    def _small(self, path: str, sha256: str) -> bytes:
        with contextlib.suppress(OSError):
            content = durable.read_bytes(self._folder / path)
            if hashlib.sha256(content).hexdigest() == sha256:
                return content
        found = self._store.read(f"files/{sha256}")
        if found is None or hashlib.sha256(found.content).hexdigest() != sha256:
            raise DamageError(
                f"{path} in {self.uri} {'is missing' if found is None else 'does not match its SHA-256'}"
            )
        return found.content

    def _upload(self, records: Records) -> None:
        files = {key_of(record): (self._folder / path, record) for path, record in records.items()}
        stored = self._store.list("files")
        kept: set[str] = set()
        for generation in self._kept().items():
            with contextlib.suppress(DamageError):  # one that no machine can pull: nothing of it is relied on
                kept |= self._keys(*generation)
        lease = self._store.read(LEASE_KEY)  # renewed a moment ago: the store's clock

        def is_there(key: str, record: FileRecord) -> bool:
            size, modified_at = stored.get(key, (-1, None))
            if size != record.size_bytes or modified_at is None:
                return False
            is_new = lease and lease.modified_at - modified_at < timedelta(seconds=REUSED_SECONDS)
            # What the copy does not have was uploaded by a worker of this run.
            return bool(is_new) or key in kept or not files[key][0].exists()

        missing = [(key, path) for key, (path, record) in files.items() if not is_there(key, record)]
        with durable.storage_errors(f"uploading to {self.uri}"), ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(lambda each: self._store.write(*each), missing))

    def _kept(self) -> Mapping[int, str]:
        """Return the hashes of the manifests that the store names."""
        return _read(self._seen, self.uri).manifests if self._seen else {}

    def _keys(self, number: int, sha256: str) -> set[str]:
        return {key_of(record) for record in self._records(number, sha256).values()}

    def _swap(self, content: bytes) -> None:
        try:
            is_swapped = self._store.swap(CURRENT_KEY, content, self._seen and self._seen.e_tag)
            unsure = None
        except TryAgainError as error:
            is_swapped, unsure = False, error
        found = self._store.read(CURRENT_KEY)
        # A reply may be lost, and the write repeated on the way: what stands there now decides.
        if not is_swapped and (found is None or found.content != content):
            raise unsure or CollectionBusyError(
                f"{self.uri} was published by another run meanwhile; run the same command again, it goes "
                "on from there"
            )
        self._seen = found

    def _sweep(self) -> None:
        """Remove files of no generation that no reader counts on any more."""
        assert self._seen is not None
        kept = set().union(*(self._keys(*generation) for generation in self._kept().items()))
        oldest = self._seen.modified_at - timedelta(seconds=KEPT_SECONDS)
        self._store.delete(
            key
            for key, (_, modified_at) in self._store.list("files").items()
            if key not in kept and modified_at < oldest
        )

    def _pull(self, current: Current) -> None:
        served = current.served
        records = self._records(served, current.manifests[served], parts=self.parts)
        target = self._folder / _folder_of(served)
        temporary = target.with_name(f".{target.name}.tmp")
        durable.remove_entry(temporary)
        temporary.mkdir(parents=True)
        downloads: list[tuple[str, Path, FileRecord]] = []
        for path, record in records.items():
            local = self._folder / path
            place = temporary / local.name if local.parent == target else local
            if not (place == local and _is_whole(local, record)) and not _link(local, place, record):
                downloads.append((key_of(record), place, record))
        with ThreadPoolExecutor(TRANSFERS) as pool:
            for is_last in (False, True):  # what is there with its manifest is there whole
                own = [each for each in downloads if (each[1].name == MANIFEST_NAME) is is_last]
                list(pool.map(lambda each: self._store.download(*each), own))
        for path in (self._folder / path for path in records if Path(path).name == MANIFEST_NAME):
            folder, own = path.parent, path.parents[2]
            built = temporary if folder == target else folder
            lance_files = Manifest.read(built).lance_files
            write_copies(own / "lance", built, own / COPIES / folder.name, lance_files)
        commit_point("copy-files-pulled")
        if not target.is_dir():
            durable.remove_entry(target)
        durable.put_in_place(temporary, target)
        commit_point("copy-generation-renamed")
        durable.clear_way(self._folder / CURRENT_KEY)
        copied = self._copied()
        kept = _followed(served, current.manifests[served], {} if copied is None else copied.manifests)
        durable.write_bytes(self._folder / CURRENT_KEY, kept.to_bytes())
        commit_point("copy-current-replaced")
        self._prune()

    def _prune(self) -> None:
        """Leave two generations, for searches that still hold the one before, and what they consist of."""
        copied = self._copied()
        assert copied is not None, "it was just written"
        kept: set[str] = {*self._records(copied.served, copied.manifests[copied.served])}
        for generation in copied.manifests.items():
            with contextlib.suppress(DamageError, TryAgainError):  # one that is damaged keeps nothing
                kept |= self._records(*generation).keys()
        used = {self._folder / path for path in kept}
        partitions = self._folder / PARTITIONS
        for own in (self._folder, *(partitions.iterdir() if partitions.is_dir() else ())):
            if not any(path.is_relative_to(own) for path in used):
                durable.remove_folder(own)
                continue
            durable.clear_temporary(own / "generations")
            for folder in list((own / "generations").iterdir()):
                if folder.name.isdigit() and folder / MANIFEST_NAME not in used:
                    durable.remove_folder(folder)
                    durable.remove_entry(own / COPIES / folder.name)
            lance = own / "lance"
            keep_only(
                lance, {path.relative_to(lance).as_posix() for path in used if path.is_relative_to(lance)}
            )

    def _copied(self) -> Current | None:
        with contextlib.suppress(OSError):
            return Current.of((self._folder / CURRENT_KEY).read_bytes())
        return None

    def _upload_records(self) -> None:
        for name in RECORD_FOLDERS:
            local = sorted((self._folder / name).glob("*")) if (self._folder / name).is_dir() else []
            stored = self._store.list(name) if local else {}
            for path in local:
                if f"{name}/{path.name}" not in stored:
                    self._store.write(f"{name}/{path.name}", path)


def _followed(number: int, sha256: str, before: Mapping[int, str]) -> Current:
    """Return what ``CURRENT`` says of a generation and of those before it that are kept."""
    older = [each for each in before.items() if each[0] < number]
    return Current({number: sha256, **dict(older[: KEPT_GENERATIONS - 1])})


def _wanted(manifest: Mapping[str, Any], parts: range | None) -> Sequence[PartitionRecord]:
    """Return the partitions that have rows, or some of them by their numbers among these."""
    partitions = [PartitionRecord(**own) for own in manifest["partitions"] if own["generation"]]
    return partitions if parts is None else partitions[parts.start : parts.stop]


def _base_of(record: PartitionRecord) -> str:
    return f"{PARTITIONS}/{record.name}/"


def _manifest_of(record: PartitionRecord) -> tuple[str, str]:
    """Return the path of a partition's manifest in a copy, and its hash."""
    return f"{_base_of(record)}{_folder_of(record.generation)}/{MANIFEST_NAME}", record.sha256


def _folder_of(number: int) -> str:
    """Return the folder of a generation in a copy."""
    return f"generations/{generation_name(number)}"


def _link(local: Path, place: Path, record: FileRecord) -> bool:
    """Take a file of a generation from another generation beside its own."""
    for path in local.parent.parent.glob(f"[0-9]*/{local.name}"):
        if _is_whole(path, record):
            durable.clear_way(place)
            place.unlink(missing_ok=True)
            place.hardlink_to(path)
            return True
    return False


def _is_whole(path: Path, record: FileRecord) -> bool:
    return record.problem(path, check_hash=False) is None and has_sha256(path, record.sha256)


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
