"""The query's vector moved towards what token vectors find best: relevance feedback without a reader.

    q' = normalise(q + WEIGHT · mean of the vectors of the NUM_WINDOWS windows with the highest MaxSim)

Nomination and ranking are done again with q'. Source: Rocchio 1971, without negative examples; token vectors
stand for the reader's judgement.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from cairn.pipeline.search.late import JudgedWindows
from cairn.pipeline.search.reader import CandidateScores
from jaxtyping import Float32

WEIGHT: Final = 0.5
"""What the mean of the windows weighs beside the query."""
NUM_WINDOWS: Final = 3
"""Windows that stand for what was meant."""


def moved_query(
    candidates: CandidateScores, vector_V: Float32[np.ndarray, " V"], judged: JudgedWindows
) -> Float32[np.ndarray, " V"]:
    """Return a unit query vector moved towards the best of the judged windows."""
    best = judged.best(NUM_WINDOWS)
    return moved(vector_V, candidates.window_sums(judged.first_J[best], judged.end_J[best]))


def moved(
    vector_V: Float32[np.ndarray, " V"], sums_nV: Float32[np.ndarray, "n V"]
) -> Float32[np.ndarray, " V"]:
    """Return the query moved by the mean of windows' vectors, given their landmarks' sums."""
    norms = np.linalg.norm(sums_nV, axis=1, keepdims=True)
    mean_V = (sums_nV / np.maximum(norms, np.finfo(np.float32).tiny)).mean(axis=0)
    sum_V = vector_V + np.float32(WEIGHT) * mean_V
    norm = float(np.linalg.norm(sum_V))
    return (sum_V / norm).astype(np.float32) if norm > 0.0 else vector_V
