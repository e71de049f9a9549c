"""Lance: a part is a fragment, whose metadata names its files and its deleted rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import lance
import pyarrow as pa
from cairn.pipeline.corpus.tables.part import NoRows, TablePart


@dataclass(frozen=True, kw_only=True, slots=True)
class LancePart:
    """A fragment."""

    fragment: lance.LanceFragment
    schema: pa.Schema
    name: str
    identity: str

    def count_rows(self) -> int:
        """Count the rows by the metadata."""
        return self.fragment.count_rows()

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Read the rows in the order they were written."""
        return self.fragment.to_batches(columns=[*columns], batch_size=batch_rows, batch_readahead=1)


def lance_parts(location: str) -> Sequence[TablePart]:
    """Return the fragments of the latest version."""
    dataset = lance.dataset(location)
    return [
        LancePart(
            fragment=fragment,
            schema=dataset.schema,
            name=f"fragment-{fragment.fragment_id:09d}",
            identity=json.dumps(fragment.metadata.to_json(), sort_keys=True),
        )
        for fragment in dataset.get_fragments()
    ] or [NoRows(schema=dataset.schema)]
