"""The last steps: encoded shards into the tables, as the one committer, and the generation published.

Of a collection in partitions each is committed by itself, on a cluster by a worker of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.names import CHUNKS, CLUSTERS_ARROW, CONTEXT_ARROW, DOCUMENTS
from cairn.pipeline.index.partitions import Change, by_partition, change_collection, new_records
from cairn.pipeline.index.publish import GenerationFacts, publish_generation
from cairn.pipeline.index.rows import LanceTables
from cairn.pipeline.line import pending
from cairn.pipeline.line.encode import EncodedCorpus
from cairn.pipeline.line.engine import CorpusView
from cairn.pipeline.line.ingest_settings import remembered_settings
from cairn.pipeline.line.run import Run
from cairn.pipeline.line.view import view_folder
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.names import hub_revision, model_folder
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import LINE_FIELD, SPARSE_FIELDS, TOKEN_FIELDS, ProgressListener, silent_progress


def publish(
    run: Run,
    view: CorpusView,
    encoded: EncodedCorpus,
    *,
    delete_vanished: bool = False,
    replaced: Manifest | None = None,
) -> Manifest:
    """Commit what is encoded to the tables, build the files of the next generation, and serve it.

    Replaced rows are deleted, vanished ones on request, and all rows of the generation ``replaced``. No
    reader sees anything before the end.
    """
    shards = pending.EncodedShards.of(run.layout, run.ledger, encoded.first_shard)
    commit = Commit(
        folder=run.layout.folder,
        shards=shards,
        deleted_ids=chain.from_iterable(
            chain(
                run.ledger.replaced_ids(),
                run.ledger.deleted_ids(),
                run.ledger.vanished_ids() if delete_vanished else (),
            )
        ),
        metadata_fields=run.metadata_fields,
        vector_dim=encoded.vector_dim,
        added=(
            *((LINE_FIELD,) if run.config.encoder.describe else ()),
            *(TOKEN_FIELDS if view.token_codebook else ()),
            *(SPARSE_FIELDS if run.config.encoder.sparse_model else ()),
        ),
        replaces_all=replaced is not None,
        facts=_facts(run, view, encoded, shards),
        config=run.config.index,
    )
    if run.config.index.partitions > 1:
        return _publish_partitions(run, commit, replaced or run.base)
    tables = run.stored[0].tables if run.stored else None
    return commit.run(run.layout, run.base, run.progress, tables)


def _publish_partitions(run: Run, commit: Commit, before: Manifest | None) -> Manifest:
    """Publish the partitions that have something to commit, then the collection."""
    num_partitions = run.config.index.partitions
    records = before.partitions if before else new_records(num_partitions, 1)
    deleted_ids = by_partition(commit.deleted_ids, num_partitions)
    is_outgrown = {rows.tables.layout.name: rows.has_new_columns() for rows in run.stored}
    changes: dict[int, Change] = {}
    files: dict[int, list[Path]] = {}
    for number in range(num_partitions):
        shards = commit.shards.of_partition(number, num_partitions)
        gone = deleted_ids.get(number, [])
        is_replaced = commit.replaces_all and records[number].generation
        if shards.counts or gone or is_replaced or is_outgrown.get(records[number].name):
            own = replace(commit, shards=shards, deleted_ids=gone)
            changes[number], files[number] = own.run, [*shards.files(), *commit.facts.side_files.values()]
    return change_collection(
        run.layout,
        records,
        changes,
        commit.facts,
        run.progress,
        run.engine.run_tasks,
        files,
        refills=run.keeps_work,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a run changes in one folder of rows: encoded shards come, and documents go.

    ``added`` are the further columns of ``chunks`` of a new folder. ``folder`` is the collection's where the
    files lie; another machine has them at the same places of its own.
    """

    folder: Path
    shards: pending.EncodedShards
    deleted_ids: Iterable[str]
    metadata_fields: Sequence[pa.Field[Any]]
    vector_dim: int
    added: Sequence[pa.Field[Any]]
    replaces_all: bool
    facts: GenerationFacts
    config: IndexConfig

    def run(
        self,
        layout: CollectionLayout,
        base: Manifest | None,
        progress: ProgressListener = silent_progress,
        tables: LanceTables | None = None,
    ) -> Manifest:
        """Commit to the tables and publish; ``base`` is what is served, None where nothing of it is kept."""
        folder = (layout.whole or layout).folder
        if folder != self.folder:
            return self._moved(folder).run(layout, base, progress, tables)
        documents, chunks = self.shards.count()
        progress("commit", 0, documents, "documents")
        if tables is None:
            versions = None if base is None else base.lance_versions
            tables = LanceTables.open_or_create(
                layout, self.metadata_fields, self.vector_dim, added=self.added, versions=versions
            )
        if self.replaces_all and set(TOKEN_FIELDS) <= set(self.added):
            tables.add_token_columns()
        tables.add_metadata_columns()
        if not self.replaces_all:
            tables.compact()
        versions = tables.commit(
            deleted_ids=self.deleted_ids,
            find_documents=None if base is None else partial(find_served, layout, base),
            replaces_all=self.replaces_all,
            documents=self.shards.stream("documents", tables.schemas[DOCUMENTS]),
            chunks=self.shards.stream("chunks", tables.schemas[CHUNKS]),
            expected_documents=documents,
            expected_chunks=chunks,
        )
        progress("commit", documents, documents, "documents")
        return publish_generation(
            layout,
            tables,
            versions,
            self.facts,
            self.config,
            progress,
            shares=not self.replaces_all,
        )

    def _moved(self, folder: Path) -> Commit:
        def moved(path: Path) -> Path:
            return folder / path.relative_to(self.folder)

        side_files = {name: moved(path) for name, path in self.facts.side_files.items()}
        return replace(
            self,
            folder=folder,
            shards=replace(self.shards, folder=moved(self.shards.folder)),
            facts=replace(self.facts, side_files=side_files),
        )


