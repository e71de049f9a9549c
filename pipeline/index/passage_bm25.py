"""BM25 of windows of neighbouring chunks, for every window, from the counts in ``passages.arrow``.

    BM25(window) = Σ idf(t) · f · (k1 + 1) / (f + k1 · (1 - b + b · length / average length))
    idf(t)       = ln(1 + (M - m + ½) / (m + ½))

    f: count of t in all of the window      m: chunks that hold t, of M      k1 = 1.2, b = 0.75
    Lengths are in characters.

A passage is a window whose length is chosen at query time. A full-text index scores the rows it holds, and
the sum of its chunks' scores is not the score of a window, which flattens with a word's count in all of it;
counts add up. Every window is scored from the words of the query alone, so no score depends on who else is a
candidate, and no text is read. Source: Robertson & Zaragoza 2009, "The Probabilistic Relevance Framework:
BM25 and Beyond".
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from pipeline.index.segments.joined_words import JoinedWords
from pipeline.index.words import terms_of

K1, B = 1.2, 0.75
MAX_STEPPED_SIZE = 16
"""Windows of more chunks are counted by sums over the whole collection.

0.5 ms a word at 200,000 chunks, whatever their size.
"""
KEPT_SIZES = 4
"""Window sizes whose lengths are kept, 4 bytes a chunk each."""


class PassageBM25:
    """Scores windows of M chunks; safe to share between threads."""

    def __init__(
        self,
        words: JoinedWords,
        chunk_offsets: Int64[np.ndarray, " N_plus_1"],
        start_char: Int64[np.ndarray, " M"],
        end_char: Int64[np.ndarray, " M"],
    ) -> None:
        self._words = words
        self._offsets, self._start_char, self._end_char = chunk_offsets, start_char, end_char
        self._first_M = np.repeat(chunk_offsets[:-1], np.diff(chunk_offsets))
        self._saturation: dict[int, Float32[np.ndarray, " M"]] = {}

    def scores(self, query: str, size: int) -> Float32[np.ndarray, " M"]:
        """Return BM25 of the window of ``size`` chunks that begins with each chunk.

        It is 0 where no window begins or no word of the query stands. A document of fewer chunks is one
        window. A word that the query repeats counts each time.
        """
        saturation_M = self._saturation_of(size)
        scores_M = np.zeros(len(self._first_M), np.float32)
        counts_M = np.zeros(len(self._first_M), np.float32)
        for term, repeats in Counter(terms_of(query)).items():
            chunks, counts = self._words.postings(term)
            if not len(chunks):
                continue
            idf = math.log(1.0 + (len(scores_M) - len(chunks) + 0.5) / (len(chunks) + 0.5))
            for begins in self._count(chunks, counts, size, counts_M):
                # A window met again has no count left and adds nothing; one that would leave its document has
                # an endless length.
                found = counts_M[begins]
                scores_M[begins] += (
                    np.float32(repeats * idf * (K1 + 1.0)) * found / (found + saturation_M[begins])
                )
                counts_M[begins] = 0.0
        return scores_M

    def _count(
        self,
        chunks: Int64[np.ndarray, " P"],
        counts: UInt8[np.ndarray, " P"],
        size: int,
        counts_M: Float32[np.ndarray, " M"],
    ) -> list[Int64[np.ndarray, " _"]]:
        """Add a word's counts to the windows that hold them, by first chunk.

        Return the windows, each at most once a list.
        """
        if size > MAX_STEPPED_SIZE:
            steps_M1 = np.zeros(len(counts_M) + 1, np.int64)
            np.add.at(steps_M1, np.maximum(chunks - size + 1, self._first_M[chunks]), counts)
            np.subtract.at(steps_M1, chunks + 1, counts)
            counts_M += np.cumsum(steps_M1[:-1])
            return [np.flatnonzero(counts_M)]
        firsts = self._first_M[chunks]
        touched: list[np.ndarray] = []
        for step in range(size):
            is_inside = chunks - step >= firsts
            begins = chunks[is_inside] - step
            counts_M[begins] += counts[is_inside]
            touched.append(begins)
        return touched

    def _saturation_of(self, size: int) -> Float32[np.ndarray, " M"]:
        """Return k1 · (1 - b + b · length / average length) by first chunk; inf where no window begins."""
        known = self._saturation.get(size)
        if known is not None:
            return known
        ends_M = np.repeat(self._offsets[1:], np.diff(self._offsets))
        begins_M = np.arange(len(ends_M))
        lengths_M = self._end_char[np.minimum(begins_M + size, ends_M) - 1] - self._start_char
        is_window_M = begins_M <= np.maximum(ends_M - size, self._first_M)
        average = max(float(lengths_M[is_window_M].mean()), 1.0) if len(ends_M) else 1.0
        saturation_M = np.where(is_window_M, K1 * (1.0 - B + B * lengths_M / average), np.inf).astype(
            np.float32
        )
        for oldest in list(self._saturation)[: max(len(self._saturation) - KEPT_SIZES + 1, 0)]:
            self._saturation.pop(oldest, None)
        self._saturation[size] = saturation_M
        return saturation_M
