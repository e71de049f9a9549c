"""What a search reads of the segments of one generation: nominees, scores of candidates, matches of tokens.

    LocalReader                      segments in this process
    cairn.pipeline.search.shards     segments in several processes, each with a LocalReader of its part

Positions are those of the generation. Both readers give the same numbers: scores depend on a row, the query
and the totals of the corpus, never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.columns import TokenVectors
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.products import inner_products
from cairn.pipeline.search.candidates import (
    DecodedChunks,
    PassageScores,
    best_of_documents,
    bm25_documents,
    bm25_passages,
    chunk_positions,
    nominate_by_chunk,
    nominate_by_document,
    nominate_by_passage_bm25,
    score_chunks,
    score_documents,
    window_cosines,
    window_firsts,
    window_sums,
)
from cairn.pipeline.search.late import LateQuery, window_max_sim
from cairn.pipeline.search.sparse import sparse_documents
from jaxtyping import Float32, Int64, UInt8


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsAsked:
    """What is to be known of a query's words.

    ``size`` is the number of chunks in the passages that rank, ``shown_size`` that of those that are shown,
    None where they are the same. Only ``allowed`` documents count, ascending.
    """

    query: str
    allowed: Int64[np.ndarray, " A"] | None
    num_candidates: int
    size: int
    shown_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseAsked:
    """The weights of a query's tokens, by which the best passages of ``size`` chunks are looked for.

    Only ``allowed`` documents count, ascending.
    """

    query: Mapping[int, float]
    allowed: Int64[np.ndarray, " A"] | None
    num_candidates: int
    size: int


SparseFound = tuple[Int64[np.ndarray, " D"], Float32[np.ndarray, " D"]]
"""The positions of the best documents and their scores, best first."""


class WordScores(Protocol):
    """BM25 of one query, to be given back to the reader that made it."""

    @property
    def documents(self) -> Int64[np.ndarray, " A"]:
        """The best documents by their own BM25."""
        ...

    @property
    def scores(self) -> Float32[np.ndarray, " A"]:
        """The BM25 of ``documents``."""
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

    def window_sums(
        self, first_n: Int64[np.ndarray, " n"], end_n: Int64[np.ndarray, " n"]
    ) -> Float32[np.ndarray, "n V"]:
        """Return the sum of the chunk vectors of each of some windows that MaxSim is known of."""
        ...


class Nominees(Protocol):
    """What vectors nominate for one query, best first, and the scores of candidates."""

    @property
    def lists(self) -> Sequence[Int64[np.ndarray, " _"]]:
        """The documents of each index."""
        ...

    def score(self, positions: Int64[np.ndarray, " N"]) -> CandidateScores:
        """Score candidates by the vector that nominated, and by what was asked for; ``positions`` ascend."""
        ...


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

    def read_words(self, asked: WordsAsked) -> WordScores:
        """Return the BM25 of a query."""
        ...

    def read_sparse(self, asked: SparseAsked) -> SparseFound:
        """Return the best documents of a query by the weights of a sparse encoder."""
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

    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        """Return the vector of an average chunk."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWords:
    """:class:`WordScores`, with the BM25 of all passages that may be found.

    ``passages`` of ``size`` chunks rank, ``windows`` are those that are shown.
    """

    documents: Int64[np.ndarray, " A"]
    scores: Float32[np.ndarray, " A"]
    nominees: Sequence[Int64[np.ndarray, " _"]]
    has_passages: bool
    shown_high: float | None
    size: int
    passages: PassageScores | None
    windows: PassageScores | None

    def of_size(self, size: int) -> PassageScores | None:
        """Return the BM25 of passages of a size, of those that rank or of those that are shown."""
        return self.passages if size == self.size else self.windows


def _no_words(_: int) -> None:
    """Return the BM25 of a query without words."""


