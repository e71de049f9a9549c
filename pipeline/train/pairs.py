"""Training pairs: a query and the document that answers it, read from Parquet or JSON lines and checked.

    query      text        what a reader asks
    document   text        what answers it
    title      may be missing or empty: the page the document stands on;
               neighbours of one title make one long sequence
    source     may be missing: where the pair comes from, the domain it is clustered in;
               else the name of the file

Order matters: pairs that follow one another in a file are taken for neighbours. What cannot be used is
counted, never dropped in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import SchemaError, SourceError

COLUMNS: Final = ("query", "document", "title", "source")
_REQUIRED: Final = ("query", "document")
_SUFFIXES: Final = (".parquet", ".jsonl")


class PairRow(NamedTuple):
    """One pair; ``page`` and ``heading`` say where its document was cut from, else empty."""

    query: str
    document: str
    title: str
    source: str
    page: str = ""
    heading: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingPairs:
    """N pairs in file order; ``skipped`` counts by reason what is not among them.

    ``pages`` and ``headings`` may be left out.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    titles: tuple[str, ...]
    sources: tuple[str, ...]
    pages: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        for name in ("pages", "headings"):
            object.__setattr__(self, name, getattr(self, name) or ("",) * len(self))

    @classmethod
    def of(cls, rows: Iterable[PairRow], skipped: Mapping[str, int]) -> TrainingPairs:
        """Take rows in order."""
        columns = list(zip(*rows, strict=True)) or [()] * len(PairRow._fields)
        queries, documents, titles, sources, pages, headings = columns
        return cls(
            queries=queries,
            documents=documents,
            titles=titles,
            sources=sources,
            pages=pages,
            headings=headings,
            skipped=dict(skipped),
        )

    def __len__(self) -> int:
        return len(self.queries)

    def rows(self) -> Iterator[PairRow]:
        """Yield the pairs one by one."""
        columns = (self.queries, self.documents, self.titles, self.sources, self.pages, self.headings)
        return map(PairRow, *columns)

    def take(self, positions: Iterable[int], reason: str) -> TrainingPairs:
        """Keep the pairs at these positions; the others are counted under ``reason``."""
        rows = list(self.rows())
        kept = [rows[position] for position in positions]
        dropped = len(self) - len(kept)
        return TrainingPairs.of(kept, Counter(self.skipped) + Counter({reason: dropped} if dropped else {}))


def join_pairs(parts: Sequence[TrainingPairs]) -> TrainingPairs:
    """Return all pairs in one, in order."""
    skipped = sum((Counter(part.skipped) for part in parts), Counter[str]())
    return TrainingPairs.of((row for part in parts for row in part.rows()), skipped)


def read_pairs(paths: Sequence[Path]) -> TrainingPairs:
    """Read files, or all Parquet and JSON-lines files below folders, in the order of their names.

    A pair with an empty side is skipped, one that stands there word for word already, and one with half a
    surrogate pair. Files without a single pair to train on raise :class:`SourceError`, a missing or mistyped
    column :class:`SchemaError`.
    """
    kept: dict[PairRow, None] = {}
    skipped: Counter[str] = Counter()
    for file in training_files(paths, _SUFFIXES):
        read = (
            read_columns(file, required=_REQUIRED, columns=COLUMNS)
            if file.suffix == ".parquet"
            else _read_lines(file)
        )
        for query, document, title, source in read:
            row = PairRow(query, document, title, source or file.stem)
            if not all(map(_is_unicode, row)):
                skipped["text that is not valid Unicode"] += 1
            elif not query.strip() or not document.strip():
                skipped["empty query" if not query.strip() else "empty document"] += 1
            elif row in kept:
                skipped["repeated pair"] += 1
            else:
                kept[row] = None
    if not kept:
        counted = (
            ", ".join(f"{count} with {reason}" for reason, count in sorted(skipped.items())) or "empty files"
        )
        raise SourceError(
            f"training files must hold at least one pair with a query and a document, got {counted}; "
            "name others"
        )
    return TrainingPairs.of(kept, skipped)


def training_files(paths: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files named, and for folders all files below them with one of the suffixes, by name."""
    return [file for path in paths for file in _files(path, suffixes)]


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if path.is_dir():
        files = sorted(file for suffix in suffixes for file in path.rglob(f"*{suffix}") if file.is_file())
        if not files:
            raise SourceError(
                f"a training folder must hold {' or '.join(suffixes)} files, got none in {str(path)!r}; "
                "name another"
            )
        return files
    if not path.is_file():
        raise SourceError(
            f"training data must be a file or a folder, got {str(path)!r}, which does not exist; name another"
        )
    if path.suffix not in suffixes:
        raise SourceError(
            f"a training file must end in {' or '.join(suffixes)}, got {path.name!r}; convert it"
        )
    return [path]


def read_columns(path: Path, *, required: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a Parquet file's text columns, null and a column that is not there as empty."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{path.name} must be a Parquet file, got an unreadable one ({error}); write it again"
        ) from error
    names = file.schema_arrow.names
    missing = [name for name in required if name not in names]
    if missing:
        raise SchemaError(
            f"{path.name} must have the columns {' and '.join(required)}, got {', '.join(names)}; rename them"
        )
    present = [name for name in columns if name in names]
    for name in present:
        kind = file.schema_arrow.field(name).type
        if not (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
            or pa.types.is_null(kind)
        ):
            raise SchemaError(f"column {name} of {path.name} must be text, got {kind}; convert it")
    try:
        for batch in file.iter_batches(columns=present):
            texts = [
                batch.column(name).to_pylist() if name in present else [None] * batch.num_rows
                for name in columns
            ]
            yield from (tuple(value or "" for value in values) for values in zip(*texts, strict=True))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{path.name} must hold whole texts in UTF-8, got others ({error}); write it again"
        ) from error


def _read_lines(path: Path) -> Iterator[tuple[str, ...]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record: Any = json.loads(line)
            except ValueError as error:
                raise SourceError(
                    f"line {number} of {path.name} must be a JSON object, got an unreadable one ({error})"
                ) from error
            if not isinstance(record, dict) or any(name not in record for name in _REQUIRED):
                found = (
                    f"one with {', '.join(map(str, record)) or 'nothing'}"
                    if isinstance(record, dict)
                    else f"{record!r:.60}"
                )
                raise SchemaError(
                    f"line {number} of {path.name} must be a JSON object with {' and '.join(_REQUIRED)}, "
                    f"got {found}"
                )
            values = [record.get(name) for name in COLUMNS]
            for name, value in zip(COLUMNS, values, strict=True):
                if value is not None and not isinstance(value, str):
                    raise SchemaError(
                        f"{name} in line {number} of {path.name} must be text, got {value!r:.60}"
                    )
            yield tuple(value or "" for value in values)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_numbers(texts: Sequence[str]) -> np.ndarray:
    """Number texts so that equal ones share a number."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
