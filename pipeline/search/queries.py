"""Queries and their vectors, checked before any work is done; options are ``pipeline/search_options.py``'s.

The filter tree is checked against the table by ``filters``, ``chunk_tokens`` against the encoder's settings
by ``windows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cairn.pipeline.errors import UsageError
from cairn.pipeline.options import shown
from cairn.pipeline.search_options import MAX_BATCH_QUERIES, MAX_QUERY_BYTES
from jaxtyping import Float32


def check_queries(queries: Sequence[str]) -> None:
    """Refuse anything that is not a list of non-empty texts of bounded size."""
    if isinstance(queries, str):
        raise UsageError("queries must be a list of texts, got one text; use search() for a single query")
    if not 1 <= len(queries) <= MAX_BATCH_QUERIES:
        raise UsageError(
            f"a batch must have 1 to {MAX_BATCH_QUERIES:,} queries, got {len(queries):,}; split it"
        )
    for query in queries:
        _check_query(query)


def _check_query(query: Any) -> None:
    if not isinstance(query, str):
        raise UsageError(f"a query must be a text, got {shown(query)}")
    if not query.strip():
        raise UsageError("a query must not be empty or blank; say what to look for")
    try:
        size = len(query.encode())
    except UnicodeEncodeError:
        raise UsageError("a query must be valid Unicode, got a lone surrogate") from None
    if size > MAX_QUERY_BYTES:
        raise UsageError(
            f"a query must have at most {MAX_QUERY_BYTES:,} bytes in UTF-8, got {size:,}; shorten it"
        )


def unit_vectors(vectors_QV: np.ndarray, vector_dim: int) -> Float32[np.ndarray, "Q V"]:
    """Return query vectors as L2-normalised float32.

    A wrong shape, a zero vector or a value that is not finite is refused.
    """
    vectors = np.asarray(vectors_QV)
    if vectors.ndim != 2 or vectors.shape[1] != vector_dim or not 1 <= vectors.shape[0] <= MAX_BATCH_QUERIES:
        raise UsageError(
            f"query vectors must have shape (1 to {MAX_BATCH_QUERIES:,}, {vector_dim}), got {vectors.shape}"
        )
    if vectors.dtype.kind not in "fiu" or not np.all(np.isfinite(vectors)):
        raise UsageError("query vectors must be finite numbers, got NaN, infinity or another type")
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    if not np.all(norms > 0.0):
        raise UsageError("query vectors must not be zero; the encoder found nothing to embed")
    return (wide / norms).astype(np.float32)
