"""Several scores of the same candidates become one ranking: pure functions on arrays.

Dense parts (cosines) are averaged with weights. The dense score and BM25 have different scales, so each is
first mapped to a scale of the query's own, then averaged: the convex combination of Bruch, Gai & Ingber 2023
("An Analysis of Fusion Functions for Hybrid Retrieval"). The scales end at the best score and begin at one
that does not depend on the other candidates: that of an average chunk, and BM25's 0.

Reciprocal rank fusion, which LanceDB's ``RRFReranker`` computes, is deliberately not used: it throws the
margins away. With all-MiniLM-L6-v2 and 128-token chunks, nDCG@10 on SQuAD passages / CACM / Cranfield: dense
.809 / .398 / .479, BM25 .949 / .442 / .525, RRF (k = 60) .890 / .503 / .545, this combination .956 / .532 /
.554; BM25 weights from .75 to 1.5 differ by less than .015 on each.

Where a collection has token vectors, they judge the best windows (late interaction):

    fused ranking ─▶ 50 best windows ─▶ MaxSim, scaled to 0 … 1 among them ─▶ added
    query's token states ─▶ as coded ──┘ weights of query tokens, trained or idf

A window takes, for each query token, the better of its own best match and its document's title's. Windows
that are not judged gain nothing. Source: Khattab & Zaharia 2020 (ColBERT), eq. 3; differs: weights.

    q query tokens    W windows    J judged windows    V vector dim
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from cairn.pipeline.index.segments.segment import TokenCodes, TokenVectors
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search_options import Granularity, SearchOptions
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import QueryTokens
from jaxtyping import Float, Float32, Float64, Int64

COSINES_OF: Final[Mapping[Granularity, tuple[str, ...]]] = {
    "document": ("document",),
    "chunk": ("chunk",),
    "both": ("document", "chunk"),
}
"""The cosines that a document's dense score is the weighted mean of."""


