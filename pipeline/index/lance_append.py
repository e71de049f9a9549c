"""Rows appended to a table in one commit: streamed by this process, or as fragments that several wrote.

A fragment is a file of rows that no version names yet. Those of a run that was killed, or of a worker that
was given up, are never committed; the clean-up at the end of the next publication removes them.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import CairnError, IntegrityError
from cairn.pipeline.index.tables import lance_errors
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata
from lance.fragment import write_fragments as write_lance_fragments

if TYPE_CHECKING:
    import lancedb.table


Fragments = list[str]
"""Fragments of one table in the order of their rows, each as Lance's JSON."""


def stream_rows(table: lancedb.table.Table, name: str, schema: pa.Schema, rows: pa.RecordBatchReader) -> None:
    """Append the rows of a reader."""
    checked = CheckedBatches(name, schema, rows)
    try:
        with lance_errors(f"appending to table `{name}`"):
            table.add(pa.RecordBatchReader.from_batches(schema, checked))
    except CairnError:
        if checked.error is not None:
            raise checked.error from None
        raise


def write_fragments(
    dataset: lance.LanceDataset, name: str, schema: pa.Schema, rows: pa.RecordBatchReader, num_rows: int
) -> Fragments:
    """Write so many rows beside those of a table, without a commit."""
    checked = CheckedBatches(name, schema, rows)
    try:
        with lance_errors(f"writing fragments of table `{name}`"):
            written = write_lance_fragments(
                pa.RecordBatchReader.from_batches(schema, checked), dataset, max_rows_per_file=num_rows
            )
    except CairnError:
        if checked.error is not None:
            raise checked.error from None
        raise
    assert isinstance(written, list), "no transaction was asked for"
    _require(name, num_rows, sum(fragment.physical_rows for fragment in written))
    fragments = [json.dumps(fragment.to_json()) for fragment in written]
    for path in fragment_files(name, fragments):
        with lance_errors(f"reading back what was written for table `{name}`"):
            _read_last_row(Path(dataset.uri).parent / path)
    return fragments


def fragment_files(name: str, fragments: Fragments) -> list[str]:
    """Return the paths of the files of fragments below ``lance/``."""
    return [f"{name}.lance/data/{file['path']}" for each in fragments for file in json.loads(each)["files"]]


def commit_fragments(dataset: lance.LanceDataset, name: str, fragments: Fragments) -> None:
    """Append what :func:`write_fragments` wrote, maybe in other processes: all of it or nothing."""
    append = lance.LanceOperation.Append([FragmentMetadata.from_json(fragment) for fragment in fragments])
    with lance_errors(f"appending to table `{name}`"):
        lance.LanceDataset.commit(dataset, append, read_version=dataset.version)


def _read_last_row(path: Path) -> None:
    """Read the end of a file: Lance does not notice one that was cut while it wrote it."""
    file = LanceFileReader(str(path), columns=["doc_id"])
    file.take_rows([file.metadata().num_rows - 1]).to_table()


def require_grown(dataset: lance.LanceDataset, name: str, before: int, expected: int) -> None:
    """Count the rows of a table."""
    _require(name, expected, dataset.count_rows() - before)


def require_appended(dataset: lance.LanceDataset, name: str, before: int, expected: int) -> None:
    """Count the rows of a table, and read the last one of each new fragment.

    Lance does not notice a file that was cut while it wrote it.
    """
    require_grown(dataset, name, before, expected)
    added = expected
    for fragment in reversed(dataset.get_fragments()):
        if added <= 0:
            break
        with lance_errors(f"reading back what was appended to table `{name}`"):
            fragment.take([fragment.count_rows() - 1], columns=["doc_id"])
        added -= fragment.count_rows()


def _require(name: str, expected: int, added: int) -> None:
    if added != expected:
        raise IntegrityError(
            f"table `{name}` must grow by {expected} rows, got {added}; run the same command again, "
            "nothing was published"
        )


class CheckedBatches:
    """Batches of a reader, checked for missing columns and vectors that are not finite.

    Either raises :class:`IntegrityError`. Lance hides what its source raises, so ``error`` keeps it.
    """

    def __init__(self, name: str, schema: pa.Schema, reader: pa.RecordBatchReader) -> None:
        self.error: CairnError | None = None
        self._name = name
        self._schema = schema
        self._reader = reader

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            if self._reader.schema.names != self._schema.names:
                raise IntegrityError(
                    f"rows of table `{self._name}` must have the columns {', '.join(self._schema.names)}, "
                    f"got {', '.join(self._reader.schema.names)}"
                )
            for batch in self._reader:
                vectors = batch.column("vector")
                if vectors.null_count or pc.any(pc.invert(pc.is_finite(vectors.flatten()))).as_py():
                    raise IntegrityError(
                        f"vectors of table `{self._name}` must be finite numbers, got a null, NaN or "
                        "infinity; "
                        "the encoder is at fault, nothing was published"
                    )
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        except CairnError as error:
            self.error = error
            raise
