"""Writes that were acknowledged and are not published yet: one file a collection, appended and flushed.

    frame = size (4 bytes) · CRC-32 (4 bytes) · JSON

An append returns when the disk has it. One that failed leaves the file as it was. A kill leaves at most a
part of the last frame, which was acknowledged to no one. What is no whole frame is cut off when the file is
opened, and kept beside it as ``writes.log.cut``: it may be damage. Frames are never changed; the file is
written again with what is still needed.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cairn.pipeline import durable

log = logging.getLogger(__name__)

GROWN_BYTES: Final = 4 << 20
_HEAD: Final = struct.Struct("<II")
Record = Mapping[str, Any]


class WriteLog:
    """The file, open for one writer; ``records`` are those it held then, each with its position.

    A position stays the same when the file is written again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with durable.storage_errors(f"opening {path.name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = durable.read_bytes(path) if path.exists() else b""
            self.records, self.size = _read(content)
            if self.size < len(content):
                log.warning("writes.cut file=%s bytes=%d", path.name, len(content) - self.size)
                durable.write_bytes(path.with_name(f"{path.name}.cut"), content[self.size :])
            self._descriptor = self._open(path)
            self._dropped_bytes = self._kept_bytes = 0
            self._is_doubtful = False
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)
            durable.fsync_folder(path.parent)

    def append(self, record: Record, *, flushes: bool = True) -> int:
        """Add a record, durably if it ``flushes``, and return its position.

        Where that fails, raises :class:`StorageError` and adds nothing.
        """
        frame = _frame(record)
        with durable.storage_errors(f"writing {self._path.name}"):
            if self._is_doubtful:
                self._put(os.pread(self._descriptor, self.size, 0))
            try:
                written = os.pwrite(self._descriptor, frame, self.size)
                while written < len(frame):  # a disk that is almost full takes a part
                    written += os.pwrite(self._descriptor, frame[written:], self.size + written)
                durable.commit_point("write-logged")
                if flushes:  # after one that failed, the kernel may not try again what it had not written
                    self._is_doubtful = True
                    os.fsync(self._descriptor)
                    self._is_doubtful = False
            except OSError:
                os.ftruncate(self._descriptor, self.size)
                raise
        self.size += len(frame)
        durable.commit_point("write-flushed")
        return self._dropped_bytes + self.size - len(frame)

    def replace(self, record: Record, position: int | None) -> None:
        """Hold this record and those from a position on, None for no other."""
        start = self.size if position is None else position - self._dropped_bytes
        with durable.storage_errors(f"writing {self._path.name}"):
            self._put(_frame(record) + os.pread(self._descriptor, self.size - start, start))

    def _put(self, content: bytes) -> None:
        """Let the file hold other bytes, which end as it does."""
        opened: int | None = None
        try:
            with durable.replacing(self._path) as temporary:
                temporary.write_bytes(content)
                opened = self._open(temporary)
        finally:  # a failure may come before the rename or after it: go on with the file of that name
            if opened is not None and os.path.samestat(self._path.stat(), os.fstat(opened)):
                opened, self._descriptor = self._descriptor, opened
                self._dropped_bytes += self.size - len(content)
                self.size = self._kept_bytes = len(content)
                self._is_doubtful = False
            if opened is not None:
                os.close(opened)

    @property
    def is_grown(self) -> bool:
        """Tell whether it is worth writing again: it is large, and twice what was last kept of it."""
        return self.size > max(GROWN_BYTES, 2 * self._kept_bytes)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _frame(record: Record) -> bytes:
    content = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _read(content: bytes) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Return the records of whole frames with their positions, and where the last of them ends."""
    records: list[tuple[int, dict[str, Any]]] = []
    end = 0
    while end + _HEAD.size <= len(content):
        size, checksum = _HEAD.unpack_from(content, end)
        start = end + _HEAD.size
        body = content[start : start + size]
        if size == 0 or len(body) < size or zlib.crc32(body) != checksum:
            break  # a power cut may leave zeros, whose checksum is that of nothing
        records.append((end, json.loads(body)))
        end = start + size
    return records, end
