"""Iceberg: a part is a data file of the current snapshot with its delete files; pyiceberg reads both.

pyiceberg decodes a data file whole, so the largest one must fit in memory. It refuses equality deletes. No
catalog is asked: a table is a metadata file, or the newest one in its folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from cairn.pipeline.corpus.tables.part import NoRows, TablePart
from cairn.pipeline.errors import SourceError
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.table import FileScanTask, StaticTable

_VERSION: Final = re.compile(r"v?(\d+)\b")

_PROPERTIES: Final = {"s3.endpoint": "AWS_ENDPOINT_URL", "s3.region": "AWS_REGION"}


@dataclass(frozen=True, kw_only=True, slots=True)
class IcebergPart:
    """A data file, and the files that say which of its rows are deleted."""

    table: StaticTable
    task: FileScanTask
    schema: pa.Schema
    name: str
    identity: str

    def count_rows(self) -> int:
        """Count the rows by the manifest, or by reading a column where rows are deleted."""
        if not self.task.delete_files:
            return self.task.file.record_count
        return sum(batch.num_rows for batch in self.batches(self.schema.names[:1], 1))

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Read the rows in the order of the file, in batches of pyiceberg's own size."""
        scan = self.table.scan(selected_fields=tuple(columns))
        reader = ArrowScan(self.table.metadata, self.table.io, scan.projection(), scan.row_filter)
        return reader.to_record_batches([self.task])


def newest_metadata(names: Sequence[str]) -> str:
    """Return the metadata file with the highest version.

    Where two have it, one of them was never committed, and :class:`SourceError` is raised.
    """
    versions = [int(found[1]) if (found := _VERSION.match(name)) else -1 for name in names]
    newest = [name for name, version in zip(names, versions, strict=True) if version == max(versions)]
    if len(newest) > 1:
        raise SourceError(
            f"one metadata file of an Iceberg table must be the newest, got {' and '.join(newest[:2])}; name "
            "the one that its catalog names"
        )
    return newest[0]


def store_properties() -> dict[str, str]:
    """Return what pyiceberg does not take from the environment by itself."""
    return {name: os.environ[variable] for name, variable in _PROPERTIES.items() if variable in os.environ}


def iceberg_parts(location: str) -> Sequence[TablePart]:
    """Return the data files of the current snapshot of a metadata file."""
    table = StaticTable.from_metadata(location, store_properties())
    scan = table.scan()
    schema = schema_to_pyarrow(scan.projection(), include_field_ids=False)
    snapshot = table.metadata.current_snapshot_id
    below = f"{table.location().rstrip('/')}/"
    return [
        IcebergPart(
            table=table,
            task=task,
            schema=schema,
            name=task.file.file_path.removeprefix(below).lstrip("/"),
            identity=f"{task.file.file_path} {snapshot if task.delete_files else ''}",
        )
        for task in scan.plan_files()
    ] or [NoRows(schema=schema)]
