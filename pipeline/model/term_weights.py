"""What a token of a query weighs in late interaction before training: its inverse document frequency."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32, Int64


def token_idf(
    ids_T: Int32[np.ndarray, " T"], offsets_M1: Int64[np.ndarray, " M1"], vocabulary_size: int
) -> Float32[np.ndarray, " vocabulary"]:
    """Return ln(1 + (M - m + ½) / (m + ½)) of every token id, m of M texts holding it."""
    num_texts = len(offsets_M1) - 1
    text_T = np.repeat(np.arange(num_texts), np.diff(offsets_M1))
    held = np.unique(text_T * vocabulary_size + ids_T) % vocabulary_size
    holding = np.bincount(held, minlength=vocabulary_size)
    return np.log1p((num_texts - holding + 0.5) / (holding + 0.5)).astype(np.float32)
