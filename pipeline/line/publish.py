"""The last steps: encoded shards into the tables, as the one committer, and the generation published.

Workers make Parquet shards, and of many chunks files that no one names yet: fragments of the tables, and
parts of a segment. This is the one place that commits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain

from cairn.pipeline.index.lance_files import LanceFiles
from cairn.pipeline.index.lance_index import LanceTables, Versions
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.names import CLUSTERS_ARROW, CONTEXT_ARROW
from cairn.pipeline.index.publish import GenerationFacts, next_generation_number, publish_generation
from cairn.pipeline.index.store_tasks import store_tasks
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.line import pending
from cairn.pipeline.line.corpus_view import CorpusView, view_folder
from cairn.pipeline.line.encode import EncodedCorpus
from cairn.pipeline.line.ingest_settings import remembered_settings
from cairn.pipeline.line.row_tasks import rows_to_append
from cairn.pipeline.line.run import Run
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.names import hub_revision, model_folder
from cairn.pipeline.token_vectors.projection import LATE_NAME


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
