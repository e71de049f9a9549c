"""BM25 of documents: of the text, from the word counts of its chunks, and of the title; both are added.

Lengths are in words without stop words. ``bm25`` has the formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int32, Int64

from pipeline.index.bm25 import add_term, length_penalty, term_weight
from pipeline.index.segments.joined_words import JoinedWords
from pipeline.index.words import terms_of


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
        self._fields: tuple[tuple[Callable[[str], _Counts], Float32[np.ndarray, " N"]], ...] = (
            (lambda term: self._of_chunks(*text.postings(term)), _penalty(text_words)),
            (title.postings, _penalty(title_words)),
        )
        self._num_documents = len(text_words)

    def scores(self, query: str) -> Float32[np.ndarray, " N"]:
        """Return the BM25 of every document, 0 where no word of the query stands.

        A word that the query repeats counts each time.
        """
        scores_N = np.zeros(self._num_documents, np.float32)
        for term, repeats in Counter(terms_of(query)).items():
            for counts_of, penalty_N in self._fields:
                documents, counts = counts_of(term)
                if not len(documents):
                    continue
                weight = term_weight(repeats, len(documents), self._num_documents)
                add_term(scores_N, documents, counts, penalty_N, weight)
        return scores_N

    def _of_chunks(self, chunks: Int64[np.ndarray, " P"], counts: np.ndarray) -> _Counts:
        """Add the counts of a document's chunks."""
        if not len(chunks):
            return chunks, counts
        owners = self._chunk_documents[chunks]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        return owners[firsts], np.add.reduceat(counts, firsts, dtype=np.int64)


_Counts = tuple[Int64[np.ndarray, " D"], np.ndarray]


def _penalty(num_words_N: Int32[np.ndarray, " N"]) -> Float32[np.ndarray, " N"]:
    return length_penalty(num_words_N, float(num_words_N.mean()) if len(num_words_N) else 1.0)
