"""Documents read by their id, from the generation a search would answer from."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from pipeline.index.generation import Generation
from pipeline.search.filters import compile_filter, compile_restriction
from pipeline.search.hits import read_rows
from pipeline.search.lexical import allowed_documents
from pipeline.types import RESERVED_COLUMNS, Document


def read_document(
    generation: Generation,
    doc_id: str,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Document | None:
    """Return the document of this id that matches ``restriction``, None where there is none."""
    schema = generation.document_schema
    wanted = compile_filter({"type": "eq", "key": "doc_id", "value": doc_id}, schema)
    where = wanted if restriction is None else compile_restriction(restriction, schema).and_(wanted)
    positions = allowed_documents(generation, where, timeout)
    if not len(positions):
        return None
    metadata = [name for name in schema.names if name not in RESERVED_COLUMNS]
    row = read_rows(generation, positions[:1], ["doc_id", "title", "text", "num_tokens", *metadata])[0]
    return Document(
        doc_id=row["doc_id"],
        title=row["title"],
        text=row["text"],
        num_tokens=row["num_tokens"],
        metadata={name: row[name] for name in metadata},
        generation=generation.number,
    )


def count_documents(
    generation: Generation,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> int:
    """Count the documents that match ``restriction``."""
    if restriction is None:
        return generation.num_documents
    where = compile_restriction(restriction, generation.document_schema)
    return len(allowed_documents(generation, where, timeout))
