"""An index reader that asks shards, each of which has consecutive documents of the generation.

The process that asks has the columns of all positions, the tables and the projection of token vectors, mapped
from the generation's files: it knows which shard has which position. Vectors, words and token vectors are
read by the shards alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.errors import StorageError
from pipeline.index.generation import Generation, sampled_chunks
from pipeline.index.protocol import NO_POSITION
from pipeline.search.candidates import documents_of_best_chunks, documents_of_chunks
from pipeline.search.late import LateQuery
from pipeline.search.reader import NearestAsked, TokenMatches, WordsAsked, WordScores
from pipeline.search.shards.fan_out import FanOut, best, gathered, nearest_of_all
from pipeline.search.shards.fetched_scores import AskedWords, FetchedScores
from pipeline.search.shards.messages import Ask, BestWords, Nearest, Words, WordTotals


class ShardedReader:
    """An :class:`~pipeline.search.reader.IndexReader` over the shards of a generation.

    Making one opens the generation on every shard; where one cannot, what ``ask`` raises passes.
    """

    def __init__(self, generation: Generation, num_shards: int, ask: Ask) -> None:
        if any(segment.lengths is None for segment in generation.segments):
            raise StorageError(
                f"generation {generation.number} of {generation.layout.name!r} must have word counts of its "
                f"documents to be searched in shards; run `{generation.layout.command('compact')}`"
            )
        self._generation = generation
        self._shards = FanOut(generation, num_shards, ask)
        sampled = sampled_chunks(generation.num_chunks)
        found = self._shards.of_chunks(
            "chunk_vectors", sampled, lambda places, first: (sampled[places] - first,)
        )
        self._mean_V = gathered(np.ones_like(sampled), found).mean(axis=0)

    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        """See :class:`~pipeline.search.reader.IndexReader`."""
        return self._mean_V

    def read_words(self, asked: WordsAsked) -> AskedWords:
        """See :class:`~pipeline.search.reader.IndexReader`."""
        sizes = [asked.size] if asked.shown_size is None else [asked.size, asked.shown_size]
        totals: list[WordTotals] = self._shards.every("word_totals", asked.query, sizes)
        words = Words(query=asked.query, totals=WordTotals.sum(totals))
        allowed = self._shards.allowed(asked.allowed)
        found: dict[int, BestWords] = self._shards.each(
            "best_words",
            {shard: (words, own, asked.num_candidates, asked.size) for shard, own in allowed.items()},
        )
        bounds, chunk_bounds = self._shards.bounds, self._shards.chunk_bounds
        documents, scores = best(
            [(bounds[shard] + each.documents, each.scores) for shard, each in found.items()],
            asked.num_candidates,
        )
        passages, _ = best(
            [(chunk_bounds[shard] + each.passages, each.passage_scores) for shard, each in found.items()],
            asked.num_candidates,
        )
        nominees = [documents]
        if len(passages):
            nominees.append(documents_of_chunks(self._generation, passages))
        return AskedWords(
            documents=documents,
            scores=scores,
            nominees=nominees,
            has_passages=len(passages) > 0,
            shown_high=max(each.highs[sizes[-1]] for each in found.values()) or None,
            words=words,
            size=asked.size,
            shown_size=sizes[-1],
        )

    def nominate(
        self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked
    ) -> list[tuple[Int64[np.ndarray, " _"], ...]]:
        """See :class:`~pipeline.search.reader.IndexReader`."""
        allowed = self._shards.allowed(asked.allowed)
        lists: list[list[Int64[np.ndarray, " _"]]] = []

        def search(num_chunks: int | None) -> dict[int, Nearest]:
            """Search the chunks, and the documents with them the first time."""
            num_documents = None if lists else asked.num_documents
            found: dict[int, tuple[Nearest, Nearest]] = self._shards.each(
                "nearest",
                {shard: (vectors_QV, num_documents, num_chunks, own) for shard, own in allowed.items()},
            )
            if num_documents is not None:
                documents = {shard: each for shard, (each, _) in found.items()}
                rows = nearest_of_all(documents, self._shards.bounds, num_documents)
                lists.append([row[row != NO_POSITION] for row in rows])
            return {shard: each for shard, (_, each) in found.items()}

        if asked.num_chunks is None:
            search(None)
            return list(zip(*lists, strict=True))
        by_chunk = documents_of_best_chunks(
            self._generation,
            lambda num_hits: nearest_of_all(search(num_hits), self._shards.chunk_bounds, num_hits),
            self._num_chunks(asked.allowed),
            asked.num_chunks,
            asked.min_documents,
        )
        return list(zip(*lists, by_chunk, strict=True))

    def score(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        words: WordScores | None,
        *,
        parts: Sequence[str],
        size: int | None,
    ) -> FetchedScores:
        """See :class:`~pipeline.search.reader.IndexReader`."""
        assert words is None or isinstance(words, AskedWords), "words are read and scored by one reader"
        return FetchedScores(
            self._generation, self._shards, positions, vector_V, words, parts=parts, size=size
        )

    def token_matches(self, chunk_C: Int64[np.ndarray, " C"], query: LateQuery) -> TokenMatches:
        """See :class:`~pipeline.search.reader.IndexReader`."""
        found: list[tuple[Int64[np.ndarray, " _"], TokenMatches]] = self._shards.of_chunks(
            "token_matches", chunk_C, lambda places, first: (chunk_C[places] - first, query)
        )
        size_C = gathered(np.ones_like(chunk_C), [(places, each.size_C) for places, each in found])
        return TokenMatches(
            size_C=size_C,
            cosine_Tq=gathered(size_C, [(places, each.cosine_Tq) for places, each in found]),
            step_T=gathered(size_C, [(places, each.step_T) for places, each in found]),
        )

    def _num_chunks(self, documents: Int64[np.ndarray, " A"] | None) -> int:
        if documents is None:
            return self._generation.num_chunks
        offsets = self._generation.chunk_offsets
        return int((offsets[documents + 1] - offsets[documents]).sum())
