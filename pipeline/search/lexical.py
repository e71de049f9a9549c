"""BM25 of documents and passages from the words of segments, by position.

Quotes, operators and boolean words in a user's text are words or nothing, never syntax.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from cairn.pipeline.index.bm25 import Totals
from cairn.pipeline.index.generation import Generation
from jaxtyping import Bool, Float32, Int64

MAX_WORDS = 128
"""Words of a query that reach BM25.

Nothing cuts it short, and its cost grows with them (7 ms at 128, 70 ms at 1,000, 20,000 documents).
"""
MAX_REPEATS = 3
"""How often one word counts."""


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


def bm25_documents(
    generation: Generation,
    query: str,
    allowed: Int64[np.ndarray, " A"] | None,
    limit: int,
    totals: tuple[Totals, Totals] | None = None,
) -> tuple[Int64[np.ndarray, " D"], Float32[np.ndarray, " D"]]:
    """Return the positions and scores of the ``allowed`` documents with the best BM25 of title and text.

    Best first, ties by position; empty where no word of the query stands in any. ``totals`` are those of a
    corpus that the generation is a part of.
    """
    scores = generation.document_bm25.scores(bounded_words(query), totals)
    found = np.flatnonzero(scores > 0.0) if allowed is None else allowed[scores[allowed] > 0.0]
    if len(found) > limit:
        least = np.partition(scores[found], -limit)[-limit]
        found = found[scores[found] >= least]
    found = found[np.lexsort((found, -scores[found]))][:limit]
    return found, scores[found]


def bm25_passages(
    generation: Generation,
    query: str,
    size: int,
    allowed: Int64[np.ndarray, " A"] | None,
) -> Float32[np.ndarray, " M"] | None:
    """Return BM25 of the window of ``size`` chunks that begins with each chunk.

    It is 0 outside of the ``allowed`` documents. None where no word of the query stands in any.
    """
    scores = generation.passage_bm25.scores(bounded_words(query), size)
    if allowed is not None:
        scores *= is_in_documents(generation, allowed)
    return scores if scores.max(initial=0.0) > 0.0 else None


def is_in_documents(generation: Generation, documents: Int64[np.ndarray, " A"]) -> Bool[np.ndarray, " M"]:
    """Tell of each chunk whether it belongs to one of some documents."""
    is_one = np.zeros(generation.num_documents, np.bool_)
    is_one[documents] = True
    return is_one[generation.chunk_documents]
