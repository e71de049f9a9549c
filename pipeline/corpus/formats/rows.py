"""Rows of Python values, whether a line of JSON held each or a caller gave them: one reading of both.

Every row is read once for the columns and their types, as ``columns`` has them, and again for its values.

JSON lines are an object a line, in UTF-8 or UTF-16, also compressed. A key that is missing is null, and blank
lines are none. A line that is no object is one damaged row, and the lines behind it are read. A line may end
in any way that lines do, and begin with the record separator of RFC 7464.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import Learned, WrittenNumber, batch_of, role_names
from cairn.pipeline.corpus.formats.file_kind import TEXT
from cairn.pipeline.corpus.formats.format import (
    Footer,
    Format,
    LongLineError,
    SourceFile,
    TextLines,
    Undecoded,
    batched,
    is_utf8,
    learned_footer,
    opened_text,
)
from cairn.pipeline.types import once
from typing_extensions import override

Row = Mapping[str, Any] | str
"""A row, or what is wrong with it."""
_LINE_DOCUMENTS: Final = 4
"""A line may be so many times as long as a document: it is escaped, and has more than the text."""
_ARRAY: Final = re.compile(r"\[\s*(\{.*)?|\{", re.DOTALL)
AS_LINES: Final = (
    "JSON lines, an object a line; "
    "`jq -c 'if type == \"array\" then .[] else . end' FILE > NEW.jsonl` writes them"
)
_NO_ROW: Final = f"it is a JSON array or has objects of several lines, and must be {AS_LINES}"

_DECODER: Final = json.JSONDecoder(parse_float=WrittenNumber, object_pairs_hook=once)


class RowsFormat(Format):
    """Reads rows whose values have the types of their columns."""

    is_typed = False

    @abstractmethod
    def rows(self, file: SourceFile, config: CorpusConfig) -> Iterator[tuple[Row, int]]:
        """Yield each row and about how many bytes it takes."""

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read every row once for the columns and their types."""
        learned = Learned()

        def counts() -> Iterator[int]:
            fault, has_rows = "", False
            for row, _ in self.rows(file, config):
                if isinstance(row, str):
                    fault = fault or row
                else:
                    has_rows = True
                    for name, value in row.items():
                        learned.add_value(name, value)
                yield 1
            if fault and not has_rows:
                raise ValueError(fault)

        return learned_footer(file, learned, counts())

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows, the damaged ones among them."""
        rows = (
            (row if isinstance(row, str) else {name: row[name] for name in types if name in row}, num_bytes)
            for row, num_bytes in self.rows(file, config)
        )
        yield from batched(file, rows, lambda some: batch_of(some, types, role_names(config)), config)


class GivenRowsFormat(RowsFormat):
    """Reads the rows that a caller gave."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self._given = given

    @override
    def rows(self, file: SourceFile, config: CorpusConfig) -> Iterator[tuple[Row, int]]:
        for row in self._given:
            yield row, sum(len(value) for value in row.values() if isinstance(value, str))


class JsonLinesFormat(RowsFormat):
    """Reads files of JSON lines."""

    suffixes = (".jsonl", ".ndjson")
    kinds = (TEXT,)
    is_compressible = True

    @override
    def rows(self, file: SourceFile, config: CorpusConfig) -> Iterator[tuple[Row, int]]:
        """Yield each object or what is wrong with its line, with the length of the line."""
        limit, is_first = _LINE_DOCUMENTS * config.max_document_bytes, True
        with opened_text(file, newline=None, guesses=False) as (_, text):
            lines = TextLines(text, limit)
            while True:
                lines.begin_row()
                try:
                    line = next(lines).strip(" \t\n\x1e")
                except StopIteration:
                    return
                except LongLineError as error:
                    yield f"line {lines.number} {error}", 0
                    continue
                if is_first and _ARRAY.fullmatch(line):
                    raise ValueError(_NO_ROW)
                if line:
                    is_first = False
                    yield _parsed(line, lines.number), len(line)


def _parsed(line: str, number: int) -> Row:
    try:
        row: object = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        at_column = isinstance(error, json.JSONDecodeError)
        told = f"{error.msg} at column {error.colno}" if at_column else str(error) or type(error).__name__
        return f"line {number} is not JSON: {told}"[:300]
    if not isinstance(row, dict):
        return f"line {number} must be an object, got {type(row).__name__}"
    columns = cast("dict[str, Any]", row)
    if not is_utf8("".join(columns)):
        return f"line {number} has a key that is not valid Unicode"
    return columns
