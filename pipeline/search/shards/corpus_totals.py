"""What BM25 has to know of the whole collection, counted by the process that asks the shards.

Counting a word reads its postings; the counts are kept, since frequent words cost most and come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cairn.pipeline.index.bm25 import Totals
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.words import terms_of
from cairn.pipeline.search.lexical import bounded_words
from cairn.pipeline.search.shards.messages import WordTotals

KEPT_TERMS: Final = 50_000
"""About 15 MB; with more, all are counted again."""


class CorpusTotals:
    """Totals of one generation; safe to share between threads."""

    def __init__(self, generation: Generation) -> None:
        self._documents, self._passages = generation.document_bm25, generation.passage_bm25
        self._held: dict[str, tuple[int, int, int]] = {}

    def of(self, query: str, sizes: Sequence[int]) -> WordTotals:
        """Return the totals for the words of a query, those of passages by the sizes of their windows."""
        terms = dict.fromkeys(terms_of(bounded_words(query)))
        held = {term: self._held.get(term) or self._count(term) for term in terms}
        text, title = self._documents.totals(())
        chunks = {term: counts[2] for term, counts in held.items()}
        return WordTotals(
            documents=(
                replace(text, holding={term: counts[0] for term, counts in held.items()}),
                replace(title, holding={term: counts[1] for term, counts in held.items()}),
            ),
            passages={size: self._of_passages(size, chunks) for size in sizes},
        )

    def _of_passages(self, size: int, chunks: Mapping[str, int]) -> tuple[Totals, Totals]:
        windows, all_chunks = self._passages.totals((), size)
        return windows, replace(all_chunks, holding=chunks)

    def _count(self, term: str) -> tuple[int, int, int]:
        """Count the texts, titles and chunks that hold a term."""
        if len(self._held) >= KEPT_TERMS:
            self._held = {}
        text, title = self._documents.totals((term,))
        chunks = self._passages.totals((term,), 1)[1]
        counts = text.holding[term], title.holding[term], chunks.holding[term]
        self._held[term] = counts
        return counts
