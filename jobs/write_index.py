"""The last steps: encoded shards into the tables, as the one committer, and the generation published.

Workers make Parquet shards, and of many chunks files that no one names yet: fragments of the tables, and
parts of a segment. This is the one place that commits them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from jobs import pending
from jobs.cluster_corpus import view_corpus
from jobs.compatibility import is_repointed
from jobs.corpus_view import CorpusView, view_folder
from jobs.encode_corpus import EncodedCorpus, encode_shards
from jobs.engine import EngineConfig
from jobs.ingest import count_vanished, finish, open_ingest, stage_corpus
from jobs.ingest_settings import remembered_settings
from jobs.row_tasks import rows_to_append
from jobs.run import Run
from pipeline.config import IngestConfig
from pipeline.errors import ConfigError
from pipeline.index.copied_names import CLUSTERS_ARROW, CONTEXT_ARROW
from pipeline.index.lance_files import LanceFiles
from pipeline.index.lance_index import LanceTables, Versions
from pipeline.index.publish import GenerationFacts, next_generation_number, publish_generation
from pipeline.index.served_documents import find_served
from pipeline.index.store_tasks import store_tasks
from pipeline.index.tables import CHUNKS, DOCUMENTS
from pipeline.manifest import Manifest
from pipeline.model.folders.names import hub_revision, model_folder
from pipeline.token_vectors.projection import LATE_NAME
from pipeline.types import IngestReport, ProgressListener, silent_progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The tables and their versions that hold a run's result; no reader sees them yet.

    ``since`` are those that hold the served generation's rows, None where nothing of them is left. ``files``
    are new files of the tables whose hashes are known.
    """

    shards: pending.EncodedShards
    tables: LanceTables
    versions: Versions
    since: Versions | None
    files: LanceFiles


def write_index(
    sources: Sequence[str],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: EngineConfig | None = None,
) -> IngestReport:
    """Commit and publish what ``encode_corpus`` left.

    Raises :class:`ConfigError` where a document is not encoded yet. The model is loaded, as the encoder's
    fingerprint is part of the generation.
    """
    with open_ingest("write_index", sources, root, collection, config, progress, engine) as run:
        staged = stage_corpus(run)
        vanished = count_vanished(run, staged)
        if staged.staged:
            raise ConfigError(
                f"every document must be encoded before write_index, got {staged.staged:,} that are not; "
                "run encode_corpus first"
            )
        if not (staged.indexed or vanished or is_repointed(run.base, config)):
            return finish(run, staged)
        view = view_corpus(run, ())
        encoded = encode_shards(run, view, (), 0)
        committed = commit_shards(
            run, encoded, has_tokens=view.token_projection is not None, delete_vanished=vanished > 0
        )
        manifest = publish(run, view, encoded, committed)
        return finish(run, staged, manifest, deleted=vanished)


def commit_shards(
    run: Run,
    encoded: EncodedCorpus,
    *,
    has_tokens: bool,
    delete_vanished: bool = False,
    replaces_all: bool = False,
) -> Committed:
    """Delete replaced rows, and vanished or all rows on request; append all encoded shards to both tables."""
    tables = run.tables
    if tables is None:
        tables = LanceTables.open_or_create(
            run.layout, run.metadata_fields, encoded.vector_dim, has_tokens=has_tokens
        )
        tables.roll_back(None)
    if replaces_all and has_tokens:
        tables.add_token_columns()
    shards = pending.EncodedShards.of(run.layout, run.ledger, encoded.first_shard)
    documents, chunks = shards.count()
    run.progress("commit", 0, documents, "documents")
    since = None if replaces_all else tables.compact()
    run_tasks = store_tasks(run.layout, run.engine.run_tasks)
    new = rows_to_append(shards, tables, run_tasks, run.layout.pending_folder)
    versions = tables.commit(
        generation=next_generation_number(run.layout),
        deleted_ids=chain(run.ledger.replaced_ids(), run.ledger.vanished_ids() if delete_vanished else ()),
        find_documents=None if run.base is None else partial(find_served, run.layout, run.base),
        replaces_all=replaces_all,
        documents=new.rows[DOCUMENTS],
        chunks=new.rows[CHUNKS],
        expected_documents=documents,
        expected_chunks=chunks,
    )
    run.progress("commit", documents, documents, "documents")
    return Committed(shards=shards, tables=tables, versions=versions, since=since, files=new.files)


def publish(run: Run, view: CorpusView, encoded: EncodedCorpus, committed: Committed) -> Manifest:
    """Build the files of the next generation from the committed versions, and serve it."""
    base = run.base
    if base:
        sizes, at_context = base.context_cluster_sizes, base.documents_at_context
    else:
        sizes_K = committed.shards.cluster_sizes(view.clusters.num_clusters)
        sizes, at_context = tuple(sizes_K.tolist()), int(sizes_K.sum())
    measured = encoded.tokens / encoded.seconds if encoded.tokens else 0.0
    folder = view_folder(run.layout, base)
    revision = hub_revision(model_folder(run.config.encoder.model))
    facts = GenerationFacts(
        run_id=run.run_id,
        side_files={
            name: folder / name
            for name in (CONTEXT_ARROW, CLUSTERS_ARROW, *([LATE_NAME] if view.token_projection else []))
        },
        fingerprints={
            "encoder": encoded.encoder_fingerprint,
            "context": view.context.fingerprint,
            "clusters": view.clusters.fingerprint,
            **({"token_vectors": view.token_projection.fingerprint} if view.token_projection else {}),
            **({"model_revision": revision} if revision else {}),
        },
        settings=remembered_settings(run.config),
        context_documents=len(view.context.doc_ids),
        context_cluster_sizes=sizes,
        documents_at_context=at_context,
        encode_tokens_per_second=measured or (base.encode_tokens_per_second if base else 0.0),
        sources=run.sources,
    )
    return publish_generation(
        run.layout,
        committed.tables,
        committed.versions,
        facts,
        run.config.index,
        run.progress,
        committed.since,
        run_tasks=store_tasks(run.layout, run.engine.run_tasks),
        hashed=committed.files,
    )


if __name__ == "__main__":
    from jobs.job import ingest_job, main

    sys.exit(main("write_index", ingest_job(write_index)))
