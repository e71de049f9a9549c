"""What a caller may ask of a search, checked before any work is done.

Limits are those of a public search service; they hold for Python callers too, so that every surface refuses
the same things. The filter tree is checked against the table by ``filters``, ``chunk_tokens`` against the
encoder's settings by ``windows``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

import numpy as np
from jaxtyping import Float32

from pipeline.errors import ConfigError, UsageError
from pipeline.types import Granularity

MAX_QUERY_BYTES = 8_192
MAX_BATCH_QUERIES = 1_024
MAX_TOP_K = 200
MAX_PASSAGES = 50
MAX_CANDIDATES = 1_000
MAX_CHUNK_TOKENS = 1 << 20
MAX_CHARACTERS = 1_000_000
MIN_DEFAULT_CANDIDATES = 50

DEFAULT_WEIGHTS: Mapping[str, float] = {"document": 0.25, "chunk": 0.75, "bm25": 1.0}
"""The best chunk's cosine three times the document's, and the dense part as much as BM25. nDCG@10, mean of nine judged sets: .701 by
these, .694 by equal weights, .697 by chunks alone; with BM25 .763, .760 and .764. Equal weights win on no
set.
"""


class SearchKeywords(TypedDict, total=False):
    """The keywords of every search method; their meaning and defaults are those of :class:`SearchOptions`."""

    top_k: int
    granularity: Granularity
    filters: Mapping[str, Any] | None
    restriction: Mapping[str, Any] | None
    hybrid: bool
    passages: int
    chunk_tokens: int | None
    weights: Mapping[str, float] | None
    max_candidates: int | None
    max_characters: int | None
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """One checked set of search options.

    ``granularity``: rank documents by their own vector, by their best chunk, or by both. ``passages`` = 0
    fetches no text. ``chunk_tokens`` is the length of a passage, a multiple of the collection's landmark
    interval; None takes 128 where the interval divides it, else the interval. It shapes passages, not the
    ranking. ``weights`` overrides some of :data:`DEFAULT_WEIGHTS`. ``max_candidates`` bounds each list that
    feeds the ranking; None takes ``max(50, 2 * top_k)``. ``max_characters`` is the budget of a reader:
    instead of ``passages`` a document, the answer holds the best passages of all documents, at most so many
    characters together and of at most ``top_k`` documents; neighbouring ones are one passage. None is no
    budget. ``restriction`` is a second filter, of whoever answers for the caller: both must match, and
    nothing in ``filters`` can widen it. ``offset`` passes over the best documents. It needs
    ``max_candidates``, which then decides the ranking alone, so that pages of one ranking fit together
    whatever their size.
    """

    top_k: int = 10
    granularity: Granularity = "both"
    filters: Mapping[str, Any] | None = None
    restriction: Mapping[str, Any] | None = None
    hybrid: bool = True
    passages: int = 3
    chunk_tokens: int | None = None
    weights: Mapping[str, float] | None = None
    max_candidates: int | None = None
    max_characters: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        _require_int("top_k", self.top_k, 1, MAX_TOP_K)
        _require_int("passages", self.passages, 0, MAX_PASSAGES)
        if self.granularity not in get_args(Granularity):
            raise ConfigError(
                f"granularity must be one of {', '.join(get_args(Granularity))}, got "
                f"{_shown(self.granularity)}"
            )
        _require_bool("hybrid", self.hybrid)
        if self.chunk_tokens is not None:
            _require_int("chunk_tokens", self.chunk_tokens, 1, MAX_CHUNK_TOKENS)
        if self.max_candidates is not None:
            _require_int("max_candidates", self.max_candidates, self.top_k, MAX_CANDIDATES)
        if self.max_characters is not None:
            _require_int("max_characters", self.max_characters, 1, MAX_CHARACTERS)
            if not self.passages:
                raise ConfigError(
                    "max_characters must come with passages, got passages = 0; leave one of them out"
                )
            if self.offset:
                raise ConfigError(
                    f"max_characters must come without an offset, got {self.offset}; a budget is spent "
                    "on one page"
                )
        _require_int(
            "offset", self.offset, 0, 0 if self.max_candidates is None else self.max_candidates - self.top_k
        )
        if self.weights is not None:
            _require_weights(self.weights)
        if (
            self.weight("document") + self.weight("chunk") + (self.weight("bm25") if self.hybrid else 0.0)
            <= 0.0
        ):
            raise ConfigError("weights must leave at least one part of the ranking with a positive weight")
        if self.granularity == "both" and self.weight("document") + self.weight("chunk") <= 0.0:
            raise ConfigError(
                "weights of document and chunk must not both be 0; granularity `both` ranks by their "
                "weighted mean"
            )

    @property
    def num_candidates(self) -> int:
        """How many entries each candidate list may have."""
        return (
            self.max_candidates
            if self.max_candidates is not None
            else max(MIN_DEFAULT_CANDIDATES, 2 * self.top_k)
        )

    @property
    def min_documents(self) -> int:
        """How many documents a candidate list is widened for.

        Of the page's size only where nobody turns pages.
        """
        return self.top_k if self.max_candidates is None else self.max_candidates

    def weight(self, part: str) -> float:
        """Return the weight of ``document``, ``chunk`` or ``bm25``."""
        return float((self.weights or {}).get(part, DEFAULT_WEIGHTS[part]))


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
        raise UsageError(f"a query must be a text, got {_shown(query)}")
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


def _require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high:,}, got {_shown(value)}")


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {_shown(value)}")


def _require_weights(weights: Any) -> None:
    if not isinstance(weights, Mapping) or not set(weights) <= set(DEFAULT_WEIGHTS):
        raise ConfigError(
            f"weights must be a mapping with keys among {', '.join(DEFAULT_WEIGHTS)}, got {_shown(weights)}"
        )
    for part, weight in weights.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
            or not 0.0 <= weight <= 1e6
        ):
            raise ConfigError(
                f"the weight of {part} must be a number from 0 to 1,000,000, got {_shown(weight)}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63):
        return repr(value)
    return f"a value of type {type(value).__name__}"
