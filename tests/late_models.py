"""A codebook of random centroids, for tests of late interaction."""

from __future__ import annotations

import numpy as np
from cairn.pipeline.token_vectors.codebook import TokenCodebook


def random_codebook(
    model_dim: int = 32, *, num_bytes: int = 8, vocabulary_size: int = 40, seed: int = 0
) -> TokenCodebook:
    """Make a codebook for unit states of a model."""
    generator = np.random.default_rng(seed)
    centroids = generator.standard_normal((num_bytes, 256, model_dim // num_bytes)) / model_dim**0.5
    weights_X = generator.uniform(0.5, 9, vocabulary_size)
    return TokenCodebook(centroids=centroids.astype(np.float16), weights_X=weights_X.astype(np.float16))
