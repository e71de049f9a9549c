"""What every document of a collection is encoded with: its clusters and its context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cluster.store import Clusters
from pipeline.context.store import ContextSet
from pipeline.index.layout import CLUSTERS_ARROW, CONTEXT_ARROW, CollectionLayout
from pipeline.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusView:
    """Clusters and context; ``known_clusters`` has the clusters of the sampled documents, by document id."""

    clusters: Clusters
    context: ContextSet
    known_clusters: Mapping[str, int] = field(default_factory=dict[str, int])


def view_folder(layout: CollectionLayout, base: Manifest | None) -> Path:
    """Return the folder of clusters and context: a generation's, or ``pending/`` where they are drawn."""
    return layout.generation_folder(base.generation) if base else layout.pending_folder


def read_view(layout: CollectionLayout, base: Manifest | None) -> CorpusView:
    """Read the clusters and the context of a generation, or those of ``pending/`` (None)."""
    folder = view_folder(layout, base)
    with layout.naming_damage():
        return CorpusView(
            clusters=Clusters.read(folder / CLUSTERS_ARROW), context=ContextSet.read(folder / CONTEXT_ARROW)
        )
