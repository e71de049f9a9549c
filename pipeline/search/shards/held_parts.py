"""The parts of generations that one process holds, and what each answers to a search.

A part is opened when it is first asked for, and closed when it is no longer asked for. Every question names
its generation, so a search that began with one is answered from it to the end, whatever is published
meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.exact_index import NO_POSITION, VectorIndex
from cairn.pipeline.index.generation import Generation, open_generation, part_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.stored_files import Checks
from cairn.pipeline.search.candidates import (
    chunk_positions,
    documents_of_chunks,
    merge_nominees,
    window_sums,
)
from cairn.pipeline.search.late import LateQuery, best_places, window_max_sim
from cairn.pipeline.search.lexical import bm25_documents, bounded_words, is_in_documents
from cairn.pipeline.search.reader import LocalReader, LocalScores, TokenMatches, WindowScores
from cairn.pipeline.search.shards.messages import (
    BestWords,
    Nearest,
    PartFound,
    PartKey,
    PartMatches,
    PartScores,
    SearchAsked,
    Words,
    content_of,
)
from cairn.pipeline.search.shards.placement import place
from jaxtyping import Float32, Int64

METHODS: Final = frozenset({"search", "score", "windows", "max_sim", "token_matches", "chunk_vectors"})
"""What may be asked."""
UNUSED_SECONDS: Final = 60.0
"""A part of another generation is closed so long after the last question: longer than any request takes."""
KEPT_SCORES: Final = 8
"""BM25 of all passages for the last queries, 4 bytes a chunk each: candidates are looked up in it."""


class ShardPart:
    """Answers for one part; safe to share between threads."""

    def __init__(self, part: Generation) -> None:
        self.part = part
        self._reader = LocalReader(part)
        self._kept: OrderedDict[tuple[str, int], Float32[np.ndarray, " M"]] = OrderedDict()
        self._lock = threading.Lock()

    def search(self, asked: SearchAsked) -> PartFound:
        """Search by a vector, and by words where the best are asked for; score what is found where asked."""
        documents, chunks = self._nearest(asked)
        best = None
        if asked.num_best is not None:
            assert asked.words is not None, "without words none are the best"
            best = self._best_words(asked.words, asked.allowed, asked.num_best)
        if asked.scores is None:
            return PartFound(
                documents=documents, chunks=chunks, words=best, positions=np.empty(0, np.int64), scores=None
            )
        nominees = [asked.scores.known]
        if documents is not None:
            nominees.append(_found(documents))
        if chunks is not None:
            nominees.append(documents_of_chunks(self.part, _found(chunks)))
        if best is not None:
            nominees += [best.documents, documents_of_chunks(self.part, best.passages)]
        positions = merge_nominees(self.part, nominees, asked.scores.min_documents)
        scores = self.score(
            positions,
            asked.vector_V,
            asked.scores.parts,
            asked.words,
            asked.scores.window_size,
        )
        return PartFound(documents=documents, chunks=chunks, words=best, positions=positions, scores=scores)

    def score(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        parts: Sequence[str],
        words: Words | None,
        window_size: int | None,
    ) -> PartScores:
        """Score candidates, and their windows where ``window_size`` is given."""
        scores = self._scores(positions, vector_V, words)
        every = np.arange(len(positions))
        return PartScores(
            document_N=scores.documents() if "document" in parts else None,
            chunk_N=scores.chunks() if "chunk" in parts else None,
            passage_N=None if words is None else scores.passages(),
            windows=None if window_size is None else scores.windows(every, window_size),
        )

    def windows(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        size: int,
        words: Words | None,
    ) -> WindowScores:
        """Score all windows of ``size`` chunks of some documents."""
        return self._scores(positions, vector_V, words).windows(np.arange(len(positions)), size)

    def _scores(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        words: Words | None,
    ) -> LocalScores:
        def bm25_of(size: int) -> Float32[np.ndarray, " M"] | None:
            return None if words is None else self._passage_scores(words, size)

        return LocalScores(self.part, positions, vector_V, words.size if words else 0, bm25_of)

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

    def token_matches(
        self, chunk_M: Int64[np.ndarray, " M"], title_N: Int64[np.ndarray, " N"], query: LateQuery
    ) -> TokenMatches:
        """Return how the tokens of some chunks and titles match a query's."""
        return self._reader.token_matches(chunk_M, title_N, query)

    def chunk_vectors(self, chunks: Int64[np.ndarray, " S"]) -> Float32[np.ndarray, "S V"]:
        """Return the vectors of some chunks."""
        return self.part.chunks.reconstruct(chunks)

    def _nearest(self, asked: SearchAsked) -> tuple[Nearest | None, Nearest | None]:
        """Return the nearest documents and chunks."""
        allowed_chunks = None
        if asked.allowed is not None and asked.num_chunks is not None:
            allowed_chunks = chunk_positions(self.part, asked.allowed)
        return (
            _nearest_of(self.part.documents, asked.vector_V, asked.num_documents, asked.allowed),
            _nearest_of(self.part.chunks, asked.vector_V, asked.num_chunks, allowed_chunks),
        )

    def _best_words(self, words: Words, allowed: Int64[np.ndarray, " A"] | None, num_best: int) -> BestWords:
        """Return the best allowed documents and passages by BM25."""
        documents, scores = bm25_documents(
            self.part, words.query, allowed, num_best, totals=words.totals.documents
        )
        found_M = {each: self._passage_scores(words, each) for each in words.totals.passages}
        if allowed is not None:
            is_allowed_M = is_in_documents(self.part, allowed)
            found_M = {each: scores_M * is_allowed_M for each, scores_M in found_M.items()}
        ranked_M = found_M[words.size]
        held = np.flatnonzero(ranked_M > 0.0)
        best = held[best_places(ranked_M[held], num_best)]
        return BestWords(
            documents=documents,
            scores=scores,
            passages=best,
            passage_scores=ranked_M[best],
            highs={each: float(scores_M.max(initial=0.0)) for each, scores_M in found_M.items()},
        )

    def _passage_scores(self, words: Words, size: int) -> Float32[np.ndarray, " M"]:
        """Return BM25 of all windows by first chunk, whatever a filter allows; the last ones are kept."""
        key = words.query, size
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        passages = words.totals.passages[size]
        scores_M = self.part.passage_bm25.scores(bounded_words(words.query), size, passages)
        with self._lock:
            self._kept[key] = scores_M
            while len(self._kept) > KEPT_SCORES:
                self._kept.popitem(last=False)
        return scores_M


