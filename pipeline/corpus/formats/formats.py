"""Every format by the name that ``SourceFile.format`` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.corpus.formats.arrow_table import ArrowTableFormat
from pipeline.corpus.formats.format import SourceFormat
from pipeline.corpus.formats.parquet import ParquetFormat
from pipeline.corpus.sources import FormatName

FORMATS: Final[Mapping[FormatName, SourceFormat]] = {
    "parquet": ParquetFormat(),
    "table": ArrowTableFormat(),
}
