"""Where documents of the served generation stand in the tables, by its position files."""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.lance_delete import PlacedDocument
from cairn.pipeline.index.layout import CHUNKS_ARROW, DELETED_BITS, DOCUMENTS_ARROW, CollectionLayout
from cairn.pipeline.index.segments.segment import SegmentRows, open_rows
from cairn.pipeline.index.stored_files import check_generation_files
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.index.verified_files import VerifiedFiles
from cairn.pipeline.manifest import Manifest


def find_served(layout: CollectionLayout, served: Manifest, doc_ids: Sequence[str]) -> list[PlacedDocument]:
    """Return those of the documents that the generation has; none where a file of its rows is damaged."""
    suffixes = (DOCUMENTS_ARROW, CHUNKS_ARROW, DELETED_BITS)
    names = [record.name + suffix for record in served.segments for suffix in suffixes]
    with VerifiedFiles.of_this_machine() as verified:
        if check_generation_files(layout, served, names=names, verified=verified):
            return []
    folder = layout.generation_folder(served.generation)
    found: list[PlacedDocument] = []
    begins = {DOCUMENTS: 0, CHUNKS: 0}
    try:
        for record in served.segments:
            rows = open_rows(folder, record)
            found += _placed(rows, begins, doc_ids)
            begins[DOCUMENTS] += rows.deleted_documents.num_live
            begins[CHUNKS] += rows.deleted_chunks.num_live
    except DamageError:
        return []
    return found


def _placed(rows: SegmentRows, begins: dict[str, int], doc_ids: Sequence[str]) -> Iterator[PlacedDocument]:
    """Yield those documents of a segment that are not deleted; its rows begin at ``begins``."""
    own = rows.documents.column("doc_id")
    stored = np.flatnonzero(pc.is_in(own, value_set=pa.array(doc_ids, own.type)).to_numpy(False))
    stored = np.setdiff1d(stored, rows.deleted_documents.rows, assume_unique=True)
    first_chunks = rows.documents.column("chunk_offset").to_numpy()[stored]
    sizes = rows.documents.column("num_chunks").to_numpy()[stored]
    live = zip(
        stored.tolist(),
        (begins[DOCUMENTS] + rows.deleted_documents.live_of(stored)).tolist(),
        (begins[CHUNKS] + rows.deleted_chunks.live_of(first_chunks)).tolist(),
        sizes.tolist(),
        strict=True,
    )
    for place, document, chunk, num_chunks in live:
        places = {DOCUMENTS: slice(document, document + 1), CHUNKS: slice(chunk, chunk + num_chunks)}
        yield PlacedDocument(doc_id=own[place].as_py(), rows=places)
