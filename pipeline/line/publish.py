"""The last steps: encoded shards into the tables, as the one committer, and the generation published.

Workers make Parquet shards, and of many chunks files that no one names yet: fragments of the tables, written
from those shards beside the tables' own, and parts of a segment. This is the one place that commits them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import pyarrow as pa
from cairn.pipeline.durable import commit_point, fsync_file
from cairn.pipeline.encode.shards import ENCODED_TABLES, EncodedTable
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index.allocator import returning_freed_memory
from cairn.pipeline.index.lance_append import Fragments, fragment_files
from cairn.pipeline.index.lance_files import LanceFiles, small_table_files
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.names import CLUSTERS_ARROW, CONTEXT_ARROW
from cairn.pipeline.index.publish import GenerationFacts, next_generation_number, publish_generation
from cairn.pipeline.index.segments.parts import RunTasks, num_parts
from cairn.pipeline.index.store_tasks import store_tasks
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.index.tiers import FACTOR
from cairn.pipeline.index.worker_files import LostFilesError
from cairn.pipeline.line import pending
from cairn.pipeline.line.encode import EncodedCorpus
from cairn.pipeline.line.engine import CorpusView
from cairn.pipeline.line.ingest_settings import remembered_settings
from cairn.pipeline.line.run import Run
from cairn.pipeline.line.view import view_folder
from cairn.pipeline.manifest import Manifest, record_file
from cairn.pipeline.model.folders.names import hub_revision, model_folder
from cairn.pipeline.token_vectors.projection import LATE_NAME

MAX_FRAGMENTS: Final = FACTOR - 1
"""Of a table in one commit: one more, and the next ingest would merge them."""


def publish(
    run: Run,
    view: CorpusView,
    encoded: EncodedCorpus,
    *,
    delete_vanished: bool = False,
    replaces_all: bool = False,
) -> Manifest:
    """Commit what is encoded to the tables, build the files of the next generation, and serve it.

    Replaced rows are deleted, and vanished or all rows on request. No reader sees anything before the end.
    """
    has_tokens = view.token_projection is not None
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
    since = None if replaces_all else tables.compact()  # what holds the served generation's rows
    run_tasks = store_tasks(run.layout, run.engine.run_tasks)
    rows, hashed = _rows_to_append(shards, tables, run_tasks, run.layout.pending_folder)
    versions = tables.commit(
        generation=next_generation_number(run.layout),
        deleted_ids=chain(run.ledger.replaced_ids(), run.ledger.vanished_ids() if delete_vanished else ()),
        find_documents=None if run.base is None else partial(find_served, run.layout, run.base),
        replaces_all=replaces_all,
        documents=rows[DOCUMENTS],
        chunks=rows[CHUNKS],
        expected_documents=documents,
        expected_chunks=chunks,
    )
    run.progress("commit", documents, documents, "documents")
    return publish_generation(
        run.layout,
        tables,
        versions,
        _facts(run, view, encoded, shards),
        run.config.index,
        run.progress,
        since,
        run_tasks=run_tasks,
        hashed=hashed,
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
    folder = view_folder(run.layout, base)
    revision = hub_revision(model_folder(run.config.encoder.model))
    return GenerationFacts(
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
        encode_tokens_per_second=tokens_per_second(base, encoded),
        sources=run.sources,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteFragments:
    """Writes a run of shards as a fragment of one table."""

    tables: LanceTables
    table: EncodedTable
    shards: pending.EncodedShards
    num_rows: int

    def reads(self) -> Iterable[Path]:
        """See :class:`cairn.pipeline.index.segments.parts.Task`."""
        yield from small_table_files(self.tables.layout, self.tables.versions())
        yield from self.shards.files(self.table)

    @returning_freed_memory()
    def run(self) -> tuple[Fragments, LanceFiles]:
        """Write, flush and hash it; what is not committed is cleared with the next publication."""
        rows = self.shards.stream(self.table, self.tables.schemas[self.table])
        fragments = self.tables.write_fragments(self.table, rows, self.num_rows)
        files: LanceFiles = {}
        for name in fragment_files(self.table, fragments):
            path = self.tables.layout.lance_folder / name
            fsync_file(path)
            files[name] = record_file(path)
        return fragments, files


Rows = Mapping[str, pa.RecordBatchReader | Fragments]
"""The rows of each table to append."""


def _rows_to_append(
    shards: pending.EncodedShards, tables: LanceTables, run_tasks: RunTasks | None, folder: Path
) -> tuple[Rows, LanceFiles]:
    """Return rows and the known hashes of their files: fragments that workers write, or streams of few rows.

    ``folder`` is one that workers see if they see the root. Raises :class:`TryAgainError` where shards in an
    object store are not what was uploaded; they count as not encoded then.
    """
    _, num_chunks = shards.count()
    parts = min(num_parts(num_chunks), MAX_FRAGMENTS)
    try:
        if run_tasks is not None and parts > 1:
            return _fragments(shards, tables, run_tasks, folder, parts)
        if tables.layout.replica is not None:
            shards.fetch(tables.layout.replica.worker_files)
    except LostFilesError as error:
        lost = shards.unfinish(error.files)
        if not lost:
            raise
        raise TryAgainError(
            f"encoded shards in the object store must be there as they were uploaded, got {lost} that are "
            f"not ({error.fault}); run the same command again, it encodes them again"
        ) from error
    streams = {table: shards.stream(table, tables.schemas[table]) for table in ENCODED_TABLES}
    return streams, {}


def _fragments(
    shards: pending.EncodedShards, tables: LanceTables, run_tasks: RunTasks, folder: Path, parts: int
) -> tuple[Rows, LanceFiles]:
    tasks = [
        WriteFragments(tables=tables, table=table, shards=part, num_rows=num_rows)
        for part in shards.cut(parts)
        for table, num_rows in zip(ENCODED_TABLES, part.count(), strict=True)
        if num_rows
    ]
    rows: dict[str, Fragments] = {table: [] for table in ENCODED_TABLES}
    files: LanceFiles = {}
    for task, (fragments, written) in zip(tasks, run_tasks(tasks, folder), strict=True):
        rows[task.table] += fragments
        files |= written
    commit_point("fragments-written")
    return rows, files
