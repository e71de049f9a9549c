"""Choose candidate documents from every index, and score them exactly.

The indexes only nominate: the document index its best documents, the chunk index the documents of its best
chunks, BM25 its best documents and those of its best passages. Every nominee is then scored from the stored
vectors and words, so that a score never depends on which list found it; the windows of those that are
returned follow.
Quantised indexes return approximate vectors, and the scores are exact for those. Quotes, operators and
boolean words in a query are words for BM25 or nothing, never syntax.

A window of k consecutive chunks scores the query's cosine with the L2-normalised sum of its landmarks'
vectors: the rule that makes the document vector, which is the widest window. Windows shape passages, never
the ranking of documents: ``ranking`` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.segments.segment import JoinedColumns
from cairn.pipeline.lexical.bm25 import FewDocuments, Totals
from cairn.pipeline.lexical.tokenizer import Variants, terms_of_query
from cairn.pipeline.ragged import ranges
from cairn.pipeline.vector_index.faiss_index import NO_POSITION
from jaxtyping import Bool, Float, Float32, Int64

MAX_CHUNK_HITS = 16_384
"""Where the search for enough documents among the best chunks gives up."""
MAX_SCORED_CHUNKS = 65_536
"""Chunk vectors scored for one query: about 100 ms and, block by block, 50 MB at 384 dimensions."""
BLOCK_CHUNKS = 16_384
"""Chunk vectors decoded at once; a single longer document is still decoded whole."""
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
    if not len(num_chunks_N):
        return np.empty(0, dtype=np.float32)
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

    Window w covers chunks ``first[w] : end[w]`` of the collection; ``owner`` is its document's index among
    those asked for.
    """

    owner: Int64[np.ndarray, " W"]
    first: Int64[np.ndarray, " W"]
    end: Int64[np.ndarray, " W"]
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
        first=first,
        end=np.minimum(first + size, ends[owner]),
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


def blocks(counts_N: Int64[np.ndarray, " N"], most_chunks: int = BLOCK_CHUNKS) -> Iterator[tuple[int, int]]:
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
