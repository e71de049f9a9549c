"""The corpus that all documents of a collection are seen in: its clusters and its context, drawn once.

They belong to a collection, not to a run: the first ingest draws them, later ones carry them over unchanged,
so that new documents and old ones stand in the same corpus. Clusters are trained on a sample that fits
memory; the engine's workers assign all other documents to them as they encode, shard by shard.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from jobs.encoder_worker import CorpusView
from jobs.engine import Engine
from pipeline import durable
from pipeline.cluster.assignment import assign
from pipeline.cluster.asymmetric_kmeans import train_clusters
from pipeline.cluster.sampling import sample_rows
from pipeline.cluster.store import Clusters
from pipeline.config import IngestConfig
from pipeline.context.store import ContextSet
from pipeline.errors import FingerprintMismatchError
from pipeline.index.layout import CLUSTERS_ARROW, CONTEXT_ARROW, CollectionLayout
from pipeline.manifest import Manifest
from pipeline.types import ProgressListener

SAMPLE_TEXT_CHARACTERS = 2_048
"""Opening of a document that surrogate and first stage may read: some 500 tokens, twice what either uses."""


def view_folder(layout: CollectionLayout, published: Manifest | None) -> Path:
    """Return where clusters and context lie.

    In the served generation, or in ``pending/`` before there is one.
    """
    return layout.generation_folder(published.generation) if published else layout.pending_folder


def corpus_view(
    layout: CollectionLayout,
    published: Manifest | None,
    staged: Sequence[Path],
    config: IngestConfig,
    engine: Engine,
    progress: ProgressListener,
) -> CorpusView:
    """Read the clusters and the context of a collection, or draw them from what is staged and keep them in ``pending/``."""
    folder = view_folder(layout, published)
    if not published and not layout.pending_context_path.exists():
        return _draw(layout, staged, config, engine, progress)
    with layout.naming_damage():
        view = CorpusView(
            clusters=Clusters.read(folder / CLUSTERS_ARROW), context=ContextSet.read(folder / CONTEXT_ARROW)
        )
    if not published:
        _require_own_context(layout, view.context, engine.load().first_stage_fingerprint)
    return view


def _require_own_context(layout: CollectionLayout, context: ContextSet, first_stage_fingerprint: str) -> None:
    """Raise :class:`FingerprintMismatchError` where a run to be resumed drew its context with another model."""
    if context.first_stage_fingerprint != first_stage_fingerprint:
        raise FingerprintMismatchError(
            f"an ingest of {layout.name!r} that was interrupted must go on with the model it began with, "
            "got other weights; "
            f"restore them, or remove {layout.pending_folder} to begin anew"
        )


def _draw(
    layout: CollectionLayout,
    staged: Sequence[Path],
    config: IngestConfig,
    engine: Engine,
    progress: ProgressListener,
) -> CorpusView:
    progress("cluster", 0, None, "documents")
    sample = sample_rows(
        map(pq.read_table, staged),
        config.cluster.max_sample_documents,
        config.cluster.seed,
        max_text_characters=SAMPLE_TEXT_CHARACTERS,
    )
    embedded = engine.embed_sample(sample)
    clusters = train_clusters(
        embedded.phi_NV,
        embedded.psi_NV,
        config.cluster,
        surrogate_fingerprint=embedded.surrogate_fingerprint,
        surrogate_state=embedded.surrogate_state,
    )
    assignments_N = assign(clusters, embedded.phi_NV, embedded.psi_NV)
    progress("cluster", sample.num_rows, sample.num_rows, "documents")
    drawn = min(config.context.num_documents, sample.num_rows)
    progress("context", 0, drawn, "documents")
    context = engine.draw_context(sample, assignments_N)
    progress("context", drawn, drawn, "documents")
    # The context is written last: where it stands, both are whole.
    clusters.write(layout.pending_clusters_path)
    durable.commit_point("clusters-written")
    context.write(layout.pending_context_path)
    durable.commit_point("context-written")
    known = dict(zip(sample.column("doc_id").to_pylist(), assignments_N.tolist(), strict=True))
    return CorpusView(clusters=clusters, context=context, known_clusters=known)


if __name__ == "__main__":
    from jobs.job import main

    sys.exit(main("cluster_corpus"))
