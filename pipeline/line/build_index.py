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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.dataset as pa_dataset
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.ledger import Ledger, record_run
from cairn.pipeline.corpus.quarantine import RowWriter, count_new
from cairn.pipeline.corpus.scan import Scan, scan_sources
from cairn.pipeline.corpus.source_record import ORIGIN_SCHEMA, create_record, holds_for
from cairn.pipeline.corpus.sources import Source
from cairn.pipeline.corpus.staging import Place, Staged, stage_changes
from cairn.pipeline.encode.shards import finished_shards, read_undescribed
from cairn.pipeline.errors import (
    CairnError,
    ConfigError,
    DocumentsRefusedError,
    IntegrityError,
    SourceError,
    UsageError,
)
from cairn.pipeline.faiss_device import use_index_device
from cairn.pipeline.index.aliases import target_of
from cairn.pipeline.index.layout import CollectionLayout, wholes
from cairn.pipeline.index.names import DOCUMENTS, partition_of
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import LanceTables, StoredRows
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
from cairn.pipeline.line.ingest_settings import with_vector_dim
from cairn.pipeline.line.language_fit import column_warnings, language_warnings
from cairn.pipeline.line.publish import publish
from cairn.pipeline.line.run import Run, StageWatch
from cairn.pipeline.line.view import view_corpus
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.model_defaults import settings_warnings
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.types import IngestReport, ProgressListener, silent_progress

log = logging.getLogger(__name__)

NAMED_CHUNKS: Final = 5
SAMPLE_SHARDS: Final = 16
"""How many shards of a first ingest are looked at for what their columns hold."""
Step = Literal["cluster", "encode", "publish"]
_JOBS: Final[Mapping[Step, str]] = {
    "cluster": "cluster_corpus",
    "encode": "encode_corpus",
    "publish": "build_index",
}
"""What the record of a run calls a line that ends after a step."""
HASHED_ROWS: Final = 65_536
"""Rows of ids and hashes that are read at once."""


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
    deleted_ids: Iterable[str] = (),
    keeps_history: bool = True,
) -> IngestReport:
    """Bring a collection up to date with its sources and return what was done.

    ``engine`` = None encodes in this process. The line ends after the step ``until``. With ``is_encoded``,
    documents that an earlier run did not encode raise :class:`ConfigError`. ``deleted_ids``, none of them in
    the sources, are deleted in the same publication. Without ``keeps_history`` neither the run nor the rows
    that its documents came from are recorded: of many small runs the records would outgrow the documents. Its
    rows were checked before: one that would go into quarantine raises :class:`DocumentsRefusedError`, and
    what a killed run encoded is encoded again.

    Sources, columns and settings are checked before anything is written. A row is counted once:
    ``rows == indexed + unchanged + quarantined``.
    """
    watch, layout = StageWatch(progress), CollectionLayout.at(Path(root), collection)
    for model in filter(None, (config.encoder.model, config.encoder.sparse_model)):
        model_folder(model)
    if config.index_device is not None:
        use_index_device(config.index_device)
    record = None if config.reread else layout.sources_path
    scan = scan_sources(sources, config.corpus, record, stored_fields(layout))
    scan, config = with_vector_dim(scan, config)
    with _open_ingest(scan, layout, config, watch, engine, keeps_work=keeps_history) as run:
        staged = _stage_corpus(run, scan, keeps_history=keeps_history)
        if staged.quarantined and not keeps_history:
            reasons = describe_reasons(staged.quarantine_reasons)
            raise DocumentsRefusedError(f"documents must be storable, got {reasons} that are not")
        if is_encoded and staged.staged:
            raise ConfigError(
                f"every document must be encoded before write_index, got {staged.staged:,} that are not; "
                "run encode_corpus first"
            )
        is_publishing, encoded, manifest, notes = until == "publish", None, None, ()
        vanished = count_vanished(run.ledger, run.config, staged) if is_publishing else 0
        if refusal := too_many_deleted(vanished, run.base, run.config):
            raise UsageError(refusal)
        deleted = run.ledger.delete(deleted_ids)
        if staged.indexed or vanished or deleted or (is_publishing and is_repointed(run.base, config)):
            view = view_corpus(run, staged.shards)
            if run.base is None and staged.shards:
                rows = pa_dataset.dataset([str(path) for path in staged.shards[:SAMPLE_SHARDS]])
                columns = column_warnings(rows, scan.warnings)
                notes = (*language_warnings(run.config, rows), *columns)
            if until != "cluster":
                encoded = encode_shards(run, view, staged.shards, staged.characters)
                notes += undescribed_warnings(run)
            if is_publishing and encoded is not None:
                manifest = publish(run, view, encoded, delete_vanished=vanished > 0)
        report = _finish(
            run,
            scan,
            staged,
            manifest,
            notes,
            encoded=encoded.documents if encoded else 0,
            vanished=vanished,
            deleted=deleted,
        )
        if keeps_history:
            run.record(
                job="write_index" if is_encoded else _JOBS[until],
                sources=run.sources,
                damaged_files=[{"file": file.name, "reason": reason} for file, reason in scan.damaged_files],
                report={**asdict(report), "warnings": list(report.warnings)},
            )
    return report