def tokens_per_second(base: Manifest | None, encoded: EncodedCorpus) -> float:
    """Return the rate of encoding, in which each run counts by its tokens.

    A run of a few documents is mostly the model's first steps, and says little of a large one.
    """
    known = base.encode_tokens_per_second if base else 0.0
    if base is None or not known:
        return encoded.tokens / encoded.seconds if encoded.tokens else 0.0
    return (base.tokens + encoded.tokens) / (base.tokens / known + encoded.seconds)


def _facts(
    run: Run, view: CorpusView, encoded: EncodedCorpus, shards: pending.EncodedShards
) -> GenerationFacts:
    base = run.base
    if base:
        sizes, at_context = base.context_cluster_sizes, base.documents_at_context
    else:
        sizes_K = shards.cluster_sizes(view.clusters.num_clusters)
        sizes, at_context = tuple(sizes_K.tolist()), int(sizes_K.sum())
    fingerprints = {
        "encoder": encoded.encoder_fingerprint,
        "context": view.context.fingerprint,
        "clusters": view.clusters.fingerprint,
    }
    side_files = [CONTEXT_ARROW, CLUSTERS_ARROW]
    if view.token_codebook:
        side_files.append(LATE_NAME)
        fingerprints["token_vectors"] = view.token_codebook.fingerprint
    if encoded.sparse_fingerprint:
        fingerprints["sparse"] = encoded.sparse_fingerprint
    if revision := hub_revision(model_folder(run.config.encoder.model)):
        fingerprints["model_revision"] = revision
    folder = view_folder(run.layout, base)
    return GenerationFacts(
        run_id=run.run_id,
        side_files={name: folder / name for name in side_files},
        fingerprints=fingerprints,
        settings=remembered_settings(run.config),
        context_documents=len(view.context.doc_ids),
        context_cluster_sizes=sizes,
        documents_at_context=at_context,
        encode_tokens_per_second=tokens_per_second(base, encoded),
        sources=run.sources,
    )
