"""What the server says of its collections.

Answers and documents come as the records of :mod:`cairn.pipeline.types`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cairn.pipeline.search_options import PublicSearchKeywords


class SearchParameters(PublicSearchKeywords, total=False):
    """The keywords of a search over HTTP; ``rerank`` asks the server's cross-encoder, where it has one."""

    rerank: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionSummary:
    """A collection in a line.

    Counts are None where there are none, or where the key sees a part of the documents only.
    """

    name: str
    status: Literal["ready", "building", "unfinished", "damaged"]
    generation: int | None
    documents: int | None
    chunks: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionDescription:
    """What a collection holds and how it can be searched.

    ``filter_columns`` maps each column that filters can name to its type. ``documents`` counts those the key
    sees; ``chunks`` and ``context_documents`` are None where it sees a part of them only.
    """

    name: str
    generation: int
    created_at: str
    documents: int
    chunks: int | None
    vector_dim: int
    landmark_interval: int
    context_documents: int | None
    uses_context: bool
    is_outdated: bool
    filter_columns: Mapping[str, str]
