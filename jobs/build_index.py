"""The line: sources in, one published generation out.

    scan ─▶ stage what changed ─▶ cluster ─▶ context ─▶ encode shard by shard ─▶ commit to Lance ─▶ publish

Every stage streams, and peak memory does not depend on the corpus. This process holds the collection's writer
lock throughout and alone writes to it; only what needs a model is the engine's, which may have workers on
other machines. Nothing a reader sees changes before the last step, and every finished shard outlives a kill.
So the jobs ``cluster_corpus`` and ``encode_corpus`` are this line stopped early, and ``write_index`` is what
is left of it then, each on the machine that suits it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from jobs import pending
from jobs.engine import EngineConfig, open_engine
from jobs.job_file import IngestJobName
from jobs.run import (
    Run,
    StageWatch,
    describe_reasons,
    is_repointed,
    may_have_another_model,
    new_run_id,
    record_run,
    require_same_settings,
)
from pipeline.config import IngestConfig
from pipeline.corpus.ledger import Ledger
from pipeline.corpus.parquet import scan_sources
from pipeline.corpus.quarantine import QuarantineWriter
from pipeline.corpus.staging import stage_changes
from pipeline.errors import SourceError
from pipeline.index.lance_index import LanceTables
from pipeline.index.layout import CollectionLayout
from pipeline.index.publish import prepare_writer
from pipeline.model.folders.names import model_folder
from pipeline.types import IngestReport, ProgressListener, silent_progress


def build_index(
    sources: Sequence[str],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: EngineConfig | None = None,
    job: IngestJobName = "build_index",
) -> IngestReport:
    """Bring a collection up to date with its sources and return what was done.

    ``job`` = ``cluster_corpus`` or ``encode_corpus`` stops after that stage and keeps its work for the next,
    with the served generation (0: none) in the report; ``write_index`` raises :class:`ConfigError` where a
    document is not encoded yet. Sources, columns and settings are checked before anything is written; a first
    ingest, which needs the model anyhow, loads it for that. A row is counted once: ``rows == indexed +
    unchanged + quarantined``.
    """
    watch = StageWatch(progress)
    layout = CollectionLayout(Path(root), collection)
    model_folder(config.encoder.model)
    scan = scan_sources(sources, config.corpus)
    with closing(open_engine(engine or EngineConfig(), config)) as opened:
        if not layout.exists():
            opened.load()
        with layout.writer_lock():
            published = prepare_writer(layout)
            require_same_settings(published, config)
            if published and may_have_another_model(published, config):
                from jobs.encode_corpus import (
                    require_same_model,  # torch comes in here: a run without changes never loads it
                )

                require_same_model(layout, published, config, opened)
            run = Run(
                run_id=new_run_id(),
                layout=layout,
                scan=scan,
                config=config,
                published=published,
                progress=watch,
                engine=opened,
                job=job,
            )
            report = _execute(run)
            record_run(run, report)
    return report


def _execute(run: Run) -> IngestReport:
    layout, config, published = run.layout, run.config, run.published
    tables = None
    if published:
        tables = LanceTables.open_or_create(layout, run.scan.metadata_fields, published.vector_dim)
        tables.roll_back(published.lance_versions)
    pending.resume_or_start(
        layout, pending.work_key(config, run.scan.schema_fingerprint, published and published.generation)
    )
    with Ledger(layout.ledger_path) as ledger:
        if published and tables:
            hashes = tables.published_hashes(published.lance_versions)
            ledger.load_published(
                (batch.column("doc_id").to_pylist(), batch.column("content_sha256").to_pylist())
                for batch in hashes
            )
        pending.load_encoded(layout, ledger)
        with QuarantineWriter(layout.quarantine_path(run.run_id)) as quarantine:
            staged = stage_changes(
                run.scan,
                config.corpus,
                ledger,
                layout.staged_folder,
                config.shard_characters,
                quarantine,
                run.progress,
            )
        deletes = (
            config.sync and staged.is_complete and run.publishes
        )  # what a damaged file held cannot be told from what vanished
        deleted = sum(map(len, ledger.vanished_ids())) if deletes else 0
        encoded = 0
        manifest = published
        if staged.indexed or deleted or is_repointed(published, config):
            from jobs.write_index import encode_and_publish  # torch comes in here, too

            manifest, encoded = encode_and_publish(run, staged, ledger, delete_vanished=deletes)
    if run.publishes or not staged.indexed:
        pending.discard(layout)
    if manifest is None and not staged.indexed:
        raise SourceError(
            f"every row was quarantined ({describe_reasons(staged.quarantine_reasons)}) and nothing was "
            "indexed; "
            f"see {layout.quarantine_path(run.run_id)}"
        )
    return IngestReport(
        collection=layout.name,
        rows=staged.rows,
        indexed=staged.indexed,
        unchanged=staged.unchanged,
        quarantined=staged.quarantined,
        deleted=deleted,
        encoded=encoded,
        generation=manifest.generation if manifest else 0,
        seconds=run.progress.seconds,
        chunks=manifest.chunks if manifest else 0,
        tokens=manifest.tokens if manifest else 0,
        quarantine_reasons=staged.quarantine_reasons,
        stage_seconds=run.progress.stage_seconds(),
        warnings=run.warnings(staged),
    )


if __name__ == "__main__":
    from jobs.job import main

    sys.exit(main("build_index"))
