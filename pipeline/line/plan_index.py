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
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pa_dataset
from cairn.pipeline.cluster.sampling import SAMPLE_TEXT_CHARACTERS
from cairn.pipeline.config import UNDESCRIBED, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.corpus.scan import Scan, read_checked, scan_sources
from cairn.pipeline.corpus.source_record import copy_record
from cairn.pipeline.corpus.sources import Source
from cairn.pipeline.corpus.staging import Staged, stage_changes
from cairn.pipeline.errors import EndpointDownError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.rows import StoredRows
from cairn.pipeline.line.build_index import (
    count_vanished,
    open_stored,
    prepare_record,
    stored_fields,
    stored_sources,
    too_many_deleted,
)
from cairn.pipeline.line.compatibility import (
    may_have_another_model,
    require_same_model,
    require_same_settings,
    stored_manifest,
)
from cairn.pipeline.line.encoder_worker import EncoderWorker, load_stages
from cairn.pipeline.line.ingest_settings import with_vector_dim
from cairn.pipeline.line.language_fit import column_warnings, language_warnings
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.model_defaults import settings_warnings
from cairn.pipeline.model.folders.names import is_endpoint
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32

SAMPLE_DOCUMENTS = 256
SAMPLE_BYTES = 16 << 20
"""How much a first ingest is looked at for its languages and columns."""
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
    scan, config = with_vector_dim(scan, config)
    published = stored_manifest(layout)
    require_same_settings(published, config)
    if published and may_have_another_model(published, config):
        require_same_model(layout, published, config, EncoderWorker(config))
    rows = open_stored(layout, published, scan.metadata_fields)
    with (
        tempfile.TemporaryDirectory(prefix="cairn-plan-") as folder,
        Ledger(
            Path(folder) / "ledger.sqlite", _copied_record(Path(folder), layout, published, rows, config)
        ) as ledger,
    ):
        planned = stage_changes(scan, config.corpus, ledger, progress=progress, stored=stored_sources(rows))
        deleted = count_vanished(ledger, config, planned)
    refusal = too_many_deleted(deleted, published, config)
    estimate, lines, untimed = _Estimate(), dict[str, float](), list[str]()
    notes = tuple[str, ...]()
    if planned.characters:
        rows = _first_rows(scan, config, planned.passed_over, is_first=published is None)
        texts = [text.as_py()[:SAMPLE_CHARACTERS] for text in rows.column("text").slice(0, SAMPLE_DOCUMENTS)]
        if published is None:
            sample = pa_dataset.dataset(rows)
            notes = (*language_warnings(config, sample), *column_warnings(sample, scan.warnings))
        estimate = _estimate(texts, config, planned, published)
        lines, untimed = _estimate_lines(texts, config, planned)
    return {
        **{name: getattr(planned, name) for name in _COUNTS},
        "left_out": dict(scan.left_out.counts),
        "deleted": deleted,
        "files": len(scan.files) + len(scan.damaged_files),
        "unread_files": len(planned.passed_over),
        "estimated_tokens": estimate.tokens,
        "estimated_context_seconds": estimate.context_seconds,
        "estimated_encode_seconds": estimate.encode_seconds,
        **lines,
        **({} if estimate.cost is None else {"estimated_cost": f"{estimate.cost:,.4f}"}),
        "warnings": [
            *([refusal] if refusal else []),
            *scan.warnings,
            *planned.warnings,
            *untimed,
            *settings_warnings(config.encoder, config.context),
            *notes,
        ],
    }


def _copied_record(
    folder: Path,
    layout: CollectionLayout,
    published: Manifest | None,
    stored: Sequence[StoredRows],
    config: IngestConfig,
) -> Path:
    """Return a copy of the record of what is published; an ingest may change its own meanwhile."""
    record = folder / layout.sources_path.name
    if published and not config.reread:
        copy_record(layout.sources_path, record)
    prepare_record(record, layout, published, stored, renew=config.reread)
    return record


