"""What a collection holds, without ranking: its documents, columns with their values, matches of a filter.

    documents   read by id, one after the other, counted, and where they came from
    columns     name, type, how many documents have a value, the most frequent values, the range
    matches     ids, titles and metadata of all that match, page by page, in the order of their ids

All are read from the generation a search would answer from. Each reads only documents that match both the
caller's filter and the restriction of who asks. A page goes on after an id, so documents that are written
meanwhile neither repeat nor shift the pages.

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
import pyarrow.compute as arrow_compute
from cairn.pipeline.corpus.source_record import Origin, find_origin
from cairn.pipeline.durable import read_bytes
from cairn.pipeline.errors import ConfigError, UsageError
from cairn.pipeline.index.generation import Generation, table_errors
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.filters import compile_filter, filterable_columns, is_text
from cairn.pipeline.search.hits import pages_in, read_rows, showable
from cairn.pipeline.search.searcher import Searcher, Served
from cairn.pipeline.types import (
    RESERVED_COLUMNS,
    ColumnSummary,
    Document,
    DocumentPage,
    Lineage,
    LineageRun,
    ListedDocument,
    ValueCount,
)
from jaxtyping import Int64
from typing_extensions import override

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

MAX_VALUES: Final = 1_000
"""Values of one column in an answer."""
DEFAULT_VALUES: Final = 20
MAX_PAGE: Final = 1_000
"""Documents of one page."""


def summarise_columns(
    served: Served,
    names: Sequence[str] | None = None,
    filters: Mapping[str, Any] | None = None,
    num_values: int = DEFAULT_VALUES,
    restriction: Mapping[str, Any] | None = None,
) -> list[ColumnSummary]:
    """Describe columns over the documents that match, None: all that filters can name.

    Values of columns that were not named, and mostly differ, are left out.
    """
    known = filterable_columns(served.generation.document_schema)
    unknown = sorted({*(names or ())} - {*known})
    if unknown:
        got = names if isinstance(names, str) else ", ".join(unknown)[:80]
        raise ConfigError(f"columns must be a list of some of {', '.join(known)}, got {got}")
    if not 0 <= num_values <= MAX_VALUES:
        raise ConfigError(f"num_values must be a whole number from 0 to {MAX_VALUES:,}, got {num_values}")
    generation, positions = visible_documents(served, restriction, filters)
    chosen = list(known) if names is None else list(dict.fromkeys(names))
    with table_errors("reading columns", generation.layout):
        rows = pa.table({name: generation.read_column(name) for name in chosen})
    rows = showable(rows.take(pa.array(positions)))
    return [
        _summary(name, known[name], rows.column(name), num_values, is_named=names is not None)
        for name in chosen
    ]


def _summary(
    name: str, data_type: pa.DataType, column: pa.ChunkedArray, num_values: int, *, is_named: bool
) -> ColumnSummary:
    num_documents = len(column) - column.null_count
    values = column.combine_chunks()
    if pa.types.is_list(data_type):
        owners = pa.table({"owner": pc.list_parent_indices(values), "value": pc.list_flatten(values)})
        values = owners.group_by(["owner", "value"]).aggregate([]).column("value").combine_chunks()
    if pa.types.is_float16(values.type):  # Arrow has no `min_max` of it
        values = values.cast(pa.float32())
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    values = values.drop_null()
    counted = values.value_counts()
    different = pa.table({"value": counted.field("values"), "documents": counted.field("counts")})
    is_key = not is_named and len(different) > max(num_values, len(values) // 2)
    order = pc.select_k_unstable(
        different,
        k=0 if is_key else min(num_values, len(different)),
        sort_keys=[("documents", "descending"), ("value", "ascending")],
    )
    low = high = None
    if len(values) and not (is_text(values.type) or pa.types.is_boolean(values.type)):
        bounds = pc.min_max(values).as_py()
        low, high = bounds["min"], bounds["max"]
    return ColumnSummary(
        name=name,
        type=str(data_type),
        documents=num_documents,
        different_values=len(different),
        values=tuple(ValueCount(**row) for row in different.take(order).to_pylist()),
        low=low,
        high=high,
    )


def list_matches(
    served: Served,
    filters: Mapping[str, Any] | None = None,
    after: str | None = None,
    limit: int = MAX_PAGE,
    restriction: Mapping[str, Any] | None = None,
) -> DocumentPage:
    """Return the ``limit`` documents that match and whose ids come next after ``after``."""
    if not 1 <= limit <= MAX_PAGE:
        raise UsageError(f"limit must be a whole number from 1 to {MAX_PAGE:,}, got {limit}")
    generation, positions = visible_documents(served, restriction, filters)
    num_matching = len(positions)
    doc_ids = generation.doc_ids.take(pa.array(positions))
    if after is not None:
        is_left = np.asarray(pc.greater(doc_ids, pa.scalar(after, doc_ids.type)))
        positions, doc_ids = positions[is_left], doc_ids.filter(pa.array(is_left))
    chosen = positions[_first_ids(doc_ids, limit)]
    metadata = [name for name in generation.document_schema.names if name not in RESERVED_COLUMNS]
    rows = read_rows(generation, chosen, ["doc_id", "title", "num_tokens", *metadata]) if len(chosen) else []
    documents = tuple(
        ListedDocument(
            doc_id=row.pop("doc_id"), title=row.pop("title"), num_tokens=row.pop("num_tokens"), metadata=row
        )
        for row in rows
    )
    has_more = len(positions) > len(chosen)
    return DocumentPage(
        generation=generation.number,
        total=num_matching,
        documents=documents,
        next_after=documents[-1].doc_id if has_more else None,
    )


def _first_ids(doc_ids: pa.Array, limit: int) -> Int64[np.ndarray, " K"]:
    """Return the places of the first ids in their order."""
    table = pa.table({"doc_id": doc_ids})
    order = pc.select_k_unstable(table, k=min(limit, len(doc_ids)), sort_keys=[("doc_id", "ascending")])
    return order.to_numpy().astype(np.int64)


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
    return served.matching(restriction, {"type": "eq", "key": "doc_id", "value": doc_id})


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
    return served.generation.ids_of(served.matching(None, filters))


def visible_documents(
    served: Served, restriction: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None
) -> tuple[Generation, Int64[np.ndarray, " A"]]:
    """Return the generation with the positions of its documents that match both, ascending."""
    return served.generation, served.matching(restriction, filters)


def count_documents(
    served: Served, restriction: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None
) -> int:
    """Count the documents that match both."""
    return len(served.matching(restriction, filters))


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

    def __init__(self, served: Searcher, name: str) -> None:
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
