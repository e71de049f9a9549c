"""BM25 of documents: of the text, from the word counts of its chunks, and of the title; both are added.

Lengths are in words without stop words. ``bm25`` has the formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
from cairn.pipeline.index.bm25 import Totals, add_term, length_penalty, term_weight
from cairn.pipeline.index.segments.joined_words import JoinedWords
from cairn.pipeline.index.words import terms_of
from jaxtyping import Float32, Int32, Int64


class DocumentBM25:
    """Scores N documents; safe to share between threads.

    ``chunk_documents`` is the document of each chunk, ``text_words`` and ``title_words`` are the lengths.
    """

    def __init__(
        self,
        text: JoinedWords,
        title: JoinedWords,
        chunk_documents: Int64[np.ndarray, " M"],
        text_words: Int32[np.ndarray, " N"],
        title_words: Int32[np.ndarray, " N"],
    ) -> None:
        self._chunk_documents = chunk_documents
        self._fields = (
            _Field(lambda term: self._of_chunks(*text.postings(term)), text_words),
            _Field(title.postings, title_words),
        )
        self._num_documents = len(text_words)

    def totals(self, terms: Collection[str]) -> tuple[Totals, Totals]:
        """Return the totals of texts and of titles for some terms."""
        text, title = (field.totals(terms) for field in self._fields)
        return text, title

    def scores(self, query: str, totals: tuple[Totals, Totals] | None = None) -> Float32[np.ndarray, " N"]:
        """Return the BM25 of every document, 0 where no word of the query stands.

        A word that the query repeats counts each time. ``totals`` are those of a corpus of which these
        documents are a part.
        """
        scores_N = np.zeros(self._num_documents, np.float32)
        of_fields = totals or (None, None)
        for term, repeats in Counter(terms_of(query)).items():
            for field, known in zip(self._fields, of_fields, strict=True):
                documents, counts = field.counts_of(term)
                if not len(documents):
                    continue
                num_holding = len(documents) if known is None else known.holding[term]
                num_texts = self._num_documents if known is None else known.texts
                average = field.average_length if known is None else known.average_length
                weight = term_weight(repeats, num_holding, num_texts)
                add_term(scores_N, documents, counts, field.penalty(average), weight)
        return scores_N

    def _of_chunks(self, chunks: Int64[np.ndarray, " P"], counts: np.ndarray) -> _Counts:
        """Add the counts of a document's chunks."""
        if not len(chunks):
            return chunks, counts
        owners = self._chunk_documents[chunks]
        firsts = np.append(0, np.flatnonzero(owners[1:] != owners[:-1]) + 1)
        return owners[firsts], np.add.reduceat(counts, firsts, dtype=np.int64)


_Counts = tuple[Int64[np.ndarray, " D"], np.ndarray]


class _Field:
    """Texts or titles: which of them hold a term how often, and their lengths."""

    def __init__(self, counts_of: Callable[[str], _Counts], num_words_N: Int32[np.ndarray, " N"]) -> None:
        self.counts_of = counts_of
        self._num_words_N = num_words_N
        self._length = int(num_words_N.sum(dtype=np.int64))
        self.average_length = self.totals(()).average_length
        self._penalty = self.average_length, length_penalty(num_words_N, self.average_length)

    def totals(self, terms: Collection[str]) -> Totals:
        return Totals(
            texts=len(self._num_words_N),
            length=self._length,
            holding={term: len(self.counts_of(term)[0]) for term in terms},
        )

    def penalty(self, average: float) -> Float32[np.ndarray, " N"]:
        """Return the length penalties; those of the last average are kept."""
        known, penalty_N = self._penalty
        if known != average:
            penalty_N = length_penalty(self._num_words_N, average)
            self._penalty = average, penalty_N
        return penalty_N
