"""What a source file may be written in: how its columns are told, and how its rows are read.

A new format is one file here, with a subclass of ``format.Format`` or, where a file is a document, of
``text.DocumentFormat``, and one entry below.

    parquet, arrow      columns as the file says
    json_lines, csv     columns learned by a first pass (values)
    text, html          a document a file: id, title, text, and the keys of front matter
    tables              a data file of a table of Lance, Delta or Iceberg, or a table in memory
"""

from collections.abc import Sequence
from typing import Final

from cairn.pipeline.corpus.formats.arrow import ArrowFormat
from cairn.pipeline.corpus.formats.csv import CsvFormat
from cairn.pipeline.corpus.formats.format import Format
from cairn.pipeline.corpus.formats.html import HtmlFormat
from cairn.pipeline.corpus.formats.json_lines import JsonLinesFormat
from cairn.pipeline.corpus.formats.parquet import ParquetFormat
from cairn.pipeline.corpus.formats.text import TextFormat

PARQUET: Final = ParquetFormat()
FORMATS: Final[Sequence[Format]] = (
    PARQUET,
    ArrowFormat(),
    JsonLinesFormat(),
    CsvFormat(),
    TextFormat(),
    HtmlFormat(),
)
"""Every format of files. A folder is read as the first that it holds; formats of documents count as one."""
READABLE: Final = ", ".join(suffix for each in FORMATS for suffix in each.suffixes)
"""The suffixes that a sentence names."""
