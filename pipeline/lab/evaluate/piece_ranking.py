"""Rank documents and passages by overlapping pieces, each a text of its own, as a careful RAG pipeline does.

    dense           cosine
    piece-bm25      BM25 of the text that is encoded
    piece-rrf       Σ 1 / (60 + rank) of both
    convex          (cosine - mean) / (max - mean) + BM25 / max
    whitened        cosine after soft whitening by a sample of the pieces
    convex+maxsim   convex; its 50 best pieces gain their MaxSim, scaled to 0 … 1 among them

A document scores as its best piece. Passages are pieces by their score, without what a better one holds.
Mean and maxima are those of a query over all pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from cairn.pipeline.context.whitening import Whitening
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.lab.evaluate.evidence import BUDGETS
from cairn.pipeline.lab.evaluate.lexical import LexicalHits
from cairn.pipeline.lab.evaluate.measures import RUN_DEPTH, RankedDocuments, id_ranks
from cairn.pipeline.lab.evaluate.passages import Passages, best_passages, overlapping_passages
from cairn.pipeline.lab.evaluate.ranking import BLOCK_QUERIES, NUM_CANDIDATES, RRF_K, Answer
from cairn.pipeline.lab.evaluate.systems import Ranking, System
from jaxtyping import Bool, Float, Float32, Float64, Int64

MAX_SIM_PIECES: Final = 50
"""Best pieces of a query that MaxSim judges."""

WHITENING_SAMPLE: Final = 512
"""Pieces that the axes of whitening are taken from, as many as a stored context has by default."""

MaxSimOf = Callable[[Int64[np.ndarray, "Q K"]], Float32[np.ndarray, "Q K"]]
"""From pieces of every query to their MaxSim."""


class PieceRanker:
    """Ranks with the pieces of one encoding; ``bm25`` and ``max_sim`` are None where no system needs them."""

    def __init__(
        self,
        doc_ids: Sequence[str],
        encoded: EncodedSet,
        bm25: LexicalHits | None,
        max_sim: MaxSimOf | None,
    ) -> None:
        self._id_rank_N = id_ranks(doc_ids)
        self._encoded = encoded
        self._bm25 = bm25
        self._max_sim = max_sim

    def rank(
        self, system: System, wants_passages_Q: Bool[np.ndarray, " Q"], depth: int = RUN_DEPTH
    ) -> list[Answer]:
        """Answer every query with at most ``depth`` documents; passages only where they are wanted."""
        passages = overlapping_passages(self._encoded)
        scores = self._with_max_sim() if system.needs_max_sim else self._scores(system.ranking)
        return [
            self._answer(scores_M, passages if wants_passages else None, depth)
            for scores_M, wants_passages in zip(scores, wants_passages_Q.tolist(), strict=True)
        ]

    def _answer(self, scores_M: Float64[np.ndarray, " M"], passages: Passages | None, depth: int) -> Answer:
        scores_N = np.maximum.reduceat(scores_M, self._encoded.chunk_offsets[:-1])
        return Answer(
            documents=RankedDocuments.best(scores_N, self._id_rank_N, depth),
            passages=None if passages is None else best_passages(scores_M, passages, max(BUDGETS)),
        )

    def _with_max_sim(self) -> Iterator[Float64[np.ndarray, " M"]]:
        assert self._max_sim is not None, "a system that ranks with MaxSim was given none"
        num_judged = min(MAX_SIM_PIECES, len(self._encoded.chunk_vectors_MV))
        judged_QK = np.array([_best_first(scores_M)[:num_judged] for scores_M in self._scores("convex")])
        max_sim_QK = self._max_sim(judged_QK)
        for query, scores_M in enumerate(self._scores("convex")):
            scores_M[judged_QK[query]] += scaled(max_sim_QK[query])
            yield scores_M

    def _scores(self, ranking: Ranking) -> Iterator[Float64[np.ndarray, " M"]]:
        """Yield the scores of all pieces, query by query; minus infinity where a piece is no candidate."""
        chunk_MV, query_QV = self._encoded.chunk_vectors_MV, self._encoded.query_vectors_QV
        if ranking == "whitened":
            chunks = np.linspace(0, len(chunk_MV) - 1, min(len(chunk_MV), WHITENING_SAMPLE)).astype(np.int64)
            whitening = Whitening.of(chunk_MV[chunks])
            chunk_MV, query_QV = whitening.apply(chunk_MV), whitening.apply(query_QV)
        for start in range(0, len(query_QV), BLOCK_QUERIES):
            for offset, cosine_M in enumerate(query_QV[start : start + BLOCK_QUERIES] @ chunk_MV.T):
                yield self._score(ranking, start + offset, cosine_M)

    def _score(
        self, ranking: Ranking, query: int, cosine_M: Float32[np.ndarray, " M"]
    ) -> Float64[np.ndarray, " M"]:
        if ranking in ("dense", "whitened"):
            return cosine_M.astype(np.float64)
        assert self._bm25 is not None, "a system that ranks with BM25 was given none"
        found, bm25 = self._bm25.positions[query], self._bm25.scores[query]
        if ranking == "convex":
            return convex(cosine_M, found, bm25)
        if ranking == "piece-rrf":
            return reciprocal_ranks(cosine_M, found)
        scores_M = np.full(len(cosine_M), -np.inf)
        scores_M[found] = bm25
        return scores_M


def convex(
    cosine_M: Float32[np.ndarray, " M"], found: Int64[np.ndarray, " A"], bm25: Float32[np.ndarray, " A"]
) -> Float64[np.ndarray, " M"]:
    """Return cosines above their mean and BM25, each as a share of its maximum, added up."""
    cosine_M = cosine_M.astype(np.float64)
    mean, highest = cosine_M.mean(), cosine_M.max()
    scores_M = (cosine_M - mean) / (highest - mean) if highest > mean else np.zeros_like(cosine_M)
    if len(found):
        scores_M[found] += bm25 / bm25.max()
    return scores_M


def reciprocal_ranks(
    cosine_M: Float32[np.ndarray, " M"], found: Int64[np.ndarray, " A"]
) -> Float64[np.ndarray, " M"]:
    """Return Σ 1 / (60 + rank) over the best of both lists, minus infinity for other pieces."""
    scores_M = np.zeros(len(cosine_M))
    for ranking in (_best_first(cosine_M)[:NUM_CANDIDATES], found[:NUM_CANDIDATES]):
        scores_M[ranking] += 1.0 / (RRF_K + 1 + np.arange(len(ranking)))
    return np.where(scores_M > 0.0, scores_M, -np.inf)


def scaled(scores_K: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    """Lay scores from 0, the lowest, to 1, the highest; all 0 where they are equal."""
    low, high = scores_K.min(), scores_K.max()
    return (scores_K - low) / (high - low) if high > low else np.zeros_like(scores_K)


def _best_first(scores_M: Float[np.ndarray, " M"]) -> Int64[np.ndarray, " M"]:
    return np.argsort(-scores_M, kind="stable")
