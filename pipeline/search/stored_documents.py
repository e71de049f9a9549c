"""The documents of a collection: counted, read by id, and read one after the other from one generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import UsageError
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.documents import document_columns, matching_documents, read_documents
from cairn.pipeline.search.filters import table_errors
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.types import Document
from jaxtyping import Int64
from typing_extensions import override

BATCH_ROWS: Final = 1_024


class StoredDocuments:
    """The documents of a collection, in the order they were ingested.

    collection.documents["guides/passwords"]     one by its id; KeyError where there is none
    len(collection.documents)                    how many there are
    for document in collection.documents: ...    all, from the generation that was served at the start
    """

    def __init__(self, searcher: Searcher, name: str) -> None:
        self._searcher = searcher
        self._name = name

    def __len__(self) -> int:
        return self._searcher.count_documents()

    def __getitem__(self, doc_id: str) -> Document:
        found = self.get(doc_id)
        if found is None:
            raise KeyError(doc_id)
        return found

    def __contains__(self, doc_id: object) -> bool:
        return isinstance(doc_id, str) and self.get(doc_id) is not None

    def __iter__(self) -> Iterator[Document]:
        generation = self._searcher.generation
        for positions in _places(generation):
            yield from read_documents(generation, positions)

    def get(self, doc_id: str) -> Document | None:
        """Return a document by its id, None where there is none."""
        return self._searcher.read_document(doc_id)

    def ids(self, filters: Mapping[str, Any] | None = None) -> list[str]:
        """Return the ids of the documents that match a filter tree, all without one."""
        generation = self._searcher.generation
        if filters is None:
            return generation.doc_ids.to_pylist()
        return generation.doc_ids.take(pa.array(matching_documents(generation, filters))).to_pylist()

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all documents as Arrow, at most ``BATCH_ROWS`` rows at a time.

        ``columns`` are those of the stored table, such as ``vector``; None takes id, title, text, number of
        tokens and metadata.
        """
        generation = self._searcher.generation
        chosen = _columns(generation, columns)
        for positions in _places(generation):
            with table_errors("reading documents", generation.layout):
                found = generation.fetch_documents(positions, chosen)
            yield from found.combine_chunks().to_batches()

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all documents as one table, in memory; the columns are those of :meth:`batches`."""
        generation = self._searcher.generation
        chosen = _columns(generation, columns)
        schema = pa.schema([generation.document_schema.field(name) for name in chosen])
        return pa.Table.from_batches(list(self.batches(chosen)), schema=schema)

    @override
    def __repr__(self) -> str:
        return f"<{len(self):,} documents of {self._name!r}>"


def _columns(generation: Generation, columns: Sequence[str] | None) -> list[str]:
    chosen, stored = list(columns or document_columns(generation)), generation.document_schema.names
    if unknown := sorted({*chosen} - {*stored}):
        raise UsageError(f"columns of documents must be among {', '.join(stored)}, got {', '.join(unknown)}")
    return chosen


def _places(generation: Generation) -> Iterator[Int64[np.ndarray, " A"]]:
    """Yield the positions of all documents, ``BATCH_ROWS`` at a time."""
    for start in range(0, generation.num_documents, BATCH_ROWS):
        yield np.arange(start, min(start + BATCH_ROWS, generation.num_documents))
