"""Parquet: the footer first, then row groups, each by itself: the next is read where one is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.decode import (
    DECODE_ERRORS,
    check_column_metadata,
    decode_row_group,
    leaves_of,
    open_parquet,
    refusal,
)
from cairn.pipeline.corpus.formats.format import Undecoded, check_names, damage_of
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile
from cairn.pipeline.errors import TryAgainError


class ParquetFormat:
    """Reads Parquet files."""

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:  # noqa: ARG002
        """Read the footer, and no row."""
        with file.open() as stream, open_parquet(stream) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
            groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
            if min(groups, default=0) < 0 or sum(groups) != metadata.num_rows:
                raise ValueError(f"the footer counts {metadata.num_rows} rows, its row groups {sum(groups)}")
            check_names(schema)
            return Footer(schema=schema, num_rows=metadata.num_rows)

    def decode(
        self, file: SourceFile, num_rows: int, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows of each row group, or what is wrong with it."""
        with file.open() as stream, open_parquet(stream) as footer:
            metadata = footer.metadata
            if metadata.num_rows != num_rows:
                raise TryAgainError(
                    f"{file.name} must not change while it is read, got {metadata.num_rows} rows; run the "
                    "command again"
                )
            leaves = leaves_of(metadata, [*types])
            for index in range(metadata.num_row_groups):
                group, done = metadata.row_group(index), 0
                try:
                    check_column_metadata(stream, metadata, index, leaves)
                    refused = refusal(group, leaves, config)
                    if refused is not None:
                        yield Undecoded(num_rows=group.num_rows, detail=refused)
                        continue
                    for batch in decode_row_group(stream, metadata, index, leaves, config):
                        done += batch.num_rows
                        yield batch
                except DECODE_ERRORS as error:  # the groups behind it have pages of their own
                    file.require_reachable(error)
                    yield Undecoded(num_rows=group.num_rows - done, detail=damage_of(error))
