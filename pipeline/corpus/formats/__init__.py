"""What a source file may be written in: how its columns are told, and how its rows are read.

A new format is one file here, with a subclass of ``format.Format`` or, where a file is a document, of
``text.TextFormat``, and one entry below.

    parquet, arrow      columns as the file says
    rows, csv           lines of JSON, rows that a caller gives, CSV: columns learned by a first pass
    text, html          a document a file: id, title, text, and the keys of front matter
    documents, paged    PDF, Office and the like, each read in a child process, page by page
    right_to_left       the order of lines of Hebrew and Arabic in PDF
    tables              a data file of a table of Lance, Delta or Iceberg, or a table in memory
    file_kind           what the first bytes of any file say that it is
    encodings           what a text is written in
"""

from collections.abc import Mapping, Sequence
from typing import Final

from cairn.pipeline.corpus.formats.arrow import ArrowFormat
from cairn.pipeline.corpus.formats.csv import CsvFormat
from cairn.pipeline.corpus.formats.documents import (
    CodeFormat,
    EpubFormat,
    ExcelFormat,
    MailboxFormat,
    MailFormat,
    NotebookFormat,
    OpenDocumentFormat,
    OpenPresentationFormat,
    PdfFormat,
    PowerPointFormat,
    RtfFormat,
    WordFormat,
)
from cairn.pipeline.corpus.formats.format import COMPRESSED, Format
from cairn.pipeline.corpus.formats.html import HtmlFormat
from cairn.pipeline.corpus.formats.parquet import ParquetFormat
from cairn.pipeline.corpus.formats.rows import JsonLinesFormat
from cairn.pipeline.corpus.formats.text import MarkdownFormat, TextFormat

PARQUET: Final = ParquetFormat()
FORMATS: Final[Sequence[Format]] = (
    PARQUET,
    ArrowFormat(),
    JsonLinesFormat(),
    CsvFormat(),
    MarkdownFormat(),
    TextFormat(),
    HtmlFormat(),
    PdfFormat(),
    WordFormat(),
    PowerPointFormat(),
    ExcelFormat(),
    OpenDocumentFormat(),
    OpenPresentationFormat(),
    EpubFormat(),
    RtfFormat(),
    MailFormat(),
    MailboxFormat(),
    NotebookFormat(),
    CodeFormat(),
)
"""Every format of files; they may stand side by side in one folder."""
FORMAT_OF: Final[Mapping[str, Format]] = {
    suffix + packed: each
    for each in FORMATS
    for suffix in each.suffixes
    for packed in ("", *(COMPRESSED if each.is_compressible else ()))
}
_NAMED: Final = [each for each in FORMATS if not isinstance(each, CodeFormat)]
READABLE: Final = ", ".join([*(suffix for each in _NAMED for suffix in each.suffixes), "source code"])
"""What a sentence names: suffixes, and the kind that has many."""
