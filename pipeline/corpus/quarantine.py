"""What was refused, and why: one row a refused source row, streamed to Parquet.

Side exit of stage 1; what streams its rows writes the origins of rows, too. Reasons are stable codes
that scripts may rely on; ``detail`` is for people and never quotes a document. A file that cannot be read at
all counts as one row without an index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from enum import StrEnum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
import pyarrow.parquet as pq
from cairn.pipeline import durable

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers


class Reason(StrEnum):
    """Why a row is refused, in lower case where it is written."""

    NULL_ID = auto()
    EMPTY_ID = auto()
    LONG_ID = auto()
    NULL_TEXT = auto()
    EMPTY_TEXT = auto()
    OVERSIZED_TEXT = auto()
    OVERSIZED_FIELD = auto()
    INVALID_UTF8 = auto()
    NUL_CHARACTER = auto()
    NAN_METADATA = auto()
    UNSHOWABLE_DATE = auto()
    UNFIT_VALUE = auto()
    UNFIT_VECTOR = auto()
    DUPLICATE_ID = auto()
    DAMAGED_ROWS = auto()
    DAMAGED_FILE = auto()
    DAMAGED_DOCUMENT = auto()
    DAMAGED_PAGE = auto()
    PAGE_WITHOUT_TEXT = auto()


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
"""Rows held before they are written.

One row group for each row would make a footer larger than the file.
"""
SHOWN_ID_CHARACTERS = 1_024
"""Longer ids are cut in the report: a poison id must not poison the quarantine file as well.

Ids that may be stored stay whole.
"""


MAX_COMPARED_ROWS: Final = 1_000_000
COMPARED_RUNS: Final = 20
"""Runs whose refused rows are compared with those of another: several sources take turns."""


def rejected_rows(
    source_file: str | pa.Array,
    row_indices: Sequence[int | None] | np.ndarray,
    reasons: str | pa.Array,
    details: str | pa.Array,
    doc_ids: pa.Array | None = None,
) -> pa.RecordBatch:
    """Return rows of :data:`REJECTED_SCHEMA`; what is no column holds for all of them."""

    def column(value: str | pa.Array | None) -> pa.Array:
        is_one = value is None or isinstance(value, str)
        return pa.repeat(pa.scalar(value, pa.string()), len(row_indices)) if is_one else value

    indices = pa.array(row_indices, pa.int64())
    columns = [column(source_file), indices, column(doc_ids), column(reasons), column(details)]
    return pa.RecordBatch.from_arrays(columns, schema=REJECTED_SCHEMA)


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


def examples(rejected: pa.RecordBatch) -> dict[str, str]:
    """Return for each reason the place and the detail of its first row."""
    found = dict[str, str]()
    for reason in reason_counts(rejected):
        row = rejected.slice(pc.index(rejected.column("reason"), reason).as_py(), 1).to_pylist()[0]
        found[reason] = f"{', '.join([row['source_file'], *place_in_file(row)])}: {row['detail']}"
    return found


def place_in_file(row: Mapping[str, Any]) -> list[str]:
    """Return where in its file a refused row stands; a file that is a document has no rows."""
    is_file = row["row_index"] is None or row["source_file"].endswith(row["doc_id"] or "\0")
    return [] if is_file else [f"row {row['row_index']:,}"]


def count_new(path: Path) -> int:
    """Count the refused rows of a run that no recent run of the collection refused for the same reason.

    A row is known by its id, one without by its place in its file. So many rows that they would fill the
    memory all count as new.
    """
    if not path.exists():
        return 0
    if (num_rows := pq.read_metadata(path).num_rows) > MAX_COMPARED_ROWS:
        return num_rows
    rows = _known_by(path)
    for earlier in sorted(path.parent.glob("*.parquet"), reverse=True)[:COMPARED_RUNS]:
        if earlier != path and rows.num_rows:
            with contextlib.suppress(pa.ArrowException, OSError):  # one that cannot be read tells of no row
                rows = rows.join(_known_by(earlier), keys=rows.column_names, join_type="left anti")
    return rows.num_rows


def _known_by(path: Path) -> pa.Table:
    """Read what a refused row is known by, without nulls, which a join would not match."""
    rows = pq.read_table(path, columns=["source_file", "row_index", "doc_id", "reason"])
    place = pc.fill_null(rows.column("row_index"), -1).cast(pa.string())
    known = pc.coalesce(rows.column("doc_id"), pc.binary_join_element_wise("row", place, " "))
    return pa.table({"file": rows.column("source_file"), "row": known, "reason": rows.column("reason")})


class RowWriter:
    """Stream rows of a schema into one Parquet file; ``doing`` names the work where storage fails.

    No file appears when nothing was written, or when the block fails.
    """

    def __init__(
        self, path: Path, schema: pa.Schema = REJECTED_SCHEMA, doing: str = "writing the quarantine file"
    ) -> None:
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
            with durable.storage_errors(self._doing):
                self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            durable.make_folder(self.path.parent)
            temporary = self._stack.enter_context(durable.replacing(self.path))
            writer = pq.ParquetWriter(temporary, self._schema, compression="zstd")
            self._writer = self._stack.enter_context(writer)
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
        with durable.storage_errors(self._doing), self._stack:
            self._flush()
