"""Every format by the name that ``SourceFile.format`` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cairn.pipeline.corpus.formats.arrow_file import ArrowFileFormat
from cairn.pipeline.corpus.formats.arrow_table import ArrowTableFormat
from cairn.pipeline.corpus.formats.csv import CsvFormat
from cairn.pipeline.corpus.formats.format import SourceFormat
from cairn.pipeline.corpus.formats.html import HtmlFormat
from cairn.pipeline.corpus.formats.json_lines import JsonLinesFormat
from cairn.pipeline.corpus.formats.parquet import ParquetFormat
from cairn.pipeline.corpus.formats.table_part import TablePartFormat
from cairn.pipeline.corpus.formats.text import TextFormat
from cairn.pipeline.corpus.sources import FormatName

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
