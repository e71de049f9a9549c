"""CSV with a header, in UTF-8, UTF-16 or what it looks like, also compressed.

The delimiter is the comma, semicolon, tab or bar that the header has most of, or what a line ``sep=;`` before
it says; lines before it that begin with ``#`` are passed over, and a header ``#id,text`` is one where the row
below has as many fields. An empty field is null, a row of them is none. Fields are texts here; a column is
one of whole numbers, numbers or booleans where every field is written as one: ``007`` is a text, and so are
``3.9`` and ``3.10``, as all files of a source together write them. ``NA`` and the like are null in such a
column, and texts elsewhere. A row with more or fewer fields than the header is one damaged row; a quote that
never closes damages the rest of the file. A file without a line end behind its last row may be cut there, and
is told of.

A quoted field may hold rows that its quote was never to enclose. Where each of its lines has the fields of a
row, and the first of them looks like the others, that is doubted: rows of TSV, which knows no quotes, are
taken as they stand, those of CSV are kept as quoted and told of.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import (
    FAULT,
    LONG_INTEGER,
    WITH_COMMA,
    Learned,
    is_number,
    pc,
    plain_type,
    role_names,
)
from cairn.pipeline.corpus.formats.encodings import encoding_of
from cairn.pipeline.corpus.formats.file_kind import TEXT
from cairn.pipeline.corpus.formats.format import (
    ENCODING,
    Footer,
    Format,
    LongLineError,
    SourceFile,
    TextLines,
    Undecoded,
    batched,
    learned_footer,
    opened_text,
)
from cairn.pipeline.corpus.quarantine import Reason
from typing_extensions import override

_WITH_SIGNS: Final = r"[0-9][^0-9]+[0-9]"
"""What has digits at several places."""
_NULLS: Final = ("", "NA", "N/A", "NULL", "\\N")
"""What R, pandas and databases write for null."""
_ROW_DOCUMENTS: Final = 2
"""A row may be so many times as long as a document."""


class CsvFormat(Format):
    """Reads CSV files."""

    suffixes = (".csv", ".tsv")
    kinds = (TEXT,)
    is_typed = False
    is_compressible = True

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read every row once for the columns and their types."""
        learned, with_commas, marked = Learned(), Counter[str](), set[str]()

        def counts() -> Iterator[int]:
            for item in _batches(file, config, None):
                if isinstance(item, Undecoded):
                    yield 1 if item.num_rows is None else item.num_rows
                    continue
                for name, column in zip(item.schema.names, item.columns, strict=True):
                    if name == FAULT:
                        continue
                    own = _type_of(column)
                    learned.add(name, [own])
                    if own == pa.float64():
                        learned.add_numbers(name, column)
                    elif own == pa.null() and column.null_count < item.num_rows:
                        marked.add(name)
                    elif own == pa.string():
                        for pattern, weight in ((WITH_COMMA, 2), (_WITH_SIGNS, -1)):
                            are_such = pc.match_substring_regex(column, pattern)
                            with_commas[name] += weight * (pc.sum(are_such).as_py() or 0)
                    elif own == pa.int64() and _holds_long(column):
                        learned.add(name, [LONG_INTEGER])
                yield item.num_rows

        footer = learned_footer(file, learned, counts())
        rows = _rows(file, config)
        told, names = next(rows), next(rows, None)
        assert isinstance(told, list)
        assert not isinstance(names, str | Undecoded), "the header comes first"
        again = [pa.field(name, pa.null()) for name, count in Counter(names or ()).items() if count > 1]
        # Where most numbers of a column have decimal commas, the point of others is one between thousands. In
        # a file with commas between its fields, a comma stands between thousands itself, as in English.
        are_doubted = max(with_commas.values(), default=0) > 0 and told[1] != ","
        fields = [
            field.with_type(pa.string())
            if (are_doubted and field.type == pa.float64())
            or (field.name in marked and field.type == pa.null())
            else field
            for field in footer.schema
        ]
        return Footer(schema=pa.schema([*fields, *again]), num_rows=footer.num_rows)

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows, the damaged ones among them, every field a text."""
        yield from _batches(file, config, types)


def _batches(
    file: SourceFile, config: CorpusConfig, wanted: Mapping[str, pa.DataType] | None
) -> Iterator[pa.RecordBatch | Undecoded]:
    rows = _rows(file, config)
    told, names = next(rows), next(rows, None)
    if names is None:
        return
    assert isinstance(told, list)
    assert isinstance(names, list)
    metadata = {ENCODING: told[0]} if told[0] else None
    places = {name: names.index(name) for name in wanted or names}
    nulls = {
        name: _NULLS if is_number(own) or pa.types.is_boolean(own) else ("",)
        for name, own in (wanted or dict.fromkeys(names, pa.string())).items()
    }

    def batch_of(some: Sequence[list[str] | str]) -> pa.RecordBatch:
        arrays = [
            _texts(
                [None if isinstance(row, str) or row[place] in nulls[name] else row[place] for row in some]
            )
            for name, place in places.items()
        ]
        faults = [f"{Reason.DAMAGED_ROWS} {row}" if isinstance(row, str) else None for row in some]
        columns = [*arrays, pa.array(faults, pa.string())]
        return pa.RecordBatch.from_arrays(columns, names=[*places, FAULT], metadata=metadata)

    if wanted is None:
        yield batch_of([])  # a file without rows has columns
    sized = (
        row if isinstance(row, Undecoded) else (row, len(row) if isinstance(row, str) else sum(map(len, row)))
        for row in rows
    )
    yield from batched(file, sized, batch_of, config)


def _type_of(column: pa.Array) -> pa.DataType:
    """Return the type of the texts of a column, but for those that stand for null where others are values."""
    own = plain_type(column)
    if own != pa.string():
        return own
    are_null = pc.is_in(column, pa.array(_NULLS))
    return plain_type(pc.if_else(are_null, None, column)) if pc.any(are_null).as_py() else own


def _holds_long(column: pa.Array) -> bool:
    """Whether a column of whole numbers has one of more digits than a float keeps."""
    return bool(pc.any(pc.match_substring_regex(column, "[0-9]{16}")).as_py())


def _texts(values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # the row is refused by the checks
        encoded = [None if value is None else value.encode("utf-8", "surrogateescape") for value in values]
        return pa.array(encoded, pa.binary()).view(pa.string())


def _rows(file: SourceFile, config: CorpusConfig) -> Iterator[list[str] | str | Undecoded]:
    """Yield the encoding if it is a guess and the delimiter, the names, then a row's fields, or a fault."""
    limit = _ROW_DOCUMENTS * config.max_document_bytes
    csv.field_size_limit(limit)
    with opened_text(file, newline="", guesses=True) as (head, text):
        encoding, is_guess = encoding_of(head)
        delimiter, skipped, is_spaced = _dialect(head.decode(encoding, "ignore"))
        yield [encoding if is_guess else "", delimiter]
        lines = TextLines(text, limit)
        for _ in range(skipped):
            lines.begin_row()
            with contextlib.suppress(LongLineError):
                next(lines, None)
        reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=is_spaced, strict=True)
        num_fields, last = 0, ""
        while True:
            last = (lines.of_row or [last])[-1]
            lines.begin_row()
            first = lines.number + 1
            try:
                fields = next(reader)
            except StopIteration:
                if num_fields and not last.endswith(("\n", "\r")):
                    cut = f"its last row, in line {lines.number}, has no line end behind it and may be cut"
                    yield Undecoded(num_rows=0, detail=f"{cut}; end the file with one if it is whole")
                return
            except (csv.Error, LongLineError) as error:
                if not num_fields:
                    raise ValueError(f"its header cannot be read: {error}") from error
                of_row = [line.rstrip("\r\n") for line in lines.of_row]
                if delimiter == "\t" and _is_of_rows(of_row, num_fields, delimiter):
                    yield from (line.split(delimiter) for line in of_row)
                    continue
                if "unexpected end" in str(error):
                    opened = f"a quote that opens in line {first}"
                    raise ValueError(
                        f"{opened} is never closed: what stands behind it is not read"
                    ) from error
                yield f"{_span(first, lines.number)} cannot be read: {error}"
                continue
            if not num_fields:
                names = _numbered([name.strip() for name in fields], role_names(config))
                num_fields = len(names)
                _require_readable(names, first, encoding)
                if num_fields:
                    yield names
            elif any(fields):
                yield from _checked(fields, num_fields, lines, delimiter)