def weighted_mean(
    parts: Sequence[Float[np.ndarray, " N"]], weights: Sequence[float]
) -> Float64[np.ndarray, " N"]:
    """Average the parts of a score in float64.

    The weights need not sum to one, only to something positive.
    """
    total = sum(
        np.asarray(part, dtype=np.float64) * weight for part, weight in zip(parts, weights, strict=True)
    )
    return np.asarray(total / sum(weights), dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A linear map of one kind of score: ``low`` becomes 0 and ``high`` 1.

    Where they are equal, every score becomes 1.
    """

    low: float
    high: float

    @classmethod
    def of(cls, scores_N: Float[np.ndarray, " N"], floor: float) -> Scale:
        """Reach from ``floor``, a score that means something, to the best.

        From the lowest where none passes the floor.
        """
        high = float(scores_N.max())
        return cls(low=floor if high > floor else float(scores_N.min()), high=high)

    def apply(self, scores_N: Float[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Map scores; what lies below ``low`` becomes negative."""
        wide = np.asarray(scores_N, dtype=np.float64)
        return np.ones_like(wide) if self.high <= self.low else (wide - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """How one query's dense scores meet BM25, in documents and passages alike: its scales and weights.

    ``dense`` reaches from what an average chunk of the corpus scores to the best document, the others from 0
    to the best. ``bm25`` is that of whole documents, ``passage_bm25`` that of passages, ``sparse`` that of a
    learned sparse encoder; some may be None: the collection has none, or nothing was found.
    """

    dense: Scale
    bm25: Scale | None
    passage_bm25: Scale | None
    dense_weight: float
    bm25_weight: float
    sparse: Scale | None = None
    sparse_weight: float = 0.0

    @property
    def weight(self) -> float:
        """Return what the fused parts weigh together."""
        bm25 = self.bm25_weight if self.bm25 or self.passage_bm25 else 0.0
        return self.dense_weight + bm25 + (self.sparse_weight if self.sparse else 0.0)

    def documents(
        self,
        dense_N: Float[np.ndarray, " N"],
        bm25_N: Float[np.ndarray, " N"] | None,
        passage_bm25_N: Float[np.ndarray, " N"] | None,
        sparse_N: Float[np.ndarray, " N"] | None = None,
    ) -> Float64[np.ndarray, " N"]:
        """Combine dense scores with the mean of both BM25, the document's and its best passage's.

        0 where no word of the query stands. Scores of a sparse encoder are a further part.
        """
        lexical = [
            scale.apply(part)
            for scale, part in ((self.bm25, bm25_N), (self.passage_bm25, passage_bm25_N))
            if scale and part is not None
        ]
        parts, weights = [self.dense.apply(dense_N)], [self.dense_weight]
        if lexical:
            parts.append(weighted_mean(lexical, [1.0] * len(lexical)))
            weights.append(self.bm25_weight)
        if self.sparse is not None and sparse_N is not None:
            parts.append(self.sparse.apply(sparse_N))
            weights.append(self.sparse_weight)
        return weighted_mean(parts, weights)

    def with_windows(self, high: float | None) -> Fusion:
        """Return the fusion for passages of another size than those that rank documents.

        ``high`` is the highest BM25 of all of them, None where no word was found in any.
        """
        return replace(self, passage_bm25=None if high is None else Scale(low=0.0, high=high))

    def passages(
        self, cosine_W: Float[np.ndarray, " W"], bm25_W: Float[np.ndarray, " W"] | None
    ) -> Float64[np.ndarray, " W"]:
        """Combine passages' cosines with their own BM25 as documents' scores are combined."""
        dense_W = self.dense.apply(cosine_W)
        if self.passage_bm25 is None or bm25_W is None:
            return dense_W
        return weighted_mean(
            [dense_W, self.passage_bm25.apply(bm25_W)], [self.dense_weight, self.bm25_weight]
        )


LATE_WEIGHT: Final = 0.5
"""What MaxSim weighs in a document's score beside BM25, which judges words, too; each of the others weighs 1.

As much as they where vectors alone rank.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateFusion:
    """How one query's MaxSim, scaled to 0 … 1, meets its other scores.

    ``dense`` scales cosines where BM25 has no say, None where the scores are fused already. A document's
    scores weigh ``weight`` together, and MaxSim ``late_weight``. The best possible score is 1.
    """

    dense: Scale | None
    weight: float
    late_weight: float

    @classmethod
    def of(cls, dense_N: Float[np.ndarray, " N"], fusion: Fusion | None, average_chunk: float) -> LateFusion:
        """Return that of a query's documents, whose dense scores are ``dense_N`` where nothing is fused."""
        if fusion is None:
            return cls(dense=Scale.of(dense_N, floor=average_chunk), weight=1.0, late_weight=1.0)
        return cls(dense=None, weight=fusion.weight, late_weight=LATE_WEIGHT)

    def documents(
        self, scores_N: Float[np.ndarray, " N"], late_N: Float[np.ndarray, " N"]
    ) -> Float64[np.ndarray, " N"]:
        """Combine documents' scores with the scaled MaxSim of their best windows."""
        return weighted_mean([self._own(scores_N), late_N], [self.weight, self.late_weight])

    def passages(
        self, scores_W: Float[np.ndarray, " W"], late_W: Float[np.ndarray, " W"]
    ) -> Float64[np.ndarray, " W"]:
        """Combine passages' scores with their scaled MaxSim: half and half.

        In documents with BM25 it weighs a fifth: words count there that stand far apart.
        """
        return weighted_mean([self._own(scores_W), late_W], [1.0, 1.0])

    def _own(self, scores_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        return scores_N if self.dense is None else self.dense.apply(scores_N)


def document_scores(
    options: SearchOptions,
    cosines: Mapping[str, Float[np.ndarray, " N"]],
    *,
    bm25_N: Float[np.ndarray, " N"] | None = None,
    passage_bm25_N: Float[np.ndarray, " N"] | None = None,
    sparse_N: Float[np.ndarray, " N"] | None = None,
    average_chunk: float = 0.0,
    is_known: bool = True,
) -> tuple[Float64[np.ndarray, " N"], Fusion | None]:
    """Return the candidates' scores, and how BM25 and sparse scores were fused into them (None: none was).

    ``cosines`` has the parts that :data:`COSINES_OF` names, ``average_chunk`` is what an average chunk of the
    corpus scores; fusion alone needs it. A BM25 is None where it has no say or no word was found, and so are
    the scores of a sparse encoder. Where the model knows no word of the query, what it says of texts has no
    say beside them: of a script that it does not know, it tells the lengths alone.
    """
    parts = COSINES_OF[options.granularity]
    weights = [options.weight(part) for part in parts] if len(parts) > 1 else [1.0]
    dense_N = weighted_mean([cosines[part] for part in parts], weights)
    if bm25_N is None and passage_bm25_N is None and sparse_N is None:
        return dense_N, None
    fusion = Fusion(
        dense=Scale.of(dense_N, floor=average_chunk),
        bm25=None if bm25_N is None else Scale.of(bm25_N, floor=0.0),
        passage_bm25=None if passage_bm25_N is None else Scale.of(passage_bm25_N, floor=0.0),
        dense_weight=is_known * (options.weight("document") + options.weight("chunk")),
        bm25_weight=options.weight("bm25"),
        sparse=None if sparse_N is None else Scale.of(sparse_N, floor=0.0),
        sparse_weight=options.weight("sparse"),
    )
    return fusion.documents(dense_N, bm25_N, passage_bm25_N, sparse_N), fusion


NEIGHBOUR_WEIGHT: Final = 0.5
"""What each of the two windows beside a window weighs in its score."""


def passage_scores(
    options: SearchOptions,
    own_W: Float[np.ndarray, " W"],
    owner_W: Int64[np.ndarray, " W"],
    document_W: Float64[np.ndarray, " W"],
) -> Float64[np.ndarray, " W"]:
    """Score passages: half by themselves and their neighbours, half by their document.

    Where chunks alone rank, a passage scores by itself. ``owner_W`` tells the windows of one document from
    those of the next, ``document_W`` is their document's score.
    """
    if options.granularity == "chunk":
        return np.asarray(own_W, dtype=np.float64)
    return (with_neighbours(own_W, owner_W) + document_W) / 2.0


def with_neighbours(
    own_W: Float[np.ndarray, " W"], owner_W: Int64[np.ndarray, " W"]
) -> Float64[np.ndarray, " W"]:
    """Return the mean of each window and those beside it, which weigh :data:`NEIGHBOUR_WEIGHT`.

    Windows stand in order, those of a document one after another; the first and the last of a document have
    one neighbour, an only one none.
    """
    is_same = owner_W[1:] == owner_W[:-1]
    sums_W = np.array(own_W, dtype=np.float64)
    weights_W = np.ones(len(sums_W))
    for here, beside in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
        sums_W[here] += np.where(is_same, NEIGHBOUR_WEIGHT * own_W[beside], 0.0)
        weights_W[here] += np.where(is_same, NEIGHBOUR_WEIGHT, 0.0)
    return sums_W / weights_W


def at_least_nth(scores_N: Float[np.ndarray, " N"], count: int) -> Int64[np.ndarray, " _"]:
    """Return the indices of the ``count`` best scores and of what ties with the last of them."""
    if len(scores_N) <= count:
        return np.arange(len(scores_N))
    return np.flatnonzero(scores_N >= np.partition(scores_N, -count)[-count])


def best_first(
    scores_N: Float[np.ndarray, " N"], doc_ids: Sequence[str], top_k: int
) -> Int64[np.ndarray, " K"]:
    """Return the indices of the ``top_k`` best scores, best first, ties by ``doc_id``."""
    scores = scores_N.tolist()
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], doc_ids[index]))
    return np.asarray(order[:top_k], dtype=np.int64)


