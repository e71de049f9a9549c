"""A new context for a corpus that has moved away from its own: clusters and context drawn anew, every vector made again.

    stored rows ─▶ staged ─▶ new clusters ─▶ new context ─▶ encoded ─▶ tables replaced ─▶ next generation

All or nothing: vectors of two contexts never stand in one generation. The texts come from the tables, so no
source is needed; a query column is not stored, and the query side of a document is its title or leading
sentence here. Searches answer from the old generation until the new one is published, and a killed run goes
on as an ingest does. No vector of an encoder that reads no context is affected.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import pending
from jobs.encode_corpus import encode_corpus, require_same_model
from jobs.engine import EngineConfig, open_engine
from jobs.run import StageWatch, new_run_id
from jobs.write_index import generation_facts
from pipeline import durable
from pipeline.config import IngestConfig
from pipeline.context.drift import measure_drift
from pipeline.corpus.ledger import Ledger
from pipeline.corpus.staging import stage_stored
from pipeline.index.lance_index import DOCUMENTS, LanceTables
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import collection_status
from pipeline.index.publish import next_generation_number, prepare_writer, publish_generation
from pipeline.types import ProgressListener, silent_progress, staged_schema

WORK = "recontextualise"
"""What pending work of this kind is known by, where an ingest's has the fingerprint of its schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterChange:
    """Documents of one cluster when the context was drawn, and now."""

    cluster: int
    documents_at_context: int
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecontextualisationPlan:
    """How far a corpus has drifted, and what a new context would cost; ``is_due`` where the drift is large and the encoder reads it.

    ``changed_clusters`` has those whose share of the corpus moved most, most first. ``encode_seconds`` counts
    what the last encoding measured, without the drawing of clusters and context.
    """

    collection: str
    generation: int
    verdict: str
    total_variation: float
    added_share: float
    changed_clusters: tuple[ClusterChange, ...]
    documents: int
    reads_context: bool
    is_due: bool
    encode_documents: int
    encode_tokens: int
    encode_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecontextualisationReport:
    """What was done; ``encoded`` is smaller than ``documents`` after a resumed run."""

    collection: str
    generation: int
    documents: int
    encoded: int
    clusters: int
    context_documents: int
    seconds: float
    stage_seconds: Mapping[str, float]


def plan_recontextualisation(root: str | Path, collection: str) -> RecontextualisationPlan:
    """Compare a collection with the corpus its context was drawn from; reads no text and loads no model."""
    status = collection_status(CollectionLayout(Path(root), collection))
    before, now = status["context"]["cluster_sizes"], status["cluster_sizes"]
    drift = measure_drift(before, now, status["context"]["collection_documents"])
    reads_context = bool(status["encoder"]["use_context"])
    speed = status["encode_tokens_per_second"]
    return RecontextualisationPlan(
        collection=collection,
        generation=status["generation"],
        verdict=drift.verdict,
        total_variation=drift.total_variation,
        added_share=drift.added_share,
        changed_clusters=tuple(
            ClusterChange(cluster=k, documents_at_context=before[k], documents=now[k])
            for k in drift.changed_clusters
        ),
        documents=status["documents"],
        reads_context=reads_context,
        is_due=reads_context and drift.verdict == "re-contextualise",
        encode_documents=status["documents"] if reads_context else 0,
        encode_tokens=status["tokens"] if reads_context else 0,
        encode_seconds=status["tokens"] / speed if reads_context and speed else 0.0,
    )


def recontextualise(
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: EngineConfig | None = None,
) -> RecontextualisationReport:
    """Draw clusters and context anew, encode every document with them, and publish the result.

    ``config`` is the collection's own. Raises :class:`FingerprintMismatchError` for another model than it was
    built with.
    """
    watch = StageWatch(progress)
    layout = CollectionLayout(Path(root), collection)
    layout.require_exists()
    with closing(open_engine(engine or EngineConfig(), config)) as opened, layout.writer_lock():
        published = prepare_writer(layout)
        assert published is not None, "require_exists found a generation"
        require_same_model(layout, published, config, opened)
        tables = LanceTables.open(layout)
        tables.roll_back(published.lance_versions)
        pending.resume_or_start(layout, pending.work_key(config, WORK, published.generation))
        schema = staged_schema(tables.metadata_fields)
        with Ledger(layout.ledger_path) as ledger:
            pending.load_encoded(layout, ledger)
            stored = tables.scan(
                DOCUMENTS, [name for name in schema.names if name != "query"], published.lance_versions
            )
            shards, characters = stage_stored(
                stored, ledger, layout.staged_folder, config.shard_characters, schema
            )
            corpus = encode_corpus(layout, None, shards, characters, config, opened, watch)
            encoded = pending.EncodedShards(layout, ledger, corpus.first_shard)
            documents, chunks = encoded.count()
            watch("commit", 0, documents, "documents")
            versions = tables.commit(
                generation=next_generation_number(layout),
                replaces_all=True,
                documents=encoded.stream("documents", tables.schemas["documents"]),
                chunks=encoded.stream("chunks", tables.schemas["chunks"]),
                expected_documents=documents,
                expected_chunks=chunks,
            )
            watch("commit", documents, documents, "documents")
        run_id = new_run_id()
        facts = generation_facts(run_id, config, corpus, None, published.sources, tables, versions)
        manifest = publish_generation(layout, tables, versions, facts, config.index, watch)
        pending.discard(layout)
        report = RecontextualisationReport(
            collection=collection,
            generation=manifest.generation,
            documents=manifest.documents,
            encoded=corpus.documents,
            clusters=corpus.view.clusters.num_clusters,
            context_documents=manifest.context_documents,
            seconds=watch.seconds,
            stage_seconds=watch.stage_seconds(),
        )
        _record(layout, run_id, config, report)
    return report


def _record(
    layout: CollectionLayout, run_id: str, config: IngestConfig, report: RecontextualisationReport
) -> None:
    content: dict[str, Any] = {"run_id": run_id, "settings": config.to_dict(), "report": asdict(report)}
    with durable.storage_errors("recording the run"):
        layout.runs_folder.mkdir(exist_ok=True)
        durable.write_json(layout.run_path(run_id), content)