def _numbered(names: Sequence[str], roles: Collection[str]) -> list[str]:
    """Return names of columns with a number behind one that stood before, as in exports of Jira."""
    counts, taken, numbered = Counter[str](), set(names), list[str]()
    for name in names:
        counts[name] += 1
        own = name
        while name and name not in roles and counts[name] > 1 and own in taken:
            own = f"{name}_{counts[name]}"
            counts[name] += own in taken
        numbered.append(own)
        taken.add(own)
    return numbered


def _require_readable(names: Sequence[str], line: int, encoding: str) -> None:
    """Raise :class:`ValueError` where the name of a column holds a byte that is no character."""
    for place, name in enumerate(names, 1):
        if lost := re.search("[\udc80-\udcff]", name):
            raise ValueError(
                f"its header, in line {line}, must be {encoding.removesuffix('-sig')}, got the byte "
                f"0x{ord(lost[0]) - 0xDC00:X} in column {place}; write the file again in UTF-8"
            )


def _checked(
    fields: list[str], num_fields: int, lines: TextLines, delimiter: str
) -> Iterator[list[str] | str | Undecoded]:
    of_row = [line.rstrip("\r\n") for line in lines.of_row]
    first = lines.number - len(of_row) + 1
    if len(of_row) > 1 and _is_of_rows(of_row, num_fields, delimiter):
        if delimiter == "\t":
            yield from (line.split(delimiter) for line in of_row)
            return
        place = _span(first, lines.number)
        doubt = f"{place} are one row by its quotes, and look like {len(of_row)}; write quotes that close"
        yield Undecoded(num_rows=0, detail=doubt)
    if len(fields) == num_fields:
        yield fields
    else:
        yield f"{_span(first, lines.number)} must have {num_fields} fields, got {len(fields)}"