@contextmanager
def _open_ingest(
    scan: Scan,
    layout: CollectionLayout,
    config: IngestConfig,
    watch: StageWatch,
    engine: Engine | None,
    *,
    keeps_work: bool,
) -> Generator[Run]:
    """Check what the sources alone do not say, hold the writer lock, and undo what a killed run left."""
    with closing(engine or EncoderWorker(config)) as opened:
        if not layout.exists():
            opened.load()  # a first ingest needs the model anyhow, and must not fail after it has written
        with layout.writer_lock():
            base = prepare_writer(layout)
            require_same_settings(base, config)
            if base and may_have_another_model(base, config):
                require_same_model(layout, base, config, opened)
            stored = open_stored(layout, base, scan.metadata_fields)
            number = base and base.generation
            key = pending.work_key(config, scan.schema_fingerprint, number) if keeps_work else None
            prepare_record(layout.sources_path, layout, base, stored, renew=config.reread)
            with pending.open_ledger(layout, key, layout.sources_path, base=number) as ledger:
                yield Run(
                    layout=layout,
                    config=config,
                    base=base,
                    stored=stored,
                    metadata_fields=scan.metadata_fields,
                    sources=scan.source_names,
                    ledger=ledger,
                    engine=opened,
                    progress=watch,
                    keeps_work=keeps_work,
                )


def stored_fields(layout: CollectionLayout) -> Sequence[pa.Field[Any]] | None:
    """Return the metadata columns of a collection, None where nothing is published."""
    base = stored_manifest(layout)
    if base is None:
        return None
    own, manifest = next(wholes(layout, base))  # all have the same columns
    with suppress(IntegrityError):
        return LanceTables.open(own, manifest.lance_versions).metadata_fields
    with layout.writer_lock():
        prepare_writer(layout)  # mends what it can
    return LanceTables.open(own, manifest.lance_versions).metadata_fields


def open_stored(
    layout: CollectionLayout, base: Manifest | None, metadata_fields: Sequence[pa.Field[Any]]
) -> list[StoredRows]:
    """Open the rows of a generation, partition by partition; other types of columns are refused."""
    stored: list[StoredRows] = []
    for own, manifest in () if base is None else wholes(layout, base):
        versions = manifest.lance_versions
        tables = LanceTables.open_or_create(own, metadata_fields, manifest.vector_dim, versions=versions)
        stored.append(StoredRows(tables=tables, versions=versions))
    return stored


def prepare_record(
    record: Path,
    layout: CollectionLayout,
    base: Manifest | None,
    stored: Sequence[StoredRows],
    *,
    renew: bool,
) -> None:
    """Leave a record as it is where it holds for the served generation, else make it from the tables.

    With ``renew`` it is made again in any case; none of its files is known then.
    """
    if base is None:
        create_record(record, "", ())
    elif renew or not holds_for(record, layout.hash_of_manifest(base.generation)):
        hashes = (
            (batch.column("doc_id").to_pylist(), batch.column("content_sha256").to_pylist())
            for rows in stored
            for batch in rows.scan(DOCUMENTS, ["doc_id", "content_sha256"], HASHED_ROWS)
        )
        create_record(record, layout.hash_of_manifest(base.generation), hashes)


def _stage_corpus(run: Run, scan: Scan, *, keeps_history: bool) -> Staged:
    """Check, hash and compare every row of the sources; stage what has to be encoded."""
    num_partitions = run.config.index.partitions
    with (
        RowWriter(run.layout.quarantine_path(run.run_id)) as quarantine,
        RowWriter(
            run.layout.origins_folder / f"{run.run_id}.parquet",
            ORIGIN_SCHEMA,
            "recording where rows came from",
        ) as origins,
    ):
        return stage_changes(
            scan,
            run.config.corpus,
            run.ledger,
            run.layout.staged_folder,
            run.config.shard_characters,
            quarantine,
            run.progress,
            origins if keeps_history else None,
            stored_sources(run.stored),
            Place(num_partitions, partial(partition_of, num_partitions=num_partitions)),
        )


def stored_sources(stored: Sequence[StoredRows]) -> Callable[[], Iterable[pa.RecordBatch]]:
    """Return what reads the ids and source files of the published documents."""
    return lambda: chain.from_iterable(rows.scan(DOCUMENTS, ["doc_id", "source_file"]) for rows in stored)


