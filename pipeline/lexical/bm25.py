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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Protocol

import numpy as np
from cairn.pipeline.lexical.tokenizer import Variants
from cairn.pipeline.ragged import ranges
from jaxtyping import Bool, Float32, Int32, Int64, Shaped, UInt8

K1, B = 1.2, 0.75
KEPT_TERMS = 8_192
"""Terms of which a field keeps how many texts hold them."""
BLOCK_COUNTS = 1 << 22
"""Counts of words in a few documents that are looked up at once: a byte each, and 12 to score."""


class Postings(Protocol):
    """Which texts hold a term, and how often; ``pipeline/index/segments`` reads them from files."""

    def postings(self, term: str) -> tuple[Int64[np.ndarray, " P"], UInt8[np.ndarray, " P"]]:
        """Return the positions of the texts that hold a term, ascending, and how often each does."""
        ...

    def num_holding(self, term: str) -> int:
        """Count the texts that hold a term."""
        ...

    def counts_of_few(self, terms: Sequence[str], few_A: Int64[np.ndarray, " A"]) -> UInt8[np.ndarray, "T A"]:
        """Return how often each of a few texts, ascending, holds each term."""
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
    """A few documents, ascending, and their chunks, which begin at ``offsets`` among them."""

    documents_A: Int64[np.ndarray, " A"]
    chunks_M: Int64[np.ndarray, " M"]
    offsets: Int64[np.ndarray, " A_plus_1"]
    _counted: dict[tuple[str, ...], UInt8[np.ndarray, "T M"]] = field(
        default_factory=dict[tuple[str, ...], UInt8[np.ndarray, "T M"]]
    )

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
            offsets=np.append(0, np.cumsum(num_chunks)),
        )

    def blocks(self, words: Collection[Variants]) -> Iterator[tuple[Sequence[Variants], tuple[str, ...]]]:
        """Yield words with their terms, as many at a time as are counted at once."""
        most, left = max(1, BLOCK_COUNTS // max(1, len(self.chunks_M))), list(words)
        while left:
            sizes = np.cumsum([len(word) for word in left])
            num_words = max(1, int(np.searchsorted(sizes, most, side="right")))
            yield left[:num_words], tuple(chain.from_iterable(left[:num_words]))
            left = left[num_words:]

    def before(self, text: Postings, terms: tuple[str, ...]) -> Int32[np.ndarray, "T M_plus_1"]:
        """Return how often the chunks before each hold each term.

        Of the terms asked for last the counts are kept: documents and passages ask for the same.
        """
        counts_TM = self._counted.get(terms)
        if counts_TM is None:
            self._counted.clear()
            counts_TM = self._counted[terms] = text.counts_of_few(terms, self.chunks_M)
        before_TM1 = np.zeros((len(terms), len(self.chunks_M) + 1), np.int32)
        np.cumsum(counts_TM, axis=1, out=before_TM1[:, 1:])
        return before_TM1


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


def add_terms(
    scores_N: Float32[np.ndarray, " N"],
    counts_RN: Float32[np.ndarray, "R N"],
    penalty_RN: Float32[np.ndarray, "R N"] | Float32[np.ndarray, " N"],
    weight_R: Float32[np.ndarray, " R"],
) -> None:
    """Add words one after another to the scores of all texts, as :func:`add_term` does."""
    shares_RN = weight_R[:, None] * counts_RN
    shares_RN /= counts_RN + penalty_RN
    for share_N in shares_RN:
        scores_N += share_N


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
        self._text, self._title = text, title
        is_whole = len(chunk_documents) == len(text_words)  # of a chunk each

        def num_texts(term: str) -> int:
            return (
                text.num_holding(term) if is_whole else _num_owners(text.postings(term)[0], chunk_documents)
            )

        self._fields = (
            _Field(lambda term: _of_chunks(*text.postings(term), chunk_documents), num_texts, text_words),
            _Field(title.postings, title.num_holding, title_words),
        )
        self._num_documents = len(text_words)

    def totals(self, terms: Collection[str]) -> tuple[Totals, Totals]:
        """Return the totals of texts and of titles for some terms."""
        text, title = (own.totals(terms) for own in self._fields)
        return text, title

    def totals_of_few(self, words: Collection[Variants], few: FewDocuments) -> tuple[Totals, Totals]:
        """Return what the totals would be if there were a few documents alone."""
        holding: tuple[dict[str, int], dict[str, int]] = {}, {}
        for _, terms in few.blocks(words):
            for known, counts_TA in zip(holding, self._counts_of_few(terms, few), strict=True):
                known.update(zip(terms, np.count_nonzero(counts_TA, axis=1).tolist(), strict=True))
        text, title = (
            Totals(texts=len(few.documents_A), length=own.length_of(few), holding=known)
            for own, known in zip(self._fields, holding, strict=True)
        )
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
        known = totals or (None, None)
        if few is not None:
            return self._scores_of_few(words, known, few)
        scores_N = np.zeros(self._num_documents, np.float32)
        for terms, repeats in words.items():
            for own, of_field in zip(self._fields, known, strict=True):
                weight = own.weight(terms, repeats, of_field)
                penalty_N = own.penalty(own.average(of_field))
                for term in terms:
                    documents, counts = own.counts_of(term)
                    if len(documents):
                        add_term(scores_N, documents, counts, penalty_N, weight)
        return scores_N

    def _scores_of_few(
        self, words: Mapping[Variants, int], totals: Sequence[Totals | None], few: FewDocuments
    ) -> Float32[np.ndarray, " A"]:
        fields = tuple(zip(self._fields, totals, strict=True))
        penalty_2A = np.stack([own.penalty_of_few(own.average(known), few) for own, known in fields])
        scores_A = np.zeros(len(few.documents_A), np.float32)
        for block, terms in few.blocks(words):
            counts_2TA = self._counts_of_few(terms, few)
            is_held_2T = np.stack([counts_TA.any(axis=1) for counts_TA in counts_2TA])
            rows, weights, begin = list[tuple[int, int]](), list[np.float32](), 0
            for word in block:
                for number, (own, known) in enumerate(fields):
                    held_t = np.flatnonzero(is_held_2T[number, begin : begin + len(word)])
                    held = [(number, begin + place) for place in held_t.tolist()]
                    if held:
                        rows += held
                        weights += [own.weight(word, words[word], known)] * len(held)
                begin += len(word)
            if rows:
                field_R, term_R = np.array(rows).T
                counts_RA = np.stack(counts_2TA)[field_R, term_R].astype(np.float32)
                add_terms(scores_A, counts_RA, penalty_2A[field_R], np.array(weights))
        return scores_A

    def _counts_of_few(
        self, terms: tuple[str, ...], few: FewDocuments
    ) -> tuple[Int32[np.ndarray, "T A"], Int32[np.ndarray, "T A"]]:
        """Return how often the texts and the titles of a few documents hold each term."""
        before_TM1 = few.before(self._text, terms)
        text_TA = before_TM1[:, few.offsets[1:]] - before_TM1[:, few.offsets[:-1]]
        return text_TA, self._title.counts_of_few(terms, few.documents_A).astype(np.int32)


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


def _num_owners(chunks: Int64[np.ndarray, " P"], owner_M: Int64[np.ndarray, " M"]) -> int:
    """Count the documents of ascending chunks."""
    owners = owner_M[chunks]
    return int(np.count_nonzero(owners[1:] != owners[:-1])) + min(len(owners), 1)


class _Field:
    """Texts or titles: which of them hold a term how often, and their lengths."""

    def __init__(
        self,
        counts_of: Callable[[str], _Counts],
        num_holding: Callable[[str], int],
        num_words_N: Int32[np.ndarray, " N"],
    ) -> None:
        self.counts_of = counts_of
        self._num_holding = lru_cache(KEPT_TERMS)(num_holding)
        self._num_words_N = num_words_N
        self._length = int(num_words_N.sum(dtype=np.int64))
        self._average = self.totals(()).average_length
        self._penalty = self._average, length_penalty(num_words_N, self._average)

    def totals(self, terms: Collection[str]) -> Totals:
        return Totals(
            texts=len(self._num_words_N),
            length=self._length,
            holding={term: self._num_holding(term) for term in terms},
        )

    def length_of(self, few: FewDocuments) -> int:
        return int(self._num_words_N[few.documents_A].sum(dtype=np.int64))

    def weight(self, terms: Collection[str], repeats: int, known: Totals | None) -> np.float32:
        """Return what a word weighs, in a corpus of these totals where they are not the field's."""
        num_texts = len(self._num_words_N) if known is None else known.texts
        return term_weight(repeats, _num_holding(terms, self._num_holding, known, num_texts), num_texts)

    def average(self, known: Totals | None) -> float:
        return self._average if known is None else known.average_length

    def penalty(self, average: float) -> Float32[np.ndarray, " N"]:
        """Return the length penalties, which are kept for the last average."""
        known, penalty_N = self._penalty
        if known != average:
            penalty_N = length_penalty(self._num_words_N, average)
            self._penalty = average, penalty_N
        return penalty_N

    def penalty_of_few(self, average: float, few: FewDocuments) -> Float32[np.ndarray, " A"]:
        return length_penalty(self._num_words_N[few.documents_A], average)


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
        self._num_holding = lru_cache(KEPT_TERMS)(words.num_holding)
        self._offsets, self._start_char, self._end_char = chunk_offsets, start_char, end_char
        self._penalties: dict[tuple[int, float], Float32[np.ndarray, " M"]] = {}
        self._lengths: dict[int, tuple[int, int]] = {}

    @cached_property
    def _firsts(self) -> Int64[np.ndarray, " M"]:
        """The first chunk of each chunk's document."""
        return np.repeat(self._offsets[:-1], np.diff(self._offsets))

    def totals(self, terms: Collection[str], size: int) -> tuple[Totals, Totals]:
        """Return the totals of passages of ``size`` chunks, and of chunks for some terms."""
        num_passages, characters = self._lengths_of(size)
        holding = {term: self._num_holding(term) for term in terms}
        return (
            Totals(texts=num_passages, length=characters, holding={}),
            Totals(texts=int(self._offsets[-1]), length=0, holding=holding),
        )

    def totals_of_few(
        self, words: Collection[Variants], size: int, few: FewDocuments
    ) -> tuple[Totals, Totals]:
        """Return what the totals would be if there were a few documents alone."""
        num_passages, characters = self._count_passages(size, few)
        holding: dict[str, int] = {}
        for _, terms in few.blocks(words):
            num_holding_T = np.count_nonzero(np.diff(few.before(self._words, terms)), axis=1)
            holding.update(zip(terms, num_holding_T.tolist(), strict=True))
        return (
            Totals(texts=num_passages, length=characters, holding={}),
            Totals(texts=len(few.chunks_M), length=0, holding=holding),
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
        known = None if totals is None else holding

        def weight_of(word: Variants) -> np.float32:
            num_holding = _num_holding(word, self._num_holding, known, holding.texts)
            return term_weight(words[word], num_holding, holding.texts)

        scores_M = np.zeros(len(penalty_M), np.float32)
        if few is not None:
            for block, terms in few.blocks(words):
                counts_TM = _count_windows(few.before(self._words, terms), size, few.offsets)
                weights = np.repeat([weight_of(word) for word in block], [len(word) for word in block])
                held = np.flatnonzero(counts_TM.any(axis=1))
                add_terms(scores_M, counts_TM[held], penalty_M, weights[held])
            return scores_M
        counts_M = np.zeros(len(scores_M), np.float32)
        for terms in words:
            weight = weight_of(terms)
            for term in terms:
                chunks, counts = self._words.postings(term)
                if not len(chunks):
                    continue
                if size > MAX_STEPPED_SIZE or size * len(chunks) > MAX_STEPPED_SHARE * len(scores_M):
                    before_M1 = np.zeros(len(scores_M) + 1, np.int32)
                    before_M1[1:][chunks] = counts
                    np.cumsum(before_M1, out=before_M1)
                    counts_W = _count_windows(before_M1[None], size, self._offsets)[0]
                    add_term(scores_M, slice(None), counts_W, penalty_M, weight)
                    continue
                for begins in _count(chunks, counts, size, self._firsts, counts_M):
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


def _count_windows(
    before_TM1: Int32[np.ndarray, "T M_plus_1"], size: int, offsets: Int64[np.ndarray, " N_plus_1"]
) -> Float32[np.ndarray, "T M"]:
    """Return each term's counts in all passages, by first chunk; anything where none begins.

    ``before_TM1`` are its counts in the chunks before each: differences are right even where a sum wraps.
    """
    num_chunks = before_TM1.shape[1] - 1
    num_whole = max(num_chunks + 1 - size, 0)
    counts_TM = np.empty((len(before_TM1), num_chunks), np.float32)
    np.subtract(before_TM1[:, size:], before_TM1[:, :num_whole], out=counts_TM[:, :num_whole])
    short = np.flatnonzero(np.diff(offsets) < size)
    begins, ends = offsets[short], offsets[short + 1]
    counts_TM[:, num_whole:] = 0.0
    counts_TM[:, begins] = before_TM1[:, ends] - before_TM1[:, begins]
    return counts_TM
