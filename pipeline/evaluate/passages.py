"""The passages a system can answer with: windows of neighbouring chunks, and the best of them that do not overlap.

The same windows as ``pipeline.search.windows`` forms at query time, here for all documents at once: a window is ``size`` consecutive chunks
of one document, its vector their normalised sum; a document with fewer chunks is one window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int64

from pipeline.evaluate.encodings import EncodedSet
from pipeline.evaluate.evidence import Spans

FIRST_LOOK = 256
"""Passages sorted at first; all are when these do not fill the budget."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passages:
    """P windows in order of document and place; window ``p`` covers chunks ``first_chunk[p]:end_chunk[p]`` of the corpus."""

    vectors_PV: Float32[np.ndarray, "P V"]
    document_P: Int64[np.ndarray, " P"]
    first_chunk_P: Int64[np.ndarray, " P"]
    end_chunk_P: Int64[np.ndarray, " P"]
    start_char_P: Int64[np.ndarray, " P"]
    end_char_P: Int64[np.ndarray, " P"]


def window_passages(encoded: EncodedSet, size: int) -> Passages:
    """Form every window of ``size`` chunks; 1 leaves the chunks as they are."""
    num_chunks_N = np.diff(encoded.chunk_offsets)
    num_windows_N = np.maximum(num_chunks_N - size + 1, 1)
    document_P = np.repeat(np.arange(len(num_chunks_N)), num_windows_N)
    place_P = np.arange(len(document_P)) - np.repeat(np.cumsum(num_windows_N) - num_windows_N, num_windows_N)
    first_P = encoded.chunk_offsets[document_P] + place_P
    end_P = first_P + np.minimum(size, num_chunks_N)[document_P]
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
        start_char_P=encoded.start_char[first_P],
        end_char_P=encoded.end_char[end_P - 1],
    )


def best_passages(scores_P: Float[np.ndarray, " P"], passages: Passages, max_characters: int) -> Spans:
    """Return the best passages until their length passes ``max_characters``, best first, ties by place.

    A passage that shares a chunk with a better one is passed over; one with the score minus infinity is never read.
    """
    chosen: list[int] = []
    for order in _orders(scores_P):
        chosen, characters = [], 0
        taken: set[int] = set()
        for index in order.tolist():
            first, last = int(passages.first_chunk_P[index]), int(passages.end_chunk_P[index]) - 1
            if scores_P[index] == -np.inf or characters >= max_characters:
                break
            # Windows of a document are equally long, so two of them overlap where an end of one lies in the other.
            if first in taken or last in taken:
                continue
            taken.update(range(first, last + 1))
            chosen.append(index)
            characters += int(passages.end_char_P[index] - passages.start_char_P[index])
        if characters >= max_characters:
            break
    return Spans(document_S=passages.document_P[chosen], start_S=passages.start_char_P[chosen], end_S=passages.end_char_P[chosen])


def _orders(scores_P: Float[np.ndarray, " P"]) -> list[Int64[np.ndarray, " _"]]:
    """Return the best few in order, then all in order where there are more."""
    if len(scores_P) <= FIRST_LOOK:
        return [np.argsort(-scores_P, kind="stable")]
    least = np.partition(scores_P, len(scores_P) - FIRST_LOOK)[len(scores_P) - FIRST_LOOK]
    few = np.flatnonzero(scores_P >= least)
    return [few[np.argsort(-scores_P[few], kind="stable")], np.argsort(-scores_P, kind="stable")]
