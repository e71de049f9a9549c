"""MaxSim of a query's token vectors with those of windows: late interaction, in NumPy.

    MaxSim(q, window) = Σ over query tokens of w · max over the window's tokens of ⟨q, d⟩ / Σ w

A window is a stretch of tokens; windows may overlap, so the best match is taken from one product with all
tokens. Vectors are taken as they are: unit vectors give cosines. The score is a weighted mean of cosines and
does not grow with the length of a query. Source: Khattab & Zaharia 2020 (ColBERT), eq. 3; differs: weights.

    q query tokens    T tokens of all documents    W windows    V vector dim
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, Int32, Int64


def max_sim(
    query_qV: Float[np.ndarray, "q V"],
    weight_q: Float[np.ndarray, " q"],
    token_TV: Float[np.ndarray, "T V"],
    first_W: Int64[np.ndarray, " W"],
    end_W: Int64[np.ndarray, " W"],
) -> Float32[np.ndarray, " W"]:
    """Return MaxSim of each window of tokens ``first:end``; 0 for an empty one and a query without weight."""
    return best_matches(query_qV, token_TV, first_W, end_W) @ normalised_weights(weight_q)


def best_matches(
    query_qV: Float[np.ndarray, "q V"],
    token_TV: Float[np.ndarray, "T V"],
    first_W: Int64[np.ndarray, " W"],
    end_W: Int64[np.ndarray, " W"],
) -> Float32[np.ndarray, "W q"]:
    """Return the highest inner product of every query token in each window; 0 in an empty one."""
    best_Wq = np.zeros((len(first_W), len(query_qV)), np.float32)
    is_filled_W = end_W > first_W
    if not is_filled_W.any():
        return best_Wq
    score_Tq = token_TV.astype(np.float32, copy=False) @ query_qV.astype(np.float32, copy=False).T
    # Every second stretch of reduceat lies between windows; a last row lets a window end with the tokens.
    padded = np.concatenate([score_Tq, score_Tq[-1:]])
    bounds = np.stack([first_W[is_filled_W], end_W[is_filled_W]], axis=1).ravel()
    best_Wq[is_filled_W] = np.maximum.reduceat(padded, bounds, axis=0)[::2]
    return best_Wq


def normalised_weights(weight_q: Float[np.ndarray, " q"]) -> Float32[np.ndarray, " q"]:
    """Return weights that sum to 1; zeros where none is above 0."""
    total = float(weight_q.sum())
    return (weight_q / total if total > 0.0 else np.zeros_like(weight_q)).astype(np.float32)


def token_idf(
    ids_T: Int32[np.ndarray, " T"],
    offsets_M1: Int64[np.ndarray, " M1"],
    vocabulary_size: int,
    num_unseen: int = 0,
) -> Float32[np.ndarray, " vocabulary"]:
    """Return ln(1 + (M - m + ½) / (m + ½)) of every token id, m of M texts holding it.

    ``num_unseen`` more texts hold none.
    """
    num_texts = len(offsets_M1) - 1
    text_T = np.repeat(np.arange(num_texts), np.diff(offsets_M1))
    held = np.unique(text_T * vocabulary_size + ids_T) % vocabulary_size
    holding = np.bincount(held, minlength=vocabulary_size)
    return np.log1p((num_texts + num_unseen - holding + 0.5) / (holding + 0.5)).astype(np.float32)