def count_vanished(ledger: Ledger, config: IngestConfig, staged: Staged) -> int:
    """Count the documents that ``--sync`` is to delete.

    None where a source file is damaged or doubted: what it held cannot be told from what vanished.
    """
    return sum(map(len, ledger.vanished_ids())) if config.sync and staged.is_complete else 0


def too_many_deleted(vanished: int, base: Manifest | None, config: IngestConfig) -> str | None:
    """Say what is wrong where ``--sync`` would delete more than its share, and more than one document."""
    if base is None or vanished <= max(config.max_deleted * base.documents, 1):
        return None
    share = min(1.0, -(-vanished * 100 // base.documents) / 100)
    return (
        f"--sync must delete at most {config.max_deleted:.0%} of the documents, got {vanished:,} of "
        f"{base.documents:,} that the sources no longer hold; if that is meant, allow it with "
        f"--max-deleted {share:g}, in Python max_deleted"
    )


def _finish(
    run: Run,
    scan: Scan,
    staged: Staged,
    manifest: Manifest | None,
    notes: tuple[str, ...],
    *,
    encoded: int,
    vanished: int,
    deleted: int,
) -> IngestReport:
    """Put the work away and return its report; ``manifest`` is of the generation it published."""
    served = manifest or run.base
    if served and (manifest or not staged.indexed):
        _record_files(run, served, has_deleted=vanished > 0)
    run.ledger.close()
    if manifest or not staged.indexed:
        pending.discard(run.layout)
    if served is None and not staged.indexed:
        raise SourceError(
            f"every row was quarantined ({describe_reasons(staged.quarantine_reasons)}) and nothing was "
            f"indexed, such as {' and '.join(staged.quarantine_examples.values())}; see "
            f"{run.layout.quarantine_path(run.run_id)}"
        )
    stage_seconds = run.progress.stage_seconds()
    return IngestReport(
        collection=run.layout.name,
        rows=staged.rows,
        indexed=staged.indexed,
        unchanged=staged.unchanged,
        quarantined=staged.quarantined,
        newly_quarantined=count_new(run.layout.quarantine_path(run.run_id)),
        deleted=vanished + deleted,
        encoded=encoded,
        generation=served.generation if served else 0,
        seconds=sum(stage_seconds.values()),
        files=len(scan.files) + len(scan.damaged_files),
        unread_files=len(staged.passed_over),
        chunks=served.chunks if served else 0,
        tokens=served.tokens if served else 0,
        quarantine_reasons=staged.quarantine_reasons,
        quarantine_examples=staged.quarantine_examples,
        left_out=dict(scan.left_out.counts),
        stage_seconds=stage_seconds,
        warnings=_warnings(run, scan, staged) + notes,
        quarantine_file=str(run.layout.quarantine_path(run.run_id)) if staged.quarantined else None,
    )


def _record_files(run: Run, served: Manifest, *, has_deleted: bool) -> None:
    """Record what was read; where that fails, the ingest stands and the next one reads every file."""
    try:
        record_run(run.ledger, run.layout.hash_of_manifest(served.generation), has_deleted=has_deleted)
    except CairnError as error:
        log.warning("sources.not_recorded collection=%s error=%s", run.layout.name, error)


def _warnings(run: Run, scan: Scan, staged: Staged) -> tuple[str, ...]:
    warnings = (
        *scan.warnings,
        *settings_warnings(run.config.encoder, run.config.context),
        *_switch_warnings(run.layout),
    )
    warnings += staged.warnings
    if run.config.sync and not staged.is_complete:
        kept = "--sync deleted nothing: documents of a damaged source file cannot be told from vanished ones"
        return (*warnings, kept)
    return warnings


def undescribed_warnings(run: Run) -> tuple[str, ...]:
    """Say how many of the encoded chunks have no line, and name the first; () where none is asked for."""
    if not run.config.encoder.describe:
        return ()
    folder, total, without = run.layout.encoded_folder, 0, list[str]()
    for number in finished_shards(folder):
        num_chunks, missing = read_undescribed(folder, number)
        total, without = total + num_chunks, without + missing
    if not without:
        return ()
    named = ", ".join(without[:NAMED_CHUNKS]) + (", …" if len(without) > NAMED_CHUNKS else "")
    sentence = (
        f"{len(without):,} of {total:,} chunks have no line, as the language model refused, or its answer "
        f"was empty or too long; they are indexed without: {named}"
    )
    return (sentence,)


def _switch_warnings(layout: CollectionLayout) -> Iterator[str]:
    with suppress(IntegrityError):  # readers say so
        target = target_of(layout.root, layout.name)
        if target != layout.name:
            back = layout.command("switch", layout.name, layout.name)
            yield f"{layout.name} answers from {target}; `{back}` lets it answer from what is ingested here"


def describe_reasons(reasons: Mapping[str, int]) -> str:
    """Write quarantine reasons as ``empty_text: 5, null_id: 1``."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))
