"""A part of a generation: consecutive documents, opened as if they were all there are.

What a shard holds. Rows beyond the part count as deleted in the segment that holds them, so every file stays
as it is and only what is read of it is mapped into memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64

from pipeline.index.generation import Generation, joined_index
from pipeline.index.segments.segment import Segment, open_segment
from pipeline.index.token_file import TokenCodes, TokenRows, TokenVectors


def part_of(generation: Generation, first: int, end: int) -> Generation:
    """Return documents ``first`` to ``end`` of a generation, numbered from 0; tables are left as they are.

    Texts and filters are the business of the whole generation: a position of the part is no row of them.
    """
    first_chunk, end_chunk = (int(generation.chunk_offsets[place]) for place in (first, end))
    segments = _segments(generation, first, end)
    manifest = replace(
        generation.manifest,
        documents=end - first,
        chunks=end_chunk - first_chunk,
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
            chunks=_CodesFrom(tokens.chunks, first_chunk),
            titles=_CodesFrom(tokens.titles, first_chunk),
        ),
    )


def _segments(generation: Generation, first: int, end: int) -> list[Segment]:
    segments: list[Segment] = []
    begin = 0
    for segment in generation.segments:
        num_live = segment.rows.deleted_documents.num_live
        own_first, own_end = max(first - begin, 0), min(end - begin, num_live)
        begin += num_live
        if own_first >= own_end:
            continue
        if own_end - own_first < num_live:
            beyond = np.concatenate([np.arange(own_first), np.arange(own_end, num_live)])
            rows = segment.rows.without(beyond)
            record = rows.described(segment.record)
            segment = open_segment(generation.folder, record, generation.manifest.files, rows)
        segments.append(segment)
    return segments


@dataclass(frozen=True, slots=True, eq=False)
class _CodesFrom:
    """The tokens of chunks, counted from ``first``."""

    codes: TokenCodes
    first: int

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> TokenRows:
        return self.codes.read(chunk_C + self.first)
