"""BM25 of windows of neighbouring chunks, for every window, from the counts in ``passages.arrow``.

The formula is that of ``bm25``: a word is counted in all of the window, its idf is that of chunks, and
lengths are in characters.

A passage is a window whose length is chosen at query time. A full-text index scores only the rows it holds.
The sum of the chunks' scores is not the score of their window, because a score flattens with a word's count.
Counts do add up, so windows are scored from the counts of their chunks. No text is read.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from pipeline.index.bm25 import add_term, length_penalty, term_weight
from pipeline.index.segments.joined_words import JoinedWords
from pipeline.index.words import terms_of

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
        self._penalties: dict[int, Float32[np.ndarray, " M"]] = {}

    def scores(self, query: str, size: int) -> Float32[np.ndarray, " M"]:
        """Return BM25 of the window of ``size`` chunks that begins with each chunk.

        It is 0 where no window begins or no word of the query stands. A document of fewer chunks is one
        window. A word that the query repeats counts each time.
        """
        penalty_M = self._penalty_of(size)
        scores_M = np.zeros(len(self._first_M), np.float32)
        counts_M = np.zeros(len(self._first_M), np.float32)
        for term, repeats in Counter(terms_of(query)).items():
            chunks, counts = self._words.postings(term)
            if not len(chunks):
                continue
            weight = term_weight(repeats, len(chunks), len(scores_M))
            for begins in self._count(chunks, counts, size, counts_M):
                # A window met again has no count left and adds nothing; one that would leave its document has
                # an endless length.
                add_term(scores_M, begins, counts_M[begins], penalty_M, weight)
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

    def _penalty_of(self, size: int) -> Float32[np.ndarray, " M"]:
        """Return the length penalty of windows by first chunk; inf where none begins."""
        known = self._penalties.get(size)
        if known is not None:
            return known
        ends_M = np.repeat(self._offsets[1:], np.diff(self._offsets))
        begins_M = np.arange(len(ends_M))
        lengths_M = self._end_char[np.minimum(begins_M + size, ends_M) - 1] - self._start_char
        is_window_M = begins_M <= np.maximum(ends_M - size, self._first_M)
        average = float(lengths_M[is_window_M].mean()) if len(ends_M) else 1.0
        penalty_M = np.where(is_window_M, length_penalty(lengths_M, average), np.float32(np.inf))
        for oldest in list(self._penalties)[: max(len(self._penalties) - KEPT_SIZES + 1, 0)]:
            self._penalties.pop(oldest, None)
        self._penalties[size] = penalty_M
        return penalty_M
