"""What all documents of a collection are encoded with: its clusters, context and token codebook, drawn once.

They belong to a collection, not to a run: the first ingest draws them and later ones keep them unchanged, so
that new and old vectors describe the same corpus. Clusters are trained on a sample that fits memory; the
engine's workers assign all other documents to them as they encode, shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.cluster.assignment import assign
from cairn.pipeline.cluster.asymmetric_kmeans import train_clusters
from cairn.pipeline.cluster.sampling import sample_rows
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.errors import FingerprintMismatchError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CLUSTERS_ARROW, CONTEXT_ARROW
from cairn.pipeline.line import pending
from cairn.pipeline.line.engine import CorpusView
from cairn.pipeline.line.run import Run
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.token_vectors.codebook import load_token_coder
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import GIVEN_VECTORS


def view_corpus(run: Run, shards: Sequence[Path]) -> CorpusView:
    """Read a collection's clusters and context, or draw them from staged shards into ``pending/``.

    Raises :class:`FingerprintMismatchError` where an interrupted run began with other models.
    """
    if run.base is None and not run.layout.pending_context_path.exists():
        return _draw(run, shards)
    view = read_view(run.layout, run.base)
    if run.base is not None:
        return view
    loaded = run.engine.load()
    if (view.context.first_stage_fingerprint, pending.noted_sparse(run.layout)) != (
        loaded.first_stage_fingerprint,
        loaded.sparse_fingerprint,
    ):
        raise FingerprintMismatchError(
            f"an ingest of {run.layout.name!r} that was interrupted must go on with the model it began with, "
            f"got other weights; restore them, or remove {run.layout.pending_folder} to begin again"
        )
    return view


def _draw(run: Run, shards: Sequence[Path]) -> CorpusView:
    run.progress("cluster", 0, None, "documents")
    sample = sample_rows(
        (pq.read_table(shard).drop_columns([GIVEN_VECTORS]) for shard in shards),
        run.config.cluster.max_sample_documents,
        run.config.cluster.seed,
    )
    embedded = run.engine.embed_sample(sample)
    clusters = train_clusters(
        embedded.phi_NV,
        embedded.psi_NV,
        run.config.cluster,
        surrogate_fingerprint=embedded.surrogate_fingerprint,
        surrogate_state=embedded.surrogate_state,
    )
    assignments_N = assign(clusters, embedded.phi_NV, embedded.psi_NV)
    run.progress("cluster", sample.num_rows, sample.num_rows, "documents")
    drawn = min(run.config.context.context_documents, sample.num_rows)
    run.progress("context", 0, drawn, "documents")
    context = run.engine.draw_context(sample, assignments_N)
    run.progress("context", drawn, drawn, "documents")
    # The context is written last: where it stands, all are whole.
    clusters.write(run.layout.pending_clusters_path)
    durable.commit_point("clusters-written")
    codebook = run.engine.fit_codebook(sample, context)
    if codebook is not None:
        codebook.save(run.layout.pending_folder)
    pending.note_sparse(run.layout, run.engine.load().sparse_fingerprint)
    context.write(run.layout.pending_context_path)
    durable.commit_point("context-written")
    known = dict(zip(sample.column("doc_id").to_pylist(), assignments_N.tolist(), strict=True))
    return CorpusView(clusters=clusters, context=context, token_codebook=codebook, known_clusters=known)


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
            token_codebook=load_token_coder(folder) if has_tokens else None,
        )
