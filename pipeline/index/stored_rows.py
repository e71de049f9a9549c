"""Rows of both tables at pinned versions, streamed in stored order: all of them, or some.

What files of a segment are made of. Memory does not grow with the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from pipeline.index.lance_index import SCAN_ROWS, LanceTables
from pipeline.index.tables import DOCUMENTS

TEXT_ROWS = 64
"""A few texts at a time: one may be long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """The rows of ``fragments``, and of them those of ``spans``, of each table; None for all."""

    tables: LanceTables
    versions: Mapping[str, int]
    fragments: Mapping[str, Sequence[int]] | None = None
    spans: Mapping[str, slice] | None = None

    def scan(
        self, table: str, columns: Sequence[str], batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Stream columns of a table."""
        fragments = None if self.fragments is None else self.fragments[table]
        span = None if self.spans is None else self.spans[table]
        return self.tables.scan(table, columns, self.versions, batch_rows, fragments=fragments, span=span)

    def vectors(self, table: str) -> Iterator[Float32[np.ndarray, "N V"]]:
        """Stream the vectors of a table."""
        for batch in self.scan(table, ["vector"]):
            yield vectors_of(batch.column("vector"))

    def texts(self) -> Iterator[list[str]]:
        """Stream the texts of the documents."""
        for batch in self.scan(DOCUMENTS, ["text"], TEXT_ROWS):
            yield batch.column("text").to_pylist()

    def titles(self) -> Iterator[list[str]]:
        """Stream the titles of the documents, empty ones of those that have none."""
        for batch in self.scan(DOCUMENTS, ["title"]):
            yield [title or "" for title in batch.column("title").to_pylist()]


def vectors_of(column: pa.FixedSizeListArray) -> Float32[np.ndarray, "N V"]:
    """View a column of fixed-size lists as a matrix, without a copy."""
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)
