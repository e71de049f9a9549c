"""Training pairs: a query and the document that answers it, made of the rows of files and checked.

    query, document          a question and what answers it
    negatives                documents that do not answer the query; others are not mined for it
    instruction              what stands before the query (NV-Embed eq. 2)
    title                    may be missing or empty: the page the document stands on;
                             neighbours of one title make one long sequence
    source                   may be missing: where the row comes from, the domain it is clustered in;
                             else the name of the file

Order matters: pairs that follow one another in a file are taken for neighbours. What cannot be used is
counted, never dropped in silence.

Rows of training files: Parquet and JSON lines, every value checked and of its kind.

    column        kind             what it is
    query         text             what a reader asks
    document      text             what answers it
    title         text             the page the document stands on
    source        text             where the row comes from, else the name of the file
    instruction   text             what the query is for
    negatives     list of texts    documents that do not answer the query
    text          text             what is pretrained or distilled on
    language      text             its language, such as en or de

Which of them a pair needs, and what is made of it, is said in :mod:`cairn.pipeline.lab.train.pairs`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Int64

SUFFIXES: Final = (".parquet", ".jsonl")


class _Kind(NamedTuple):
    """A kind of column: its name, whether a value is of it, and what null is read as."""

    name: str
    fits: Callable[[Any], bool]
    value: Callable[[Any], Any]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)


_TEXT: Final = _Kind("text", lambda value: isinstance(value, str), lambda value: value or "")
_TEXTS: Final = _Kind(
    "a list of texts",
    _is_texts,
    lambda value: tuple(text for text in value or () if text and text.strip()),
)


def training_files(paths: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files named, and for folders all files below them with one of the suffixes, by name."""
    found: list[Path] = []
    for path in paths:
        own = [path]
        if path.is_dir():
            own = sorted(file for suffix in suffixes for file in path.rglob(f"*{suffix}") if file.is_file())
            if not own:
                raise SourceError(
                    f"a training folder must hold {' or '.join(suffixes)} files, got none in {str(path)!r}; "
                    "name another"
                )
        elif not path.is_file():
            raise SourceError(
                f"training data must be a file or a folder, got {str(path)!r}, which does not exist; name "
                "another"
            )
        elif path.suffix not in suffixes:
            raise SourceError(
                f"a training file must end in {' or '.join(suffixes)}, got {path.name!r}; convert it"
            )
        found += own
    return found


def read_columns(path: Path, columns: Sequence[str], *required: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield columns of a file's rows, checked, with all of one of ``required``; what is missing is empty."""
    kinds = [_TEXTS if name == "negatives" else _TEXT for name in columns]
    rows = _json_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path, columns)
    for number, row in rows:
        if not any(set(wanted) <= row.keys() for wanted in required):
            listed = ", or ".join(" and ".join(wanted) for wanted in required)
            raise SchemaError(
                f"row {number} of {path.name} must have {listed}, got {', '.join(map(str, row)) or 'nothing'}"
            )
        values = [row.get(name) for name in columns]
        for name, kind, value in zip(columns, kinds, values, strict=True):
            if value is not None and not kind.fits(value):
                raise SchemaError(
                    f"{name} in row {number} of {path.name} must be {kind.name}, got {value!r:.60}"
                )
        yield tuple(kind.value(value) for kind, value in zip(kinds, values, strict=True))


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = pq.ParquetFile(path)
        present = [name for name in file.schema_arrow.names if name in columns]
        number = 0
        for batch in file.iter_batches(columns=present or None):
            yield from enumerate(batch.to_pylist(), start=number + 1)
            number += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{path.name} must be a Parquet file of whole texts in UTF-8, got another ({error}); write it "
            "again"
        ) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SourceError(
                    f"row {number} of {path.name} must be a JSON object, got an unreadable one ({error})"
                ) from error
            if not isinstance(record, dict):
                raise SchemaError(f"row {number} of {path.name} must be a JSON object, got {record!r:.60}")
            yield number, record


