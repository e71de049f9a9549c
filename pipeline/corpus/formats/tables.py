"""Tables as sources: one of Lance, Delta Lake or Iceberg as its data files, or one in memory.

A part is a data file without its deleted rows, read through the table's own library, which is imported once a
table of its format is a source. Libraries reach a store by the usual environment variables of its vendor:
what a source's URI says beside bucket and path is for Arrow alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import Footer, Format, SourceFile, TablePart, check_names
from cairn.pipeline.errors import CairnError, SourceError, extra_missing, is_panic
from typing_extensions import override

if TYPE_CHECKING:
    import lance
    import pyarrow.dataset as ds
    from pyiceberg.table import FileScanTask, StaticTable

TableKind = Literal["Delta", "Iceberg", "Lance"]
_SHOWN_CHARACTERS: Final = 300
_BRANCH: Final = re.compile(r"\s*\n\s*(?:\x1b\[\d+m|↳)*\s*")
"""What stands between a sentence and its cause where deltalake draws them as a tree."""
_ONE_PART: Final = frozenset({"columnMapping", "deletionVectors"})
"""Features of Delta tables that only deltalake's own engine reads, which tells no files apart."""
_COLUMN_MAPPING_VERSION: Final = 2
"""The reader version of Delta whose only addition is column mapping."""
_ICEBERG_PROPERTIES: Final = {"s3.endpoint": "AWS_ENDPOINT_URL", "s3.region": "AWS_REGION"}


class TableFormat(Format):
    """Reads the part of a table that a source is."""

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the table's schema, and count the rows of the part."""
        part = _part(file)
        check_names(part.schema)
        with damage_raised():
            return Footer(schema=part.schema, num_rows=part.num_rows())

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch]:
        with damage_raised():
            for batch in _part(file).read([*types], config.batch_rows):
                chosen = batch.select([*types])
                for start in range(0, batch.num_rows, config.batch_rows):
                    yield chosen.slice(start, config.batch_rows)


def _part(file: SourceFile) -> TablePart:
    assert file.part is not None, "the format is that of a part"
    return file.part


def memory_part(table: pa.Table) -> TablePart:
    """Return a table in memory as a part that has no identity; nothing of it is copied."""
    return TablePart(
        schema=table.schema,
        count=lambda: table.num_rows,
        read=lambda columns, rows: table.select([*columns]).to_batches(max_chunksize=rows),
        identity=None,
    )


def open_parts(kind: TableKind, location: str, name: str) -> Sequence[TablePart]:
    """Open a table and return its parts; ``name`` is how the user would call it.

    Raises :class:`ConfigError` where its library is not installed, and :class:`SourceError` where the table
    cannot be opened.
    """
    opened = {"Delta": _delta_parts, "Iceberg": _iceberg_parts, "Lance": _lance_parts}[kind]
    try:
        return opened(location)
    except ModuleNotFoundError as error:
        package = "pyiceberg" if kind == "Iceberg" else "deltalake"
        raise extra_missing(
            error, what=f"{kind} table {name}", module=package, package=package, extra=kind.lower()
        ) from error
    except CairnError:
        raise
    except BaseException as error:
        cause = _cause_of(error)
        raise SourceError(f"{kind} table {name} must be one that can be opened, got: {cause}") from error


