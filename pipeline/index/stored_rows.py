"""Rows of both tables at pinned versions, streamed in stored order: all of them, or some.

What files of a segment are made of. Memory does not grow with the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.lance_files import small_table_files
from cairn.pipeline.index.lance_index import SCAN_ROWS, LanceTables
from cairn.pipeline.index.tables import DOCUMENTS, TABLES, open_pinned_dataset
from jaxtyping import Float32

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

    def files(self, tables: Collection[str] = TABLES) -> Iterator[Path]:
        """Yield the files that scans of some tables read."""
        for table in tables:
            folder = self.tables.layout.lance_folder / f"{table}.lance"
            yield from small_table_files(self.tables.layout, {table: self.versions[table]})
            span = slice(0, sys.maxsize) if self.spans is None else self.spans[table]
            dataset = open_pinned_dataset(self.tables.layout.lance_folder, table, self.versions[table])
            end = 0
            for fragment in dataset.get_fragments():
                if self.fragments is not None and fragment.fragment_id not in self.fragments[table]:
                    continue
                begin, end = end, end + fragment.physical_rows - fragment.num_deletions
                if begin < span.stop and span.start < end:
                    yield from (folder / "data" / file.path for file in fragment.data_files())

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
