"""What was refused, and why: one row a refused source row, streamed to Parquet.

Side exit of stage 1. Reasons are stable codes that scripts may rely on; ``detail`` is for people and never
quotes a document. A file that cannot be read at all counts as one row without an index.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import durable

NULL_ID = "null_id"
EMPTY_ID = "empty_id"
LONG_ID = "long_id"
NULL_TEXT = "null_text"
EMPTY_TEXT = "empty_text"
OVERSIZED_TEXT = "oversized_text"
OVERSIZED_FIELD = "oversized_field"
INVALID_UTF8 = "invalid_utf8"
LONE_SURROGATE = "lone_surrogate"
NUL_CHARACTER = "nul_character"
NAN_METADATA = "nan_metadata"
DUPLICATE_ID = "duplicate_id"
DAMAGED_ROWS = "damaged_rows"
DAMAGED_FILE = "damaged_file"

REASONS = (
    NULL_ID,
    EMPTY_ID,
    LONG_ID,
    NULL_TEXT,
    EMPTY_TEXT,
    OVERSIZED_TEXT,
    OVERSIZED_FIELD,
    INVALID_UTF8,
    LONE_SURROGATE,
    NUL_CHARACTER,
    NAN_METADATA,
    DUPLICATE_ID,
    DAMAGED_ROWS,
    DAMAGED_FILE,
)

REJECTED_SCHEMA = pa.schema(
    [
        pa.field("source_file", pa.string(), nullable=False),
        pa.field("row_index", pa.int64()),
        pa.field("doc_id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

ROW_GROUP_ROWS = 8_192
"""Rejected rows held before they are written.

One row group for each bad row would make a footer larger than the file.
"""

SHOWN_ID_CHARACTERS = 1_024
"""Longer ids are cut in the report: a poison id must not poison the quarantine file as well.

Ids that may be stored stay whole.
"""


def shown_id(raw: bytes | None) -> str | None:
    """Make an id printable: undecodable bytes, surrogates and NUL become U+FFFD, the tail is cut."""
    if raw is None:
        return None
    # Four bytes a character at most; cutting first keeps a 10 MB id cheap.
    text = raw[: SHOWN_ID_CHARACTERS * 4].decode("utf-8", "replace").replace("\0", "\ufffd")
    return text[:SHOWN_ID_CHARACTERS]


def reason_counts(rejected: pa.RecordBatch) -> dict[str, int]:
    """Count rows of :data:`REJECTED_SCHEMA` by their reason."""
    counted = rejected.column("reason").value_counts()
    return dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))


class QuarantineWriter:
    """Stream rejected rows into one Parquet file.

    No file appears when nothing was rejected, or when the block fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows = 0
        self._counts: Counter[str] = Counter()
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._stack = contextlib.ExitStack()
        self._writer: pq.ParquetWriter | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """Rejected rows by reason, reasons sorted."""
        return dict(sorted(self._counts.items()))

    def write(self, rejected: pa.RecordBatch) -> None:
        """Append rows of :data:`REJECTED_SCHEMA`."""
        if rejected.num_rows == 0:
            return
        self._pending.append(rejected)
        self._pending_rows += rejected.num_rows
        self.num_rows += rejected.num_rows
        self._counts.update(reason_counts(rejected))
        if self._pending_rows >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        with durable.storage_errors("writing the quarantine file"):
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._stack.enter_context(durable.replacing(self.path))
                self._writer = self._stack.enter_context(
                    pq.ParquetWriter(temporary, REJECTED_SCHEMA, compression="zstd")
                )
            self._writer.write_table(pa.Table.from_batches(self._pending, REJECTED_SCHEMA))
        self._pending, self._pending_rows = [], 0

    def __enter__(self) -> QuarantineWriter:
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
        with durable.storage_errors("writing the quarantine file"):
            self._stack.close()
