"""What every document of a collection is encoded with: its clusters, its context, its token projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CLUSTERS_ARROW, CONTEXT_ARROW
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.token_vectors.projection import LATE_NAME, TokenProjection, load_token_projection


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusView:
    """Clusters and context; ``known_clusters`` has the clusters of the sampled documents, by document id.

    ``token_projection`` is None where the collection has no token vectors.
    """

    clusters: Clusters
    context: ContextSet
    token_projection: TokenProjection | None = None
    known_clusters: Mapping[str, int] = field(default_factory=dict[str, int])


def view_folder(layout: CollectionLayout, base: Manifest | None) -> Path:
    """Return the folder of clusters and context: a generation's, or ``pending/`` where they are drawn."""
    return layout.generation_folder(base.generation) if base else layout.pending_folder


def read_view(layout: CollectionLayout, base: Manifest | None) -> CorpusView:
    """Read the clusters and the context of a generation, or those of ``pending/`` (None)."""
    folder = view_folder(layout, base)
    has_tokens = (folder / LATE_NAME).is_file() and (base is None or LATE_NAME in base.files)
    with layout.naming_damage():
        return CorpusView(
            clusters=Clusters.read(folder / CLUSTERS_ARROW),
            context=ContextSet.read(folder / CONTEXT_ARROW),
            token_projection=load_token_projection(folder / LATE_NAME) if has_tokens else None,
        )