JUDGED_WINDOWS: Final = 50
"""Best windows of the fused ranking that are judged."""
ABSENT: Final = -2.0
"""Below any cosine."""
BLOCK_ROWS: Final = 1_024
"""Chunks whose tokens are compared at once: at most 35 MB for 64 tokens each, whatever a window holds."""
LEAST_WEIGHT: Final = 0.15
"""Of the heaviest token's weight: function words are below."""
MAX_QUERY_TOKENS: Final = 128
"""Tokens of a query that judge, those of most weight: the cost grows with them."""


class Windows(NamedTuple):
    """Windows by their first chunk, the one behind their last, and the first chunk of their document."""

    first_W: Int64[np.ndarray, " W"]
    end_W: Int64[np.ndarray, " W"]
    title_W: Int64[np.ndarray, " W"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LateQuery:
    """A query's token vectors, weights that sum to 1, and the tokens' places in the query."""

    vectors_qV: Float32[np.ndarray, "q V"]
    weights_q: Float32[np.ndarray, " q"]
    places_q: Int64[np.ndarray, " q"]

    @classmethod
    def of(cls, tokens: QueryTokens, codebook: TokenCoder) -> LateQuery | None:
        """Weigh a query's tokens; None where none carries weight: function words alone ask for nothing."""
        weights = codebook.weights_of(tokens.ids_T)
        if weights.max(initial=0.0) <= LEAST_WEIGHT * codebook.heaviest:
            return None
        places = np.flatnonzero(weights > 0.0)
        if len(places) > MAX_QUERY_TOKENS:
            places = np.sort(places[np.argsort(-weights[places], kind="stable")[:MAX_QUERY_TOKENS]])
        return cls(
            vectors_qV=codebook.project(tokens.states_TD[places]),
            weights_q=normalised_weights(weights[places]),
            places_q=places,
        )


def normalised_weights(weight_q: Float[np.ndarray, " q"]) -> Float32[np.ndarray, " q"]:
    """Return weights that sum to 1; zeros where none is above 0."""
    total = float(weight_q.sum())
    return (weight_q / total if total > 0.0 else np.zeros_like(weight_q)).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JudgedWindows:
    """Windows judged for one query: their first chunks, ascending, with MaxSim and its scale.

    MaxSim of ``low`` becomes 0 and of ``high`` 1; where they are equal, all become 0.
    """

    first_J: Int64[np.ndarray, " J"]
    max_sim_J: Float32[np.ndarray, " J"]
    low: float
    high: float

    def scaled(self, max_sim: Float32[np.ndarray, " W"]) -> Float[np.ndarray, " W"]:
        """Lay MaxSim on the scale of the judged windows."""
        if self.high <= self.low:
            return np.zeros(len(max_sim))
        return np.clip((max_sim.astype(np.float64) - self.low) / (self.high - self.low), 0.0, 1.0)

    def spread(self, first_W: Int64[np.ndarray, " W"]) -> Float32[np.ndarray, " W"]:
        """Return MaxSim of windows by their first chunk; ``low`` for one that was not judged."""
        place_W = np.minimum(np.searchsorted(self.first_J, first_W), len(self.first_J) - 1)
        is_judged_W = self.first_J[place_W] == first_W
        return np.where(is_judged_W, self.max_sim_J[place_W], np.float32(self.low)).astype(np.float32)


def judge_windows(
    max_sim: Callable[[Windows], Float32[np.ndarray, " W"]],
    scores_W: Float[np.ndarray, " W"],
    windows: Windows,
) -> JudgedWindows:
    """Judge the best of some windows, ties by place.

    ``max_sim`` judges windows whose first chunks ascend, as :func:`window_max_sim` does for one query.
    """
    judged = best_places(scores_W, JUDGED_WINDOWS)
    judged = judged[np.argsort(windows.first_W[judged], kind="stable")]
    own = Windows(*(each[judged] for each in windows))
    max_sim_J = max_sim(own)
    return JudgedWindows(
        first_J=own.first_W,
        max_sim_J=max_sim_J,
        low=float(max_sim_J.min()),
        high=float(max_sim_J.max()),
    )


def best_places(scores_W: Float[np.ndarray, " W"], count: int) -> Int64[np.ndarray, " n"]:
    """Return the places of the best scores, best first, ties by place."""
    few = at_least_nth(scores_W, count)
    return few[np.argsort(-scores_W[few], kind="stable")[:count]]


def window_max_sim(stored: TokenVectors, query: LateQuery, windows: Windows) -> Float32[np.ndarray, " W"]:
    """Return MaxSim of windows of chunks, each with the title of its document.

    A window without a token in text or title has 0.
    """
    best_Wq = _best_matches(stored, stored.chunks, query, windows.first_W, windows.end_W)
    titles, place_W = np.unique(windows.title_W, return_inverse=True)
    title_Nq = _best_matches(stored, stored.titles, query, titles, titles + 1)
    best_Wq = np.maximum(best_Wq, title_Nq[place_W])
    return np.vecdot(np.where(best_Wq == ABSENT, np.float32(0.0), best_Wq), query.weights_q)


def _best_matches(
    stored: TokenVectors,
    column: TokenCodes,
    query: LateQuery,
    first_W: Int64[np.ndarray, " W"],
    end_W: Int64[np.ndarray, " W"],
) -> Float32[np.ndarray, "W q"]:
    """Return the highest cosine of each query token in windows of rows; ABSENT in one without tokens.

    Rows of overlapping windows are decoded once, and only so many at a time.
    """
    rows = np.unique(ranges(first_W, end_W - first_W))
    # Every second stretch of reduceat lies between windows; a last row lets a window end with the rows.
    best_Rq = np.full((len(rows) + 1, len(query.vectors_qV)), ABSENT, np.float32)
    for start in range(0, len(rows), BLOCK_ROWS):
        tokens = column.read(rows[start : start + BLOCK_ROWS])
        filled = np.flatnonzero(tokens.size_C)
        if len(filled):
            score_Tq = stored.codebook.similarities(tokens.codes, query.vectors_qV)
            first_T = (np.cumsum(tokens.size_C) - tokens.size_C)[filled]
            best_Rq[start + filled] = np.maximum.reduceat(score_Tq, first_T, axis=0)
    bounds = np.stack([np.searchsorted(rows, first_W), np.searchsorted(rows, end_W)], axis=1).ravel()
    return np.maximum.reduceat(best_Rq, bounds, axis=0)[::2]