def _nearest_of(
    index: VectorIndex,
    vector_V: Float32[np.ndarray, " V"],
    num_wanted: int | None,
    allowed: Int64[np.ndarray, " A"] | None,
) -> Nearest | None:
    if num_wanted is None:
        return None
    num_found = min(num_wanted, index.num_vectors if allowed is None else len(allowed))
    scores_QK, positions_QK = index.search(vector_V[None], num_found, allowed)
    return Nearest(scores_K=scores_QK[0], positions_K=positions_QK[0])


def _found(nearest: Nearest) -> Int64[np.ndarray, " _"]:
    return nearest.positions_K[nearest.positions_K != NO_POSITION]


class HeldParts:
    """Answers questions about the collections under ``root``; safe to share between threads.

    With ``verify``, every file of a collection is hashed when the first part of it is opened.
    """

    def __init__(self, root: Path, *, verify: bool = False) -> None:
        self._root, self._verify = root, verify
        self._parts: dict[PartKey, ShardPart] = {}
        self._asked_at: dict[PartKey, float] = {}
        self._opening = threading.Lock()

    def answer(self, key: PartKey, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer a question, opening its part first where it is not held."""
        if method not in METHODS:
            raise AssertionError(f"a shard has no method {method!r}")
        self._asked_at[key] = time.monotonic()
        part = self._parts.get(key) or self._open(key)
        part.part.require_whole()
        return getattr(part, method)(*arguments)

    def held(self) -> list[PartKey]:
        """List the parts that are open."""
        return sorted(self._parts)

    def _open(self, key: PartKey) -> ShardPart:
        with self._opening:
            known = self._parts.get(key)
            if known is not None:
                return known
            layout = CollectionLayout.at(self._root, key.collection)
            is_first = all(held.collection != key.collection for held in self._parts)
            checks = Checks(verify=self._verify and is_first)
            generation = open_generation(layout, key.generation, checks)
            placement = place(generation, key.num_shards, key.place_by)
            if content_of(generation, placement) != key.content:
                raise StorageError(
                    f"generation {key.generation} of {key.collection!r} must be the same for every process "
                    "of a search, got two; let all see one root folder"
                )
            part = self._parts[key] = ShardPart(part_of(generation, placement.documents[key.shard]))
            self._close_unused(key)
            return part

    def _close_unused(self, opened: PartKey) -> None:
        before = time.monotonic() - UNUSED_SECONDS
        for key in list(self._parts):
            if key.collection == opened.collection and self._asked_at[key] < before:
                del self._parts[key], self._asked_at[key]
