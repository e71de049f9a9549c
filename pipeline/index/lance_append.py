"""Rows appended to a table in one commit, as fragments that this process or several wrote.

A fragment is a file of rows that no version names yet. Those of a run that was killed, or of a worker that
was given up, are never committed; the clean-up at the end of the next publication removes them.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import CairnError, IntegrityError
from cairn.pipeline.index.tables import lance_errors
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata
from lance.fragment import write_fragments as write_lance_fragments

Fragments = list[str]
"""Fragments of one table in the order of their rows, each as Lance's JSON."""


def write_fragments(
    dataset: lance.LanceDataset, name: str, schema: pa.Schema, rows: pa.RecordBatchReader, num_rows: int
) -> Fragments:
    """Write so many rows beside those of a table, without a commit."""
    raised: list[CairnError] = []  # Lance hides what its source raises

    def checked() -> Iterator[pa.RecordBatch]:
        try:
            yield from _checked(name, schema, rows)
        except CairnError as error:
            raised.append(error)
            raise

    reader = pa.RecordBatchReader.from_batches(schema, checked())
    try:
        with lance_errors(f"writing fragments of table `{name}`"):
            written = write_lance_fragments(reader, dataset, max_rows_per_file=num_rows)
    except CairnError:
        if raised:
            raise raised[0] from None
        raise
    assert isinstance(written, list), "no transaction was asked for"
    require_grown(name, num_rows, sum(fragment.physical_rows for fragment in written))
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


def require_grown(name: str, expected: int, added: int) -> None:
    """Raise :class:`IntegrityError` where a table has grown by another number of rows than it must."""
    if added != expected:
        raise IntegrityError(
            f"table `{name}` must grow by {expected} rows, got {added}; run the same command again, "
            "nothing was published"
        )


def _checked(name: str, schema: pa.Schema, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Refuse missing columns and vectors that are not finite, which Lance silently accepts."""
    if rows.schema.names != schema.names:
        raise IntegrityError(
            f"rows of table `{name}` must have the columns {', '.join(schema.names)}, got "
            f"{', '.join(rows.schema.names)}"
        )
    for batch in rows:
        vectors = batch.column("vector")
        if vectors.null_count or pc.any(pc.invert(pc.is_finite(vectors.flatten()))).as_py():
            raise IntegrityError(
                f"vectors of table `{name}` must be finite numbers, got a null, NaN or infinity; the encoder "
                "is at fault, nothing was published"
            )
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
