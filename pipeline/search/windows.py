"""Passage size chosen at query time: sliding windows of k neighbouring landmarks, nothing encoded again.

A window is k consecutive chunks of one document; it never crosses into another, and a document with fewer
than k chunks is one window. Its score is the query's cosine with the L2-normalised sum of its landmarks'
stored vectors: the rule that makes the document vector, which is the widest window. k = 1 leaves the chunks
as they are. The vectors of windows shape passages, never the ranking of documents: ``ranking`` says why.

Windows slide because the passage a query asks for rarely starts where a fixed group would. Share of the
evidence within the best 2,000 characters of a collection (all-MiniLM-L6-v2, landmarks of 64 tokens, 20 whole
articles of SQuAD, 600 questions): single landmarks .559, fixed pairs .586, sliding pairs .612.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.products import inner_products
from cairn.pipeline.ragged import ranges
from jaxtyping import Float, Float32, Int64

DEFAULT_CHUNK_TOKENS = 128
"""About a paragraph: long enough to be read alone, short enough to quote."""
FIRST_LOOK = 256
"""Windows sorted at first; all are when these are read to the end."""


def window_size(chunk_tokens: int | None, settings: Mapping[str, Any]) -> int:
    """Return how many landmarks make a passage of ``chunk_tokens``; ``settings`` are the manifest's.

    ``chunk_tokens`` must be a multiple of the stored landmark interval. None takes
    :data:`DEFAULT_CHUNK_TOKENS` where the interval divides it, else the interval itself.
    """
    interval = int(settings["encoder"]["landmark_interval"])
    default = interval * default_window(interval)
    wanted = default if chunk_tokens is None else chunk_tokens
    if wanted < interval or wanted % interval:
        allowed = f"{interval}, {2 * interval}, {3 * interval}, …; left out, it is {default}"
        raise ConfigError(
            f"chunk_tokens must be a multiple of this collection's {interval} ({allowed}), got {wanted}"
        )
    return wanted // interval


def default_window(interval: int) -> int:
    """Return how many landmarks make a passage where nothing else is asked for."""
    return 1 if DEFAULT_CHUNK_TOKENS % interval else DEFAULT_CHUNK_TOKENS // interval


def window_scores(
    vectors_MV: Float32[np.ndarray, "M V"], query_V: Float32[np.ndarray, " V"], size: int
) -> Float32[np.ndarray, " W"]:
    """Return the score of each window of one document, or of a part of it, in order; a zero sum scores 0.

    A single landmark scores its inner product with the query, as in the chunk index.
    """
    size = min(size, len(vectors_MV))
    if size <= 1:
        return inner_products(vectors_MV, query_V)
    sums_WV = sliding_sums(vectors_MV, size)
    norms_W = np.sqrt(np.einsum("wv,wv->w", sums_WV, sums_WV))
    return inner_products(sums_WV, query_V) / np.maximum(norms_W, np.finfo(np.float32).tiny)


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


def choose_windows(scores_W: Float[np.ndarray, " W"], size: int, limit: int) -> list[int]:
    """Return up to ``limit`` windows that share no landmark, best first, ties by place.

    What lies between two chosen windows and is shorter than ``size`` is in none.
    """
    left_W = scores_W.copy()
    chosen: list[int] = []
    while len(chosen) < limit:
        best = int(np.argmax(left_W))
        if left_W[best] == -np.inf:
            break
        chosen.append(best)
        left_W[max(best - size + 1, 0) : best + size] = -np.inf
    return chosen


def new_pieces(
    scores_W: Float[np.ndarray, " W"], first_W: Int64[np.ndarray, " W"], end_W: Int64[np.ndarray, " W"]
) -> Iterator[tuple[int, int, int]]:
    """Yield (window, first chunk, end chunk): of each window, best first, what no better one holds.

    So a good place grows by its neighbours, a landmark at a time, and nothing is read twice. A window held
    whole by better ones, and one that scores minus infinity, is left out. ``first_W`` and ``end_W`` are
    chunks of the whole collection; windows of a document are equally long.
    """
    taken: set[int] = set()
    for window in _best_first(scores_W):
        if scores_W[window] == -np.inf:
            return
        new = [chunk for chunk in range(int(first_W[window]), int(end_W[window])) if chunk not in taken]
        # Neighbours: better windows hold stretches at least as long as this one, so never just its middle.
        if new:
            taken.update(new)
            yield window, new[0], new[-1] + 1


def _best_first(scores_W: Float[np.ndarray, " W"]) -> Iterator[int]:
    """Yield windows by falling score, ties by place; sorting them all only where the best few do not do."""
    few = np.arange(len(scores_W))
    if len(scores_W) > FIRST_LOOK:
        few = np.flatnonzero(
            scores_W >= np.partition(scores_W, len(scores_W) - FIRST_LOOK)[len(scores_W) - FIRST_LOOK]
        )
    yield from few[np.argsort(-scores_W[few], kind="stable")].tolist()
    if len(few) < len(scores_W):
        yield from np.argsort(-scores_W, kind="stable")[len(few) :].tolist()
