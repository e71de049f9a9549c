"""The line: sources in, one published generation out.

    stage ─▶ view ─────────────▶ encode ─────────▶ publish
    checked  clusters and        shard by shard    the one writer of the tables,
    rows     context, drawn once                   vector files, then CURRENT

Every step streams, and peak memory does not depend on the size of the corpus. This process holds the
collection's writer lock throughout and alone writes to it; only what needs a model is the engine's, which may
have workers on other machines. A reader sees nothing of it before ``CURRENT`` moves, and every finished shard
outlives a kill. ``until`` ends the line after its clusters or its encoding, and what is done is kept for the
next run: so each part can have the machine that suits it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.origins import origin_writer
from cairn.pipeline.corpus.quarantine import count_new, quarantine_writer
from cairn.pipeline.corpus.read_files import record_run
from cairn.pipeline.corpus.scan import Scan, scan_sources
from cairn.pipeline.corpus.source_record import create_record, holds_for
from cairn.pipeline.corpus.sources import Source
from cairn.pipeline.corpus.staging import Staged, stage_changes
from cairn.pipeline.errors import CairnError, ConfigError, IntegrityError, SourceError
from cairn.pipeline.index.aliases import target_of
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import prepare_writer
from cairn.pipeline.line import pending
from cairn.pipeline.line.compatibility import (
    is_repointed,
    may_have_another_model,
    require_same_model,
    require_same_settings,
    stored_manifest,
)
from cairn.pipeline.line.encode import encode_shards
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.engine import Engine
from cairn.pipeline.line.publish import publish
from cairn.pipeline.line.run import Run, StageWatch, new_run_id
from cairn.pipeline.line.view import view_corpus
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.untrained_settings import settings_warnings
from cairn.pipeline.types import IngestReport, ProgressListener, silent_progress

log = logging.getLogger(__name__)

Step = Literal["cluster", "encode", "publish"]
_JOBS: Final[Mapping[Step, str]] = {
    "cluster": "cluster_corpus",
    "encode": "encode_corpus",
    "publish": "build_index",
}
"""What the record of a run calls a line that ends after a step."""


def build_index(
    sources: Sequence[Source],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: Engine | None = None,
    *,
    until: Step = "publish",
    is_encoded: bool = False,
) -> IngestReport:
    """Bring a collection up to date with its sources and return what was done.

    ``engine`` = None encodes in this process. The line ends after the step ``until``. With ``is_encoded``,
    documents that an earlier run did not encode raise :class:`ConfigError`.

    Sources, columns and settings are checked before anything is written. A row is counted once:
    ``rows == indexed + unchanged + quarantined``.
    """
    job = "write_index" if is_encoded else _JOBS[until]
    with _open_ingest(job, sources, root, collection, config, progress, engine) as run:
        staged = _stage_corpus(run)
        if is_encoded and staged.staged:
            raise ConfigError(
                f"every document must be encoded before write_index, got {staged.staged:,} that are not; "
                "run encode_corpus first"
            )
        vanished = _count_vanished(run, staged) if until == "publish" else 0
        is_moved = until == "publish" and is_repointed(run.base, config)
        if not (staged.indexed or vanished or is_moved):
            return _finish(run, staged)
        view = view_corpus(run, staged.shards)
        if until == "cluster":
            return _finish(run, staged)
        encoded = encode_shards(run, view, staged.shards, staged.characters)
        if until == "encode":
            return _finish(run, staged, encoded=encoded.documents)
        manifest = publish(run, view, encoded, delete_vanished=vanished > 0)
        return _finish(run, staged, manifest, encoded=encoded.documents, deleted=vanished)


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestRun(Run):
    """A run that reads sources."""

    job: str
    scan: Scan


@contextmanager
def _open_ingest(
    job: str,
    sources: Sequence[Source],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener,
    engine: Engine | None,
) -> Generator[IngestRun]:
    """Check everything that can be checked before work begins, then hold the writer lock.

    A first ingest needs the model anyhow, and loads it before anything is written. Table versions that a
    killed run left are rolled back.
    """
    watch = StageWatch(progress)
    layout = CollectionLayout.at(Path(root), collection)
    model_folder(config.encoder.model)
    record = None if config.reread else layout.sources_path
    scan = scan_sources(sources, config.corpus, record, stored_fields(layout))
    with closing(engine or EncoderWorker(config)) as opened:
        if not layout.exists():
            opened.load()
        with layout.writer_lock():
            base = prepare_writer(layout)
            require_same_settings(base, config)
            if base and may_have_another_model(base, config):
                require_same_model(layout, base, config, opened)
            tables = None
            if base:
                tables = LanceTables.open_or_create(layout, scan.metadata_fields, base.vector_dim)
                tables.roll_back(base.lance_versions)
            key = pending.work_key(config, scan.schema_fingerprint, base and base.generation)
            prepare_record(layout.sources_path, layout, base, tables, renew=config.reread)
            with pending.open_ledger(layout, key, layout.sources_path) as ledger:
                yield IngestRun(
                    run_id=new_run_id(),
                    layout=layout,
                    config=config,
                    base=base,
                    tables=tables,
                    metadata_fields=scan.metadata_fields,
                    sources=scan.source_names,
                    ledger=ledger,
                    engine=opened,
                    progress=watch,
                    job=job,
                    scan=scan,
                )


def stored_fields(layout: CollectionLayout) -> Sequence[pa.Field[Any]] | None:
    """Return the metadata columns of a collection, None where nothing is published."""
    return LanceTables.open(layout).metadata_fields if stored_manifest(layout) else None


def prepare_record(
    record: Path,
    layout: CollectionLayout,
    base: Manifest | None,
    tables: LanceTables | None,
    *,
    renew: bool,
) -> None:
    """Leave a record as it is where it holds for the served generation, else make it from the tables.

    With ``renew`` it is made again in any case; none of its files is known then.
    """
    if base is None or tables is None:
        create_record(record, "", ())
    elif renew or not holds_for(record, layout.hash_of_manifest(base.generation)):
        hashes = (
            (batch.column("doc_id").to_pylist(), batch.column("content_sha256").to_pylist())
            for batch in tables.published_hashes(base.lance_versions)
        )
        create_record(record, layout.hash_of_manifest(base.generation), hashes)


def _stage_corpus(run: IngestRun) -> Staged:
    """Check, hash and compare every row of the sources; stage what has to be encoded."""
    with (
        quarantine_writer(run.layout.quarantine_path(run.run_id)) as quarantine,
        origin_writer(run.layout.origins_folder / f"{run.run_id}.parquet") as origins,
    ):
        return stage_changes(
            run.scan,
            run.config.corpus,
            run.ledger,
            run.layout.staged_folder,
            run.config.shard_characters,
            quarantine,
            run.progress,
            origins,
        )


def _count_vanished(run: IngestRun, staged: Staged) -> int:
    """Count the documents that ``--sync`` is to delete.

    None where a source file is damaged: what it held cannot be told from what vanished.
    """
    if not (run.config.sync and staged.is_complete):
        return 0
    return sum(map(len, run.ledger.vanished_ids()))


def _finish(
    run: IngestRun, staged: Staged, manifest: Manifest | None = None, *, encoded: int = 0, deleted: int = 0
) -> IngestReport:
    """Write the run's record and return its report; ``manifest`` is of the generation it published, if any.

    Pending work is kept where it is still to be published. A run whose rows were all quarantined, of a
    collection without a generation, raises :class:`SourceError`.
    """
    served = manifest or run.base
    if served and (manifest or not staged.indexed):
        _record_files(run, served, has_deleted=deleted > 0)
    run.ledger.close()
    if manifest or not staged.indexed:
        pending.discard(run.layout)
    if served is None and not staged.indexed:
        raise SourceError(
            f"every row was quarantined ({describe_reasons(staged.quarantine_reasons)}) and nothing was "
            f"indexed; see {run.layout.quarantine_path(run.run_id)}"
        )
    report = IngestReport(
        collection=run.layout.name,
        rows=staged.rows,
        indexed=staged.indexed,
        unchanged=staged.unchanged,
        quarantined=staged.quarantined,
        newly_quarantined=count_new(run.layout.quarantine_path(run.run_id)),
        deleted=deleted,
        encoded=encoded,
        generation=served.generation if served else 0,
        seconds=run.progress.seconds,
        files=len(run.scan.files) + len(run.scan.damaged_files),
        unread_files=len(staged.passed_over),
        chunks=served.chunks if served else 0,
        tokens=served.tokens if served else 0,
        quarantine_reasons=staged.quarantine_reasons,
        stage_seconds=run.progress.stage_seconds(),
        warnings=_warnings(run, staged),
        quarantine_file=str(run.layout.quarantine_path(run.run_id)) if staged.quarantined else None,
    )
    run.record(
        job=run.job,
        sources=run.sources,
        damaged_files=[{"file": file.name, "reason": reason} for file, reason in run.scan.damaged_files],
        report={**asdict(report), "warnings": list(report.warnings)},
    )
    return report


def _record_files(run: IngestRun, served: Manifest, *, has_deleted: bool) -> None:
    """Record what was read; where that fails, the ingest stands and the next one reads every file."""
    try:
        record_run(run.ledger, run.layout.hash_of_manifest(served.generation), has_deleted=has_deleted)
    except CairnError as error:
        log.warning("sources.not_recorded collection=%s error=%s", run.layout.name, error)


def _warnings(run: IngestRun, staged: Staged) -> tuple[str, ...]:
    warnings = (
        *run.scan.warnings,
        *settings_warnings(run.config.encoder, run.config.context),
        *_switch_warnings(run.layout),
    )
    if run.config.sync and not staged.is_complete:
        kept = "--sync deleted nothing: documents of a damaged source file cannot be told from vanished ones"
        return (*warnings, kept)
    return warnings


def _switch_warnings(layout: CollectionLayout) -> Iterator[str]:
    with suppress(IntegrityError):  # readers say so
        target = target_of(layout.root, layout.name)
        if target != layout.name:
            back = layout.command("switch", layout.name, layout.name)
            yield f"{layout.name} answers from {target}; `{back}` lets it answer from what is ingested here"


def describe_reasons(reasons: Mapping[str, int]) -> str:
    """Write quarantine reasons as ``empty_text: 5, null_id: 1``."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))
