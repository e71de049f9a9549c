"""The passages a system answers with: windows of neighbouring chunks, read as a search with a budget reads.

The same windows as ``cairn.pipeline.search.windows`` forms at query time, here for all documents at once: a
window is ``size`` consecutive chunks of one document, its vector their normalised sum; a document with fewer
chunks is one window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cairn.pipeline.lab.evaluate.encodings import EncodedSet, sliding_windows
from cairn.pipeline.lab.evaluate.evidence import Spans
from cairn.pipeline.search.windows import new_pieces
from jaxtyping import Float, Float32, Int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passages:
    """P windows in order of document and place.

    Window ``p`` covers chunks ``first_chunk[p]:end_chunk[p]`` of the corpus's M.
    """

    vectors_PV: Float32[np.ndarray, "P V"]
    document_P: Int64[np.ndarray, " P"]
    first_chunk_P: Int64[np.ndarray, " P"]
    end_chunk_P: Int64[np.ndarray, " P"]
    start_char_M: Int64[np.ndarray, " M"]
    end_char_M: Int64[np.ndarray, " M"]


def window_passages(encoded: EncodedSet, size: int) -> Passages:
    """Form every window of ``size`` chunks; 1 leaves the chunks as they are."""
    document_P, first_P, end_P = sliding_windows(encoded.chunk_offsets, size)
    vectors_PV = encoded.chunk_vectors_MV
    if size > 1:
        vectors_PV = encoded.chunk_vectors_MV[first_P].copy()
        for step in range(1, size):
            is_inside = first_P + step < end_P
            vectors_PV[is_inside] += encoded.chunk_vectors_MV[first_P[is_inside] + step]
        vectors_PV /= np.maximum(np.linalg.norm(vectors_PV, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return Passages(
        vectors_PV=vectors_PV,
        document_P=document_P,
        first_chunk_P=first_P,
        end_chunk_P=end_P,
        start_char_M=encoded.start_char,
        end_char_M=encoded.end_char,
    )


def overlapping_passages(encoded: EncodedSet) -> Passages:
    """Return the chunks as passages that may share text: each covers the stretches between all their ends."""
    document_M = encoded.chunk_document
    # Documents laid end to end, so that one sorted list holds the ends of all their chunks.
    length_N = np.zeros(len(encoded.chunk_offsets) - 1, np.int64)
    np.maximum.at(length_N, document_M, encoded.end_char)
    base_M = (np.cumsum(length_N) - length_N)[document_M]
    ends = np.unique(np.concatenate([base_M + encoded.start_char, base_M + encoded.end_char]))
    document_S = np.searchsorted(np.cumsum(length_N), ends[:-1], side="right")
    base_S = (np.cumsum(length_N) - length_N)[document_S]
    return Passages(
        vectors_PV=encoded.chunk_vectors_MV,
        document_P=document_M,
        first_chunk_P=np.searchsorted(ends, base_M + encoded.start_char),
        end_chunk_P=np.searchsorted(ends, base_M + encoded.end_char),
        start_char_M=ends[:-1] - base_S,
        end_char_M=ends[1:] - base_S,
    )


def best_passages(scores_P: Float[np.ndarray, " P"], passages: Passages, max_characters: int) -> Spans:
    """Return what a search with a budget reads, best first, until its length passes ``max_characters``.

    Of each passage what no better one holds; one with the score minus infinity is never read.
    """
    document, start, end = list[int](), list[int](), list[int]()
    characters = 0
    for index, first, stop in new_pieces(scores_P, passages.first_chunk_P, passages.end_chunk_P):
        document.append(int(passages.document_P[index]))
        start.append(int(passages.start_char_M[first]))
        end.append(int(passages.end_char_M[stop - 1]))
        characters += end[-1] - start[-1]
        if characters >= max_characters:
            break
    return Spans(
        document_S=np.array(document, np.int64),
        start_S=np.array(start, np.int64),
        end_S=np.array(end, np.int64),
    )