_COUNTS: Final = (
    "rows", "indexed", "new", "changed", "unchanged",
    "quarantined", "quarantine_reasons", "quarantine_examples",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Estimate:
    """Tokens of the texts, seconds to encode them, seconds to embed what is drawn beforehand, and the cost.

    The cost is in the currency of ``endpoint_price``, None where there is none.
    """

    tokens: int = 0
    encode_seconds: float = 0.0
    context_seconds: float = 0.0
    cost: float | None = None


def _estimate(
    texts: Sequence[str], config: IngestConfig, planned: Staged, published: Manifest | None
) -> _Estimate:
    from cairn.pipeline.encode.documents import DocumentEncoder  # imports torch

    if config.encoder.given_dims is not None:
        return _Estimate(encode_seconds=_reading_seconds(texts, config, planned))
    if is_endpoint(config.encoder.model):
        return _estimate_endpoint(texts, config, planned, published)
    sample = _within(texts, SAMPLE_CHARACTERS // (CONTEXT_SHARE if config.encoder.use_context else 1))
    stages = load_stages(config)
    encoder_config = replace(config.encoder, **UNDESCRIBED)
    encoder = DocumentEncoder(replace(encoder_config, use_context=False), backbone=stages.backbone)
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
    num_context = min(config.context.context_documents, planned.indexed)
    num_embedded = num_context if config.encoder.use_context else 0
    if config.cluster.surrogate == "encoder":
        # As documents, and as their queries.
        num_embedded += 2 * min(config.cluster.max_sample_documents, planned.indexed)
    if config.encoder.use_context:
        # Only the shape of a context costs time: the sample's embeddings, repeated, stand in for those to be
        # drawn.
        stand_in = _context_of(np.resize(embeddings_SD, (num_context, embeddings_SD.shape[1])))
        encoder = DocumentEncoder(encoder_config, stand_in, stages.backbone)
    started = time.monotonic()
    encoder.encode(sample)
    return _Estimate(
        tokens=total,
        encode_seconds=(time.monotonic() - started) * total / max(1, tokens),
        context_seconds=0.0 if published else float(num_embedded * document_seconds),
    )


def _estimate_endpoint(
    texts: Sequence[str], config: IngestConfig, planned: Staged, published: Manifest | None
) -> _Estimate:
    """Count what would be sent, with titles and prefixes, and time one batch of words that are no text's."""
    from cairn.pipeline.encode.endpoint import EndpointEncoder

    with closing(EndpointEncoder(replace(config.encoder, **UNDESCRIBED))) as encoder:
        own = int(sum(len(encoding.ids) for encoding in encoder.tokenizer.encode_batch(texts)))
        tokens = round(planned.characters * own / max(1, sum(map(len, texts))))
        chunk = min(config.encoder.landmark_interval, max(1, own // max(1, len(texts))))
        extra = (
            len(encoder.tokenizer.encode(config.encoder.document_prefix).ids)
            + config.encoder.title_tokens // 4
        )
        sent = round(tokens * (1 + extra / chunk))
        rate = published.encode_tokens_per_second if published else 0.0
        seconds = tokens / rate if rate else encoder.seconds_a_token(chunk) * sent
    if not rate:
        seconds += _reading_seconds(texts, config, planned)
    price = config.encoder.endpoint_price
    return _Estimate(tokens=sent, encode_seconds=seconds, cost=sent * price / 1e6 if price else None)


def _reading_seconds(texts: Sequence[str], config: IngestConfig, planned: Staged) -> float:
    """Return how long tokens are read here for an encoder that shows no states of them, 0 without."""
    from cairn.pipeline.encode.documents import load_token_reader

    if not config.encoder.token_bytes:
        return 0.0
    reader, sample = load_token_reader(config.encoder), _within(texts, SAMPLE_CHARACTERS)
    started = time.monotonic()
    reader.encode(sample)
    return (time.monotonic() - started) * planned.characters / max(1, sum(map(len, sample)))


def _estimate_lines(
    texts: Sequence[str], config: IngestConfig, planned: Staged
) -> tuple[dict[str, float], list[str]]:
    """Count what a language model would read and write to describe chunks, and time one question to it.

    A server with a prefix cache reads a document once, and so less. Where it does not answer in time, the
    seconds are left out and a warning says so.
    """
    if not config.encoder.describe:
        return {}, []
    from cairn.pipeline.encode.describe import TYPICAL_LINE_TOKENS, Describer
    from cairn.pipeline.encode.documents import cut_into_chunks, shown_chunks
    from cairn.pipeline.encode.encoder import load_cutter
    from cairn.pipeline.encode.endpoint_requests import QUERY
    from cairn.pipeline.encode.tokenization import tokenize

    tokens = tokenize(load_cutter(config.encoder).tokenizer, texts)
    chunks = cut_into_chunks(config.encoder, tokens, texts)
    _, start_char, end_char = shown_chunks(chunks, tokens, texts)
    share = planned.characters / max(1, sum(map(len, texts)))
    num_chunks = round(share * len(start_char))
    tokens_a_character = len(tokens.ids) / max(1, sum(map(len, texts)))
    with closing(Describer(config.encoder, QUERY)) as describer:
        asked = describer.question_characters(texts, chunks.chunk_offsets, start_char, end_char)
        lines: dict[str, float] = {
            "estimated_lines": num_chunks,
            "estimated_line_tokens": round(share * asked * tokens_a_character)
            + num_chunks * TYPICAL_LINE_TOKENS,
        }
        try:
            seconds = describer.seconds_a_line(asked // len(start_char))
        except EndpointDownError as error:
            return lines, [f"the time that lines take is left out: {error}"]
    return {**lines, "estimated_line_seconds": num_chunks * seconds}, []


def _first_rows(
    scan: Scan, config: IngestConfig, passed_over: Collection[int], *, is_first: bool
) -> pa.Table:
    """Return the rows that an estimate needs; of a first ingest, those that its warnings are drawn from."""
    batches, num_bytes, num_rows = list[pa.RecordBatch](), 0, 0
    for batch in read_checked(scan, config.corpus, passed_over):
        batches.append(batch.rows)
        num_bytes += batch.rows.nbytes
        num_rows += len(batch.rows)
        if num_bytes >= SAMPLE_BYTES or (num_rows >= SAMPLE_DOCUMENTS and not is_first):
            break
    return pa.Table.from_batches(batches)


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
