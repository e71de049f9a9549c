"""Files of a run that workers wrote to an object store, and that this machine's copy lacks.

A publication names them by their hashes, as it names every other file. What the committer reads itself is
fetched. The rest comes with the next pull, as what another machine published does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.index.object_folder import ObjectFolder
from pipeline.manifest import FileRecord, record_file


def key_of(record: FileRecord) -> str:
    """Return the name of a file in the store."""
    return f"files/{record.sha256}"


class WorkerFiles:
    """What workers wrote for the collection in ``folder``, by path below it."""

    def __init__(self, store: ObjectFolder, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._records: dict[str, FileRecord] = {}

    def clear(self) -> None:
        """Forget all: another run begins."""
        self._records.clear()

    def note(self, records: Mapping[Path, FileRecord]) -> None:
        """Remember what workers wrote."""
        self._records |= {self._name(path): record for path, record in records.items()}

    def upload(self, path: Path) -> FileRecord:
        """Write a file of the copy to the store, for workers."""
        record = record_file(path)
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

    def fetch(self, path: Path) -> None:
        """Bring a file into the copy."""
        self._store.download(key_of(self._records[self._name(path)]), path, self._records[self._name(path)])

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()