def is_unicode(text: str) -> bool:
    """Say whether a text has no half of a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def counted(skipped: Mapping[str, int]) -> str:
    """Return what was left out, for a sentence."""
    return ", ".join(f"{count} with {reason}" for reason, count in sorted(skipped.items())) or "empty files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts with their languages, "" where a file does not say."""

    texts: tuple[str, ...]
    languages: tuple[str, ...]
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def fingerprint(self) -> str:
        """Identify the texts and their languages, in their order."""
        return fingerprint(texts=self.texts, languages=self.languages)


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read files, or all below folders, by name; what cannot be used is counted."""
    kept: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for file in training_files(paths, SUFFIXES):
        for text, language in read_columns(file, ("text", "language"), ("text",)):
            if not text.strip():
                skipped["empty text"] += 1
            elif not (is_unicode(text) and is_unicode(language)):
                skipped["text that is not valid Unicode"] += 1
            elif text in kept:
                skipped["repeated text"] += 1
            else:
                kept[text] = language
    if not kept:
        raise SourceError(f"files of texts must hold at least one, got {counted(skipped)}; name others")
    return Texts(texts=tuple(kept), languages=tuple(kept.values()), skipped=dict(skipped))


NONE_FOUND: Final = -1
"""Place of a negative that is not there."""


class PairRow(NamedTuple):
    """One pair; ``page`` says where its document was cut from; ``negatives`` do not answer the query."""

    query: str
    document: str
    title: str
    source: str
    page: str = ""
    instruction: str = ""
    negatives: tuple[str, ...] = ()


_COLUMNS: Final = ("queries", "documents", "titles", "sources", "pages", "instructions", "negatives")
"""Columns of the fields of a pair, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingPairs:
    """N pairs in file order; ``skipped`` counts by reason what is not among them.

    Columns after ``sources`` may be left out.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    titles: tuple[str, ...]
    sources: tuple[str, ...]
    pages: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    negatives: tuple[tuple[str, ...], ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        blanks = PairRow._field_defaults.values()
        for name, blank in zip(_COLUMNS[-len(blanks) :], blanks, strict=True):
            object.__setattr__(self, name, getattr(self, name) or (blank,) * len(self))

    @classmethod
    def of(cls, rows: Iterable[PairRow], skipped: Mapping[str, int]) -> TrainingPairs:
        """Take rows in order."""
        columns = list(zip(*rows, strict=True)) or [()] * len(PairRow._fields)
        return cls(**dict(zip(_COLUMNS, columns, strict=True)), skipped=dict(skipped))

    def __len__(self) -> int:
        return len(self.queries)

    def rows(self) -> Iterator[PairRow]:
        """Yield the pairs one by one."""
        return map(PairRow, *(getattr(self, name) for name in _COLUMNS))

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
    """Read files, or all below folders, by name; what cannot be used is counted."""
    kept: dict[PairRow, None] = {}
    skipped: Counter[str] = Counter()
    columns = ("query", "document", "title", "source", "instruction", "negatives")
    for file in training_files(paths, SUFFIXES):
        for values in read_columns(file, columns, ("query", "document")):
            found = PairRow(**dict(zip(columns, values, strict=True)))
            row = found._replace(
                source=found.source.strip() or file.stem,
                negatives=tuple(dict.fromkeys(text for text in found.negatives if text != found.document)),
            )
            if reason := _refused(row):
                skipped[reason] += 1
            elif row in kept:
                skipped["repeated pair"] += 1
            else:
                kept[row] = None
    if not kept:
        raise SourceError(
            "training files must hold at least one pair with a query and a document, got "
            f"{counted(skipped)}; name others"
        )
    return TrainingPairs.of(kept, skipped)


def _refused(row: PairRow) -> str | None:
    """Return why a row is no pair, None where it is one."""
    if not row.query.strip():
        return "empty query"
    if not row.document.strip():
        return "empty document"
    texts = (row.query, row.document, row.title, row.source, row.instruction, *row.negatives)
    return None if all(map(is_unicode, texts)) else "text that is not valid Unicode"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Documents of N pairs by position, then given negatives; ``given_Nk`` are their places, -1 for none."""

    texts: tuple[str, ...]
    given_Nk: Int64[np.ndarray, "N k"]

    @classmethod
    def of(cls, pairs: TrainingPairs) -> Candidates:
        """Collect them; negatives that read the same stand there once."""
        place_of: dict[str, int] = {}
        given = [
            [place_of.setdefault(text, len(pairs) + len(place_of)) for text in negatives]
            for negatives in pairs.negatives
        ]
        given_Nk = np.full((len(pairs), max(map(len, given), default=0)), NONE_FOUND, np.int64)
        for own, places in zip(given_Nk, given, strict=True):
            own[: len(places)] = places
        return cls(texts=(*pairs.documents, *place_of), given_Nk=given_Nk)


def text_numbers(texts: Sequence[str]) -> np.ndarray:
    """Number texts so that equal ones share a number."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
