"""The words of several segments, looked up as one: a term's chunks by position among those that are left."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.segments.deleted import DeletedRows
from jaxtyping import Int64, Integer, UInt8, UInt32

SAMPLED_TERMS = 16
"""One term of so many is kept in memory, so that few are read to find one: 4 bytes a term of a file."""

KEPT_TERMS = 1_024
"""Terms whose places are kept: 2 kB each in twelve segments."""


class JoinedWords:
    """The postings of ``passages.arrow`` of segments, in their order, each with its deleted chunks."""

    def __init__(self, parts: Sequence[tuple[pa.RecordBatch, DeletedRows]]) -> None:
        files = [_Words(terms, deleted) for terms, deleted in parts]
        begins = np.cumsum([0, *(deleted.num_live for _, deleted in parts)]).tolist()
        # A query asks for its words several times. The cache does not hold this object, which would then
        # keep files mapped until it is found to be garbage.
        self._find = lru_cache(KEPT_TERMS)(partial(_places, list(zip(files, begins, strict=False))))

    def postings(self, term: str) -> tuple[Int64[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the positions of the chunks that hold a term, ascending, and how often each does."""
        places = self._find(term)
        if not places:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        found = [words.read(place) for words, _, place in places]
        chunks_P = np.concatenate([chunks for chunks, _ in found], dtype=np.int64)
        end = 0
        for (_, begin, _), (chunks, _) in zip(places, found, strict=True):
            if begin:
                chunks_P[end : end + len(chunks)] += begin
            end += len(chunks)
        return chunks_P, found[0][1] if len(found) == 1 else np.concatenate([counts for _, counts in found])


def _places(files: Sequence[tuple[_Words, int]], term: str) -> list[tuple[_Words, int, slice]]:
    """Return where the files that hold a term have it, each with its first position."""
    wanted = term.encode()
    places = ((words, begin, words.find(wanted)) for words, begin in files)
    return [(words, begin, place) for words, begin, place in places if place is not None]


class _Words:
    """One file of :mod:`cairn.pipeline.index.passage_terms`, without its deleted chunks."""

    def __init__(self, terms: pa.RecordBatch, deleted: DeletedRows) -> None:
        column = terms.column("term")
        _, offsets, text = column.buffers()
        # The order of UTF-8 is that of code points; bytes cost a third of what strings of Arrow do.
        self._text = memoryview(text or b"")
        self._term_bounds = memoryview(offsets or b"").cast("q")[column.offset :]
        self._places = range(len(column))
        self._sampled = [self._term_at(place) for place in self._places[::SAMPLED_TERMS]]
        self._bounds_T = memoryview(terms.column("chunks").offsets.to_numpy())
        self._chunks = terms.column("chunks").values.to_numpy()
        self._counts = terms.column("counts").values.to_numpy()
        self._deleted = deleted

    def find(self, wanted: bytes) -> slice | None:
        """Return which postings are those of a term in UTF-8, None where there are none."""
        block = bisect_right(self._sampled, wanted) * SAMPLED_TERMS
        last = min(block, len(self._places))
        place = bisect_left(self._places, wanted, max(block - SAMPLED_TERMS, 0), last, key=self._term_at)
        if place == last or self._term_at(place) != wanted:
            return None
        return slice(self._bounds_T[place], self._bounds_T[place + 1])

    def read(self, own: slice) -> tuple[Integer[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the chunks among those that are left, and how often each holds the word."""
        chunks, counts = self._chunks[own], self._counts[own]
        if not len(self._deleted.rows):
            return chunks, counts
        before, up_to = _num_deleted(self._deleted.rows, chunks)
        is_live = before == up_to
        return (chunks - before)[is_live], counts[is_live]

    def _term_at(self, place: int) -> bytes:
        return self._text[self._term_bounds[place] : self._term_bounds[place + 1]].tobytes()


def _num_deleted(
    rows: Int64[np.ndarray, " D"], chunks: UInt32[np.ndarray, " P"]
) -> tuple[Int64[np.ndarray, " P"], Int64[np.ndarray, " P"]]:
    """Count the deleted rows before each chunk, and those up to it; both arrays ascend.

    The longer one is searched for each of the shorter.
    """
    if len(rows) > len(chunks):
        return np.searchsorted(rows, chunks), np.searchsorted(rows, chunks, side="right")
    wanted, ends = rows.astype(np.uint32), len(chunks) + 1
    behind, at = np.searchsorted(chunks, wanted, side="right"), np.searchsorted(chunks, wanted)
    before, up_to = (np.cumsum(np.bincount(each, minlength=ends))[:-1] for each in (behind, at))
    return before, up_to
