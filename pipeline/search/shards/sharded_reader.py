"""An index reader that asks shards, each of which has some documents of the generation.

    one question a shard: vector, words ─▶ nearest documents and chunks, best by BM25, scores of them all

The process that asks has the columns of all positions, the tables and the projection of token vectors, mapped
from the generation's files: it knows which shard has which position. It counts the words of the collection,
and reads sampled vectors when it starts. All other vectors, words and token vectors are read by the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from cairn.pipeline.index.exact_index import NO_POSITION
from cairn.pipeline.index.generation import Generation, sampled_chunks
from cairn.pipeline.search.candidates import documents_of_best_chunks
from cairn.pipeline.search.late import LateQuery
from cairn.pipeline.search.reader import (
    NearestAsked,
    Nominate,
    Nominees,
    ScoresAsked,
    TokenMatches,
    WordsAsked,
)
from cairn.pipeline.search.shards.fan_out import FanOut, Places, best, gathered
from cairn.pipeline.search.shards.fetched import CorpusTotals, FetchedScores, FetchedWords, FoundNominees
from cairn.pipeline.search.shards.messages import Nearest, PartFound, PartScoresAsked, SearchAsked
from cairn.pipeline.search.shards.routes import Routes
from jaxtyping import Float32, Int64


class ShardedReader:
    """An :class:`~cairn.pipeline.search.reader.IndexReader` over the shards of a generation.

    Making one opens the generation on every shard; where one cannot, what ``ask`` raises passes.
    """

    def __init__(self, generation: Generation, shards: FanOut) -> None:
        self._generation = generation
        self._shards = shards
        self._totals = CorpusTotals(generation)
        self._routes = None
        if shards.sharding.route_clusters is not None:
            self._routes = Routes(generation, shards.placement, shards.sharding.route_clusters)
        sampled = sampled_chunks(generation.num_chunks)
        found = self._shards.of_chunks("chunk_vectors", sampled, lambda _, numbers: (numbers,))
        self._mean_V = gathered(np.ones_like(sampled), found).mean(axis=0)

    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        """See :class:`~cairn.pipeline.search.reader.IndexReader`."""
        return self._mean_V

    def read_words(self, asked: WordsAsked) -> FetchedWords:
        """See :class:`~cairn.pipeline.search.reader.IndexReader`; the shards are asked with the vector."""
        sizes = [asked.size] if asked.shown_size is None else [asked.size, asked.shown_size]
        return FetchedWords(self._generation, self._shards, asked, self._totals.of(asked.query, sizes))

    def nominate(self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked) -> Nominate:
        """See :class:`~cairn.pipeline.search.reader.IndexReader`; the shards are asked for each query."""
        return lambda index, scores: self._search(vectors_QV[index], asked, scores)

    def score(
        self,
        nominees: Nominees,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        asked: ScoresAsked,
    ) -> FetchedScores:
        """See :class:`~cairn.pipeline.search.reader.IndexReader`."""
        assert isinstance(nominees, FoundNominees), "candidates are nominated and scored by one reader"
        return FetchedScores(self._generation, self._shards, nominees, positions, vector_V, asked)

    def token_matches(
        self, chunk_M: Int64[np.ndarray, " M"], title_N: Int64[np.ndarray, " N"], query: LateQuery
    ) -> TokenMatches:
        """See :class:`IndexReader`; chunks and titles are asked for together."""

        def arguments(places: Places, numbers: Places) -> tuple[Places, Places, LateQuery]:
            num_chunks = int(np.searchsorted(places, len(chunk_M)))
            return numbers[:num_chunks], numbers[num_chunks:], query

        chunk_C = np.concatenate([chunk_M, title_N])
        found: list[tuple[Places, TokenMatches]] = self._shards.of_chunks("token_matches", chunk_C, arguments)
        size_C = gathered(np.ones_like(chunk_C), [(places, each.size_C) for places, each in found])
        return TokenMatches(
            size_C=size_C,
            cosine_Tq=gathered(size_C, [(places, each.cosine_Tq) for places, each in found]),
            step_T=gathered(size_C, [(places, each.step_T) for places, each in found]),
        )

    def _search(
        self, vector_V: Float32[np.ndarray, " V"], asked: NearestAsked, scores: ScoresAsked
    ) -> FoundNominees:
        words = scores.words
        assert words is None or isinstance(words, FetchedWords), "words are read and scored by one reader"
        is_asked = words is not None and not words.is_known
        known = {} if words is None or is_asked else self._numbers(words)
        allowed = self._asked_shards(vector_V, asked, set(known))
        questions = {
            shard: SearchAsked(
                vector_V=vector_V,
                num_documents=asked.num_documents,
                num_chunks=asked.num_chunks,
                allowed=own,
                words=None if words is None else words.words,
                num_best=words.num_candidates if words is not None and is_asked else None,
                scores=PartScoresAsked(
                    known=known.get(shard, np.empty(0, np.int64)),
                    parts=scores.parts,
                    window_size=scores.size,
                    min_documents=asked.min_documents,
                ),
            )
            for shard, own in allowed.items()
        }
        found = self._ask(questions)
        if words is not None and is_asked:
            words.keep({shard: each.words for shard, each in found.items() if each.words is not None})
        return FoundNominees(lists=self._lists(asked, questions, found), found=found)

    def _asked_shards(
        self, vector_V: Float32[np.ndarray, " V"], asked: NearestAsked, known: set[int]
    ) -> dict[int, Places | None]:
        """Return the shards to search with their allowed documents; those with ``known`` ones are asked."""
        allowed = self._shards.allowed(asked.allowed)
        if self._routes is None:
            return allowed
        wanted = self._routes.shards(vector_V, asked.allowed) | known
        return {shard: own for shard, own in allowed.items() if shard in wanted}

    def _numbers(self, words: FetchedWords) -> dict[int, Places]:
        """Return the documents that words nominated, by the numbers of their shards."""
        documents = np.unique(np.concatenate(words.nominees))
        return {shard: own for shard, _, own in self._shards.placement.split_documents(documents)}

    def _lists(
        self, asked: NearestAsked, questions: Mapping[int, SearchAsked], found: Mapping[int, PartFound]
    ) -> list[Places]:
        """Return the documents that each index nominates; for more of them the chunks are searched again."""
        placement = self._shards.placement
        lists: list[Places] = []
        if asked.num_documents is not None:
            documents = {shard: part.documents for shard, part in found.items()}
            lists.append(_nearest(documents, placement.documents_of, asked.num_documents))
        if asked.num_chunks is None:
            return lists
        num_asked = asked.num_chunks

        def search(num_hits: int) -> Int64[np.ndarray, "Q K"]:
            parts = found
            if num_hits > num_asked:
                wider = {
                    shard: replace(
                        each, num_documents=None, num_chunks=num_hits, words=None, num_best=None, scores=None
                    )
                    for shard, each in questions.items()
                }
                parts = self._ask(wider)
            chunks = {shard: part.chunks for shard, part in parts.items()}
            return _nearest(chunks, placement.chunks_of, num_hits)[None]

        lists += documents_of_best_chunks(
            self._generation, search, self._num_chunks(asked.allowed), num_asked, asked.min_documents
        )
        return lists

    def _ask(self, questions: Mapping[int, SearchAsked]) -> dict[int, PartFound]:
        return self._shards.each("search", {shard: (each,) for shard, each in questions.items()})

    def _num_chunks(self, documents: Int64[np.ndarray, " A"] | None) -> int:
        if documents is None:
            return self._generation.num_chunks
        offsets = self._generation.chunk_offsets
        return int((offsets[documents + 1] - offsets[documents]).sum())


def _nearest(
    found: Mapping[int, Nearest | None], positions_of: Callable[[int, Places], Places], top_k: int
) -> Places:
    """Return the positions of the nearest vectors of several shards, best first, ties by position.

    ``positions_of`` gives the positions of a shard's own numbers.
    """
    lists: list[tuple[Places, Float32[np.ndarray, " _"]]] = []
    for shard, nearest in found.items():
        assert nearest is not None, "an index that was asked"
        is_found_K = nearest.positions_K != NO_POSITION
        lists.append((positions_of(shard, nearest.positions_K[is_found_K]), nearest.scores_K[is_found_K]))
    return best(lists, top_k)[0]