def _is_of_rows(lines: Sequence[str], num_fields: int, delimiter: str) -> bool:
    """Whether each line of one quoted row could be a row of its own."""
    if num_fields == 1 or any(line.count(delimiter) != num_fields - 1 for line in lines):
        return False
    shapes = {
        re.sub(r"\d+", "0", re.sub(r"[^\W\d]+", "a", line.split(delimiter)[0].strip(' "'))) for line in lines
    }
    return len(shapes) == 1 and shapes != {""}


def _span(first: int, last: int) -> str:
    return f"line {first}" if first >= last else f"lines {first} to {last}"


def _dialect(head: str) -> tuple[str, int, bool]:
    """Return the delimiter, the lines before the header, and whether blanks follow delimiters."""
    lines = [line.rstrip("\r\n") for line in io.StringIO(head, newline="")] or [""]
    told = re.fullmatch(r"(?i)sep=(.)\s*", lines[0])
    skipped = 1 if told else _num_comments(lines)
    header = next(filter(str.strip, lines[skipped:]), "")
    delimiter = told[1] if told else _likely_delimiter(header)
    return delimiter, skipped, f"{delimiter} " in header


def _num_comments(lines: Sequence[str]) -> int:
    """Count the lines with ``#`` before the header, which may be ``#id,text`` itself, like the row below."""
    count = next((place for place, line in enumerate(lines) if not line.startswith("#")), 0)
    if not count or not lines[count - 1][1:2].strip():
        return count
    last, row = lines[count - 1], next(filter(str.strip, lines[count:]), "")
    delimiter = _likely_delimiter(last)
    header_fields, row_fields = (re.sub('"[^"]*"', "", line).count(delimiter) for line in (last, row))
    return count - (header_fields == row_fields)


def _likely_delimiter(header: str) -> str:
    return max(",;\t|", key=header.count)
