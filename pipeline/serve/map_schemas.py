"""Replies about a collection's map and health."""

from __future__ import annotations

from typing import Literal

from cairn.pipeline.serve.schemas import Reply
from pydantic import Field


class MapPoints(Reply):
    """Documents on the map as columns of one length."""

    doc_id: list[str]
    title: list[str | None] = Field(description="Long ones are cut.")
    x: list[float] = Field(description="From -1 to 1.")
    y: list[float] = Field(description="From -1 to 1, upwards.")
    cluster: list[int]


class MapCluster(Reply):
    """A cluster's documents on the map.

    Its name is made of words of their titles or texts, and empty where there are none.
    """

    cluster: int
    documents: int
    name: str
    x: float
    y: float


class MapReply(Reply):
    """The documents this key sees, or an even sample of them, laid out so that neighbours are alike."""

    generation: int
    status: Literal["ready", "drawing"] = Field(
        description="A map is drawn when it is first asked for: ask again in a second."
    )
    documents: int = Field(description="Documents this key sees, on the map or not.")
    progress: float | None = Field(
        default=None, description="While the map is being drawn: the share that is done, 0 to 1."
    )
    points: MapPoints | None = None
    clusters: list[MapCluster] | None = None


class DriftReply(Reply):
    """How far the corpus has moved from the context it was encoded with, cluster by cluster."""

    verdict: Literal["none", "slight", "re-contextualise"]
    total_variation: float = Field(
        description="Share of documents that would have to change cluster, 0 to 1."
    )
    jensen_shannon_bits: float
    added_share: float = Field(description="Documents gained since, as a share of those now.")
    changed_clusters: list[int]


class LengthReply(Reply):
    """Documents of min_tokens to max_tokens tokens.

    How many, and the mean cosine of their vectors over pairs, null for few.
    """

    min_tokens: int
    max_tokens: int
    documents: int
    cosine: float | None


class HealthReply(Reply):
    """The health of a collection, of the part that the key sees; null where a figure is of the whole."""

    generation: int
    created_at: str
    documents: int
    chunks: int
    tokens: int
    clusters: int = Field(description="Clusters that hold documents.")
    vector_dim: int
    uses_context: bool
    context_documents: int | None
    drift: DriftReply | None
    is_outdated: bool = Field(
        description="A newer generation was published but is damaged; an older one answers."
    )
    lengths: list[LengthReply] = Field(
        description="The curve of length collapse: alike vectors of long documents are told apart badly."
    )
