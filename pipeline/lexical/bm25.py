"""BM25, as documents and passages are scored by it.

    BM25(text) = Σ idf(t) · f · (k1 + 1) / (f + k1 · (1 - b + b · length / average length))
    idf(t)     = ln(1 + (N - n + ½) / (n + ½))

    f: count of t in the text      n: texts that hold t, of N      k1 = 1.2, b = 0.75

A word of the query has a term in each of the collection's main languages. They count as one word, whose n is
the sum of theirs.

No score depends on how the collection was written or on who else is a candidate: where only some documents
are scored, the totals are those of all, or of those alone where the others are hidden.

Source: Robertson & Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from cairn.pipeline.lexical.tokenizer import Variants
from cairn.pipeline.ragged import ranges
from jaxtyping import Bool, Float32, Int32, Int64, Shaped, UInt8

K1, B = 1.2, 0.75
KEPT_TERMS = 8_192
"""Terms of which a field keeps how many texts hold them."""


class Postings(Protocol):
    """Which texts hold a term, and how often; ``pipeline/index/segments`` reads them from files."""

    def postings(
        self, term: str, few_A: Int64[np.ndarray, " A"] | None = None
    ) -> tuple[Int64[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the positions of the texts that hold a term, ascending, and how often each does.

        Of a few texts, ascending, returns their places among them.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Texts of one kind: how many there are, how long they are together, how many hold each term asked for.

    Totals of the parts of a corpus are added, so that each part scores its texts as the whole would.
    """

    texts: int
    length: int
    holding: Mapping[str, int]

    @property
    def average_length(self) -> float:
        """Return the mean length, 1 of no texts."""
        return self.length / self.texts if self.texts else 1.0

    def __add__(self, other: Totals) -> Totals:
        """Return the totals of two parts, asked for the same terms."""
        return Totals(
            texts=self.texts + other.texts,
            length=self.length + other.length,
            holding={term: count + other.holding[term] for term, count in self.holding.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FewDocuments:
    """A few documents, ascending, and their chunks; ``owner_M`` are places among the documents."""

    documents_A: Int64[np.ndarray, " A"]
    chunks_M: Int64[np.ndarray, " M"]
    owner_M: Int64[np.ndarray, " M"]
    offsets: Int64[np.ndarray, " A_plus_1"]

    @classmethod
    def of(
        cls, documents: Int64[np.ndarray, " A"], chunk_offsets: Int64[np.ndarray, " N_plus_1"]
    ) -> FewDocuments:
        """Return some of the documents whose chunks begin at these offsets."""
        firsts = chunk_offsets[documents]
        num_chunks = chunk_offsets[documents + 1] - firsts
        return cls(
            documents_A=documents,
            chunks_M=ranges(firsts, num_chunks),
            owner_M=np.repeat(np.arange(len(documents)), num_chunks),
            offsets=np.append(0, np.cumsum(num_chunks)),
        )


def length_penalty(lengths_N: Shaped[np.ndarray, " N"], average: float) -> Float32[np.ndarray, " N"]:
    """Return k1 · (1 - b + b · length / average length) of each text."""
    return (K1 * (1.0 - B + B * lengths_N / max(average, 1.0))).astype(np.float32)


def add_term(
    scores_N: Float32[np.ndarray, " N"],
    texts_A: Int64[np.ndarray, " A"] | slice,
    counts_A: Shaped[np.ndarray, " A"],
    penalty_N: Float32[np.ndarray, " N"],
    weight: np.float32,
) -> None:
    """Add a word to the scores of the texts that hold it, each named once."""
    found = counts_A.astype(np.float32, copy=False)
    share = weight * found
    share /= found + penalty_N[texts_A]
    scores_N[texts_A] += share


def term_weight(repeats: int, num_holding: int, num_texts: int) -> np.float32:
    """Return idf(t) · (k1 + 1), for each time the query has the word."""
    idf = math.log(1.0 + (num_texts - num_holding + 0.5) / (num_holding + 0.5))
    return np.float32(repeats * idf * (K1 + 1.0))


def _num_holding(
    terms: Collection[str], count: Callable[[str], int], known: Totals | None, num_texts: int
) -> int:
    """Return how many texts hold one of the terms of a word, of a whole corpus where that is known."""
    return min(sum(count(term) if known is None else known.holding[term] for term in terms), num_texts)


class DocumentBM25:
    """Scores N documents, by their texts and titles, which are added; safe to share between threads.

    The counts of a text are those of its chunks together. Lengths are in words without stop words.

    ``chunk_documents`` is the document of each chunk, ``text_words`` and ``title_words`` are the lengths.
    """

    def __init__(
        self,
        text: Postings,
        title: Postings,
        chunk_documents: Int64[np.ndarray, " M"],
        text_words: Int32[np.ndarray, " N"],
        title_words: Int32[np.ndarray, " N"],
    ) -> None:
        def of_text(term: str, few: FewDocuments | None) -> _Counts:
            if few is None:
                return _of_chunks(*text.postings(term), chunk_documents)
            return _of_chunks(*text.postings(term, few.chunks_M), few.owner_M)

        def of_title(term: str, few: FewDocuments | None) -> _Counts:
            return title.postings(term, None if few is None else few.documents_A)

        self._fields = _Field(of_text, text_words), _Field(of_title, title_words)
        self._num_documents = len(text_words)

    def totals(self, terms: Collection[str], few: FewDocuments | None = None) -> tuple[Totals, Totals]:
        """Return the totals of texts and of titles for some terms, of all documents or of ``few``."""
        text, title = (field.totals(terms, few) for field in self._fields)
        return text, title

    def scores(
        self,
        words: Mapping[Variants, int],
        totals: tuple[Totals, Totals] | None = None,
        few: FewDocuments | None = None,
    ) -> Float32[np.ndarray, " N"]:
        """Return the BM25 of every document, or of ``few``; 0 where no word of the query stands.

        ``words`` are those of the query, and how often it has each. ``totals`` are those that count where
        they are not these documents': of a corpus that they are a part of, or of a few.
        """
        scores_N = np.zeros(self._num_documents if few is None else len(few.documents_A), np.float32)
        of_fields = totals or (None, None)
        for terms, repeats in words.items():
            for field, known in zip(self._fields, of_fields, strict=True):
                num_texts = self._num_documents if known is None else known.texts
                num_holding = _num_holding(terms, field.num_holding, known, num_texts)
                average = field.average_length if known is None else known.average_length
                weight = term_weight(repeats, num_holding, num_texts)
                penalty_N = field.penalty(average, few)
                for term in terms:
                    documents, counts = field.counts_of(term, few)
                    if len(documents):
                        add_term(scores_N, documents, counts, penalty_N, weight)
        return scores_N


_Counts = tuple[Int64[np.ndarray, " D"], np.ndarray]


def _of_chunks(
    chunks: Int64[np.ndarray, " P"], counts: np.ndarray, owner_M: Int64[np.ndarray, " M"]
) -> _Counts:
    """Add the counts of a document's chunks."""
    if not len(chunks):
        return chunks, counts
    owners = owner_M[chunks]
    firsts = np.append(0, np.flatnonzero(owners[1:] != owners[:-1]) + 1)
    return owners[firsts], np.add.reduceat(counts, firsts, dtype=np.int64)


class _Field:
    """Texts or titles: which of them, or of a few, hold a term how often, and their lengths."""

    def __init__(
        self,
        counts_of: Callable[[str, FewDocuments | None], _Counts],
        num_words_N: Int32[np.ndarray, " N"],
    ) -> None:
        self.counts_of = counts_of
        self.num_holding = lru_cache(KEPT_TERMS)(lambda term: len(counts_of(term, None)[0]))
        self._num_words_N = num_words_N
        self._length = int(num_words_N.sum(dtype=np.int64))
        self.average_length = self.totals(()).average_length
        self._penalty = self.average_length, length_penalty(num_words_N, self.average_length)

    def totals(self, terms: Collection[str], few: FewDocuments | None = None) -> Totals:
        if few is not None:
            return Totals(
                texts=len(few.documents_A),
                length=int(self._num_words_N[few.documents_A].sum(dtype=np.int64)),
                holding={term: len(self.counts_of(term, few)[0]) for term in terms},
            )
        return Totals(
            texts=len(self._num_words_N),
            length=self._length,
            holding={term: self.num_holding(term) for term in terms},
        )

    def penalty(self, average: float, few: FewDocuments | None) -> Float32[np.ndarray, " N"]:
        """Return the length penalties; those of all texts are kept for the last average."""
        if few is not None:
            return length_penalty(self._num_words_N[few.documents_A], average)
        known, penalty_N = self._penalty
        if known != average:
            penalty_N = length_penalty(self._num_words_N, average)
            self._penalty = average, penalty_N
        return penalty_N


MAX_STEPPED_SIZE = 16
"""Passages of more chunks are counted by sums over the whole collection.

Half a millisecond a word at 200,000 chunks, whatever their size.
"""
MAX_STEPPED_SHARE = 0.25
"""So are those of words that so large a share of all passages may hold: each costs a quarter there."""
KEPT_SIZES = 4
"""Passage sizes whose lengths are kept, 4 bytes a chunk each."""


class PassageBM25:
    """Scores passages, which are runs of M chunks; safe to share between threads.

    A passage's length is chosen at query time, so it is scored from the counts of its chunks: counts add up,
    and scores do not, since a score flattens with a word's count. A word's idf is that of chunks. Lengths are
    in characters.
    """

    def __init__(
        self,
        words: Postings,
        chunk_offsets: Int64[np.ndarray, " N_plus_1"],
        start_char: Int64[np.ndarray, " M"],
        end_char: Int64[np.ndarray, " M"],
    ) -> None:
        self._words = words
        self._num_holding = lru_cache(KEPT_TERMS)(lambda term: len(words.postings(term)[0]))
        self._offsets, self._start_char, self._end_char = chunk_offsets, start_char, end_char
        self._penalties: dict[tuple[int, float], Float32[np.ndarray, " M"]] = {}
        self._lengths: dict[int, tuple[int, int]] = {}

    @cached_property
    def _firsts(self) -> Int64[np.ndarray, " M"]:
        """The first chunk of each chunk's document."""
        return np.repeat(self._offsets[:-1], np.diff(self._offsets))

    def totals(
        self, terms: Collection[str], size: int, few: FewDocuments | None = None
    ) -> tuple[Totals, Totals]:
        """Return the totals of passages of ``size`` chunks, and of chunks for some terms."""
        if few is None:
            num_passages, characters = self._lengths_of(size)
            num_chunks, num_holding = int(self._offsets[-1]), self._num_holding
        else:
            num_passages, characters = self._count_passages(size, few)
            num_chunks = len(few.chunks_M)
            num_holding = lambda term: len(self._words.postings(term, few.chunks_M)[0])  # noqa: E731
        return (
            Totals(texts=num_passages, length=characters, holding={}),
            Totals(texts=num_chunks, length=0, holding={term: num_holding(term) for term in terms}),
        )

    def scores(
        self,
        words: Mapping[Variants, int],
        size: int,
        totals: tuple[Totals, Totals] | None = None,
        few: FewDocuments | None = None,
    ) -> Float32[np.ndarray, " M"]:
        """Return BM25 of the passage of ``size`` chunks that begins with each chunk, or each of ``few``.

        It is 0 where no passage begins or no word of the query stands. A document of fewer chunks is one
        passage. ``words`` and ``totals`` are as :class:`DocumentBM25` has them.
        """
        passages, holding = totals or self.totals((), size)
        penalty_M = self._penalty_of(size, passages.average_length, few)
        offsets, firsts_M, chunks_M = self._offsets, self._firsts, None
        if few is not None:
            offsets, chunks_M = few.offsets, few.chunks_M
            firsts_M = offsets[few.owner_M]
        scores_M = np.zeros(len(firsts_M), np.float32)
        counts_M = np.zeros(len(firsts_M), np.float32)
        for terms, repeats in words.items():
            known = None if totals is None else holding
            num_holding = _num_holding(terms, self._num_holding, known, holding.texts)
            weight = term_weight(repeats, num_holding, holding.texts)
            for term in terms:
                chunks, counts = self._words.postings(term, chunks_M)
                if not len(chunks):
                    continue
                if size > MAX_STEPPED_SIZE or size * len(chunks) > MAX_STEPPED_SHARE * len(scores_M):
                    counts_W = _count_everywhere(chunks, counts, size, offsets)
                    add_term(scores_M, slice(None), counts_W, penalty_M, weight)
                    continue
                for begins in _count(chunks, counts, size, firsts_M, counts_M):
                    # A passage met again has no count left and adds nothing; one that would leave its
                    # document has an endless length.
                    add_term(scores_M, begins, counts_M[begins], penalty_M, weight)
                    counts_M[begins] = 0.0
        return scores_M

    def _lengths_of(self, size: int) -> tuple[int, int]:
        """Return the number of passages and their characters together."""
        known = self._lengths.get(size)
        if known is None:
            known = self._lengths[size] = self._count_passages(size, None)
        return known

    def _count_passages(self, size: int, few: FewDocuments | None) -> tuple[int, int]:
        lengths_M, is_passage_M = self._passages_of(size, few)
        return int(is_passage_M.sum()), int(lengths_M[is_passage_M].sum())

    def _penalty_of(self, size: int, average: float, few: FewDocuments | None) -> Float32[np.ndarray, " M"]:
        """Return the length penalty of passages by first chunk; inf where none begins."""
        known = None if few is not None else self._penalties.get((size, average))
        if known is not None:
            return known
        lengths_M, is_passage_M = self._passages_of(size, few)
        penalty_M = np.where(is_passage_M, length_penalty(lengths_M, average), np.float32(np.inf))
        if few is not None:
            return penalty_M
        for oldest in list(self._penalties)[: max(len(self._penalties) - KEPT_SIZES + 1, 0)]:
            self._penalties.pop(oldest, None)
        self._penalties[size, average] = penalty_M
        return penalty_M

    def _passages_of(
        self, size: int, few: FewDocuments | None
    ) -> tuple[Int64[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
        """Return the length of the passage that begins with each chunk, and whether one does."""
        offsets, start_M, end_M = self._offsets, self._start_char, self._end_char
        if few is not None:
            offsets, start_M, end_M = few.offsets, start_M[few.chunks_M], end_M[few.chunks_M]
        first_M = np.repeat(offsets[:-1], np.diff(offsets))
        ends_M = np.repeat(offsets[1:], np.diff(offsets))
        begins_M = np.arange(len(ends_M))
        lengths_M = end_M[np.minimum(begins_M + size, ends_M) - 1] - start_M
        return lengths_M, begins_M <= np.maximum(ends_M - size, first_M)


def _count(
    chunks: Int64[np.ndarray, " P"],
    counts: UInt8[np.ndarray, " P"],
    size: int,
    firsts_M: Int64[np.ndarray, " M"],
    counts_M: Float32[np.ndarray, " M"],
) -> list[Int64[np.ndarray, " _"]]:
    """Add a word's counts to the passages that hold them, by first chunk.

    Return the passages, each at most once a list.
    """
    firsts = firsts_M[chunks]
    counts_M[chunks] = counts
    touched = [chunks]
    for step in range(1, size):
        is_inside = chunks - step >= firsts
        begins = chunks[is_inside] - step
        counts_M[begins] += counts[is_inside]
        touched.append(begins)
    return touched


def _count_everywhere(
    chunks: Int64[np.ndarray, " P"],
    counts: UInt8[np.ndarray, " P"],
    size: int,
    offsets: Int64[np.ndarray, " N_plus_1"],
) -> Float32[np.ndarray, " M"]:
    """Return a word's counts in all passages, by first chunk; anything where none begins."""
    num_chunks = int(offsets[-1])
    before_M1 = np.zeros(num_chunks + 1, np.int32)  # differences are right even where a sum wraps
    before_M1[1:][chunks] = counts
    np.cumsum(before_M1, out=before_M1)
    num_whole = max(num_chunks + 1 - size, 0)
    counts_M = np.empty(num_chunks, np.float32)
    np.subtract(before_M1[size:], before_M1[:num_whole], out=counts_M[:num_whole])
    short = np.flatnonzero(np.diff(offsets) < size)
    begins, ends = offsets[short], offsets[short + 1]
    counts_M[num_whole:] = 0.0
    counts_M[begins] = before_M1[ends] - before_M1[begins]
    return counts_M
