"""``deleted.bits``: which documents of a segment were replaced or deleted, one bit a stored row.

Stored rows are those a segment's files hold; live rows are numbered without the deleted ones. Both ways cost
a binary search in the deleted rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cairn.pipeline.durable import write_bytes
from cairn.pipeline.errors import DamageError
from cairn.pipeline.ragged import ranges
from jaxtyping import Int32, Int64


@dataclass(frozen=True, slots=True, eq=False)
class DeletedRows:
    """Which of ``num_stored`` rows are deleted, ascending."""

    num_stored: int
    rows: Int64[np.ndarray, " D"]

    @property
    def num_live(self) -> int:
        """Count the rows that are left."""
        return self.num_stored - len(self.rows)

    def live_of(self, stored: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " A"]:
        """Return the live numbers of stored rows that are not deleted."""
        return stored - np.searchsorted(self.rows, stored) if len(self.rows) else stored

    def stored_of(self, live: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " A"]:
        """Return the stored rows of live numbers."""
        if not len(self.rows):
            return live
        num_live_before = self.rows - np.arange(len(self.rows))
        return live + np.searchsorted(num_live_before, live, side="right")

    def is_live(self) -> np.ndarray:
        """Return a mask over the stored rows."""
        mask = np.ones(self.num_stored, np.bool_)
        mask[self.rows] = False
        return mask

    def with_live(self, live: Int64[np.ndarray, " A"]) -> DeletedRows:
        """Return these and the rows of further live numbers."""
        return DeletedRows(self.num_stored, np.sort(np.concatenate([self.rows, self.stored_of(live)])))

    def of_chunks(
        self, first_chunks: Int64[np.ndarray, " N"], num_chunks: Int32[np.ndarray, " N"], num_stored: int
    ) -> DeletedRows:
        """Return which of ``num_stored`` chunks are deleted, given the first and the number of each document.

        Costs the deleted rows alone, however many documents there are.
        """
        sizes = num_chunks[self.rows].astype(np.int64)
        return DeletedRows(num_stored, ranges(first_chunks[self.rows], sizes))


def none_deleted(num_stored: int) -> DeletedRows:
    """Return the deleted rows of a segment that has none."""
    return DeletedRows(num_stored, np.empty(0, np.int64))


def bits_of(deleted: DeletedRows) -> bytes:
    """Return the content of the file."""
    return np.packbits(~deleted.is_live(), bitorder="little").tobytes()


def write_deleted(path: Path, deleted: DeletedRows) -> None:
    """Write the bits of a segment's documents."""
    write_bytes(path, bits_of(deleted))


def read_deleted(path: Path, num_stored: int, num_deleted: int) -> DeletedRows:
    """Read the bits; a file that does not fit the segment raises :class:`DamageError`."""
    try:
        bits = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read") from error
    rows = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    if len(bits) != -(-num_stored // 8) or len(rows) != num_deleted or np.any(rows >= num_stored):
        raise DamageError(f"{path.name} must mark {num_deleted} of {num_stored} rows, got {len(rows)}")
    return DeletedRows(num_stored, rows)
