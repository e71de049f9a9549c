"""A new context for a corpus that has moved away from its own: all clusters, contexts and vectors made again.

    stage ─▶ view ───────▶ encode ─▶ commit ──────▶ publish
    stored   new clusters            tables
    rows     and context             replaced

The steps are those of ``build_index``. All or nothing: a generation never mixes vectors of two contexts. The
texts come from the tables, so no source is needed. A query column is not stored; the query side of a document
is its title or leading sentence here. Searches answer from the old generation until the new one is published,
and a killed run goes on as an ingest does. An encoder that reads no context gains nothing from this.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cairn.pipeline.config import EncoderConfig, IngestConfig
from cairn.pipeline.context.drift import measure_drift
from cairn.pipeline.corpus.source_record import carry_over
from cairn.pipeline.corpus.staging import stage_stored
from cairn.pipeline.index.lance_index import DOCUMENTS, LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import prepare_writer
from cairn.pipeline.index.status import collection_status
from cairn.pipeline.line import pending
from cairn.pipeline.line.compatibility import require_same_model
from cairn.pipeline.line.encode import encode_shards
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.engine import Engine
from cairn.pipeline.line.publish import publish
from cairn.pipeline.line.run import Run, StageWatch, new_run_id
from cairn.pipeline.line.view import view_corpus
from cairn.pipeline.types import ProgressListener, silent_progress, staged_schema

WORK = "recontextualise"
"""Stands in the key of pending work where an ingest has the fingerprint of its schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterChange:
    """Documents of one cluster when the context was drawn, and now."""

    cluster: int
    documents_at_context: int
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecontextualisationPlan:
    """How far a corpus has drifted, and what a new context would cost.

    ``is_due`` where the drift is large and the encoder reads the context. ``changed_clusters`` are ordered by
    how much their share of the corpus changed. ``encode_seconds`` is estimated from the speed of the last
    encoding; it leaves out the drawing of clusters and context. ``has_token_vectors`` says whether searches
    judge by token vectors.
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
    has_token_vectors: bool


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
    status = collection_status(CollectionLayout.at(Path(root), collection))
    before, now = status["context"]["cluster_sizes"], status["cluster_sizes"]
    drift = measure_drift(before, now, status["context"]["collection_documents"])
    reads_context = EncoderConfig(**status["encoder"]).needs_context
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
        has_token_vectors=status["token_vectors"] is not None,
    )


def recontextualise(
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: Engine | None = None,
) -> RecontextualisationReport:
    """Draw new clusters and a new context, encode every document with them, and publish the result.

    ``config`` is the collection's own. Raises :class:`FingerprintMismatchError` for another model than it was
    built with.
    """
    with _open(root, collection, config, progress, engine) as run:
        shards, characters = _stage_stored(run)
        view = view_corpus(run, shards)
        encoded = encode_shards(run, view, shards, characters)
        before = run.layout.current_generation_number()
        before_sha256 = run.layout.hash_of_manifest(before) if before else ""
        manifest = publish(run, view, encoded, replaces_all=True)
        carry_over(run.layout.sources_path, before_sha256, run.layout.hash_of_manifest(manifest.generation))
        run.ledger.close()
        pending.discard(run.layout)
        report = RecontextualisationReport(
            collection=collection,
            generation=manifest.generation,
            documents=manifest.documents,
            encoded=encoded.documents,
            clusters=view.clusters.num_clusters,
            context_documents=manifest.context_documents,
            seconds=run.progress.seconds,
            stage_seconds=run.progress.stage_seconds(),
        )
        run.record(report=asdict(report))
    return report


@contextmanager
def _open(
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener,
    engine: Engine | None,
) -> Generator[Run]:
    """Hold the writer lock of a collection whose model is the one it was built with."""
    watch = StageWatch(progress)
    layout = CollectionLayout.at(Path(root), collection)
    layout.require_exists()
    with closing(engine or EncoderWorker(config)) as opened, layout.writer_lock():
        published = prepare_writer(layout)
        assert published is not None, "require_exists found a generation"
        require_same_model(layout, published, config, opened)
        tables = LanceTables.open(layout)
        tables.roll_back(published.lance_versions)
        with pending.open_ledger(layout, pending.work_key(config, WORK, published.generation)) as ledger:
            yield Run(
                run_id=new_run_id(),
                layout=layout,
                config=config,
                base=None,
                tables=tables,
                metadata_fields=tables.metadata_fields,
                sources=published.sources,
                ledger=ledger,
                engine=opened,
                progress=watch,
            )


def _stage_stored(run: Run) -> tuple[tuple[Path, ...], int]:
    """Stage the rows of the tables; return the shards and the characters of their texts."""
    assert run.tables is not None
    schema = staged_schema(run.metadata_fields)
    columns = [name for name in schema.names if name != "query"]
    stored = run.tables.scan(DOCUMENTS, columns, run.tables.versions())
    return stage_stored(stored, run.ledger, run.layout.staged_folder, run.config.shard_characters, schema)
