"""Delta Lake: a part is a data file that the log names; deltalake follows the log.

Arrow reads the data files. Tables with column mapping or deletion vectors are read by deltalake's own engine,
which tells no files apart: such a table is one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.dataset as ds
from cairn.pipeline.corpus.tables.part import NoRows, TablePart
from deltalake import DeltaTable

_ONE_PART: Final = frozenset({"columnMapping", "deletionVectors"})
_COLUMN_MAPPING_VERSION: Final = 2
"""The reader version whose only addition is column mapping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFilePart:
    """A data file, with the values of its partition."""

    fragment: ds.ParquetFileFragment
    schema: pa.Schema
    name: str
    identity: str

    def count_rows(self) -> int:
        """Count the rows by the footer of the file."""
        return self.fragment.count_rows()

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Read the rows in the order of the file."""
        return self.fragment.to_batches(
            schema=self.schema,
            columns=[*columns],
            batch_size=batch_rows,
            batch_readahead=1,
            use_threads=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTablePart:
    """A whole table. The order of its rows is not fixed."""

    table: DeltaTable
    schema: pa.Schema
    name: str
    identity: str

    def count_rows(self) -> int:
        """Count the rows by reading a column."""
        return sum(batch.num_rows for batch in self.batches(self.schema.names[:1], 1))

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Read the rows in batches of the engine's own size."""
        yield from pa.RecordBatchReader.from_stream(self.table.scan(columns=[*columns]))


def delta_parts(location: str) -> Sequence[TablePart]:
    """Return the data files of the latest version, or the whole table."""
    table = DeltaTable(location)
    protocol, table_id = table.protocol(), table.metadata().id
    if protocol.min_reader_version == _COLUMN_MAPPING_VERSION or _ONE_PART & {
        *(protocol.reader_features or ())
    }:
        version = f"version-{table.version()}"
        schema = pa.schema(table.schema().to_arrow())
        return [DeltaTablePart(table=table, schema=schema, name=version, identity=f"{table_id} {version}")]
    dataset = table.to_pyarrow_dataset()
    return [
        DeltaFilePart(
            fragment=fragment,
            schema=dataset.schema,
            name=fragment.path,
            identity=f"{table_id} {fragment.path}",
        )
        for fragment in dataset.get_fragments()
    ] or [NoRows(schema=dataset.schema)]
