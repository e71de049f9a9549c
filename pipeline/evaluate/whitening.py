"""Soft whitening: vectors centred on a corpus's mean and evened out along its principal axes.

    y = normalise((x - μ) W · λ^(-g / 2))      μ, W, λ: mean, axes and variances of a sample of the corpus

g = 0 only centres, g = 1 whitens. It is the baseline of what a corpus's context can add to vectors.
Source: Su et al. 2021 (BERT-whitening); differs: the exponent.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float32

GAMMA: Final = 0.3
"""Chosen once for all sets."""
SAMPLE: Final = 512
"""Vectors the axes are taken from, as many as a stored context has by default."""
SMALLEST_VARIANCE: Final = 1e-4
"""Variances below this share of the largest are raised to it: a small sample says nothing of them."""


def soft_whitening(
    sample_CV: Float32[np.ndarray, "C V"], gamma: float = GAMMA
) -> tuple[Float32[np.ndarray, " V"], Float32[np.ndarray, "V V"]]:
    """Return mean and matrix of the map ``(x - mean) @ matrix``; what it gives is to be normalised."""
    mean_V = sample_CV.mean(0)
    variance_V, axes_VV = np.linalg.eigh(np.cov(sample_CV - mean_V, rowvar=False, bias=True))
    variance_V = np.maximum(variance_V, SMALLEST_VARIANCE * variance_V[-1])
    return mean_V, (axes_VV * variance_V ** (-gamma / 2)).astype(np.float32)


def whiten(
    vectors_NV: Float32[np.ndarray, "N V"],
    mean_V: Float32[np.ndarray, " V"],
    matrix_VV: Float32[np.ndarray, "V V"],
) -> Float32[np.ndarray, "N V"]:
    """Apply the map and normalise."""
    mapped_NV = (vectors_NV - mean_V) @ matrix_VV
    norm_N1 = np.linalg.norm(mapped_NV, axis=1, keepdims=True)
    return mapped_NV / np.maximum(norm_N1, np.finfo(np.float32).tiny)
