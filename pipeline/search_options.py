"""What a caller may ask of a search: the one definition that Python, terminal, HTTP and client share.

Limits are those of a public search service. They hold for Python callers too, so that every surface refuses
the same values. An option without a help text is for the layers between a surface and the searcher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypedDict

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import About, check_options, option, options_of, shown

Granularity = Literal["document", "chunk", "both"]

MAX_QUERY_BYTES = 8_192
MAX_BATCH_QUERIES = 1_024
MAX_TOP_K = 200
MAX_PASSAGES = 50
MAX_CANDIDATES = 1_000
MAX_CHUNK_TOKENS = 1 << 20
MAX_CHARACTERS = 1_000_000
MIN_DEFAULT_CANDIDATES = 50

DEFAULT_WEIGHTS: Mapping[str, float] = {"document": 0.25, "chunk": 0.75, "bm25": 1.0, "sparse": 1.0}
"""The best chunk's cosine three times the document's; the dense part as much as BM25, and as sparse weights.

nDCG@10, mean of nine judged sets: .701 by these, .694 by equal weights, .697 by chunks alone; with BM25 .763,
.760 and .764. Equal weights win on no set.
"""


class PublicSearchKeywords(TypedDict, total=False):
    """The keywords of a search on every surface, for type checkers; :class:`SearchOptions` explains them."""

    top_k: int
    granularity: Granularity
    passages: int
    chunk_tokens: int | None
    max_characters: int | None
    filters: Mapping[str, Any] | None
    group_by: str | None
    group_size: int
    mmr: float | None
    hybrid: bool
    late: bool
    weights: Mapping[str, float] | None
    min_probability: float | None
    partial: bool


class SearchParameters(PublicSearchKeywords, total=False):
    """The keywords of a search over HTTP; ``rerank`` asks the server's cross-encoder, where it has one.

    ``query_vector`` takes the place of the query's encoding.
    """

    rerank: bool
    query_vector: Sequence[float]


class SearchKeywords(PublicSearchKeywords, total=False):
    """The keywords of the searcher's methods."""

    restriction: Mapping[str, Any] | None
    hide_word_statistics: bool
    max_candidates: int | None
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """One checked set of search options.

    ``passages`` = 0 fetches no text. ``chunk_tokens`` shapes passages, not the ranking; None takes 128 where
    the landmark interval divides it, else the interval. ``weights`` overrides some of
    :data:`DEFAULT_WEIGHTS`. ``max_candidates`` bounds each list that feeds the ranking; None takes
    ``max(50, 2 * top_k)``. With ``max_characters`` the answer holds the best passages of at most ``top_k``
    documents; neighbouring ones are joined. ``group_by`` and ``mmr`` choose these documents first
    (:mod:`cairn.pipeline.search.diversity`), ``mmr`` among the best :attr:`num_candidates`. ``restriction``
    is a second filter, set by the layer that answers for the caller: both must match, and nothing in
    ``filters`` can widen it. With ``hide_word_statistics`` the scores of such a search are made of the
    documents that ``restriction`` leaves: nothing in them tells of others. ``offset`` passes over the best
    documents. It needs ``max_candidates``: all pages then rank the same candidates, whatever ``top_k`` is.
    """

    top_k: int = option(10, About("Documents to answer with.", low=1, high=MAX_TOP_K))
    granularity: Granularity = option("both", About("Vectors to rank by."))
    passages: int = option(3, About("Best passages of each document.", low=0, high=MAX_PASSAGES))
    chunk_tokens: int | None = option(
        None,
        About(
            "Length of a passage, a multiple of the collection's landmark interval.",
            low=1,
            high=MAX_CHUNK_TOKENS,
            default_text="128",
        ),
    )
    max_characters: int | None = option(
        None,
        About(
            "Answer with the best passages of all documents, at most so many characters together, instead "
            "of `passages` of each document.",
            low=1,
            high=MAX_CHARACTERS,
        ),
    )
    filters: Mapping[str, Any] | None = option(None, About("What documents must match."))
    group_by: str | None = option(
        None,
        About("Column of whose values each may have `group_size` documents in the answer.", is_column=True),
    )
    group_size: int = option(1, About("Documents of one value of `group_by`.", low=1, high=MAX_TOP_K))
    mmr: float | None = option(
        None,
        About(
            "Choose by maximal marginal relevance: 1 looks at scores alone, 0 at how unlike documents are.",
            low=0.0,
            high=1.0,
        ),
    )
    hybrid: bool = option(
        True, About("Rank by BM25 as well as by vectors.", default_text="hybrid", off_flag="--no-hybrid")
    )
    late: bool = option(
        True,
        About(
            "Judge the best passages by their token vectors, where the collection has them.",
            default_text="late",
            off_flag="--no-late",
        ),
    )
    weights: Mapping[str, float] | None = option(None, About("How much each part of the score counts."))
    min_probability: float | None = option(
        None,
        About(
            "Leave out documents that answer with less than this probability, and give it among the scores.",
            low=0.0,
            high=1.0,
        ),
    )
    partial: bool = option(
        False,
        About("Answer from the other partitions where some are lost or out of reach; a warning names those."),
    )
    restriction: Mapping[str, Any] | None = None
    hide_word_statistics: bool = False
    max_candidates: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_candidates is not None:
            _require_within("max_candidates", self.max_candidates, self.top_k, MAX_CANDIDATES)
        if self.max_characters is not None:
            if not self.passages:
                raise ConfigError(
                    "max_characters must come with passages, got passages = 0; leave one of them out"
                )
            if self.offset:
                raise ConfigError(
                    f"max_characters must come without an offset, got {self.offset}; a budget is spent "
                    "on one page"
                )
        _require_within(
            "offset", self.offset, 0, 0 if self.max_candidates is None else self.max_candidates - self.top_k
        )
        if self.group_size != 1 and self.group_by is None:
            raise ConfigError(
                f"group_size must come with group_by, got {self.group_size} without it; name a column"
            )
        if self.weights is not None:
            _require_weights(self.weights)
        by_words = self.weight("bm25") + self.weight("sparse") if self.hybrid else 0.0
        if self.weight("document") + self.weight("chunk") + by_words <= 0.0:
            raise ConfigError("weights must leave at least one part of the ranking with a positive weight")
        if self.granularity == "both" and self.weight("document") + self.weight("chunk") <= 0.0:
            raise ConfigError(
                "weights of document and chunk must not both be 0; granularity `both` ranks by their "
                "weighted mean"
            )

    @property
    def asks_of_columns(self) -> bool:
        """Tell whether documents are chosen by what columns hold; most searches do not ask for that."""
        names = ("filters", "restriction", *column_options())
        return any(getattr(self, name) is not None for name in names)

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

        Of the page's size where there are no further pages.
        """
        return self.top_k if self.max_candidates is None else self.max_candidates

    @property
    def is_diversified(self) -> bool:
        """Tell whether documents are chosen by more than their scores."""
        return self.group_by is not None or self.mmr is not None

    def weight(self, part: str) -> float:
        """Return the weight of ``document``, ``chunk``, ``bm25`` or ``sparse``."""
        return float((self.weights or {}).get(part, DEFAULT_WEIGHTS[part]))


@cache
def column_options() -> tuple[str, ...]:
    """Return the options that name a column."""
    return tuple(name for name, each in options_of(SearchOptions).items() if each.about.is_column)


def _require_within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high:,}, got {shown(value)}")


def _require_weights(weights: Any) -> None:
    if not isinstance(weights, Mapping) or not set(weights) <= set(DEFAULT_WEIGHTS):
        got = [*weights] if isinstance(weights, Mapping) else weights
        raise ConfigError(
            f"weights must be a mapping with keys among {', '.join(DEFAULT_WEIGHTS)}, got {shown(got)}"
        )
    for part, weight in weights.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
            or not 0.0 <= weight <= 1e6
        ):
            raise ConfigError(
                f"the weight of {part} must be a number from 0 to 1,000,000, got {shown(weight)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenOptions:
    """How a collection is opened."""

    verify: bool = option(False, About("Hash every file that is opened, also those known to be whole."))
