"""A part of a generation: some of its documents, opened as if they were all there are.

What a shard holds. Rows beyond the part count as deleted in the segment that holds them, so every file stays
as it is and only what is read of it is mapped into memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from cairn.pipeline.index.generation import Generation, joined_index
from cairn.pipeline.index.segments.segment import Segment, open_segment
from cairn.pipeline.index.token_file import TokenCodes, TokenRows, TokenVectors
from cairn.pipeline.ragged import ranges
from jaxtyping import Int64


def part_of(generation: Generation, documents: Int64[np.ndarray, " P"]) -> Generation:
    """Return some documents of a generation, which ascend, numbered from 0; tables are left as they are.

    Texts and filters are the business of the whole generation: a position of the part is no row of them.
    """
    first_P = generation.chunk_offsets[documents]
    chunks = ranges(first_P, generation.chunk_offsets[documents + 1] - first_P)
    segments = _segments(generation, documents)
    manifest = replace(
        generation.manifest,
        documents=len(documents),
        chunks=len(chunks),
        segments=tuple(segment.record for segment in segments),
    )
    tokens = generation.token_vectors
    return replace(
        generation,
        manifest=manifest,
        segments=segments,
        documents=joined_index([(each.documents, each.rows.deleted_documents) for each in segments]),
        chunks=joined_index([(each.chunks, each.rows.deleted_chunks) for each in segments]),
        token_vectors=None
        if tokens is None
        else TokenVectors(
            projection=tokens.projection,
            chunks=_CodesOf(tokens.chunks, chunks),
            titles=_CodesOf(tokens.titles, chunks),
        ),
    )


def _segments(generation: Generation, documents: Int64[np.ndarray, " P"]) -> list[Segment]:
    segments: list[Segment] = []
    begin = 0
    for segment in generation.segments:
        num_live = segment.rows.deleted_documents.num_live
        cuts = np.searchsorted(documents, (begin, begin + num_live)).tolist()
        own = documents[slice(*cuts)] - begin
        begin += num_live
        if not len(own):
            continue
        if len(own) < num_live:
            is_beyond = np.ones(num_live, np.bool_)
            is_beyond[own] = False
            rows = segment.rows.without(np.flatnonzero(is_beyond))
            record = rows.described(segment.record)
            segment = open_segment(generation.folder, record, generation.manifest.files, rows)
        segments.append(segment)
    return segments


@dataclass(frozen=True, slots=True, eq=False)
class _CodesOf:
    """The tokens of some chunks of a generation, by their number among them."""

    codes: TokenCodes
    chunks: Int64[np.ndarray, " M"]

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> TokenRows:
        return self.codes.read(self.chunks[chunk_C])
