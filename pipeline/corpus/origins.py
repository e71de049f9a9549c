"""Where each indexed document came from: one Parquet file a run, of the rows that the run indexed.

    doc_id    digest of its content    row in its source file, counted from 0

The source file itself is a column of the stored documents. A run may be killed before it publishes, and then
another one indexes its rows, and lists them, too: the newest file with the id and the content tells. The
files grow with what changes, not with the corpus, and only :func:`find_origin` reads them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.corpus.source_record import DIGEST_HEX_DIGITS, digest_of

ORIGIN_SCHEMA: Final = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("content", pa.binary(DIGEST_HEX_DIGITS // 2), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run that indexed a document, and the row it read it from, counted from 0."""

    run_id: str
    row_index: int


def find_origin(folder: Path, doc_id: str, content_sha256: str) -> Origin | None:
    """Return the last run that indexed a document with this content; None where no file tells.

    A file that cannot be read is passed over.
    """
    asked: Any = [("doc_id", "=", doc_id), ("content", "=", digest_of(content_sha256))]
    for path in sorted(folder.glob("*.parquet"), key=_age, reverse=True):
        with contextlib.suppress(pa.ArrowException, OSError):
            for row in pq.read_table(path, columns=["row_index"], filters=asked).column(0).to_pylist():
                return Origin(run_id=path.stem, row_index=row)
    return None


def _age(path: Path) -> tuple[str, int]:
    """Order runs by the second in their name, those of one second by when they wrote."""
    return path.stem.partition("-")[0], path.stat().st_mtime_ns
