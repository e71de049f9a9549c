"""Documents read by their id, from the generation a search would answer from."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.conditions import allowed_documents
from cairn.pipeline.search.filters import compile_both, compile_filter, compile_restriction
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.types import RESERVED_COLUMNS, Document
from jaxtyping import Int64

_OWN_COLUMNS: Final = ("doc_id", "title", "text", "num_tokens")


def read_document(
    generation: Generation,
    doc_id: str,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Document | None:
    """Return the document of this id that matches ``restriction``, None where there is none."""
    positions = positions_of(generation, doc_id, restriction, timeout)
    return read_documents(generation, positions[:1])[0] if len(positions) else None


def positions_of(
    generation: Generation,
    doc_id: str,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Int64[np.ndarray, " A"]:
    """Return the position of the document of this id that matches ``restriction``, or none."""
    wanted: dict[str, Any] = {"type": "eq", "key": "doc_id", "value": doc_id}
    condition = compile_both(wanted, restriction, generation.document_schema)
    assert condition is not None, "an id is asked for"
    return allowed_documents(generation, condition, timeout)


def read_documents(generation: Generation, positions: Int64[np.ndarray, " A"]) -> list[Document]:
    """Return the documents at these positions, in the order asked."""
    return [
        Document(**{name: row.pop(name) for name in _OWN_COLUMNS}, metadata=row, generation=generation.number)
        for row in read_rows(generation, positions, document_columns(generation))
    ]


def document_columns(generation: Generation) -> list[str]:
    """Name the columns that a document is made of: its own, then the metadata."""
    names = generation.document_schema.names
    return [*_OWN_COLUMNS, *(name for name in names if name not in RESERVED_COLUMNS)]


def matching_documents(generation: Generation, filters: Mapping[str, Any]) -> Int64[np.ndarray, " A"]:
    """Return the positions of the documents that match a filter tree, ascending."""
    return allowed_documents(generation, compile_filter(filters, generation.document_schema), None)


def count_documents(
    generation: Generation,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> int:
    """Count the documents that match ``restriction``."""
    if restriction is None:
        return generation.num_documents
    condition = compile_restriction(restriction, generation.document_schema)
    return len(allowed_documents(generation, condition, timeout))
