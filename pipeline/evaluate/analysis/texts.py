"""The texts of an analysis: one column of a Parquet file, or of all in a folder."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import SchemaError, SourceError
from pipeline.evaluate.retrieval_set import CORPUS_FILE


def read_texts(path: Path, column: str = "text") -> list[str]:
    """Return the texts that are not empty, in the order of the files.

    Of a judged folder, which has ``corpus.parquet``, that file alone.
    """
    corpus = path / CORPUS_FILE
    files = [path] if path.is_file() else [corpus] if corpus.is_file() else sorted(path.glob("*.parquet"))
    if not files:
        raise SourceError(f"texts must be a Parquet file or a folder of some, got {str(path)!r}; name one")
    return [text for file in files for text in _column(file, column) if text]


def _column(file: Path, column: str) -> list[str | None]:
    try:
        names = pq.read_schema(file).names
        values = pq.read_table(file, columns=[column] if column in names else [])
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.name} must be a readable Parquet file; write it again") from error
    if column not in names:
        raise SchemaError(f"{file.name} must have the column {column}, got {', '.join(names)}; name another")
    try:
        return values.column(column).cast(pa.large_string()).to_pylist()
    except pa.ArrowException as error:
        raise SchemaError(f"column {column} of {file.name} must hold text; name another") from error
