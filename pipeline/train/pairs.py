"""Training pairs: a query and the document that answers it, read from Parquet or JSON lines and checked.

    query      text        what somebody asks
    document   text        what answers it
    title      may be missing or empty: the page the document stands on; neighbours of one title make one long sequence
    source     may be missing: where the pair comes from, the domain it is clustered in; else the name of the file

Order matters: pairs that follow one another in a file are taken for neighbours. What cannot be used is counted, never dropped in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import SchemaError, SourceError

COLUMNS: Final = ("query", "document", "title", "source")
_REQUIRED: Final = ("query", "document")
_SUFFIXES: Final = (".parquet", ".jsonl")

_Row = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingPairs:
    """N pairs in file order; ``skipped`` counts by reason what is not among them."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    titles: tuple[str, ...]
    sources: tuple[str, ...]
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, positions: Iterable[int], reason: str) -> TrainingPairs:
        """Keep the pairs at these positions; the others are counted under ``reason``."""
        kept = list(positions)
        dropped = len(self) - len(kept)
        columns = ([column[position] for position in kept] for column in (self.queries, self.documents, self.titles, self.sources))
        queries, documents, titles, sources = (tuple(column) for column in columns)
        skipped = Counter(self.skipped) + Counter({reason: dropped} if dropped else {})
        return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=sources, skipped=dict(skipped))


def read_pairs(paths: Sequence[Path]) -> TrainingPairs:
    """Read files, or all Parquet and JSON-lines files below folders, in the order of their names.

    A pair with an empty side is skipped, and one that stands there word for word already. Files without a single pair to train on raise
    :class:`SourceError`, a missing or mistyped column :class:`SchemaError`.
    """
    files = [file for path in paths for file in _files(path)]
    kept: dict[_Row, None] = {}
    skipped: Counter[str] = Counter()
    for file in files:
        for row in _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file):
            if not row[0].strip() or not row[1].strip():
                skipped["empty query" if not row[0].strip() else "empty document"] += 1
            elif row in kept:
                skipped["repeated pair"] += 1
            else:
                kept[row] = None
    if not kept:
        counted = ", ".join(f"{count} with {reason}" for reason, count in sorted(skipped.items())) or "empty files"
        raise SourceError(f"training files must hold at least one pair with a query and a document, got {counted}; name others")
    queries, documents, titles, sources = zip(*kept, strict=True)
    return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=sources, skipped=dict(skipped))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for suffix in _SUFFIXES for file in path.rglob(f"*{suffix}") if file.is_file())
        if not files:
            raise SourceError(f"a training folder must hold {' or '.join(_SUFFIXES)} files, got none in {str(path)!r}; name another")
        return files
    if not path.is_file():
        raise SourceError(f"training data must be a file or a folder, got {str(path)!r}, which does not exist; name another")
    if path.suffix not in _SUFFIXES:
        raise SourceError(f"a training file must end in {' or '.join(_SUFFIXES)}, got {path.name!r}; convert it")
    return [path]


def _read_parquet(path: Path) -> Iterator[_Row]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{path.name} must be a Parquet file, got an unreadable one ({error}); write it again") from error
    names = file.schema_arrow.names
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise SchemaError(f"{path.name} must have the columns {' and '.join(_REQUIRED)}, got {', '.join(names)}; rename them")
    present = [name for name in COLUMNS if name in names]
    for name in present:
        kind = file.schema_arrow.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_null(kind)):
            raise SchemaError(f"column {name} of {path.name} must be text, got {kind}; convert it")
    for batch in file.iter_batches(columns=present):
        columns = [batch.column(name).to_pylist() if name in present else [None] * batch.num_rows for name in COLUMNS]
        for values in zip(*columns, strict=True):
            yield _row(values, path)


def _read_lines(path: Path) -> Iterator[_Row]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record: Any = json.loads(line)
            except ValueError as error:
                raise SourceError(f"line {number} of {path.name} must be a JSON object, got an unreadable one ({error})") from error
            if not isinstance(record, dict) or any(name not in record for name in _REQUIRED):
                raise SchemaError(f"line {number} of {path.name} must be a JSON object with {' and '.join(_REQUIRED)}, got {line[:60]!r}")
            values = [record.get(name) for name in COLUMNS]
            for name, value in zip(COLUMNS, values, strict=True):
                if value is not None and not isinstance(value, str):
                    raise SchemaError(f"{name} in line {number} of {path.name} must be text, got {value!r:.60}")
            yield _row(values, path)


def _row(values: Sequence[str | None], path: Path) -> _Row:
    query, document, title, source = ((value or "") for value in values)
    return query, document, title, source or path.stem


def text_numbers(texts: Sequence[str]) -> np.ndarray:
    """Number texts so that equal ones share a number."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
