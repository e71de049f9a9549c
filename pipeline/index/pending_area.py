"""Encoded shards of a run in the object store of their collection, until the run is published.

    workers that encode ─▶ pending/<area>/<sha256> ─▶ workers that write fragments of the tables
              └─▶ sizes and hashes ─▶ committer ─▶ tasks ──┘

Each folder of pending work has an area of its own, so who discards the work removes the area and no other
run's shards. One whose machine was lost is removed as files of no generation are: see ``replica``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.lease import LEASE_KEY
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.manifest import FileRecord


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
