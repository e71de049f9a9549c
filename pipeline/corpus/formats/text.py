"""Markdown and plain text: a file is a document.

Its id is its path below the source. Its text is the file, with headings and without Markdown's front matter.
Its title is the `title` of its front matter, else its first heading, else the name of the file. The other
keys of the front matter are columns; ``cairn.pipeline.corpus.lacking_columns`` says what other files have
there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import Undecoded
from cairn.pipeline.corpus.formats.front_matter import FRONT_MATTER_BYTES, FrontMatter, read_front_matter
from cairn.pipeline.corpus.formats.values import as_column, type_of
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile

DOCUMENT_SCHEMA: Final = pa.schema(
    [pa.field("id", pa.string()), pa.field("title", pa.string()), pa.field("text", pa.large_string())]
)
_DOCUMENT_COLUMNS: Final = frozenset(DOCUMENT_SCHEMA.names)
_HEADING: Final = re.compile(rb"#{1,6}[ \t]+(.*)", re.DOTALL)
_UNDERLINE: Final = re.compile(rb"={3,}[ \t]*")
_BOM: Final = b"\xef\xbb\xbf"
TITLE_BYTES: Final = 64 << 10
"""How much of the start of a file is searched for its title."""


class TextFormat:
    """Reads Markdown and plain text files."""

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:  # noqa: ARG002
        """Return the columns of every document and those of its front matter, which is all that is read."""
        if _is_plain(file):
            return Footer(schema=DOCUMENT_SCHEMA, num_rows=1)
        with file.open_stream() as stream:
            front = read_front_matter(stream.read(FRONT_MATTER_BYTES).removeprefix(_BOM))
        keys = {key: value for key, value in front.values.items() if key not in _DOCUMENT_COLUMNS}
        fields = [pa.field(key, type_of(value)) for key, value in keys.items()]
        return Footer(schema=pa.schema([*DOCUMENT_SCHEMA, *fields]), num_rows=1, fault=front.fault)

    def decode(
        self,
        file: SourceFile,
        num_rows: int,  # noqa: ARG002 - a file is one row
        types: Mapping[str, pa.DataType],
        config: CorpusConfig,
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the one document."""
        raw = read_document(file, config).removeprefix(_BOM)
        front = FrontMatter({}, 0) if _is_plain(file) else read_front_matter(raw)
        text = raw[front.text_start :].lstrip(b"\r\n") if front.text_start else raw
        yield one_document(file, _title(file, front, text), text, types, front.values)


def read_document(file: SourceFile, config: CorpusConfig) -> bytes:
    """Return a file's bytes; of one that is too large, only so many that the row checks refuse it."""
    with file.open() as stream:
        return stream.read(config.max_document_bytes + 1)


def _is_plain(file: SourceFile) -> bool:
    return file.path.lower().endswith(".txt")


def _title(file: SourceFile, front: FrontMatter, text: bytes) -> str:
    named = front.values.get("title")
    if isinstance(named, str | int | float) and not isinstance(named, bool) and str(named).strip():
        return str(named).strip()
    found = b"" if _is_plain(file) else _heading(text[:TITLE_BYTES].splitlines())
    return found.decode("utf-8", "replace") or PurePosixPath(file.relative).stem


def _heading(lines: Sequence[bytes]) -> bytes:
    """Return the first heading, empty where there is none. No pattern here can backtrack."""
    for line, below in zip_longest(lines, lines[1:], fillvalue=b""):
        if (marked := _HEADING.match(line)) and (text := marked[1].strip(b" \t#")):
            return text
        if line[:1].strip() and _UNDERLINE.fullmatch(below):
            return line.strip()
    return b""


def one_document(
    file: SourceFile,
    title: str,
    text: str | bytes,
    types: Mapping[str, pa.DataType],
    values: Mapping[str, Any] = MappingProxyType({}),
) -> pa.RecordBatch:
    """Return the row of a file that is a document; bytes are checked to be UTF-8 later.

    ``values`` are its further columns. A single value of a column of lists is a list of one.
    """
    columns = {
        "id": as_column([file.relative], pa.string()),
        "title": as_column([title], pa.string()),
        "text": as_column([text], pa.string())
        if isinstance(text, str)
        else pa.array([text], pa.large_binary()).view(pa.large_string()),
    }
    for name, arrow_type in types.items():
        if name not in columns:
            value = values.get(name)
            is_one = pa.types.is_list(arrow_type) and value is not None and not isinstance(value, list)
            columns[name] = as_column([[value] if is_one else value], arrow_type)
    return pa.RecordBatch.from_arrays([columns[name] for name in types], names=[*types])
