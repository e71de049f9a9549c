"""Rows streamed into one Parquet file, which appears complete or not at all.

The side exits of stage 1 are written with it: what was refused, and where each indexed document came from.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable

ROW_GROUP_ROWS = 8_192
"""Rows held before they are written.

One row group for each row would make a footer larger than the file.
"""


class RowWriter:
    """Stream rows of a schema into one Parquet file; ``doing`` names the work where storage fails.

    No file appears when nothing was written, or when the block fails.
    """

    def __init__(self, path: Path, schema: pa.Schema, doing: str) -> None:
        self.path = path
        self.num_rows = 0
        self._schema = schema
        self._doing = doing
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._stack = contextlib.ExitStack()
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the schema."""
        if rows.num_rows == 0:
            return
        self._pending.append(rows)
        self._pending_rows += rows.num_rows
        self.num_rows += rows.num_rows
        if self._pending_rows >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        with durable.storage_errors(self._doing):
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._stack.enter_context(durable.replacing(self.path))
                self._writer = self._stack.enter_context(
                    pq.ParquetWriter(temporary, self._schema, compression="zstd")
                )
            self._writer.write_table(pa.Table.from_batches(self._pending, self._schema))
        self._pending, self._pending_rows = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        try:
            self._flush()
        except BaseException as failure:
            self._stack.__exit__(type(failure), failure, failure.__traceback__)
            raise
        with durable.storage_errors(self._doing):
            self._stack.close()
