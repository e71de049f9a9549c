"""The first dimensions of vectors: ``v[:d]``, normalised again (m³BERT §2.1).

Inside the model everything keeps its full width, the context's embeddings too. Vectors of a model trained for
it lose little; of another one, what is left over. The first layers of a model are ``folders/first_layers``'
business.
"""

from __future__ import annotations

import numpy as np
from cairn.pipeline.errors import ConfigError
from jaxtyping import Float32


def require_dims(truncate_dim: int | None, model_dim: int) -> int:
    """Return the width of the vectors; raise :class:`ConfigError` for more dimensions than the model has."""
    if truncate_dim is None:
        return model_dim
    if not 1 <= truncate_dim <= model_dim:
        raise ConfigError(
            f"dims must lie between 1 and the model's {model_dim}, got {truncate_dim}; "
            "leave it out to keep all"
        )
    return truncate_dim


def first_dims(embeddings_ND: Float32[np.ndarray, "N D"], vector_dim: int) -> Float32[np.ndarray, "N V"]:
    """Keep the first dimensions of every row and divide it by its length.

    A row of zeros becomes NaN, which no caller lets pass.
    """
    vectors_NV = embeddings_ND[:, :vector_dim]
    with np.errstate(invalid="ignore", over="ignore"):
        return vectors_NV / np.linalg.norm(vectors_NV, axis=1, keepdims=True)
