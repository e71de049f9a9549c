"""CSV with a header, UTF-8, also compressed; the delimiter is the comma, semicolon or tab of the header.

An empty field is null, a quoted empty one is an empty text. A column is one of whole numbers, numbers or
booleans where every field is, written plainly: ``007`` is a text. A row with more or fewer fields than the
header is one damaged row; an open quote damages the rest of the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from csv import Error as CsvError
from csv import reader as csv_rows
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import Format, SourceFile, Undecoded
from cairn.pipeline.corpus.formats.values import footer_of
from cairn.pipeline.corpus.source_record import Footer
from pyarrow import csv
from typing_extensions import override

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

_PLAIN: Final[Mapping[str, pa.DataType]] = {
    r"^-?(0|[1-9][0-9]{0,17})$": pa.int64(),
    r"^-?[0-9]{1,15}(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?$": pa.float64(),
    r"^(true|false)$": pa.bool_(),
}
_LEADING_ZERO: Final = r"^-?0[0-9]"
_HEADER_BYTES: Final = 1 << 16
_ROW_DOCUMENTS: Final = 2
"""A block holds so many times the largest document: a row must fit in one."""


class CsvFormat(Format):
    """Reads CSV files."""

    suffixes = (".csv", ".tsv")
    is_typed = False
    is_compressible = True

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read every row once for the columns and their types."""
        names, _ = _header(file)
        if len({*names}) < len(names):
            return Footer(schema=pa.schema([(name, pa.string()) for name in names]), num_rows=1)

        def parts() -> Iterator[Mapping[str, pa.DataType] | int | Undecoded]:
            for batch in _batches(file, config, None):
                if isinstance(batch, Undecoded):
                    yield batch
                else:
                    columns = zip(batch.schema.names, batch.columns, strict=True)
                    yield {name: _type_of(column) for name, column in columns}
                    yield batch.num_rows

        return footer_of(file, parts())

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows, and the damaged ones of each block behind it."""
        for batch in _batches(file, config, [*types]):
            if isinstance(batch, Undecoded):
                yield batch
                continue
            for start in range(0, batch.num_rows, config.batch_rows):
                part = batch.slice(start, config.batch_rows)
                arrays = [_as_type(part.column(name), arrow_type) for name, arrow_type in types.items()]
                yield pa.RecordBatch.from_arrays(arrays, names=[*types])


def _batches(
    file: SourceFile, config: CorpusConfig, columns: list[str] | None
) -> Iterator[pa.RecordBatch | Undecoded]:
    """Yield blocks of rows, every field a text, and behind each block its damaged rows."""
    damaged: list[Undecoded] = []

    def take_damaged(row: csv.InvalidRow) -> str:
        fault = f"row {row.number} must have {row.expected_columns} fields, got {row.actual_columns}"
        damaged.append(Undecoded(num_rows=1, detail=fault))
        return "skip"

    names, delimiter = _header(file)
    with file.open_stream() as stream:
        reader = csv.open_csv(
            stream,
            read_options=csv.ReadOptions(
                use_threads=False, block_size=_ROW_DOCUMENTS * config.max_document_bytes
            ),
            parse_options=csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=take_damaged
            ),
            convert_options=csv.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=columns,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        for batch in reader:
            yield batch
            yield from damaged
            damaged.clear()
        yield from damaged


def _header(file: SourceFile) -> tuple[list[str], str]:
    """Return the names of the columns, and the delimiter."""
    with file.open_stream() as stream:
        header = stream.read(_HEADER_BYTES)
    line = header.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    delimiter = max(",;\t", key=lambda each: line.count(each.encode()))
    try:
        fields = next(csv_rows(io.StringIO(header.decode("utf-8-sig", "ignore")), delimiter=delimiter), None)
    except CsvError as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    if not fields:
        raise ValueError("it has no header")
    return fields, delimiter


def _type_of(column: pa.Array) -> pa.DataType:
    if column.null_count == len(column):
        return pa.null()
    if not pc.any(pc.match_substring_regex(column, _LEADING_ZERO)).as_py():
        for pattern, arrow_type in _PLAIN.items():
            if pc.all(pc.match_substring_regex(column, pattern)).as_py():
                return arrow_type
    return pa.string()


def _as_type(column: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    return (
        column
        if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
        else column.cast(arrow_type)
    )
