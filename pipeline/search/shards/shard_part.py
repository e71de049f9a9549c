"""A part of a generation answers what a search asks of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.index.generation import Generation
from pipeline.index.protocol import VectorIndex
from pipeline.search.candidates import (
    best_of_documents,
    chunk_positions,
    score_chunks,
    score_documents,
    window_cosines,
    window_firsts,
    window_sums,
)
from pipeline.search.late import LateQuery, best_places, window_max_sim
from pipeline.search.lexical import bm25_documents, bounded_words, is_in_documents
from pipeline.search.reader import LocalReader, TokenMatches, WindowScores
from pipeline.search.shards.messages import BestWords, Nearest, PartMatches, PartScores, Words, WordTotals

KEPT_SCORES: Final = 8
"""BM25 of all passages for the last queries, 4 bytes a chunk each: candidates are looked up in it."""


class ShardPart:
    """Answers for one part; safe to share between threads."""

    def __init__(self, part: Generation) -> None:
        self.part = part
        self._reader = LocalReader(part)
        self._kept: OrderedDict[tuple[str, int], Float32[np.ndarray, " M"]] = OrderedDict()
        self._lock = threading.Lock()

    def word_totals(self, query: str, sizes: Sequence[int]) -> WordTotals:
        """Return what BM25 has to know of this part, passages by the sizes of their windows."""
        documents, passages = self.part.document_bm25, self.part.passage_bm25
        assert documents is not None
        assert passages is not None
        words = bounded_words(query)
        return WordTotals(
            documents=documents.totals(words),
            passages={size: passages.totals(words, size) for size in sizes},
        )

    def best_words(
        self, words: Words, allowed: Int64[np.ndarray, " A"] | None, num_candidates: int, size: int
    ) -> BestWords:
        """Return the best allowed documents and passages of ``size`` chunks by BM25."""
        documents, scores = bm25_documents(
            self.part, words.query, allowed, num_candidates, totals=words.totals.documents
        )
        found_M = {each: self._passage_scores(words, each) for each in words.totals.passages}
        if allowed is not None:
            is_allowed_M = is_in_documents(self.part, allowed)
            found_M = {each: scores_M * is_allowed_M for each, scores_M in found_M.items()}
        held = np.flatnonzero(found_M[size] > 0.0)
        best = held[best_places(found_M[size][held], num_candidates)]
        return BestWords(
            documents=documents,
            scores=scores,
            passages=best,
            passage_scores=found_M[size][best],
            highs={each: float(scores_M.max(initial=0.0)) for each, scores_M in found_M.items()},
        )

    def nearest(
        self,
        vectors_QV: Float32[np.ndarray, "Q V"],
        num_documents: int | None,
        num_chunks: int | None,
        allowed: Int64[np.ndarray, " A"] | None,
    ) -> tuple[Nearest | None, Nearest | None]:
        """Return the nearest documents and chunks, None of an index that is not asked."""
        chunks = None
        if num_chunks is not None:
            allowed_chunks = None if allowed is None else chunk_positions(self.part, allowed)
            chunks = _nearest(self.part.chunks, vectors_QV, num_chunks, allowed_chunks)
        if num_documents is None:
            return None, chunks
        return _nearest(self.part.documents, vectors_QV, num_documents, allowed), chunks

    def score(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        parts: Sequence[str],
        words: Words | None,
        rank_size: int,
        window_size: int | None,
    ) -> PartScores:
        """Score candidates, and their windows where ``window_size`` is given.

        BM25 is that of passages of ``rank_size`` chunks.
        """
        passage_N = None
        if words is not None:
            own_M = self._passage_scores(words, rank_size)[chunk_positions(self.part, positions)]
            passage_N = best_of_documents(self.part, own_M, positions)
        chunk_N = None
        if "chunk" in parts:
            chunk_N = best_of_documents(self.part, score_chunks(self.part, positions, vector_V), positions)
        return PartScores(
            document_N=score_documents(self.part, positions, vector_V) if "document" in parts else None,
            chunk_N=chunk_N,
            passage_N=passage_N,
            windows=None
            if window_size is None
            else self.windows(positions, vector_V, window_size, words, rank_size),
        )

    def windows(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        size: int,
        words: Words | None,
        word_size: int,
    ) -> WindowScores:
        """Score all windows of ``size`` chunks of some documents; BM25 is that of ``word_size`` chunks."""
        words_W = None
        if words is not None:
            first_W = window_firsts(self.part, positions, size)
            words_W = self._passage_scores(words, word_size)[first_W]
        return WindowScores(cosine_W=window_cosines(self.part, positions, vector_V, size), words_W=words_W)

    def max_sim(
        self,
        query: LateQuery,
        first_W: Int64[np.ndarray, " W"],
        end_W: Int64[np.ndarray, " W"],
        title_W: Int64[np.ndarray, " W"],
        num_best: int,
    ) -> PartMatches:
        """Return MaxSim of windows, and the sums of the vectors of the best."""
        stored = self.part.token_vectors
        assert stored is not None, "a projected query needs token vectors"
        max_sim_W = window_max_sim(stored, query, first_W, end_W, title_W)
        best_n = np.argsort(-max_sim_W, kind="stable")[:num_best]
        return PartMatches(
            max_sim_W=max_sim_W,
            best_n=best_n,
            sums_nV=window_sums(self.part, first_W[best_n], end_W[best_n]),
        )

    def token_matches(self, chunk_C: Int64[np.ndarray, " C"], query: LateQuery) -> TokenMatches:
        """Return how the tokens of some chunks match a query's."""
        return self._reader.token_matches(chunk_C, query)

    def chunk_vectors(self, chunks: Int64[np.ndarray, " S"]) -> Float32[np.ndarray, "S V"]:
        """Return the vectors of some chunks."""
        return self.part.chunks.reconstruct(chunks)

    def _passage_scores(self, words: Words, size: int) -> Float32[np.ndarray, " M"]:
        """Return BM25 of all windows by first chunk, whatever a filter allows; the last ones are kept."""
        key = words.query, size
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        bm25 = self.part.passage_bm25
        assert bm25 is not None
        scores_M = bm25.scores(bounded_words(words.query), size, words.totals.passages[size])
        with self._lock:
            self._kept[key] = scores_M
            while len(self._kept) > KEPT_SCORES:
                self._kept.popitem(last=False)
        return scores_M


def _nearest(
    index: VectorIndex,
    vectors_QV: Float32[np.ndarray, "Q V"],
    num_wanted: int,
    allowed: Int64[np.ndarray, " A"] | None,
) -> Nearest:
    num_found = min(num_wanted, index.num_vectors if allowed is None else len(allowed))
    scores_QK, positions_QK = index.search(vectors_QV, num_found, allowed)
    return Nearest(scores_QK=scores_QK, positions_QK=positions_QK)
