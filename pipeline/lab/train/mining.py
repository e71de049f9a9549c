"""Positive-aware hard negatives: what a surrogate ranks highest below a threshold under the positive's score.

    by percentage   score < share x positive           TopK-PercPos, 95 % by default
    by margin       score < positive - margin          TopK-MarginPos, none by default

What scores nearly as high as the positive is likely to answer the query too, so it is no negative; with both
thresholds the lower one holds. Candidates
are the documents of the query's own source: those of another are seldom hard, and searching them all costs
the square of the data.

Source: NV-Embed §4.1.1 (percentage), after Moreira et al. 2024 (NV-Retriever), which compares both. Differs:
the surrogate is the base model, not a 7B teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from cairn.pipeline.lab.train.pairs import text_numbers
from jaxtyping import Float32, Int64

NONE_FOUND: Final = -1
BLOCK_QUERIES: Final = 256


def score_limit(positive_q: Float32[np.ndarray, " q"], max_share: float, margin: float) -> np.ndarray:
    """Return the score below which a text is a negative, for each query by its positive's score."""
    # A negative score has its 95 % below it, too.
    return positive_q - np.maximum((1.0 - max_share) * np.abs(positive_q), margin)


def mine_hard_negatives(
    query_NV: Float32[np.ndarray, "N V"],
    document_NV: Float32[np.ndarray, "N V"],
    documents: Sequence[str],
    sources: Sequence[str],
    *,
    num_negatives: int,
    max_share: float,
    left_out: Int64[np.ndarray, " n"],
    margin: float = 0.0,
) -> Int64[np.ndarray, "N k"]:
    """Return for each pair the pairs with the hardest negative documents, hardest first.

    They score below ``max_share`` of the positive's score and by more than ``margin`` below it.
    :data:`NONE_FOUND` fills up where there are no more. Pairs ``left_out`` are negatives of no pair. A text
    is taken once, and never the positive's own.
    """
    mined_Nk = np.full((len(query_NV), num_negatives), NONE_FOUND, np.int64)
    numbers_N = text_numbers(documents)
    names = np.array(sources)
    for name in np.unique(names).tolist():
        positions = np.flatnonzero(names == name)
        allowed = np.setdiff1d(positions, left_out)
        _, first = np.unique(numbers_N[allowed], return_index=True)
        candidates = allowed[np.sort(first)]
        if not len(candidates):
            continue
        for start in range(0, len(positions), BLOCK_QUERIES):
            block = positions[start : start + BLOCK_QUERIES]
            scores_qc = query_NV[block] @ document_NV[candidates].T
            positive_q = np.einsum("qv,qv->q", query_NV[block], document_NV[block])
            limit_q = score_limit(positive_q, max_share, margin)
            is_refused = (scores_qc >= limit_q[:, None]) | (
                numbers_N[candidates][None] == numbers_N[block][:, None]
            )
            scores_qc[is_refused] = -np.inf
            num_kept = min(num_negatives, len(candidates))
            best = np.argpartition(-scores_qc, num_kept - 1, axis=1)[:, :num_kept]
            best = np.take_along_axis(
                best, np.lexsort((best, -np.take_along_axis(scores_qc, best, axis=1)), axis=1), axis=1
            )
            is_found = np.isfinite(np.take_along_axis(scores_qc, best, axis=1))
            mined_Nk[block, :num_kept] = np.where(is_found, candidates[best], NONE_FOUND)
    return mined_Nk
