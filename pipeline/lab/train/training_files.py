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
    text          text             what is pretrained or distilled on
    language      text             its language, such as en or de

Which of them a pair needs, and what is made of it, is said in :mod:`cairn.pipeline.lab.train.pairs`.
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


class _Kind(NamedTuple):
    """A kind of column: its name, whether a value is of it, and what null is read as."""

    name: str
    fits: Callable[[Any], bool]
    value: Callable[[Any], Any]


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and not abs(value) > sys.float_info.max  # NaN stands for a missing one in many tables


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(text is None or isinstance(text, str) for text in value)


_TEXT: Final = _Kind("text", lambda value: isinstance(value, str), lambda value: value or "")
_KINDS: Final[Mapping[str, _Kind]] = {
    "negatives": _Kind(
        "a list of texts",
        _is_texts,
        lambda value: tuple(text for text in value or () if text and text.strip()),
    ),
    "label": _Kind(
        "text or a whole number",
        lambda value: isinstance(value, (str, int)) and not isinstance(value, bool),
        lambda value: "" if value is None else str(value),
    ),
    "score": _Kind("a number", _is_number, lambda value: value),
}
"""Of the columns that are not text."""


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


def read_columns(path: Path, columns: Sequence[str], *required: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the columns of a file's rows; what is missing is empty, a missing score None.

    Rows without all columns of one of ``required``, or with a value of another kind, raise
    :class:`SchemaError`, an unreadable file :class:`SourceError`.
    """
    kinds = [_KINDS.get(name, _TEXT) for name in columns]
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
    """Read files, or all Parquet and JSON-lines files below folders, in the order of their names.

    Empty texts, repeated ones and those with half a surrogate pair are counted. Files without a text raise
    :class:`SourceError`, a missing or mistyped column :class:`SchemaError`.
    """
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
