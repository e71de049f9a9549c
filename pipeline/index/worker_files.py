"""Files of a run that workers wrote to an object store, and that this machine's copy lacks.

A publication names them by their hashes, as it names every other file. What the committer reads itself is
fetched. The rest comes with the next pull, as what another machine published does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cairn.pipeline.durable import storage_errors
from cairn.pipeline.errors import CairnError, DamageError
from cairn.pipeline.index.lease import LEASE_KEY
from cairn.pipeline.index.object_folder import TRANSFERS, ObjectFolder
from cairn.pipeline.manifest import FileRecord, record_file


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRecord(FileRecord):
    """Size and hash of a file in an area, and its name in the store."""

    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingArea:
    """The place of one run's shards below the collection at ``uri``; travels to workers."""

    uri: str
    name: str

    def is_reached(self) -> bool:
        """Tell whether this process can read the store; see :func:`is_reached`."""
        return is_reached(self.uri)

    def record(self, file: FileRecord) -> PendingRecord:
        """Return the record of a file that lies here, or is to."""
        key = f"{self._prefix}/{file.sha256}"
        return PendingRecord(size_bytes=file.size_bytes, sha256=file.sha256, key=key)

    def write(self, content: bytes) -> FileRecord:
        """Upload a file, whole or not at all."""
        record = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        ObjectFolder(self.uri).write(self.record(record).key, content)
        return record

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of all files here in bytes, by their names in the store."""
        return {key: size for key, (size, _) in ObjectFolder(self.uri).list(self._prefix).items()}

    def clear(self) -> None:
        """Remove all files."""
        ObjectFolder(self.uri).delete(self.sizes())

    @property
    def _prefix(self) -> str:
        return f"pending/{self.name}"


def is_reached(uri: str) -> bool:
    """Tell whether this process can read the store of a collection that is being written."""
    try:
        return ObjectFolder(uri).read(LEASE_KEY) is not None
    except CairnError:
        return False


Files = Mapping[str, FileRecord]
"""Files by path below the collection's folder."""


class LostFilesError(DamageError):
    """Files of a collection are not in its store as they were written; ``files`` says what is wrong."""

    def __init__(self, files: Mapping[Path, str]) -> None:
        super().__init__(next(iter(files.values())))
        self.files = files


def key_of(record: FileRecord) -> str:
    """Return the name of a file in the store."""
    return record.key if isinstance(record, PendingRecord) else f"files/{record.sha256}"


def fetch_files(store: ObjectFolder, folder: Path, files: Files) -> dict[str, str]:
    """Fetch files into a folder; return what is wrong with those that are missing or were changed."""
    lost: dict[str, str] = {}

    def fetch(name: str) -> None:
        try:
            store.download(key_of(files[name]), folder / name, files[name])
        except DamageError as error:
            lost[name] = error.fault

    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(fetch, files))
    return lost


class WorkerFiles:
    """What workers wrote for the collection in ``folder``, by path below it."""

    def __init__(self, store: ObjectFolder, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._records: dict[str, FileRecord] = {}
        self.pending_area: PendingArea | None = None
        """Where files of ``pending/`` are uploaded to; None is the place of all files."""

    def clear(self) -> None:
        """Forget all: another run begins."""
        self._records.clear()
        self.pending_area = None

    def note(self, records: Mapping[Path, FileRecord]) -> None:
        """Remember what workers wrote."""
        self._records |= {self._name(path): record for path, record in records.items()}

    def upload(self, path: Path) -> FileRecord:
        """Write a file of the copy to the store, for workers."""
        record = record_file(path)
        if self.pending_area is not None and self._name(path).startswith("pending/"):
            record = self.pending_area.record(record)
        self._store.write(key_of(record), path)
        self._records[self._name(path)] = record
        return record

    def move(self, source: Path, target: Path) -> None:
        """Give a file another name; the store knows it by its hash alone."""
        self._records[self._name(target)] = self._records.pop(self._name(source))

    def record_of(self, path: Path) -> FileRecord | None:
        """Return what a file must be that a worker wrote, None where none did."""
        return self._records.get(self._name(path))

    def below(self, folder: Path) -> dict[Path, FileRecord]:
        """Return the files in a folder."""
        return {
            self._folder / name: record
            for name, record in self._records.items()
            if (self._folder / name).parent == folder
        }

    def fetch(self, paths: Iterable[Path]) -> None:
        """Bring files into the copy; raise :class:`LostFilesError` for those that are not as written."""
        files = {self._name(path): self._records[self._name(path)] for path in paths}
        with storage_errors("fetching what workers wrote"):
            lost = fetch_files(self._store, self._folder, files)
        if lost:
            raise LostFilesError({self._folder / name: fault for name, fault in lost.items()})

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()
