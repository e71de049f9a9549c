"""Where a hit came from: source file and row, the run that read it, model, context and generation.

Computed for one document when it is asked for, from its stored columns, the manifest and the files of runs; a
search does nothing for it. The files of runs stay with whoever wrote the collection: a copy of an object
store, and documents that an older release indexed, have no row and no run.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, Final

from cairn.pipeline.corpus.origins import Origin, find_origin
from cairn.pipeline.durable import read_bytes
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.documents import positions_of
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.types import Lineage, LineageRun

_COLUMNS: Final = ("source_file", "content_sha256", "cluster_id", "num_tokens", "num_chunks")


def read_lineage(
    generation: Generation,
    doc_id: str,
    restriction: Mapping[str, Any] | None,
    timeout: dt.timedelta | None,
) -> Lineage | None:
    """Return the lineage of the document that matches ``restriction``, None where there is none."""
    positions = positions_of(generation, doc_id, restriction, timeout)
    if not len(positions):
        return None
    (row,) = read_rows(generation, positions[:1], _COLUMNS)
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
