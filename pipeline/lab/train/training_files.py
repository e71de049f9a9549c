"""Rows of training files: Parquet and JSON lines, every value checked and of its kind.

    column        kind             what it is
    query         text             what a reader asks, or a text of a class
    document      text             what answers it; files of labelled texts have none
    title         text             the page the document stands on
    source        text             where the row comes from, else the name of the file
    instruction   text             what the query is for (NV-Embed eq. 2)
    negatives     list of texts    documents that do not answer the query
    label         text or number   the class of the query
    score         number           how alike query and document are
    task          text             retrieval, class or similarity

Which of them a row needs, and what is made of it, is said in :mod:`cairn.pipeline.lab.train.pairs`.

Texts to pretrain on, in Parquet or JSON lines, with a language for each where given.

text        required
language    optional, such as en or de
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.manifest import fingerprint

SUFFIXES: Final = (".parquet", ".jsonl")
_REQUIRED: Final = (("query", "document"), ("query", "label"))


class PairRecord(NamedTuple):
    """One row as it stands in a file; what is missing is empty, a missing score None."""

    query: str
    document: str
    title: str
    source: str
    instruction: str
    negatives: tuple[str, ...]
    label: str
    score: float | None
    task: str


class _Kind(NamedTuple):
    """A kind of column: its name, whether Parquet's type or a JSON value is of it, and its value."""

    name: str
    fits_type: Callable[[pa.DataType], bool]
    fits: Callable[[Any], bool]
    value: Callable[[Any], Any]


def _is_text_type(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_text_list(kind: pa.DataType) -> bool:
    return isinstance(kind, (pa.ListType, pa.LargeListType)) and (
        _is_text_type(kind.value_type) or pa.types.is_null(kind.value_type)
    )


def _is_number_type(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # NaN is not; a whole number may be beyond it


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)


_TEXT: Final = _Kind("text", _is_text_type, lambda value: isinstance(value, str), lambda value: value or "")
_TEXTS: Final = _Kind(
    "a list of texts",
    _is_text_list,
    _is_texts,
    lambda value: tuple(text for text in value or () if text and text.strip()),
)
_LABEL: Final = _Kind(
    "text or a whole number",
    lambda kind: _is_text_type(kind) or pa.types.is_integer(kind),
    lambda value: isinstance(value, (str, int)) and not isinstance(value, bool),
    lambda value: "" if value is None else str(value),
)
_NUMBER: Final = _Kind("a number", _is_number_type, _is_number, lambda value: value)
_KINDS: Final[Mapping[str, _Kind]] = dict.fromkeys(PairRecord._fields, _TEXT) | {
    "negatives": _TEXTS,
    "label": _LABEL,
    "score": _NUMBER,
}


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


def read_records(path: Path) -> Iterator[PairRecord]:
    """Yield the rows of a Parquet or JSON-lines file.

    A missing or mistyped column raises :class:`SchemaError`, an unreadable file :class:`SourceError`.
    """
    if path.suffix == ".jsonl":
        return _read_lines(path)
    return map(PairRecord._make, _read_table(path, _REQUIRED, PairRecord._fields))


def read_columns(path: Path, *, required: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a Parquet file's text columns, null and a column that is not there as empty."""
    return _read_table(path, (required,), columns)


def _read_table(
    path: Path, required: Sequence[Sequence[str]], columns: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    kinds = [_KINDS.get(name, _TEXT) for name in columns]
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{path.name} must be a Parquet file, got an unreadable one ({error}); write it again"
        ) from error
    names = file.schema_arrow.names
    if not any(set(wanted) <= set(names) for wanted in required):
        listed = ", or ".join(" and ".join(wanted) for wanted in required)
        raise SchemaError(f"{path.name} must have the columns {listed}, got {', '.join(names)}; rename them")
    present = [name for name in columns if name in names]
    for name in present:
        found, kind = file.schema_arrow.field(name).type, _KINDS.get(name, _TEXT)
        if not (kind.fits_type(found) or pa.types.is_null(found)):
            raise SchemaError(f"column {name} of {path.name} must be {kind.name}, got {found}; convert it")
    try:
        for batch in file.iter_batches(columns=present):
            values = [
                batch.column(name).to_pylist() if name in present else [None] * batch.num_rows
                for name in columns
            ]
            for row in zip(*values, strict=True):
                yield tuple(kind.value(value) for kind, value in zip(kinds, row, strict=True))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{path.name} must hold whole texts in UTF-8, got others ({error}); write it again"
        ) from error


def json_line(line: bytes, number: int, path: Path) -> Any:
    """Return what a line of a file says; an unreadable one raises :class:`SourceError`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"line {number} of {path.name} must be a JSON object, got an unreadable one ({error})"
        ) from error


def is_unicode(text: str) -> bool:
    """Say whether a text has no half of a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_lines(path: Path) -> Iterator[PairRecord]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            record = json_line(line, number, path)
            if not (isinstance(record, dict) and any(set(names) <= set(record) for names in _REQUIRED)):
                found = (
                    f"one with {', '.join(map(str, record)) or 'nothing'}"
                    if isinstance(record, dict)
                    else f"{record!r:.60}"
                )
                raise SchemaError(
                    f"line {number} of {path.name} must be a JSON object with query and document, or "
                    f"query and label, got {found}"
                )
            values = [record.get(name) for name in PairRecord._fields]
            for name, value in zip(PairRecord._fields, values, strict=True):
                if value is not None and not _KINDS[name].fits(value):
                    raise SchemaError(
                        f"{name} in line {number} of {path.name} must be {_KINDS[name].name}, "
                        f"got {value!r:.60}"
                    )
            yield PairRecord._make(
                _KINDS[name].value(value) for name, value in zip(PairRecord._fields, values, strict=True)
            )


COLUMNS: Final = ("text", "language")
_SUFFIXES: Final = (".parquet", ".jsonl")


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
    """Read files, or all Parquet and JSON-lines files below folders, in the order of their names.

    Empty texts, repeated ones and those with half a surrogate pair are counted. Files without a text raise
    :class:`SourceError`, a missing or mistyped column :class:`SchemaError`.
    """
    kept: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for file in training_files(paths, _SUFFIXES):
        is_parquet = file.suffix == ".parquet"
        rows = (
            read_columns(file, required=("text",), columns=COLUMNS) if is_parquet else _read_text_lines(file)
        )
        for text, language in rows:
            if not text.strip():
                skipped["empty text"] += 1
            elif not (is_unicode(text) and is_unicode(language)):
                skipped["text that is not valid Unicode"] += 1
            elif text in kept:
                skipped["repeated text"] += 1
            else:
                kept[text] = language
    if not kept:
        counted = ", ".join(f"{count} with {reason}" for reason, count in sorted(skipped.items()))
        raise SourceError(
            f"files of texts must hold at least one, got {counted or 'empty files'}; name others"
        )
    return Texts(texts=tuple(kept), languages=tuple(kept.values()), skipped=dict(skipped))


def _read_text_lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            record = json_line(line, number, path)
            text, language = (
                (record.get(name) for name in COLUMNS) if isinstance(record, dict) else (None, None)
            )
            if not isinstance(text, str) or not isinstance(language, str | None):
                raise SchemaError(
                    f"line {number} of {path.name} must be a JSON object with a text and, where given, a "
                    f"language, got {line.decode(errors='replace').strip()!r:.80}"
                )
            yield text, language or ""
