"""A search before its queries have vectors: its options, and what can be read without vectors.

    texts ──┬─▶ encoder ─────────────────────────▶ vectors ─┬─▶ ranking ─▶ hits
            └─▶ filter ─▶ BM25 of documents, passages ──────┘

A filter waits for tables, and a reader of shards for other machines: that time is saved beside the encoder.
:meth:`~cairn.pipeline.search.searcher.Searcher.reads_beside` says when a server reads so. Everything is read
from the one generation that the search began with.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.conditions import Condition, allowed_documents
from cairn.pipeline.search.reader import IndexReader, WordsAsked, WordScores
from cairn.pipeline.search_options import SearchOptions
from jaxtyping import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSearch:
    """One call: its generation and how it is read, its checked options and what they resolve to.

    ``queries`` is None where only vectors are known. ``window`` is the number of chunks in a passage,
    ``ranking_window`` that of the passages whose BM25 ranks documents, whatever size is asked for.

    :meth:`read` adds ``allowed``, the documents the filter allows, ascending (None: all), and
    ``first_words``, the BM25 of the first query. Those of other queries are read when they are ranked, since
    each takes 4 bytes a chunk of the collection.
    """

    generation: Generation
    reader: IndexReader
    options: SearchOptions
    queries: Sequence[str] | None
    condition: Condition | None
    window: int
    ranking_window: int
    timeout: dt.timedelta | None
    allowed: Int64[np.ndarray, " A"] | None = None
    first_words: WordScores | None = None

    def read(self) -> PreparedSearch:
        """Read what needs no vector."""
        if self.condition is None:
            return replace(self, first_words=self.read_words(0))
        allowed = allowed_documents(self.generation, self.condition, self.timeout)
        filtered = self.among(allowed)
        return replace(filtered, first_words=filtered.read_words(0))

    def among(self, allowed: Int64[np.ndarray, " A"]) -> PreparedSearch:
        """Return the search of these documents alone, ascending; its words are still to be read."""
        return replace(self, allowed=allowed, first_words=None)

    @property
    def num_allowed(self) -> int:
        """Count the documents that may be found."""
        return self.generation.num_documents if self.allowed is None else len(self.allowed)

    def read_words(self, index: int) -> WordScores | None:
        """Return the BM25 of a query; None where BM25 has no say, or there is no document to find."""
        options = self.options
        if self.queries is None or not self.num_allowed:
            return None
        if not options.hybrid or options.weight("bm25") <= 0.0:
            return None
        is_shown = bool(options.passages) and self.window != self.ranking_window
        return self.reader.read_words(
            WordsAsked(
                query=self.queries[index],
                allowed=self.allowed,
                num_candidates=options.num_candidates,
                size=self.ranking_window,
                shown_size=self.window if is_shown else None,
            )
        )