class LocalReader:
    """An :class:`IndexReader` of a generation that this process has opened."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def read_words(self, asked: WordsAsked) -> LocalWords:
        generation, allowed = self._generation, asked.allowed
        documents, scores = bm25_documents(generation, asked.query, allowed, asked.num_candidates)
        nominees = [documents]
        passages = windows = bm25_passages(generation, asked.query, asked.size, allowed)
        if passages is not None:
            found = nominate_by_passage_bm25(generation, passages, asked.num_candidates)
            nominees.append(found)
            if asked.shown_size is not None:
                windows = bm25_passages(generation, asked.query, asked.shown_size, allowed)
        return LocalWords(
            documents=documents,
            scores=scores,
            nominees=nominees,
            has_passages=passages is not None,
            shown_high=None if windows is None else float(windows.scores_M.max()),
            size=asked.size,
            passages=passages,
            windows=windows,
        )

    def read_sparse(self, asked: SparseAsked) -> SparseFound:
        return sparse_documents(
            self._generation, asked.query, asked.size, asked.allowed, asked.num_candidates
        )

    def nominate(self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked) -> Nominate:
        """All queries are searched at once."""
        lists: list[list[Int64[np.ndarray, " _"]]] = []
        if asked.num_documents is not None:
            lists.append(
                nominate_by_document(self._generation, vectors_QV, asked.num_documents, asked.allowed)
            )
        if asked.num_chunks is not None:
            lists.append(
                nominate_by_chunk(
                    self._generation, vectors_QV, asked.num_chunks, asked.min_documents, asked.allowed
                )
            )
        return lambda index, scored: LocalNominees(
            self._generation, [each[index] for each in lists], vectors_QV[index], scored.words
        )

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

    def mean_chunk_vector(self) -> Float32[np.ndarray, " V"]:
        return self._generation.mean_chunk_vector


HELD_CHUNKS: Final = 16_384
"""Chunk vectors of one query's candidates that are kept decoded: 25 MB at 384 dimensions."""


@dataclass(frozen=True, eq=False)
class LocalNominees:
    """:class:`Nominees` whose scores are computed when they are asked for."""

    generation: Generation
    lists: Sequence[Int64[np.ndarray, " _"]]
    vector_V: Float32[np.ndarray, " V"]
    words: WordScores | None

    def score(self, positions: Int64[np.ndarray, " N"]) -> LocalScores:
        words = self.words
        assert words is None or isinstance(words, LocalWords), "words are read and scored by one reader"
        size, bm25_of = (0, _no_words) if words is None else (words.size, words.of_size)
        return LocalScores(self.generation, positions, self.vector_V, size, bm25_of)


@dataclass(frozen=True, eq=False)
class LocalScores:
    """:class:`CandidateScores` computed when they are asked for.

    ``bm25_of`` gives the BM25 of all windows of a size by first chunk, None where there is none; windows of
    ``ranking_size`` rank.
    """

    generation: Generation
    positions: Int64[np.ndarray, " N"]
    vector_V: Float32[np.ndarray, " V"]
    ranking_size: int
    bm25_of: Callable[[int], PassageScores | None]

    @cached_property
    def _chunks(self) -> DecodedChunks | None:
        """The chunk vectors of all candidates, None where they are too many to keep."""
        offsets = self.generation.chunk_offsets
        counts = offsets[self.positions + 1] - offsets[self.positions]
        return DecodedChunks.of(self.generation, self.positions) if counts.sum() <= HELD_CHUNKS else None

    def documents(self) -> Float32[np.ndarray, " N"]:
        return score_documents(self.generation, self.positions, self.vector_V)

    def chunks(self) -> Float32[np.ndarray, " N"]:
        if self._chunks is None:
            scores_M = score_chunks(self.generation, self.positions, self.vector_V)
        else:
            scores_M = inner_products(self._chunks.vectors_MV, self.vector_V)
        return best_of_documents(self.generation, scores_M, self.positions)

    def passages(self) -> Float32[np.ndarray, " N"]:
        bm25 = self.bm25_of(self.ranking_size)
        assert bm25 is not None
        own_M = bm25.of(chunk_positions(self.generation, self.positions))
        return best_of_documents(self.generation, own_M, self.positions)

    def windows(self, chosen: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        positions, bm25 = self.positions[chosen], self.bm25_of(size)
        words_W = None if bm25 is None else bm25.of(window_firsts(self.generation, positions, size))
        if self._chunks is None:
            cosine_W = window_cosines(self.generation, positions, self.vector_V, size)
        else:
            cosine_W = self._chunks.window_cosines(chosen, self.vector_V, size)
        return WindowScores(cosine_W=cosine_W, words_W=words_W)

    def max_sim(
        self,
        query: LateQuery,
        first_W: Int64[np.ndarray, " W"],
        end_W: Int64[np.ndarray, " W"],
        title_W: Int64[np.ndarray, " W"],
    ) -> Float32[np.ndarray, " W"]:
        return window_max_sim(_tokens(self.generation), query, first_W, end_W, title_W)

    def window_sums(
        self, first_n: Int64[np.ndarray, " n"], end_n: Int64[np.ndarray, " n"]
    ) -> Float32[np.ndarray, "n V"]:
        return window_sums(self.generation, first_n, end_n)


def _tokens(generation: Generation) -> TokenVectors:
    stored = generation.token_vectors
    assert stored is not None, "a projected query needs token vectors"
    return stored
