"""What a collection holds, without ranking: columns with their values, counts, and all matches of a filter.

    columns     name, type, how many documents have a value, the most frequent values, the range
    count       how many documents match
    matches     ids, titles and metadata of all that match, page by page, in the order of their ids

Each reads only documents that match both the caller's filter and the restriction of who asks. A page goes on
after an id, so documents that are written meanwhile neither repeat nor shift the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.errors import ConfigError, UsageError
from cairn.pipeline.search.documents import visible_documents
from cairn.pipeline.search.filters import filterable_columns, is_text, table_errors
from cairn.pipeline.search.hits import read_rows, showable
from cairn.pipeline.search.served import Served
from cairn.pipeline.types import (
    RESERVED_COLUMNS,
    ColumnSummary,
    DocumentPage,
    ListedDocument,
    ValueCount,
)
from jaxtyping import Int64

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
