"""JSON lines: an object a line, UTF-8, also compressed. A key that is missing is null; blank lines are none.

A line that is no object is one damaged row, and the lines behind it are read. What values of several kinds
in one column become is said in ``formats.values``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import Format, SourceFile, Undecoded, damage_reported
from cairn.pipeline.corpus.formats.values import as_column, footer_of, is_utf8, type_of
from cairn.pipeline.corpus.source_record import Footer
from typing_extensions import override

_READ_BYTES: Final = 1 << 20
_LINE_DOCUMENTS: Final = 4
"""A line may be so many times as long as a document: it is escaped, and has more than the text."""


class _Row(NamedTuple):
    """An object, and how many bytes its line has."""

    columns: dict[str, Any]
    num_bytes: int


class JsonLinesFormat(Format):
    """Reads files of JSON lines."""

    suffixes = (".jsonl", ".ndjson")
    is_typed = False
    is_compressible = True

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read every line once for the columns and their types."""

        def parts() -> Iterator[Mapping[str, pa.DataType] | int | Undecoded]:
            for row in _rows(file, config):
                if isinstance(row, Undecoded):
                    yield row
                else:
                    yield {name: type_of(value) for name, value in row.columns.items()}
                    yield 1

        return footer_of(file, parts())

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows, and each damaged line where it stands."""
        rows: list[dict[str, Any]] = []
        size_bytes = 0
        for row in damage_reported(file, _rows(file, config)):  # rows in front of damage are kept
            if not isinstance(row, Undecoded):
                rows.append({name: row.columns[name] for name in types if name in row.columns})
                size_bytes += row.num_bytes
            if rows and (
                isinstance(row, Undecoded)
                or len(rows) == config.batch_rows
                or size_bytes >= config.batch_bytes
            ):
                yield _batch(rows, types)
                rows, size_bytes = [], 0
            if isinstance(row, Undecoded):
                yield row
        if rows:
            yield _batch(rows, types)


def _batch(rows: list[dict[str, Any]], types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    columns = {name: [row.get(name) for row in rows] for name in types}
    arrays = [as_column(values, types[name]) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=[*types])


def _rows(file: SourceFile, config: CorpusConfig) -> Iterator[_Row | Undecoded]:
    for number, line in _lines(file, _LINE_DOCUMENTS * config.max_document_bytes):
        if isinstance(line, Undecoded):
            yield line
            continue
        try:
            row: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = str(error) or type(error).__name__
            yield Undecoded(num_rows=1, detail=f"line {number} is not JSON: {fault}"[:300])
            continue
        if not isinstance(row, dict):
            yield Undecoded(num_rows=1, detail=f"line {number} must be an object, got {type(row).__name__}")
            continue
        columns = cast("dict[str, Any]", row)
        if is_utf8("".join(columns)):
            yield _Row(columns=columns, num_bytes=len(line))
        else:
            yield Undecoded(num_rows=1, detail=f"line {number} has a key that is not valid Unicode")


def _lines(file: SourceFile, max_bytes: int) -> Iterator[tuple[int, bytes | Undecoded]]:
    """Yield the lines that are not blank with their numbers; one that is too long is not kept."""
    number, line, is_skipped = 1, bytearray(), False
    with file.open_stream() as stream:
        while block := stream.read(_READ_BYTES):
            *ended, rest = block.split(b"\n")
            for piece in ended:
                line += piece
                if is_skipped:
                    is_skipped = False
                elif line.strip():
                    yield number, bytes(line).removeprefix(b"\xef\xbb\xbf") if number == 1 else bytes(line)
                line.clear()
                number += 1
            if not is_skipped:
                line += rest
            if len(line) > max_bytes:
                yield number, Undecoded(num_rows=1, detail=f"line {number} has more than {max_bytes} bytes")
                line.clear()
                is_skipped = True
    if line.strip():
        yield number, bytes(line)
