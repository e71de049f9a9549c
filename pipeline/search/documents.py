"""The documents of a collection: read by id, one after the other, counted, and where they came from.

All are read from the generation a search would answer from.

Lineage is computed for one document when it is asked for, from its stored columns, the manifest and the files
of runs. Those stay with the writer of the collection: a copy of an object store has no row and no run.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.corpus.origins import Origin, find_origin
from cairn.pipeline.corpus.pages import pages_in
from cairn.pipeline.durable import read_bytes
from cairn.pipeline.errors import UsageError
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.filters import compile_filter, matching_documents, table_errors
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.search.served import Served, ServedGeneration
from cairn.pipeline.types import RESERVED_COLUMNS, Document, Lineage, LineageRun
from jaxtyping import Int64
from typing_extensions import override

_OWN_COLUMNS: Final = ("doc_id", "title", "text", "num_tokens")
_LINEAGE_COLUMNS: Final = ("source_file", "content_sha256", "cluster_id", "num_tokens", "num_chunks", "text")


def read_document(
    served: Served, doc_id: str, restriction: Mapping[str, Any] | None = None
) -> Document | None:
    """Return the document of this id that matches ``restriction``, None where there is none."""
    positions = _positions_of(served, doc_id, restriction)
    return read_documents(served.generation, positions)[0] if len(positions) else None


def read_row(served: Served, doc_id: str) -> pa.Table | None:
    """Return the row of a document, with the types of its columns, its hash and its source file."""
    generation, positions = served.generation, _positions_of(served, doc_id, None)
    if not len(positions):
        return None
    own = [name for name in document_columns(generation) if name != "num_tokens"]
    with table_errors("reading documents", generation.layout):
        return generation.fetch_documents(positions, [*own, "content_sha256", "source_file"])


def _positions_of(
    served: Served, doc_id: str, restriction: Mapping[str, Any] | None
) -> Int64[np.ndarray, " A"]:
    """Return the position of the document of this id that matches ``restriction``, or none."""
    position = served.generation.position_of(doc_id)
    if position is None or restriction is None:
        return np.array([] if position is None else [position], np.int64)
    return visible_documents(served, restriction, {"type": "eq", "key": "doc_id", "value": doc_id})[1]


def read_documents(generation: Generation, positions: Int64[np.ndarray, " A"]) -> list[Document]:
    """Return the documents at these positions, in the order asked."""
    own = (*_OWN_COLUMNS, "content_sha256")
    return [
        Document(**{name: row.pop(name) for name in own}, metadata=row, generation=generation.number)
        for row in read_rows(generation, positions, [*document_columns(generation), "content_sha256"])
    ]


def document_columns(generation: Generation) -> list[str]:
    """Name the columns that a document is made of: its own, then the metadata."""
    names = generation.document_schema.names
    return [*_OWN_COLUMNS, *(name for name in names if name not in RESERVED_COLUMNS)]


def ids_of_matches(served: Served, filters: Mapping[str, Any]) -> list[str]:
    """Return the ids of the documents that match a filter tree, which must ask for something."""
    compile_filter(filters, served.generation.document_schema)
    generation, positions = visible_documents(served, None, filters)
    return generation.ids_of(positions)


def visible_documents(
    served: Served, restriction: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None
) -> tuple[Generation, Int64[np.ndarray, " A"]]:
    """Return the generation with the positions of its documents that match both, ascending."""
    allowed = matching_documents(served.generation, filters, restriction, served.timeout)
    every = np.arange(served.generation.num_documents)
    return served.generation, every if allowed is None else allowed


def count_documents(
    served: Served, restriction: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None
) -> int:
    """Count the documents that match both."""
    return len(visible_documents(served, restriction, filters)[1])


def read_lineage(served: Served, doc_id: str, restriction: Mapping[str, Any] | None = None) -> Lineage | None:
    """Return the lineage of the document that matches ``restriction``, None where there is none."""
    positions = _positions_of(served, doc_id, restriction)
    if not len(positions):
        return None
    generation = served.generation
    (row,) = read_rows(generation, positions, _LINEAGE_COLUMNS)
    text = row.pop("text")
    manifest, layout = generation.manifest, generation.layout
    origin = find_origin(layout.origins_folder, doc_id, row["content_sha256"])
    context_documents = manifest.context_documents if manifest.encoder.use_context else 0
    return Lineage(
        doc_id=doc_id,
        **row,
        pages=pages_in(text, row["source_file"]),
        source_row=origin and origin.row_index,
        run=origin and _run_of(layout, origin),
        model=manifest.encoder.model,
        model_revision=manifest.fingerprints.get("model_revision"),
        encoder_fingerprint=manifest.fingerprints["encoder"],
        context_documents=context_documents if restriction is None else None,
        context_fingerprint=manifest.fingerprints["context"],
        collection=layout.name,
        generation=manifest.generation,
        published_by=manifest.run_id,
        published_at=manifest.created_at,
    )


def _run_of(layout: CollectionLayout, origin: Origin) -> LineageRun:
    """Read the run's record; one that is gone or damaged, or was never written, leaves what its name says."""
    try:
        record = json.loads(read_bytes(layout.runs_folder / f"{origin.run_id}.json"))
        job, generation = str(record["job"]), int(record["report"]["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        job = generation = None
    began = dt.datetime.strptime(origin.run_id[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC)
    return LineageRun(
        run_id=origin.run_id, started_at=began.isoformat(timespec="seconds"), job=job, generation=generation
    )


BATCH_ROWS: Final = 1_024


class StoredDocuments:
    """The documents of a collection, in the order they were ingested.

    collection.documents["guides/passwords"]     one by its id; KeyError where there is none
    len(collection.documents)                    how many there are
    for document in collection.documents: ...    all, from the generation that was served at the start
    """

    def __init__(self, served: ServedGeneration, name: str) -> None:
        self._served, self._name = served, name

    def __len__(self) -> int:
        return self._served.generation.num_documents

    def __getitem__(self, doc_id: str) -> Document:
        found = self.get(doc_id)
        if found is None:
            raise KeyError(doc_id)
        return found

    def __contains__(self, doc_id: object) -> bool:
        return isinstance(doc_id, str) and self.get(doc_id) is not None

    def __iter__(self) -> Iterator[Document]:
        generation = self._served.generation
        for positions in _places(generation):
            yield from read_documents(generation, positions)

    def get(self, doc_id: str) -> Document | None:
        """Return a document by its id, None where there is none."""
        return self._served.reading(read_document, doc_id)

    def ids(self, filters: Mapping[str, Any] | None = None) -> list[str]:
        """Return the ids of the documents that match a filter tree, all without one."""
        if filters is None:
            return self._served.generation.doc_ids.to_pylist()
        return self._served.reading(ids_of_matches, filters)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all documents as Arrow, at most ``BATCH_ROWS`` rows at a time.

        ``columns`` are those of the stored table, such as ``vector``; None takes id, title, text, number of
        tokens and metadata.
        """
        generation = self._served.generation
        chosen = _columns(generation, columns)
        for positions in _places(generation):
            with table_errors("reading documents", generation.layout):
                found = generation.fetch_documents(positions, chosen)
            yield from found.combine_chunks().to_batches()

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all documents as one table, in memory; the columns are those of :meth:`batches`."""
        generation = self._served.generation
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
