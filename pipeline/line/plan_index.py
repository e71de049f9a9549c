"""What an ingest would do and how long it would take, without doing it.

Counts are exact: the whole corpus passes the same checks and the same ledger. Tokens and time are estimates
from the corpus's first documents, tokenised and, where the collection has not measured the encoder yet,
timed: what the first stage embeds for the context, and the encoding with a context of that size where one is
read.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.corpus.scan import Scan, read_checked, scan_sources
from cairn.pipeline.corpus.source_record import copy_record
from cairn.pipeline.corpus.sources import Source
from cairn.pipeline.corpus.staging import Staged, plan_changes
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import prepare_record, stored_fields
from cairn.pipeline.line.compatibility import (
    may_have_another_model,
    require_same_model,
    require_same_settings,
    stored_manifest,
)
from cairn.pipeline.line.encoder_worker import EncoderWorker, load_stages
from cairn.pipeline.line.view import SAMPLE_TEXT_CHARACTERS
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.untrained_settings import settings_warnings
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32

SAMPLE_DOCUMENTS = 256
SAMPLE_CHARACTERS = 40_000
"""Some 10,000 tokens: a second or two of encoding."""
CONTEXT_SHARE = 4
"""An encoder that reads a context is slower, so its sample is smaller by this factor."""


def plan_index(
    sources: Sequence[Source],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
) -> dict[str, Any]:
    """Return the counts that ``build_index`` would report, and estimates of tokens and seconds."""
    layout = CollectionLayout.at(Path(root), collection)
    record = None if config.reread else layout.sources_path
    scan = scan_sources(sources, config.corpus, record, stored_fields(layout))
    published = stored_manifest(layout)
    require_same_settings(published, config)
    if published and may_have_another_model(published, config):
        require_same_model(layout, published, config, EncoderWorker(config))
    with (
        tempfile.TemporaryDirectory(prefix="cairn-plan-") as folder,
        Ledger(
            Path(folder) / "ledger.sqlite", _copied_record(Path(folder), layout, scan, published, config)
        ) as ledger,
    ):
        planned = plan_changes(scan, config.corpus, ledger, progress=progress)
        deleted = sum(map(len, ledger.vanished_ids())) if config.sync and planned.is_complete else 0
    estimate = _estimate(scan, config, planned, published) if planned.characters else _Estimate()
    return {
        "rows": planned.rows,
        "indexed": planned.indexed,
        "new": planned.new,
        "changed": planned.changed,
        "unchanged": planned.unchanged,
        "quarantined": planned.quarantined,
        "quarantine_reasons": planned.quarantine_reasons,
        "deleted": deleted,
        "files": len(scan.files) + len(scan.damaged_files),
        "unread_files": len(planned.passed_over),
        "estimated_tokens": estimate.tokens,
        "estimated_context_seconds": estimate.context_seconds,
        "estimated_encode_seconds": estimate.encode_seconds,
        "warnings": [*scan.warnings, *settings_warnings(config.encoder, config.context)],
    }


def _copied_record(
    folder: Path, layout: CollectionLayout, scan: Scan, published: Manifest | None, config: IngestConfig
) -> Path:
    """Return a copy of the record of what is published, or one made from the tables.

    An ingest may go on meanwhile and change its own.
    """
    record = folder / layout.sources_path.name
    if published and not config.reread:
        copy_record(layout.sources_path, record)
    tables = published and LanceTables.open_or_create(layout, scan.metadata_fields, published.vector_dim)
    prepare_record(record, layout, published, tables, renew=config.reread)
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class _Estimate:
    """What is left to the model.

    Tokens of the texts, seconds to encode them, and seconds to embed what a first ingest draws beforehand.
    """

    tokens: int = 0
    encode_seconds: float = 0.0
    context_seconds: float = 0.0


def _estimate(scan: Scan, config: IngestConfig, planned: Staged, published: Manifest | None) -> _Estimate:
    from cairn.pipeline.encode.documents import DocumentEncoder  # imports torch

    texts = _first_texts(scan, config, planned.passed_over)
    sample = _within(texts, SAMPLE_CHARACTERS // (CONTEXT_SHARE if config.encoder.use_context else 1))
    stages = load_stages(config)
    encoder = DocumentEncoder(config.encoder.without_context, backbone=stages.backbone)
    tokens = int(encoder.encode(sample).num_tokens.sum())  # warms up, too
    tokens_a_character = tokens / max(1, sum(map(len, sample)))
    total = round(planned.characters * tokens_a_character)
    if published and published.encode_tokens_per_second:
        return _Estimate(tokens=total, encode_seconds=total / published.encode_tokens_per_second)
    started = time.monotonic()
    embeddings_SD = stages.first_stage.embed([text[:SAMPLE_TEXT_CHARACTERS] for text in sample])
    embed_seconds = time.monotonic() - started
    # The first stage reads heads of documents; those of the sample fill its budget and may be few and long.
    characters_read = round(config.context.max_document_tokens / max(tokens_a_character, 1e-6))
    texts_read, sample_read = (
        np.minimum([len(text) for text in some], characters_read) for some in (texts, sample)
    )
    document_seconds = embed_seconds * texts_read.mean() / max(1, sample_read.sum())
    num_context = num_embedded = min(config.context.context_documents, planned.indexed)
    if config.cluster.surrogate == "encoder":
        num_embedded += 2 * min(
            config.cluster.max_sample_documents, planned.indexed
        )  # as documents, and as their queries
    if config.encoder.use_context:
        # Only the shape of a context costs time: the sample's embeddings, repeated, stand in for those to be
        # drawn.
        stand_in = _context_of(np.resize(embeddings_SD, (num_context, embeddings_SD.shape[1])))
        encoder = DocumentEncoder(replace(config.encoder, whitening=0.0), stand_in, stages.backbone)
    started = time.monotonic()
    encoder.encode(sample)
    return _Estimate(
        tokens=total,
        encode_seconds=(time.monotonic() - started) * total / max(1, tokens),
        context_seconds=0.0 if published else float(num_embedded * document_seconds),
    )


def _first_texts(scan: Scan, config: IngestConfig, passed_over: Collection[int]) -> list[str]:
    rows = (
        text
        for batch in read_checked(scan, config.corpus, passed_over)
        for text in batch.rows.column("text").to_pylist()
    )
    return [text[:SAMPLE_CHARACTERS] for text in islice(rows, SAMPLE_DOCUMENTS)]


def _within(texts: Sequence[str], budget: int) -> list[str]:
    kept: list[str] = []
    for text in texts:
        kept.append(text[:budget])
        budget -= len(kept[-1])
        if budget <= 0:
            break
    return kept


def _context_of(embeddings_CD: Float32[np.ndarray, "C D"]) -> ContextSet:
    num_documents = len(embeddings_CD)
    return ContextSet(
        doc_ids=("",) * num_documents,
        content_sha256s=("",) * num_documents,
        cluster_ids_C=np.zeros(num_documents, np.int32),
        embeddings_CD=embeddings_CD,
        first_stage_fingerprint="",
    )
