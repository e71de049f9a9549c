"""Markdown and plain text: a file is a document.

Its id is its path below the source, its text the file as it is, so that headings stay. Its title is the
`title` of its front matter, else its first heading, else the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
_FRONT_MATTER: Final = re.compile(rb"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_TITLE: Final = re.compile(rb"^title:[ \t]*(.+?)\s*$", re.MULTILINE)
_HEADING: Final = re.compile(rb"^#{1,6}[ \t]+(.+?)[ \t#]*$|^(\S.*?)\s*\n={3,}\s*$", re.MULTILINE)


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
    front = _FRONT_MATTER.match(raw)
    if front and (named := _TITLE.search(front[1])):
        return named[1].strip(b"\"'").decode("utf-8", "replace")
    is_markdown = not file.path.lower().endswith(".txt")
    heading = _HEADING.search(raw, front.end() if front else 0) if is_markdown else None
    found = (heading[1] or heading[2]).strip() if heading else b""
    return found.decode("utf-8", "replace") or PurePosixPath(file.relative).stem


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
