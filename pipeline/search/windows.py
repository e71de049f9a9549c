"""Passage size chosen at query time: windows of k neighbouring landmarks, sliding by one, formed without encoding anything again.

A window is k consecutive chunks of one document; it never crosses into another, and a document with fewer than k chunks is one window.
Its score is the query's cosine with the L2-normalised sum of its landmarks' stored vectors: the rule that makes the document vector, which
is the widest window. k = 1 leaves the chunks as they are.
Windows shape passages, never the ranking of documents: ``ranking`` says why.

Windows slide because the passage a query asks for rarely starts where a fixed group would. Share of the evidence within the best 2,000
characters of a collection (all-MiniLM-L6-v2, landmarks of 64 tokens, 20 whole articles of SQuAD, 600 questions): single landmarks .559,
fixed pairs .586, sliding pairs .612.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from pipeline.errors import ConfigError

DEFAULT_CHUNK_TOKENS = 128
"""About a paragraph: long enough to be read alone, short enough to quote."""


def window_size(chunk_tokens: int | None, settings: Mapping[str, Any]) -> int:
    """Return how many landmarks make a passage of ``chunk_tokens``; ``settings`` is the manifest's resolved configuration.

    ``chunk_tokens`` must be a multiple of the stored landmark interval. None takes :data:`DEFAULT_CHUNK_TOKENS` where the interval divides
    it, else the interval itself.
    """
    interval = int(settings["encoder"]["landmark_interval"])
    default = interval if DEFAULT_CHUNK_TOKENS % interval else DEFAULT_CHUNK_TOKENS
    wanted = default if chunk_tokens is None else chunk_tokens
    if wanted < interval or wanted % interval:
        allowed = f"{interval}, {2 * interval}, {3 * interval}, …; left out, it is {default}"
        raise ConfigError(f"chunk_tokens must be a multiple of this collection's {interval} ({allowed}), got {wanted}")
    return wanted // interval


def window_scores(vectors_MV: Float32[np.ndarray, "M V"], query_V: Float32[np.ndarray, " V"], size: int) -> Float32[np.ndarray, " W"]:
    """Return the score of each window of one document (or of a stretch of it), in order; a sum of zero scores 0.

    A single landmark scores its inner product with the query, as in the chunk index.
    """
    size = min(size, len(vectors_MV))
    if size <= 1:
        return vectors_MV @ query_V
    sums_WV = sliding_sums(vectors_MV, size)
    norms_W = np.sqrt(np.einsum("wv,wv->w", sums_WV, sums_WV))
    return sums_WV @ query_V / np.maximum(norms_W, np.finfo(np.float32).tiny)


def sliding_sums(vectors_MV: Float32[np.ndarray, "M V"], size: int) -> Float32[np.ndarray, "W V"]:
    """Return the sum of every ``size`` consecutive rows, built by doubling: about log2(size) additions of the whole array."""
    sums_WV, width = vectors_MV, 1
    for bit in f"{size:b}"[1:]:
        sums_WV = sums_WV[:-width] + sums_WV[width:]
        width *= 2
        if bit == "1":
            sums_WV = sums_WV[:-1] + vectors_MV[width:]
            width += 1
    return sums_WV


def choose_windows(scores_W: Float32[np.ndarray, " W"], size: int, limit: int) -> list[int]:
    """Return up to ``limit`` windows, best first, ties by place; one that shares a landmark with a better one is passed over.

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
