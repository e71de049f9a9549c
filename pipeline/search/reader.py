"""What a search reads of the segments of one generation: nominees, scores of candidates, matches of tokens.

    LocalReader                      segments in this process
    cairn.pipeline.search.shards     segments in several processes, each with a LocalReader of its part

Positions are those of the generation. Both readers give the same numbers: scores depend on a row, the query
and the totals of the corpus, never on the rows beside it.

The indexes only nominate: the document index its best documents, the chunk index the documents of its best
chunks, BM25 its best documents and those of its best passages. Every nominee is then scored from the stored
vectors and words, so that a score never depends on which list found it. Quantised indexes return approximate
vectors, and the scores are exact for those. Quotes, operators and boolean words in a query are words for BM25
or nothing, never syntax.

A window of k consecutive chunks scores the query's cosine with the L2-normalised sum of its landmarks'
vectors: the rule that makes the document vector, which is the widest window. Windows shape passages, never
the ranking of documents: ``ranking`` says why.

    N documents    M chunks    W windows    P postings    T tokens    A allowed, or found
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.segments.segment import JoinedColumns, JoinedWords, TokenVectors
from cairn.pipeline.index.segments.words import sparse_term
from cairn.pipeline.lexical.bm25 import FewDocuments, Totals
from cairn.pipeline.lexical.tokenizer import Variants, terms_of_query
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.fusion import LateQuery, Windows, window_max_sim
from cairn.pipeline.types import SPARSE_STEP
from cairn.pipeline.vector_index.faiss_index import NO_POSITION
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8

Found = tuple[Int64[np.ndarray, " A"], Float32[np.ndarray, " A"]]
"""Positions of what was found and their scores, best first."""


class Alone(NamedTuple):
    """The documents that count where nothing of others may show, and what they say of words and vectors.

    ``languages`` are those that queries are read in.
    """

    few: FewDocuments
    languages: tuple[str, ...]
    mean_chunk_V: Float32[np.ndarray, " V"]


class WordsAsked(NamedTuple):
    """A query whose words are looked for; only ``allowed`` documents are found, which ascend, None for all.

    ``size`` is the number of chunks in the passages that rank, ``shown_size`` that of those that are shown,
    None where they are the same. ``alone`` is None where all documents count.
    """

    query: str
    size: int
    shown_size: int | None
    allowed: Int64[np.ndarray, " A"] | None
    limit: int
    alone: Alone | None


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

    def max_sim(self, query: LateQuery, windows: Windows) -> Float32[np.ndarray, " W"]:
        """Return MaxSim of windows of candidates, as :func:`window_max_sim` does; first chunks ascend."""
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


class PassagesAsked(NamedTuple):
    """Columns of documents, in the order asked, runs of chunks in them, and what is to be matched."""

    positions: Int64[np.ndarray, " A"]
    columns: Sequence[str]
    first_n: Int64[np.ndarray, " n"]
    end_n: Int64[np.ndarray, " n"]
    matches: MatchesAsked | None = None


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

    def read_sparse(
        self, query: Mapping[int, float], size: int, allowed: Int64[np.ndarray, " A"] | None, limit: int
    ) -> Found:
        """Return the best documents by a query's weights of tokens; see :func:`sparse_documents`."""
        ...

    def nominate(self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked) -> Nominate:
        """Return what nominates documents for each query."""
        ...

    def token_matches(self, asked: MatchesAsked) -> TokenMatches:
        """Return how tokens match a query's; C of the result is M + N."""
        ...

    def read_passages(self, asked: PassagesAsked) -> PassagesRead:
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

    def read_words(self, asked: WordsAsked) -> LocalWords:
        query, size, shown_size, allowed, limit, alone = asked
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

    def read_passages(self, asked: PassagesAsked) -> PassagesRead:
        return PassagesRead(
            self._generation.fetch_documents(asked.positions, asked.columns),
            *self._generation.spans_of(asked.first_n, asked.end_n),
            None if asked.matches is None else self.token_matches(asked.matches),
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
            for start, stop in blocks(counts_K, BLOCK_CHUNKS):
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

    def max_sim(self, query: LateQuery, windows: Windows) -> Float32[np.ndarray, " W"]:
        return window_max_sim(_tokens(self.generation), query, windows)


def _tokens(generation: Generation) -> TokenVectors:
    stored = generation.token_vectors
    assert stored is not None, "a projected query needs token vectors"
    return stored


MAX_CHUNK_HITS = 16_384
"""Where the search for enough documents among the best chunks gives up."""
MAX_SCORED_CHUNKS = 65_536
"""Chunk vectors scored for one query: about 100 ms and, block by block, 50 MB at 384 dimensions."""
BLOCK_CHUNKS = 16_384
"""Chunks decoded or scored at once; a single longer document is still decoded whole."""
BLOCK_WINDOWS = 4_096
"""Windows formed at once: 6 MB of sums at 384 dimensions."""


def chunk_positions(generation: JoinedColumns, documents: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " B"]:
    """Return the positions of all chunks of these documents, in their order."""
    firsts, ends = generation.chunks_of(documents)
    return ranges(firsts, ends - firsts)


def documents_of_best_chunks(
    generation: JoinedColumns,
    search: Callable[[int], Int64[np.ndarray, "Q K"]],
    num_chunks: int,
    num_candidates: int,
    min_documents: int,
) -> list[Int64[np.ndarray, " _"]]:
    """Return the documents of each query's best chunks, best first, each once.

    ``search`` gives so many of ``num_chunks`` chunks. When long documents crowd the list, it is widened until
    every query has ``min_documents`` or there is no more to find.
    """
    limit = min(num_chunks, MAX_CHUNK_HITS)
    num_hits = min(num_candidates, limit)
    while True:
        found = [row[row != NO_POSITION] for row in search(num_hits)]
        ranked = [documents_of_chunks(generation, chunks) for chunks in found]
        if num_hits >= limit or all(
            len(row) >= min_documents or len(hits) < num_hits for row, hits in zip(ranked, found, strict=True)
        ):
            return ranked
        num_hits = min(4 * num_hits, limit)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BM25Scores:
    """BM25 of each document, or of the passage that begins with each chunk; 0 for no word.

    ``rows`` are the only documents or chunks that have one, ascending; None: all do.
    """

    scores_M: Float32[np.ndarray, " M"]
    rows: Int64[np.ndarray, " M"] | None = None

    def of(self, asked_N: Int64[np.ndarray, " N"]) -> Float32[np.ndarray, " N"]:
        """Return the scores of documents, or of passages by first chunk; 0 of others than ``rows``."""
        if self.rows is None:
            return self.scores_M[asked_N]
        places = np.minimum(np.searchsorted(self.rows, asked_N), len(self.rows) - 1)
        return self.scores_M[places] * (self.rows[places] == asked_N)


def nominate_by_passage_bm25(
    generation: JoinedColumns, passages: BM25Scores, num_candidates: int
) -> Int64[np.ndarray, " _"]:
    """Return the documents of the passages with the best BM25, best first, each once.

    Ties at the end go to the lower id.
    """
    return documents_of_chunks(generation, best_passages(generation, passages, num_candidates)[0])


def best_passages(
    generation: JoinedColumns, passages: BM25Scores, limit: int
) -> tuple[Int64[np.ndarray, " A"], Float32[np.ndarray, " A"]]:
    """Return the first chunks and scores of the passages with the best BM25, best first."""
    found = np.flatnonzero(passages.scores_M > 0.0)  # three times as fast as on numbers
    scores = passages.scores_M[found]
    chunks = found if passages.rows is None else passages.rows[found]
    best = best_by_id(scores, limit, lambda tied: generation.ids_of(generation.owners_of(chunks[tied])))
    return chunks[best], scores[best]


def best_by_id(
    scores_A: Float32[np.ndarray, " A"],
    limit: int,
    ids_of: Callable[[Int64[np.ndarray, " T"]], Sequence[str]],
) -> Int64[np.ndarray, " B"]:
    """Return the places of the best scores, best first; of those that tie at the end, the lowest ids.

    So the same are found however the documents are laid out. ``ids_of`` gives the ids of places.
    """
    if len(scores_A) <= limit:
        return np.argsort(-scores_A, kind="stable")
    last = np.partition(scores_A, len(scores_A) - limit)[len(scores_A) - limit]
    better, tied = np.flatnonzero(scores_A > last), np.flatnonzero(scores_A == last)
    better = better[np.argsort(-scores_A[better], kind="stable")]
    room = limit - len(better)
    if room < len(tied):
        few = nsmallest(room, zip(ids_of(tied), tied.tolist(), strict=True))
        tied = np.array([place for _, place in few], np.int64)
    return np.concatenate([better, tied])


def documents_of_chunks(
    generation: JoinedColumns, chunks: Int64[np.ndarray, " A"]
) -> Int64[np.ndarray, " B"]:
    """Return the documents of these chunks in the order in which they are met, each once."""
    documents = generation.owners_of(chunks)
    return documents[np.sort(np.unique(documents, return_index=True)[1])]


def best_of_documents(
    scores_M: Float32[np.ndarray, " M"], num_chunks_N: Int64[np.ndarray, " N"]
) -> Float32[np.ndarray, " N"]:
    """Return the best score of each document; ``scores_M`` holds those of their chunks, in order."""
    return np.maximum.reduceat(scores_M, np.cumsum(num_chunks_N) - num_chunks_N)


def merge_nominees(
    generation: JoinedColumns, rankings: Sequence[Int64[np.ndarray, " _"]], min_documents: int
) -> Int64[np.ndarray, " N"]:
    """Return the union of several rankings, ascending, cut where its chunks pass :data:`MAX_SCORED_CHUNKS`.

    What is cut is what stands lowest in every ranking; ``min_documents`` are always kept.
    """
    ranks = np.concatenate([np.arange(len(ranking)) for ranking in rankings])
    stacked = np.concatenate(rankings)
    order = np.lexsort((stacked, ranks))
    _, first = np.unique(stacked[order], return_index=True)
    by_rank = stacked[order][np.sort(first)]
    firsts, ends = generation.chunks_of(by_rank)
    num_chunks = np.cumsum(ends - firsts)
    num_kept = max(int(np.searchsorted(num_chunks, MAX_SCORED_CHUNKS, side="right")), min_documents)
    return np.sort(by_rank[:num_kept])


def window_scores(
    vectors_MV: Float32[np.ndarray, "M V"], query_V: Float32[np.ndarray, " V"], size: int
) -> Float32[np.ndarray, " W"]:
    """Return the score of each window of consecutive chunks, in order; a zero sum scores 0.

    A single landmark scores its inner product with the query, as in the chunk index.
    """
    size = min(size, len(vectors_MV))
    if size <= 1:
        return np.vecdot(vectors_MV, query_V)
    scores_W = np.empty(len(vectors_MV) - size + 1, np.float32)
    for start in range(0, len(scores_W), BLOCK_WINDOWS):
        sums_WV = sliding_sums(vectors_MV[start : start + BLOCK_WINDOWS + size - 1], size)
        norms_W = np.sqrt(np.einsum("wv,wv->w", sums_WV, sums_WV))
        products_W = np.vecdot(sums_WV, query_V)
        scores_W[start : start + BLOCK_WINDOWS] = products_W / np.maximum(norms_W, np.finfo(np.float32).tiny)
    return scores_W


def window_scores_of_documents(
    vectors_MV: Float32[np.ndarray, "M V"],
    num_chunks_N: Int64[np.ndarray, " N"],
    query_V: Float32[np.ndarray, " V"],
    size: int,
) -> Float32[np.ndarray, " W"]:
    """Return :func:`window_scores` of several documents whose chunks stand one after another."""
    firsts_N = np.cumsum(num_chunks_N) - num_chunks_N
    num_windows_N = np.maximum(num_chunks_N - size, 0) + 1
    is_short_N = num_chunks_N < size
    bounds = np.append(0, np.cumsum(num_windows_N))
    scores_W = np.empty(bounds[-1], np.float32)
    is_short_W = np.repeat(is_short_N, num_windows_N)
    if not np.all(is_short_N):
        places_W = ranges(firsts_N, num_windows_N)
        scores_W[~is_short_W] = window_scores(vectors_MV, query_V, size)[places_W[~is_short_W]]
    for length in np.unique(num_chunks_N[is_short_N]).tolist():
        alike = np.flatnonzero(num_chunks_N == length)
        own_MV = vectors_MV[ranges(firsts_N[alike], num_chunks_N[alike])]
        scores_W[bounds[alike]] = window_scores(own_MV, query_V, length)[::length]
    return scores_W


def sliding_sums(vectors_MV: Float32[np.ndarray, "M V"], size: int) -> Float32[np.ndarray, "W V"]:
    """Return the sum of every ``size`` consecutive rows, built by doubling.

    About log2(size) additions of the whole array.
    """
    sums_WV, width = vectors_MV, 1
    for bit in f"{size:b}"[1:]:
        sums_WV = sums_WV[:-width] + sums_WV[width:]
        width *= 2
        if bit == "1":
            sums_WV = sums_WV[:-1] + vectors_MV[width:]
            width += 1
    return sums_WV


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredWindows:
    """All windows of some documents, in order, with their scores and the parts those were made of.

    ``places`` are chunks of the collection; ``owner`` is a window's document's index among those asked for.
    """

    owner: Int64[np.ndarray, " W"]
    places: Windows
    scores: Float[np.ndarray, " W"]
    parts: Mapping[str, Float32[np.ndarray, " W"]]


def score_windows(
    generation: JoinedColumns,
    positions: Int64[np.ndarray, " N"],
    size: int,
    cosines: Float32[np.ndarray, " W"],
) -> ScoredWindows:
    """Return every window of ``size`` chunks of each document, scored by its cosine."""
    firsts, ends = generation.chunks_of(positions)
    num_windows = _num_windows(firsts, ends, size)
    owner = np.repeat(np.arange(len(positions)), num_windows)
    first = ranges(firsts, num_windows)
    return ScoredWindows(
        owner=owner,
        places=Windows(first, np.minimum(first + size, ends[owner]), firsts[owner]),
        scores=cosines,
        parts={"chunk": cosines},
    )


def windows_of_documents(
    generation: JoinedColumns, positions: Int64[np.ndarray, " N"], size: int
) -> Int64[np.ndarray, " N"]:
    """Count the windows of ``size`` chunks of each document."""
    return _num_windows(*generation.chunks_of(positions), size)


def _num_windows(
    firsts: Int64[np.ndarray, " N"], ends: Int64[np.ndarray, " N"], size: int
) -> Int64[np.ndarray, " N"]:
    return np.maximum(ends - firsts - size, 0) + 1


def window_firsts(
    generation: JoinedColumns, positions: Int64[np.ndarray, " N"], size: int
) -> Int64[np.ndarray, " W"]:
    """Return the first chunk of every window of ``size`` chunks of each document."""
    firsts, ends = generation.chunks_of(positions)
    return ranges(firsts, _num_windows(firsts, ends, size))


def blocks(counts_N: Int64[np.ndarray, " N"], most_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield runs of documents, or passages, of at most so many chunks together, or of one longer one."""
    assert np.all(counts_N >= 1), "a document without chunks was published"
    start = num_chunks = 0
    for index, count in enumerate(counts_N.tolist()):
        if num_chunks and num_chunks + count > most_chunks:
            yield start, index
            start, num_chunks = index, 0
        num_chunks += count
    if start < len(counts_N):
        yield start, len(counts_N)


MAX_WORDS = 128
"""Words of a query that reach BM25.

Nothing cuts it short, and its cost grows with them (7 ms at 128, 70 ms at 1,000, 20,000 documents).
"""
MAX_REPEATS = 3
"""How often one word counts."""
FEW_SHARE = 16
"""Where a filter leaves one document of so many, BM25 scores those alone."""


def bounded_words(query: str) -> str:
    """Return the first :data:`MAX_WORDS` words of a query, each at most :data:`MAX_REPEATS` times."""
    seen: Counter[str] = Counter()
    kept: list[str] = []
    for word in query.split():
        folded = word.casefold()
        seen[folded] += 1
        if seen[folded] <= MAX_REPEATS:
            kept.append(word)
    return " ".join(kept[:MAX_WORDS])


def words_asked(query: str, languages: Sequence[str]) -> Counter[Variants]:
    """Return the words that BM25 counts of a query, and how often it has each, in its order."""
    return Counter(terms_of_query(bounded_words(query), languages))


def few_documents(
    generation: Generation, allowed: Int64[np.ndarray, " A"] | None, alone: FewDocuments | None = None
) -> FewDocuments | None:
    """Return the allowed documents where BM25 is to score no others: they are few, or the others hidden.

    ``alone`` are the only documents that count, None where all do; the allowed are among them.
    """
    if allowed is None or (len(allowed) * FEW_SHARE > generation.num_documents and alone is None):
        return None
    if alone is not None and len(allowed) == len(alone.documents_A):
        return alone
    return FewDocuments.of(allowed, generation.chunk_offsets)


def bm25_documents(
    generation: Generation,
    words: Mapping[Variants, int],
    few: FewDocuments | None,
    totals: tuple[Totals, Totals] | None = None,
    *,
    alone: FewDocuments | None = None,
) -> BM25Scores:
    """Return the BM25 of title and text, of ``few`` documents or of all.

    ``totals`` are those of a corpus that the generation is a part of, ``alone`` is as
    :func:`few_documents` has it.
    """
    if alone is not None:
        totals = generation.document_bm25.totals_of_few(words, alone)
    scores = generation.document_bm25.scores(words, totals, few)
    return BM25Scores(scores_M=scores, rows=None if few is None else few.documents_A)


def best_documents(
    generation: JoinedColumns, bm25: BM25Scores, allowed: Int64[np.ndarray, " A"] | None, limit: int
) -> tuple[Int64[np.ndarray, " D"], Float32[np.ndarray, " D"]]:
    """Return the ``allowed`` documents with the best scores above 0, best first, ties at the end by id."""
    if bm25.rows is not None or allowed is None:
        places = np.flatnonzero(bm25.scores_M > 0.0)
        found = places if bm25.rows is None else bm25.rows[places]
    else:
        places = found = allowed[bm25.scores_M[allowed] > 0.0]
    scores = bm25.scores_M[places]
    best = best_by_id(scores, limit, lambda tied: generation.ids_of(found[tied]))
    return found[best], scores[best]


def bm25_passages(
    generation: Generation,
    words: Mapping[Variants, int],
    size: int,
    allowed: Int64[np.ndarray, " A"] | None,
    few: FewDocuments | None,
    *,
    alone: FewDocuments | None = None,
) -> BM25Scores | None:
    """Return BM25 of the windows of ``size`` chunks of the ``allowed`` documents, 0 of others.

    None where no word of the query stands in any. ``few`` and ``alone`` are as :func:`few_documents` has
    them.
    """
    bm25 = generation.passage_bm25
    totals = None if alone is None else bm25.totals_of_few(words, size, alone)
    scores = bm25.scores(words, size, totals, few)
    if few is None and allowed is not None:
        scores *= is_in_documents(generation, allowed)
    if scores.max(initial=0.0) <= 0.0:
        return None
    return BM25Scores(scores_M=scores, rows=None if few is None else few.chunks_M)


def is_in_documents(generation: Generation, documents: Int64[np.ndarray, " A"]) -> Bool[np.ndarray, " M"]:
    """Tell of each chunk whether it belongs to one of some documents."""
    is_one = np.zeros(generation.num_documents, np.bool_)
    is_one[documents] = True
    return is_one[generation.chunk_documents]


BLOCK_POSTINGS: Final = 1 << 20
"""Postings read at once, about 30 MB; those of one token are read whole."""


class _Postings(NamedTuple):
    """Postings of some tokens of a query, token after token; ``firsts_T`` is where each begins."""

    chunks_P: Int64[np.ndarray, " P"]
    shares_P: Float32[np.ndarray, " P"]
    firsts_T: Int64[np.ndarray, " T"]


def sparse_documents(
    generation: Generation,
    query: Mapping[int, float],
    size: int,
    allowed: Int64[np.ndarray, " A"] | None,
    limit: int,
) -> tuple[Int64[np.ndarray, " D"], Float32[np.ndarray, " D"]]:
    """Return the positions and scores of the ``allowed`` documents with the best passages of ``size`` chunks.

    Best first, ties at the end by id; empty where no token of the query stands in any.

        score(passage)  = Σ weight in the query · highest weight in the passage's chunks
        score(document) = that of its best passage

    A passage is a run of chunks, as BM25 has it: an encoder takes the highest weight of a text's tokens, so
    what its chunks have together is what the passage has. A query has up to 192 tokens, so postings are read
    many tokens at a time and scored as whole documents first. That is exact where a document is one passage,
    and no passage of a longer one scores higher: only the longer ones that may be among the best are looked
    at closely. No score depends on the corpus: each part of it scores its own.
    """
    words = generation.sparse_words
    assert words is not None, "a query has weights where the collection has some"
    few = list(islice(_postings(words, query), 2))
    read = partial(_postings, words, query) if len(few) > 1 else lambda: iter(few)
    scores_N = _whole_documents(generation, read())
    if allowed is not None:
        scores_N[~np.isin(np.arange(len(scores_N)), allowed, assume_unique=True)] = 0.0
    is_bound_N = np.diff(generation.chunk_offsets) > size
    best, _ = best_documents(generation, BM25Scores(scores_M=scores_N), None, limit)
    documents = np.sort(best[is_bound_N[best]])
    while len(documents):
        scores_N[documents] = _best_sparse_passages(generation, read(), documents, size)
        is_bound_N[documents] = False
        if len(best) < limit:  # no other has a token of the query
            break
        # At least so much is among the best: after a second round no other document has a chance.
        documents = np.flatnonzero(is_bound_N & (scores_N >= scores_N[best].min()))
    return best_documents(generation, BM25Scores(scores_M=scores_N), None, limit)


def _whole_documents(generation: JoinedColumns, postings: Iterator[_Postings]) -> Float32[np.ndarray, " N"]:
    """Return the score of each document as one passage."""
    scores_N = np.zeros(len(generation.chunk_offsets) - 1)
    for chunks_P, shares_P, firsts_T in postings:
        owners_P = generation.chunk_documents[chunks_P]
        is_first_P = np.append(True, owners_P[1:] != owners_P[:-1])
        is_first_P[firsts_T] = True
        firsts = np.flatnonzero(is_first_P)
        highest = np.maximum.reduceat(shares_P, firsts)
        scores_N += np.bincount(owners_P[firsts], highest, len(scores_N))
    return scores_N.astype(np.float32)


def _best_sparse_passages(
    generation: JoinedColumns,
    postings: Iterator[_Postings],
    documents_n: Int64[np.ndarray, " n"],
    size: int,
) -> Float32[np.ndarray, " n"]:
    """Return the score of the best passage of documents of more than ``size`` chunks each, ascending."""
    counts_n = np.diff(generation.chunk_offsets)[documents_n]
    ends_n = np.cumsum(counts_n)
    firsts_n = ends_n - counts_n
    place_N = np.full(len(generation.chunk_offsets) - 1, -1)
    place_N[documents_n] = np.arange(len(documents_n))
    scores_W: Float64[np.ndarray, " W"] = np.zeros(int(ends_n[-1]))
    for chunks_P, shares_P, firsts_T in postings:
        owners_P = generation.chunk_documents[chunks_P]
        asked = np.flatnonzero(place_N[owners_P] >= 0)
        tokens = np.searchsorted(firsts_T, asked, side="right") - 1
        owners = owners_P[asked]
        columns = chunks_P[asked] - generation.chunk_offsets[owners] + firsts_n[place_N[owners]]
        for start, stop in blocks(counts_n, BLOCK_CHUNKS):
            first, end = int(firsts_n[start]), int(ends_n[stop - 1])
            own = np.flatnonzero((columns >= first) & (columns < end))
            shares_TW = np.zeros((len(firsts_T), end - first), np.float32)
            shares_TW[tokens[own], columns[own] - first] = shares_P[asked[own]]
            scores_W[first : end - size + 1] += _sliding_max(shares_TW, size).sum(axis=0, dtype=np.float64)
    # Every other part is of windows that would leave their document.
    bounds = np.stack([firsts_n, ends_n - size + 1], axis=1).ravel()[:-1]
    return np.maximum.reduceat(scores_W, bounds)[::2].astype(np.float32)


def _sliding_max(shares_TM: Float32[np.ndarray, "T M"], size: int) -> Float32[np.ndarray, "T W"]:
    """Return the maximum of every ``size`` consecutive columns, built by doubling."""
    width = 1
    while width < size:
        step = min(width, size - width)
        shares_TM = np.maximum(shares_TM[:, :-step], shares_TM[:, step:])
        width += step
    return shares_TM


def _postings(words: JoinedWords, query: Mapping[int, float]) -> Iterator[_Postings]:
    """Yield the postings of all tokens of a query, several tokens at a time."""
    found: list[tuple[Int64[np.ndarray, " _"], Float32[np.ndarray, " _"]]] = []
    num_found = 0
    for token, weight in query.items():
        chunks, steps = words.postings(sparse_term(token))
        if not len(chunks):
            continue
        if found and num_found + len(chunks) > BLOCK_POSTINGS:
            yield _joined(found)
            found, num_found = [], 0
        found.append((chunks, steps.astype(np.float32) * np.float32(weight * SPARSE_STEP)))
        num_found += len(chunks)
    if found:
        yield _joined(found)


def _joined(found: list[tuple[Int64[np.ndarray, " _"], Float32[np.ndarray, " _"]]]) -> _Postings:
    lengths = [len(chunks) for chunks, _ in found]
    return _Postings(
        np.concatenate([chunks for chunks, _ in found]),
        np.concatenate([shares for _, shares in found]),
        np.cumsum([0, *lengths[:-1]]),
    )
