"""Texts to pretrain on, in Parquet or JSON lines, with a language for each where given.

text        required
language    optional, such as en or de
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.train.pair_files import is_unicode, json_line, read_columns, training_files
from cairn.pipeline.manifest import fingerprint

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
        rows = read_columns(file, required=("text",), columns=COLUMNS) if is_parquet else _read_lines(file)
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


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
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
