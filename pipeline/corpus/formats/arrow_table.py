"""A table in memory that a caller of the Python library gave: its own columns and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile


class ArrowTableFormat:
    """Reads the table of a source that is one."""

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:  # noqa: ARG002
        """Return the table's own schema and number of rows."""
        return Footer(schema=_table(file).schema, num_rows=_table(file).num_rows)

    def decode(
        self,
        file: SourceFile,
        num_rows: int,  # noqa: ARG002 - a table does not change
        types: Mapping[str, pa.DataType],
        config: CorpusConfig,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows; nothing is copied."""
        yield from _table(file).select([*types]).to_batches(max_chunksize=config.batch_rows)


def _table(file: SourceFile) -> pa.Table:
    assert file.table is not None, "the format is that of a table"
    return file.table
