"""What was refused, and why: one row a refused source row, streamed to Parquet.

Side exit of stage 1. Reasons are stable codes that scripts may rely on; ``detail`` is for people and never
quotes a document. A file that cannot be read at all counts as one row without an index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from cairn.pipeline.corpus.row_writer import RowWriter
from typing_extensions import override

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


class QuarantineWriter(RowWriter):
    """Stream rejected rows, of :data:`REJECTED_SCHEMA`, and count them by reason."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, REJECTED_SCHEMA, "writing the quarantine file")
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Rejected rows by reason, reasons sorted."""
        return dict(sorted(self._counts.items()))

    @override
    def write(self, rows: pa.RecordBatch) -> None:
        super().write(rows)
        self._counts.update(reason_counts(rows))
