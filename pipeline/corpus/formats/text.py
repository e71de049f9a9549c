"""Markdown and plain text: a file is a document.

Its id is its path below the source, its text the file as it is, so that headings stay. Its title is the
`title` of its front matter, else its first heading, else the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa

from pipeline.config import CorpusConfig
from pipeline.corpus.formats.format import Undecoded
from pipeline.corpus.formats.values import as_column
from pipeline.corpus.source_record import Footer
from pipeline.corpus.sources import SourceFile

DOCUMENT_SCHEMA: Final = pa.schema(
    [pa.field("id", pa.string()), pa.field("title", pa.string()), pa.field("text", pa.large_string())]
)
_HEADING: Final = re.compile(rb"#{1,6}[ \t]+(.*)", re.DOTALL)
_UNDERLINE: Final = re.compile(rb"={3,}[ \t]*")
TITLE_BYTES: Final = 64 << 10
"""How much of the start of a file is searched for its title."""


class TextFormat:
    """Reads Markdown and plain text files."""

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:  # noqa: ARG002
        """Return the columns of every document; the file is not opened."""
        return Footer(schema=DOCUMENT_SCHEMA, num_rows=1)

    def decode(
        self,
        file: SourceFile,
        num_rows: int,  # noqa: ARG002 - a file is one row
        types: Mapping[str, pa.DataType],
        config: CorpusConfig,
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the one document."""
        raw = read_document(file, config).removeprefix(b"\xef\xbb\xbf")
        yield one_document(file, title_of(file, raw), raw, types)


def read_document(file: SourceFile, config: CorpusConfig) -> bytes:
    """Return a file's bytes; of one that is too large, only so many that the row checks refuse it."""
    with file.open() as stream:
        return stream.read(config.max_document_bytes + 1)


def title_of(file: SourceFile, raw: bytes) -> str:
    """Return the title of a Markdown or plain text file."""
    front, lines = _parts(raw[:TITLE_BYTES].splitlines())
    named = next((line[6:].strip() for line in front if line.startswith(b"title:") and line[6:].strip()), b"")
    is_markdown = not file.path.lower().endswith(".txt")
    found = named.strip(b"\"'") or (_heading(lines) if is_markdown else b"")
    return found.decode("utf-8", "replace") or PurePosixPath(file.relative).stem


def _parts(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split lines into those of the front matter, none where there is none, and those behind it."""
    if lines[:1] == [b"---"]:
        for index, line in enumerate(lines[1:], start=1):
            if line.rstrip() == b"---":
                return lines[1:index], lines[index + 1 :]
    return [], lines


def _heading(lines: Sequence[bytes]) -> bytes:
    """Return the first heading, empty where there is none. No pattern here can backtrack."""
    for line, below in zip_longest(lines, lines[1:], fillvalue=b""):
        if (marked := _HEADING.match(line)) and (text := marked[1].strip(b" \t#")):
            return text
        if line[:1].strip() and _UNDERLINE.fullmatch(below):
            return line.strip()
    return b""


def one_document(
    file: SourceFile, title: str, text: str | bytes, types: Mapping[str, pa.DataType]
) -> pa.RecordBatch:
    """Return the row of a file that is a document; bytes are checked to be UTF-8 later."""
    columns = {
        "id": as_column([file.relative], pa.string()),
        "title": as_column([title], pa.string()),
        "text": as_column([text], pa.string())
        if isinstance(text, str)
        else pa.array([text], pa.large_binary()).view(pa.large_string()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in types], names=[*types])