@contextlib.contextmanager
def damage_raised() -> Generator[None]:
    """Raise :class:`ValueError` for what a library raises in the block, in one line.

    A file that is gone or may not be read is told as usual.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except BaseException as error:
        raise ValueError(_cause_of(error)) from error


def _cause_of(error: BaseException) -> str:
    """Return what a library says, in one line; each raises errors of its own.

    What is no error of a library, such as an interrupt, is raised as it is.
    """
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    return (_BRANCH.sub(": ", str(error).strip()) or type(error).__name__)[:_SHOWN_CHARACTERS]


def _no_rows(schema: pa.Schema) -> TablePart:
    return TablePart(schema=schema, count=lambda: 0, read=lambda _columns, _rows: ())


def _delta_parts(location: str) -> Sequence[TablePart]:
    """Return the data files of the latest version, read by Arrow.

    A table with column mapping or deletion vectors is one part, read by deltalake; its rows have no order.
    """
    from deltalake import DeltaTable

    table = DeltaTable(location)
    protocol, table_id = table.protocol(), str(table.metadata().id)
    features = {*(protocol.reader_features or ())}
    if protocol.min_reader_version == _COLUMN_MAPPING_VERSION or _ONE_PART & features:
        version = f"version-{table.version()}"
        return [
            TablePart(
                schema=pa.schema(table.schema().to_arrow()),
                read=lambda columns, _rows: pa.RecordBatchReader.from_stream(table.scan(columns=[*columns])),
                name=version,
                identity=f"{table_id} {version}",
            )
        ]
    dataset = table.to_pyarrow_dataset()
    return [_delta_part(fragment, dataset.schema, table_id) for fragment in dataset.get_fragments()] or [
        _no_rows(dataset.schema)
    ]


def _delta_part(fragment: ds.ParquetFileFragment, schema: pa.Schema, table_id: str) -> TablePart:
    """Return a data file with the values of its partition."""

    def read(columns: Sequence[str], rows: int) -> Iterable[pa.RecordBatch]:
        return fragment.to_batches(
            schema=schema, columns=[*columns], batch_size=rows, batch_readahead=1, use_threads=False
        )

    return TablePart(
        schema=schema,
        read=read,
        count=fragment.count_rows,
        name=fragment.path,
        identity=f"{table_id} {fragment.path}",
    )


def _lance_parts(location: str) -> Sequence[TablePart]:
    """Return the fragments of the latest version; their metadata names files and deleted rows."""
    import lance

    dataset = lance.dataset(location)
    return [_lance_part(fragment, dataset.schema) for fragment in dataset.get_fragments()] or [
        _no_rows(dataset.schema)
    ]


def _lance_part(fragment: lance.LanceFragment, schema: pa.Schema) -> TablePart:
    return TablePart(
        schema=schema,
        read=lambda columns, rows: fragment.to_batches(
            columns=[*columns], batch_size=rows, batch_readahead=1
        ),
        count=fragment.count_rows,
        name=f"fragment-{fragment.fragment_id:09d}",
        identity=json.dumps(fragment.metadata.to_json(), sort_keys=True),
    )


def _iceberg_parts(location: str) -> Sequence[TablePart]:
    """Return the data files of the current snapshot of a metadata file, each with its delete files.

    No catalog is asked. pyiceberg refuses equality deletes.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(location, store_properties())
    scan = table.scan()
    schema = schema_to_pyarrow(scan.projection(), include_field_ids=False)
    return [iceberg_part(table, task, schema) for task in scan.plan_files()] or [_no_rows(schema)]


def iceberg_part(table: StaticTable, task: FileScanTask, schema: pa.Schema) -> TablePart:
    """Return a data file; pyiceberg decodes it whole, so the largest one must fit in memory."""
    from pyiceberg.io.pyarrow import ArrowScan

    def read(columns: Sequence[str], _rows: int) -> Iterable[pa.RecordBatch]:
        scan = table.scan(selected_fields=tuple(columns))
        reader = ArrowScan(table.metadata, table.io, scan.projection(), scan.row_filter)
        return reader.to_record_batches([task])

    below = f"{table.location().rstrip('/')}/"
    snapshot = table.metadata.current_snapshot_id if task.delete_files else ""
    return TablePart(
        schema=schema,
        read=read,
        count=None if task.delete_files else lambda: task.file.record_count,
        name=task.file.file_path.removeprefix(below).lstrip("/"),
        identity=f"{task.file.file_path} {snapshot}",
    )


def store_properties() -> dict[str, str]:
    """Return what pyiceberg does not take from the environment by itself."""
    return {
        name: os.environ[variable] for name, variable in _ICEBERG_PROPERTIES.items() if variable in os.environ
    }
