"""The best windows of a search judged by token vectors: late interaction.

    fused ranking ─▶ 50 best windows ─▶ MaxSim, scaled to 0 … 1 among them ─▶ added
    query's token states ─▶ as coded ──┘ weights of query tokens, trained or idf

A window takes, for each query token, the better of its own best match and its document's title's. Windows
that are not judged gain nothing.

Everything here works on arrays. Source: Khattab & Zaharia 2020 (ColBERT), eq. 3; differs: weights.

    q query tokens    W windows    J judged windows    V vector dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from cairn.pipeline.index.columns import TokenCodes, TokenVectors
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.fusion import at_least_nth
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import QueryTokens
from jaxtyping import Float, Float32, Int64

JUDGED_WINDOWS: Final = 50
"""Best windows of the fused ranking that are judged."""
ABSENT: Final = -2.0
"""Below any cosine."""
BLOCK_ROWS: Final = 1_024
"""Chunks whose tokens are compared at once: at most 35 MB for 64 tokens each, whatever a window holds."""
MaxSim = Callable[
    [Int64[np.ndarray, " W"], Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]], Float32[np.ndarray, " W"]
]
"""MaxSim of windows by their first chunk, the one behind their last, and the first of their document."""
LEAST_WEIGHT: Final = 0.15
"""Of the heaviest token's weight: function words are below."""
MAX_QUERY_TOKENS: Final = 128
"""Tokens of a query that judge, those of most weight: the cost grows with them."""


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
    max_sim: MaxSim,
    scores_W: Float[np.ndarray, " W"],
    first_W: Int64[np.ndarray, " W"],
    end_W: Int64[np.ndarray, " W"],
    title_W: Int64[np.ndarray, " W"],
) -> JudgedWindows:
    """Judge the best of some windows, ties by place; ``title_W`` are the first chunks of their documents.

    ``max_sim`` judges windows whose first chunks ascend, as :func:`window_max_sim` does for one query.
    """
    judged = best_places(scores_W, JUDGED_WINDOWS)
    judged = judged[np.argsort(first_W[judged], kind="stable")]
    max_sim_J = max_sim(first_W[judged], end_W[judged], title_W[judged])
    return JudgedWindows(
        first_J=first_W[judged],
        max_sim_J=max_sim_J,
        low=float(max_sim_J.min()),
        high=float(max_sim_J.max()),
    )


def best_places(scores_W: Float[np.ndarray, " W"], count: int) -> Int64[np.ndarray, " n"]:
    """Return the places of the best scores, best first, ties by place."""
    few = at_least_nth(scores_W, count)
    return few[np.argsort(-scores_W[few], kind="stable")[:count]]


def window_max_sim(
    stored: TokenVectors,
    query: LateQuery,
    first_W: Int64[np.ndarray, " W"],
    end_W: Int64[np.ndarray, " W"],
    title_W: Int64[np.ndarray, " W"],
) -> Float32[np.ndarray, " W"]:
    """Return MaxSim of windows of chunks, each with the title of the document that begins at ``title_W``.

    A window without a token in text or title has 0.
    """
    best_Wq = _best_matches(stored, stored.chunks, query, first_W, end_W)
    titles, place_W = np.unique(title_W, return_inverse=True)
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
