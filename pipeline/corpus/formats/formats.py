"""Every format by the name that ``SourceFile.format`` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.corpus.formats.arrow_file import ArrowFileFormat
from pipeline.corpus.formats.arrow_table import ArrowTableFormat
from pipeline.corpus.formats.csv import CsvFormat
from pipeline.corpus.formats.format import SourceFormat
from pipeline.corpus.formats.html import HtmlFormat
from pipeline.corpus.formats.json_lines import JsonLinesFormat
from pipeline.corpus.formats.parquet import ParquetFormat
from pipeline.corpus.formats.table_part import TablePartFormat
from pipeline.corpus.formats.text import TextFormat
from pipeline.corpus.sources import FormatName

FORMATS: Final[Mapping[FormatName, SourceFormat]] = {
    "parquet": ParquetFormat(),
    "table": ArrowTableFormat(),
    "table_part": TablePartFormat(),
    "arrow": ArrowFileFormat(),
    "json_lines": JsonLinesFormat(),
    "csv": CsvFormat(),
    "text": TextFormat(),
    "html": HtmlFormat(),
}
