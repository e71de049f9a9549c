"""Documents read by their id, and where they came from: from the generation a search would answer from.

Lineage is computed for one document when it is asked for, from its stored columns, the manifest and the files
of runs. Those stay with whoever wrote the collection: a copy of an object store has no row and no run.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from cairn.pipeline.corpus.origins import Origin, find_origin
from cairn.pipeline.durable import read_bytes
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.filters import allowed_documents, compile_both, compile_filter, compile_restriction
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.types import RESERVED_COLUMNS, Document, Lineage, LineageRun
from jaxtyping import Int64

_OWN_COLUMNS: Final = ("doc_id", "title", "text", "num_tokens")
_LINEAGE_COLUMNS: Final = ("source_file", "content_sha256", "cluster_id", "num_tokens", "num_chunks")


def read_document(
    generation: Generation,
    doc_id: str,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Document | None:
    """Return the document of this id that matches ``restriction``, None where there is none."""
    positions = _positions_of(generation, doc_id, restriction, timeout)
    return read_documents(generation, positions[:1])[0] if len(positions) else None


def _positions_of(
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


def visible_documents(
    generation: Generation,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Int64[np.ndarray, " A"]:
    """Return the positions of the documents that match ``restriction``, ascending; None lets all through."""
    if restriction is None:
        return np.arange(generation.num_documents)
    condition = compile_restriction(restriction, generation.document_schema)
    return allowed_documents(generation, condition, timeout)


def read_lineage(
    generation: Generation,
    doc_id: str,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Lineage | None:
    """Return the lineage of the document that matches ``restriction``, None where there is none."""
    positions = _positions_of(generation, doc_id, restriction, timeout)
    if not len(positions):
        return None
    (row,) = read_rows(generation, positions[:1], _LINEAGE_COLUMNS)
    manifest, layout = generation.manifest, generation.layout
    origin = find_origin(layout.origins_folder, doc_id, row["content_sha256"])
    return Lineage(
        doc_id=doc_id,
        **row,
        source_row=origin and origin.row_index,
        run=origin and _run_of(layout, origin),
        model=manifest.encoder.model,
        model_revision=manifest.fingerprints.get("model_revision"),
        encoder_fingerprint=manifest.fingerprints["encoder"],
        context_documents=manifest.context_documents if manifest.encoder.needs_context else 0,
        context_fingerprint=manifest.fingerprints["context"],
        collection=layout.name,
        generation=manifest.generation,
        published_by=manifest.run_id,
        published_at=manifest.created_at,
    )


def _run_of(layout: CollectionLayout, origin: Origin) -> LineageRun:
    """Read the run's record; one that is gone or damaged, or was never written, leaves what its name says."""
    try:
        record = json.loads(read_bytes(layout.run_path(origin.run_id)))
        job, generation = str(record["job"]), int(record["report"]["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        job = generation = None
    began = dt.datetime.strptime(origin.run_id[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC)
    return LineageRun(
        run_id=origin.run_id, started_at=began.isoformat(timespec="seconds"), job=job, generation=generation
    )
