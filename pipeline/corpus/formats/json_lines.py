"""JSON lines: an object a line, in UTF-8 or UTF-16, also compressed.

A key that is missing is null, and blank lines are none. A line that is no object is one damaged row, and the
lines behind it are read. A line may end in any way that lines do, and begin with the record separator of RFC
7464.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import WrittenNumber
from cairn.pipeline.corpus.formats.file_kind import TEXT
from cairn.pipeline.corpus.formats.format import (
    LongLineError,
    SourceFile,
    TextLines,
    is_utf8,
    once,
    opened_text,
)
from cairn.pipeline.corpus.formats.rows import Row, RowsFormat
from typing_extensions import override

_LINE_DOCUMENTS: Final = 4
"""A line may be so many times as long as a document: it is escaped, and has more than the text."""
_ARRAY: Final = re.compile(r"\[\s*(\{.*)?|\{", re.DOTALL)
AS_LINES: Final = (
    "JSON lines, an object a line; "
    "`jq -c 'if type == \"array\" then .[] else . end' FILE > NEW.jsonl` writes them"
)
_NO_ROW: Final = f"it is a JSON array or has objects of several lines, and must be {AS_LINES}"

_DECODER: Final = json.JSONDecoder(parse_float=WrittenNumber, object_pairs_hook=once)


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
