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
from functools import partial
from itertools import chain, islice
from pathlib import Path

from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.source_record import carry_over
from cairn.pipeline.corpus.staging import UNSTORED, Place, stage_stored
from cairn.pipeline.encode.paid import PAID_NAME
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.layout import CollectionLayout, wholes
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS, partition_of
from cairn.pipeline.index.recovery import writing
from cairn.pipeline.index.rows import TEXT_ROWS, LanceTables, StoredRows
from cairn.pipeline.line import pending
from cairn.pipeline.line.compatibility import require_same_model
from cairn.pipeline.line.encode import encode_shards
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.engine import Engine
from cairn.pipeline.line.publish import publish
from cairn.pipeline.line.run import Run, StageWatch
from cairn.pipeline.line.view import view_corpus
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.names import is_endpoint
from cairn.pipeline.types import ProgressListener, silent_progress, staged_schema

WORK = "recontextualise"
"""Stands in the key of pending work where an ingest has the fingerprint of its schema."""


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
    with _open(root, collection, config, progress, engine) as (run, published):
        shards, characters = _stage_stored(run)
        view = view_corpus(run, shards)
        _keep_lines(run)
        encoded = encode_shards(run, view, shards, characters)
        before = run.layout.current_generation_number()
        before_sha256 = run.layout.hash_of_manifest(before) if before else ""
        manifest = publish(run, view, encoded, replaced=published)
        carry_over(run.layout.sources_path, before_sha256, run.layout.hash_of_manifest(manifest.generation))
        run.ledger.close()
        pending.discard(run.layout)
        stage_seconds = run.progress.stage_seconds()
        report = RecontextualisationReport(
            collection=collection,
            generation=manifest.generation,
            documents=manifest.documents,
            encoded=encoded.documents,
            clusters=view.clusters.num_clusters,
            context_documents=manifest.context_documents,
            seconds=sum(stage_seconds.values()),
            stage_seconds=stage_seconds,
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
) -> Generator[tuple[Run, Manifest]]:
    """Hold the writer lock of a collection whose model is its own; yield the run, and what it replaces."""
    watch = StageWatch(progress)
    layout = CollectionLayout.at(Path(root), collection)
    with closing(engine or EncoderWorker(config)) as opened, writing(layout) as published:
        if config.encoder.given_dims is not None or is_endpoint(config.encoder.model):
            raise ConfigError(
                "a new context must be for documents that a model encodes here, got some that bring their "
                "vectors or have an endpoint's; ingest them again, into a new collection, to change these"
            )
        require_same_model(layout, published, config, opened)
        stored = [
            StoredRows(tables=LanceTables.open(own, each.lance_versions), versions=each.lance_versions)
            for own, each in wholes(layout, published)
        ]
        base = published.generation
        with pending.open_ledger(layout, pending.work_key(config, WORK, base), base=base) as ledger:
            run = Run(
                layout=layout,
                config=config,
                base=None,
                stored=stored,
                metadata_fields=stored[0].tables.metadata_fields,
                sources=published.sources,
                ledger=ledger,
                engine=opened,
                progress=watch,
            )
            yield run, published


def _keep_lines(run: Run) -> None:
    """Keep the lines that chunks have, so that no language model is asked for them again."""
    if not run.config.encoder.describe:
        return
    from cairn.pipeline.encode.describe import Describer

    columns = ["start_char", "end_char", "line"]
    with closing(Describer(run.config.encoder)) as describer:
        describer.keep_paid(run.layout.pending_folder / PAID_NAME)
        for rows in run.stored:
            chunks = chain.from_iterable(batch.to_pylist() for batch in rows.scan(CHUNKS, columns))
            for batch in rows.scan(DOCUMENTS, ["title", "text", "num_chunks"], TEXT_ROWS):
                for document in batch.to_pylist():
                    own = list(islice(chunks, document["num_chunks"]))
                    describer.keep_known(document["title"], document["text"], own)


def _stage_stored(run: Run) -> tuple[tuple[Path, ...], int]:
    """Stage the rows of the tables; return the shards and the characters of their texts."""
    schema = staged_schema(run.metadata_fields)
    num_partitions = run.config.index.partitions
    columns = [name for name in schema.names if name not in UNSTORED]
    return stage_stored(
        chain.from_iterable(rows.scan(DOCUMENTS, columns) for rows in run.stored),
        run.ledger,
        run.layout.staged_folder,
        run.config.shard_characters,
        schema,
        Place(num_partitions, partial(partition_of, num_partitions=num_partitions)),
    )
