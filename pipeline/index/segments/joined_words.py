"""The words of several segments, looked up as one: a term's chunks by position among those that are left."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt8

from pipeline.index.segments.deleted import DeletedRows


class JoinedWords:
    """The postings of ``passages.arrow`` of segments, in their order, each with its deleted chunks."""

    def __init__(self, parts: Sequence[tuple[pa.RecordBatch, DeletedRows]]) -> None:
        self._parts: list[tuple[_Words, DeletedRows, int]] = []
        begin = 0
        for terms, deleted in parts:
            self._parts.append((_Words(terms), deleted, begin))
            begin += deleted.num_live

    def postings(self, term: str) -> tuple[Int64[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the positions of the chunks that hold a term, ascending, and how often each does."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for words, deleted, begin in self._parts:
            chunks, counts = words.postings(term)
            if not len(chunks):
                continue
            if len(deleted.rows):
                # The deleted rows at or before each chunk: one more than before it where it is one of them.
                places = np.searchsorted(deleted.rows, chunks)
                behind = np.searchsorted(deleted.rows, chunks, side="right")
                is_live = places == behind
                chunks, counts = (chunks - places)[is_live], counts[is_live]
            found.append((chunks + begin if begin else chunks, counts))
        if len(found) == 1:
            return found[0]
        return (
            np.concatenate([np.empty(0, np.int64), *(chunks for chunks, _ in found)]),
            np.concatenate([np.empty(0, np.uint8), *(counts for _, counts in found)]),
        )


class _Words:
    """One file of :mod:`pipeline.index.passage_terms`."""

    def __init__(self, terms: pa.RecordBatch) -> None:
        column = terms.column("term")
        _, offsets, text = column.buffers()
        # The order of UTF-8 is that of code points; bytes cost a third of what strings of Arrow do.
        self._text = memoryview(text or b"")
        self._term_bounds = memoryview(offsets or b"").cast("q")[column.offset :]
        self._places = range(len(column))
        self._bounds_T = terms.column("chunks").offsets.to_numpy()
        self._chunks = terms.column("chunks").values.to_numpy()
        self._counts = terms.column("counts").values.to_numpy()

    def postings(self, term: str) -> tuple[Int64[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        wanted = term.encode()
        place = bisect_left(self._places, wanted, key=self._term_at)
        if place == len(self._places) or self._term_at(place) != wanted:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        own = slice(int(self._bounds_T[place]), int(self._bounds_T[place + 1]))
        return self._chunks[own].astype(np.int64), self._counts[own]

    def _term_at(self, place: int) -> bytes:
        return self._text[self._term_bounds[place] : self._term_bounds[place + 1]].tobytes()
