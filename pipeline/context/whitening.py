"""Soft whitening: vectors moved by a corpus's mean and evened out along its principal axes.

    y = normalise((x - μ) W diag(λ^(-g / 2)) Wᵀ)      μ, W, λ: mean, axes and variances of a sample

What the texts of a corpus have in common counts less, what tells them apart counts more. g = 0 only centres,
g = 1 whitens. The last factor Wᵀ turns back, so that no sign or order of the axes enters a vector, whatever
library found them. Source: Su et al. 2021 (BERT-whitening); differs: the exponent, the last factor, and that
mean and variances are shrunk.

    S vectors of the sample    V width    N vectors
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32

GAMMA: Final = 0.3
"""The exponent of the baseline in ``cairn evaluate``; chosen once for all sets."""
PRIOR_VECTORS: Final = 32
"""A sample counts as if so many vectors more had been seen, around zero and equally wide in every direction.

So a small sample moves vectors little, and a sample of one or of equal vectors none to zero.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Whitening:
    """The map ``normalise((x - mean) @ matrix)``."""

    mean_V: Float32[np.ndarray, " V"]
    matrix_VV: Float32[np.ndarray, "V V"]

    @classmethod
    def of(cls, sample_SV: Float32[np.ndarray, "S V"], gamma: float = GAMMA) -> Whitening:
        """Return the map of a sample of vectors."""
        exact_SV = sample_SV.astype(np.float64)
        trust = len(exact_SV) / (len(exact_SV) + PRIOR_VECTORS)
        mean_V = exact_SV.mean(0)
        centred_SV = exact_SV - mean_V
        variance_V, axes_VV = np.linalg.eigh(centred_SV.T @ centred_SV / len(exact_SV))
        variance_V = np.maximum(variance_V, 0.0)  # rounding
        shrunk_V = trust * variance_V + (1 - trust) * max(variance_V.mean(), np.finfo(np.float32).tiny)
        scale_V = shrunk_V ** (-gamma / 2)
        return cls(
            mean_V=(trust * mean_V).astype(np.float32),
            matrix_VV=((axes_VV * scale_V) @ axes_VV.T).astype(np.float32),
        )

    def apply(self, vectors_NV: Float32[np.ndarray, "N V"]) -> Float32[np.ndarray, "N V"]:
        """Return whitened vectors of length one; a vector equal to the mean becomes zero."""
        mapped_NV = (vectors_NV - self.mean_V) @ self.matrix_VV
        norm_N1 = np.linalg.norm(mapped_NV, axis=1, keepdims=True)
        return mapped_NV / np.maximum(norm_N1, np.finfo(np.float32).tiny)
