"""The texts of an analysis: one column of a file, or of all in a folder."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.judged_files import corpus_files, read_columns
from cairn.pipeline.errors import SchemaError


def read_texts(path: Path, column: str = "text") -> list[str]:
    """Return the texts that are not empty, in the order of the files.

    Of a judged folder its corpus alone.
    """
    return [text for file in corpus_files(path) for text in _column(file, column) if text]


def _column(file: SourceFile, column: str) -> list[str | None]:
    try:
        return read_columns(file, (column,)).column(column).cast(pa.large_string()).to_pylist()
    except pa.ArrowException as error:
        raise SchemaError(f"column {column} of {file.name} must hold text; name another") from error
