"""A part of a table of Lance, Delta or Iceberg: columns and types of the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import check_names
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile
from cairn.pipeline.corpus.tables.part import TablePart
from cairn.pipeline.corpus.tables.tables import damage_raised


class TablePartFormat:
    """Reads the part of a source that is one."""

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:  # noqa: ARG002
        """Return the table's schema, and count the rows of the part."""
        part = _part(file)
        check_names(part.schema)
        with damage_raised():
            return Footer(schema=part.schema, num_rows=part.count_rows())

    def decode(
        self,
        file: SourceFile,
        num_rows: int,  # noqa: ARG002 - a part does not change
        types: Mapping[str, pa.DataType],
        config: CorpusConfig,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        with damage_raised():
            for batch in _part(file).batches([*types], config.batch_rows):
                chosen = batch.select([*types])
                for start in range(0, batch.num_rows, config.batch_rows):
                    yield chosen.slice(start, config.batch_rows)


def _part(file: SourceFile) -> TablePart:
    assert file.part is not None, "the format is that of a part"
    return file.part
