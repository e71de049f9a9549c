"""What a search reads of the segments of one generation: nominees, scores of candidates, matches of tokens.

    LocalReader                      segments in this process
    cairn.pipeline.search.shards     segments in several processes, each with a LocalReader of its part

Positions are those of the generation. Both readers give the same numbers: scores depend on a row, the query
and the totals of the corpus, never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.columns import TokenVectors
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.lexical.bm25 import FewDocuments
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.candidates import (
    BLOCK_CHUNKS,
    BM25Scores,
    best_documents,
    best_of_documents,
    blocks,
    bm25_documents,
    bm25_passages,
    chunk_positions,
    documents_of_best_chunks,
    few_documents,
    nominate_by_passage_bm25,
    window_firsts,
    window_scores_of_documents,
    words_asked,
)
from cairn.pipeline.search.late import LateQuery, window_max_sim
from cairn.pipeline.search.sparse import sparse_documents
from cairn.pipeline.vector_index.faiss_index import NO_POSITION
from jaxtyping import Float32, Int64, UInt8

Found = tuple[Int64[np.ndarray, " A"], Float32[np.ndarray, " A"]]
"""Positions of what was found and their scores, best first."""


class Alone(NamedTuple):
    """The documents that count where nothing of others may show, and what they say of words and vectors.

    ``languages`` are those that queries are read in.
    """

    few: FewDocuments
    languages: tuple[str, ...]
    mean_chunk_V: Float32[np.ndarray, " V"]


class WordScores(Protocol):
    """BM25 of one query, to be given back to the reader that made it."""

    @property
    def documents(self) -> Int64[np.ndarray, " A"]:
        """The best documents by their own BM25."""
        ...

    @property
    def nominees(self) -> Sequence[Int64[np.ndarray, " _"]]:
        """The documents to look at, best first, by their own BM25 or that of a passage."""
        ...

    @property
    def has_passages(self) -> bool:
        """Tell whether a word stands in any passage."""
        ...

    @property
    def shown_high(self) -> float | None:
        """The highest BM25 of the passages that are shown; None where no word stands in any."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NearestAsked:
    """Which documents vectors are to nominate: the best by each index, None for one that is not asked.

    ``ids`` are what the queries are as ids of documents, which the generation is asked for afterwards; None
    where it is not.
    """

    num_documents: int | None
    num_chunks: int | None
    min_documents: int
    allowed: Int64[np.ndarray, " A"] | None
    ids: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoresAsked:
    """Which scores a query's candidates will be asked for.

    ``parts`` are cosines, ``words`` the query's BM25; windows of ``size`` chunks are wanted, None for none.
    ``others`` are documents that are nominated by other means than vectors and words.
    """

    parts: Sequence[str]
    words: WordScores | None
    size: int | None
    others: Sequence[Int64[np.ndarray, " _"]] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenMatches:
    """The cosines of the tokens of some chunks, then titles, with a query's, and where they begin.

    ``start_C`` are the first characters of the chunks, 0 for titles.
    """

    size_C: Int64[np.ndarray, " C"]
    cosine_Tq: Float32[np.ndarray, "T q"]
    step_T: UInt8[np.ndarray, " T"]
    start_C: Int64[np.ndarray, " C"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowScores:
    """Cosines of windows, and their BM25; None where no word of the query stands in any of the collection."""

    cosine_W: Float32[np.ndarray, " W"]
    words_W: Float32[np.ndarray, " W"] | None


class CandidateScores(Protocol):
    """Scores of one query's candidates, by their ascending positions."""

    def documents(self) -> Float32[np.ndarray, " N"]:
        """Return the cosine of each document vector."""
        ...

    def chunks(self) -> Float32[np.ndarray, " N"]:
        """Return the cosine of each document's best chunk."""
        ...

    def words(self) -> Float32[np.ndarray, " N"]:
        """Return the BM25 of each document."""
        ...

    def passages(self) -> Float32[np.ndarray, " N"]:
        """Return the BM25 of each document's best passage."""
        ...

    def windows(self, chosen: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        """Return the scores of every window of ``size`` chunks of some candidates, one after another."""
        ...

    def max_sim(
        self,
        query: LateQuery,
        first_W: Int64[np.ndarray, " W"],
        end_W: Int64[np.ndarray, " W"],
        title_W: Int64[np.ndarray, " W"],
    ) -> Float32[np.ndarray, " W"]:
        """Return MaxSim of windows of candidates, as ``late`` has it; ``first_W`` ascend."""
        ...


class Nominees(NamedTuple):
    """What vectors nominate for one query: the documents of each index, best first.

    ``score`` scores candidates, which ascend, by the vector that nominated and by what was asked for.
    """

    lists: Sequence[Int64[np.ndarray, " _"]]
    score: Callable[[Int64[np.ndarray, " N"]], CandidateScores]


Nominate = Callable[[int, ScoresAsked], Nominees]
"""Returns the nominees for the query with this index.

A reader may look for the query's words at the same time, and for scores of what it nominates.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatchesAsked:
    """The tokens of some chunks, and of the titles of documents, are matched with a query's.

    ``title_N`` are the first chunks of the documents.
    """

    chunk_M: Int64[np.ndarray, " M"]
    title_N: Int64[np.ndarray, " N"]
    query: LateQuery


class PassagesRead(NamedTuple):
    """Columns of documents, where runs of chunks begin and end in their texts, and what was matched."""

    table: pa.Table
    start_n: Int64[np.ndarray, " n"]
    end_n: Int64[np.ndarray, " n"]
    matches: TokenMatches | None = None


class IndexReader(Protocol):
    """Reads one generation; safe to use from several threads."""

    def read_words(
        self,
        query: str,
        size: int,
        shown_size: int | None,
        allowed: Int64[np.ndarray, " A"] | None,
        limit: int,
        alone: Alone | None = None,
    ) -> WordScores:
        """Return the BM25 of a query; only ``allowed`` documents are found, ascending.

        ``size`` is the number of chunks in the passages that rank, ``shown_size`` that of those that are
        shown, None where they are the same. ``alone`` is None where all documents count.
        """
        ...

    def read_sparse(
        self, query: Mapping[int, float], size: int, allowed: Int64[np.ndarray, " A"] | None, limit: int
    ) -> Found:
        """Return the best documents by a query's weights of tokens, as ``sparse`` has it."""
        ...

    def nominate(self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked) -> Nominate:
        """Return what nominates documents for each query."""
        ...

    def token_matches(self, asked: MatchesAsked) -> TokenMatches:
        """Return how tokens match a query's; C of the result is M + N."""
        ...

    def read_passages(
        self,
        positions: Int64[np.ndarray, " A"],
        columns: Sequence[str],
        first_n: Int64[np.ndarray, " n"],
        end_n: Int64[np.ndarray, " n"],
        asked: MatchesAsked | None,
    ) -> PassagesRead:
        """Return columns of documents in the order asked, and the rest; a position may repeat."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWords:
    """:class:`WordScores`, with the BM25 of all documents and passages that may be found.

    ``passages`` of ``size`` chunks rank, ``windows`` are those that are shown.
    """

    documents: Int64[np.ndarray, " A"]
    of_documents: BM25Scores
    nominees: Sequence[Int64[np.ndarray, " _"]]
    has_passages: bool
    shown_high: float | None
    size: int
    passages: BM25Scores | None
    windows: BM25Scores | None

    def of_size(self, size: int) -> BM25Scores | None:
        """Return the BM25 of passages of a size, of those that rank or of those that are shown."""
        return self.passages if size == self.size else self.windows


class LocalReader:
    """An :class:`IndexReader` of a generation that this process has opened."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def read_words(
        self,
        query: str,
        size: int,
        shown_size: int | None,
        allowed: Int64[np.ndarray, " A"] | None,
        limit: int,
        alone: Alone | None = None,
    ) -> LocalWords:
        generation, visible = self._generation, alone and alone.few
        few = few_documents(generation, allowed, visible)
        words = words_asked(query, generation.query_languages if alone is None else alone.languages)
        of_documents = bm25_documents(generation, words, few, alone=visible)
        documents, _ = best_documents(generation, of_documents, allowed, limit)
        nominees = [documents]
        passages = windows = bm25_passages(generation, words, size, allowed, few, alone=visible)
        if passages is not None:
            nominees.append(nominate_by_passage_bm25(generation, passages, limit))
            if shown_size is not None:
                windows = bm25_passages(generation, words, shown_size, allowed, few, alone=visible)
        return LocalWords(
            documents=documents,
            of_documents=of_documents,
            nominees=nominees,
            has_passages=passages is not None,
            shown_high=None if windows is None else float(windows.scores_M.max()),
            size=size,
            passages=passages,
            windows=windows,
        )

    def read_sparse(
        self, query: Mapping[int, float], size: int, allowed: Int64[np.ndarray, " A"] | None, limit: int
    ) -> Found:
        return sparse_documents(self._generation, query, size, allowed, limit)

    def nominate(self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked) -> Nominate:
        """All queries are searched at once."""
        generation, lists = self._generation, list[list[Int64[np.ndarray, " _"]]]()
        if asked.num_documents is not None:
            _, positions_QK = generation.documents.search(vectors_QV, asked.num_documents, asked.allowed)
            lists.append([row[row != NO_POSITION] for row in positions_QK])
        if asked.num_chunks is not None:
            allowed = None if asked.allowed is None else chunk_positions(generation, asked.allowed)
            lists.append(
                documents_of_best_chunks(
                    generation,
                    lambda num_hits: generation.chunks.search(vectors_QV, num_hits, allowed)[1],
                    generation.chunks.num_vectors if allowed is None else len(allowed),
                    asked.num_chunks,
                    asked.min_documents,
                )
            )

        def nominees(index: int, scored: ScoresAsked) -> Nominees:
            words = scored.words
            assert words is None or isinstance(words, LocalWords), "words are read and scored by one reader"
            known = words and LocalBM25(words.size, words.of_size, lambda: words.of_documents)
            return Nominees(
                [each[index] for each in lists],
                lambda positions: LocalScores(generation, positions, vectors_QV[index], known),
            )

        return nominees

    def token_matches(self, asked: MatchesAsked) -> TokenMatches:
        stored = _tokens(self._generation)
        parts = (stored.chunks.read(asked.chunk_M), stored.titles.read(asked.title_N))
        codes = np.concatenate([part.codes for part in parts])
        starts = [self._generation.chunk_starts[asked.chunk_M], np.zeros_like(asked.title_N)]
        return TokenMatches(
            size_C=np.concatenate([part.size_C for part in parts]),
            cosine_Tq=stored.codebook.similarities(codes, asked.query.vectors_qV),
            step_T=np.concatenate([part.step_T for part in parts]),
            start_C=np.concatenate(starts),
        )

    def read_passages(
        self,
        positions: Int64[np.ndarray, " A"],
        columns: Sequence[str],
        first_n: Int64[np.ndarray, " n"],
        end_n: Int64[np.ndarray, " n"],
        asked: MatchesAsked | None,
    ) -> PassagesRead:
        return PassagesRead(
            self._generation.fetch_documents(positions, columns),
            *self._generation.spans_of(first_n, end_n),
            None if asked is None else self.token_matches(asked),
        )


class LocalBM25(NamedTuple):
    """Gives the BM25 of all documents, and of all windows of a size by first chunk, None where there is none.

    Windows of ``ranking_size`` rank.
    """

    ranking_size: int
    of_size: Callable[[int], BM25Scores | None]
    of_documents: Callable[[], BM25Scores]


@dataclass(frozen=True, eq=False)
class LocalScores:
    """:class:`CandidateScores` computed when they are asked for."""

    generation: Generation
    positions: Int64[np.ndarray, " N"]
    vector_V: Float32[np.ndarray, " V"]
    bm25: LocalBM25 | None

    @cached_property
    def _num_chunks(self) -> Int64[np.ndarray, " N"]:
        firsts, ends = self.generation.chunks_of(self.positions)
        return ends - firsts

    @cached_property
    def _kept(self) -> Float32[np.ndarray, "M V"] | None:
        """The chunk vectors of all candidates, decoded once; None where they are too many to keep."""
        if self._num_chunks.sum() > BLOCK_CHUNKS:
            return None
        return self.generation.chunks.reconstruct(chunk_positions(self.generation, self.positions))

    def _vectors(
        self, chosen: Int64[np.ndarray, " K"]
    ) -> Iterator[tuple[Int64[np.ndarray, " k"], Float32[np.ndarray, "m V"]]]:
        """Yield the chunk vectors of some candidates, a block at a time, with how many each has."""
        counts_K, kept = self._num_chunks[chosen], self._kept
        if kept is None:
            for start, stop in blocks(counts_K):
                chunks = chunk_positions(self.generation, self.positions[chosen[start:stop]])
                yield counts_K[start:stop], self.generation.chunks.reconstruct(chunks)
        elif len(chosen) == len(self.positions) and np.array_equal(chosen, np.arange(len(chosen))):
            yield counts_K, kept
        else:
            firsts = (np.cumsum(self._num_chunks) - self._num_chunks)[chosen]
            yield counts_K, kept[ranges(firsts, counts_K)]

    def documents(self) -> Float32[np.ndarray, " N"]:
        # It sums every row alike, whatever stands beside it: shards have the scores of one whole, copies tie.
        return np.vecdot(self.generation.documents.reconstruct(self.positions), self.vector_V)

    def chunks(self) -> Float32[np.ndarray, " N"]:
        blocks_of_all = self._vectors(np.arange(len(self.positions)))
        scores = [np.vecdot(vectors_MV, self.vector_V) for _, vectors_MV in blocks_of_all]
        return best_of_documents(np.concatenate(scores), self._num_chunks)

    def words(self) -> Float32[np.ndarray, " N"]:
        assert self.bm25 is not None
        return self.bm25.of_documents().of(self.positions)

    def passages(self) -> Float32[np.ndarray, " N"]:
        assert self.bm25 is not None
        bm25 = self.bm25.of_size(self.bm25.ranking_size)
        assert bm25 is not None
        own_M = bm25.of(chunk_positions(self.generation, self.positions))
        return best_of_documents(own_M, self._num_chunks)

    def windows(self, chosen: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        bm25 = self.bm25 and self.bm25.of_size(size)
        cosines = [
            window_scores_of_documents(vectors_MV, counts, self.vector_V, size)
            for counts, vectors_MV in self._vectors(chosen)
        ]
        return WindowScores(
            cosine_W=np.concatenate(cosines) if cosines else np.empty(0, np.float32),
            words_W=bm25 and bm25.of(window_firsts(self.generation, self.positions[chosen], size)),
        )

    def max_sim(
        self,
        query: LateQuery,
        first_W: Int64[np.ndarray, " W"],
        end_W: Int64[np.ndarray, " W"],
        title_W: Int64[np.ndarray, " W"],
    ) -> Float32[np.ndarray, " W"]:
        return window_max_sim(_tokens(self.generation), query, first_W, end_W, title_W)


def _tokens(generation: Generation) -> TokenVectors:
    stored = generation.token_vectors
    assert stored is not None, "a projected query needs token vectors"
    return stored
