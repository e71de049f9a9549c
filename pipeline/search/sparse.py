"""The best documents of a query by the weights of a learned sparse encoder.

    score(passage)  = Σ weight in the query · highest weight in the passage's chunks
    score(document) = that of its best passage

A passage is a run of chunks, as BM25 has it: an encoder takes the highest weight of a text's tokens, so what
its chunks have together is what the passage has. A query has up to 192 tokens, so postings are read many
tokens at a time and scored as whole documents first. That is exact where a document is one passage, and no
passage of a longer one scores higher: only the longer ones that may be among the best are looked at closely.
No score depends on the corpus: each part of it scores its own.

    N documents    M chunks    P postings    T tokens of the query    W windows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.segments.segment import JoinedColumns, JoinedWords
from cairn.pipeline.index.words import sparse_term
from cairn.pipeline.search.candidates import BM25Scores, best_documents, blocks
from cairn.pipeline.types import SPARSE_STEP
from jaxtyping import Float32, Float64, Int64

BLOCK_POSTINGS: Final = 1 << 20
"""Postings read at once, about 30 MB; those of one token are read whole."""
BLOCK_CHUNKS: Final = 16_384
"""Chunks of longer documents looked at together: 13 MB for 192 tokens."""


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
        scores_N[documents] = _best_passages(generation, read(), documents, size)
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


def _best_passages(
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
