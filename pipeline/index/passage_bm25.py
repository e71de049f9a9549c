"""BM25 of windows of neighbouring chunks, for every window, from the counts in ``passages.arrow``.

The formula is that of ``bm25``: a word is counted in all of the window, its idf is that of chunks, and
lengths are in characters.

A passage is a window whose length is chosen at query time. A full-text index scores only the rows it holds.
The sum of the chunks' scores is not the score of their window, because a score flattens with a word's count.
Counts do add up, so windows are scored from the counts of their chunks. No text is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cached_property

import numpy as np
from cairn.pipeline.index.bm25 import Totals, add_term, length_penalty, term_weight
from cairn.pipeline.index.segments.joined_words import JoinedWords
from cairn.pipeline.index.words import terms_of
from jaxtyping import Bool, Float32, Int64, UInt8

MAX_STEPPED_SIZE = 16
"""Windows of more chunks are counted by sums over the whole collection.

Half a millisecond a word at 200,000 chunks, whatever their size.
"""
MAX_STEPPED_SHARE = 0.25
"""So are those of words that so large a share of all windows may hold: each costs a quarter there."""
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
        self._penalties: dict[tuple[int, float], Float32[np.ndarray, " M"]] = {}
        self._lengths: dict[int, tuple[int, int]] = {}

    @cached_property
    def _firsts(self) -> Int64[np.ndarray, " M"]:
        """The first chunk of each chunk's document."""
        return np.repeat(self._offsets[:-1], np.diff(self._offsets))

    def totals(self, terms: Collection[str], size: int) -> tuple[Totals, Totals]:
        """Return the totals of windows of ``size`` chunks, and of chunks for some terms."""
        num_windows, characters = self._lengths_of(size)
        holding = {term: len(self._words.postings(term)[0]) for term in terms}
        return (
            Totals(texts=num_windows, length=characters, holding={}),
            Totals(texts=int(self._offsets[-1]), length=0, holding=holding),
        )

    def scores(
        self, query: str, size: int, totals: tuple[Totals, Totals] | None = None
    ) -> Float32[np.ndarray, " M"]:
        """Return BM25 of the window of ``size`` chunks that begins with each chunk.

        It is 0 where no window begins or no word of the query stands. A document of fewer chunks is one
        window. A word that the query repeats counts each time. ``totals`` are those of a corpus of which
        these chunks are a part.
        """
        windows, holding = totals or self.totals((), size)
        penalty_M = self._penalty_of(size, windows.average_length)
        scores_M = np.zeros(len(self._firsts), np.float32)
        counts_M = np.zeros(len(self._firsts), np.float32)
        for term, repeats in Counter(terms_of(query)).items():
            chunks, counts = self._words.postings(term)
            if not len(chunks):
                continue
            num_holding = len(chunks) if totals is None else holding.holding[term]
            weight = term_weight(repeats, num_holding, holding.texts)
            if size > MAX_STEPPED_SIZE or size * len(chunks) > MAX_STEPPED_SHARE * len(scores_M):
                counts_W = self._count_everywhere(chunks, counts, size)
                add_term(scores_M, slice(None), counts_W, penalty_M, weight)
                continue
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
        firsts = self._firsts[chunks]
        counts_M[chunks] = counts
        touched = [chunks]
        for step in range(1, size):
            is_inside = chunks - step >= firsts
            begins = chunks[is_inside] - step
            counts_M[begins] += counts[is_inside]
            touched.append(begins)
        return touched

    def _count_everywhere(
        self, chunks: Int64[np.ndarray, " P"], counts: UInt8[np.ndarray, " P"], size: int
    ) -> Float32[np.ndarray, " M"]:
        """Return a word's counts in all windows, by first chunk; anything where a document has no window."""
        num_chunks = len(self._firsts)
        before_M1 = np.zeros(num_chunks + 1, np.int32)  # differences are right even where a sum wraps
        before_M1[1:][chunks] = counts
        np.cumsum(before_M1, out=before_M1)
        num_whole = max(num_chunks + 1 - size, 0)
        counts_M = np.empty(num_chunks, np.float32)
        np.subtract(before_M1[size:], before_M1[:num_whole], out=counts_M[:num_whole])
        short = np.flatnonzero(np.diff(self._offsets) < size)
        begins, ends = self._offsets[short], self._offsets[short + 1]
        counts_M[num_whole:] = 0.0
        counts_M[begins] = before_M1[ends] - before_M1[begins]
        return counts_M

    def _lengths_of(self, size: int) -> tuple[int, int]:
        """Return the number of windows and their characters together."""
        known = self._lengths.get(size)
        if known is None:
            lengths_M, is_window_M = self._windows_of(size)
            known = self._lengths[size] = int(is_window_M.sum()), int(lengths_M[is_window_M].sum())
        return known

    def _penalty_of(self, size: int, average: float) -> Float32[np.ndarray, " M"]:
        """Return the length penalty of windows by first chunk; inf where none begins."""
        known = self._penalties.get((size, average))
        if known is not None:
            return known
        lengths_M, is_window_M = self._windows_of(size)
        penalty_M = np.where(is_window_M, length_penalty(lengths_M, average), np.float32(np.inf))
        for oldest in list(self._penalties)[: max(len(self._penalties) - KEPT_SIZES + 1, 0)]:
            self._penalties.pop(oldest, None)
        self._penalties[size, average] = penalty_M
        return penalty_M

    def _windows_of(self, size: int) -> tuple[Int64[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
        """Return the length of the window that begins with each chunk, and whether one does."""
        first_M = np.repeat(self._offsets[:-1], np.diff(self._offsets))
        ends_M = np.repeat(self._offsets[1:], np.diff(self._offsets))
        begins_M = np.arange(len(ends_M))
        lengths_M = self._end_char[np.minimum(begins_M + size, ends_M) - 1] - self._start_char
        return lengths_M, begins_M <= np.maximum(ends_M - size, first_M)
