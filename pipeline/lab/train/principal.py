"""The principal directions of vectors: where a rotation and a token projection begin.

N vectors    D width
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32


def principal_rotation(vectors_ND: Float32[np.ndarray, "N D"]) -> Float32[np.ndarray, "D D"]:
    """Return the second moment's eigenvectors as columns, by falling eigenvalue, signs fixed."""
    moment_DD = vectors_ND.T.astype(np.float64) @ vectors_ND.astype(np.float64)
    _, columns_DD = np.linalg.eigh(moment_DD)
    columns_DD = columns_DD[:, ::-1]
    largest_D = np.take_along_axis(columns_DD, np.abs(columns_DD).argmax(0)[None], axis=0)[0]
    return np.ascontiguousarray(columns_DD * np.sign(largest_D), np.float32)
