"""What an ingest would do and how long it would take, without doing it.

Counts are exact: the whole corpus passes the same checks and the same ledger. Tokens and time are estimates from the corpus's first
documents, tokenised and, where the collection has not measured the encoder yet, timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jobs.run import describe_reasons, require_same_settings
from pipeline.config import IngestConfig
from pipeline.corpus.ledger import Ledger
from pipeline.corpus.parquet import Scan, read_checked, scan_sources
from pipeline.corpus.staging import plan_changes
from pipeline.index.generation import read_manifest
from pipeline.index.lance_index import LanceTables
from pipeline.index.layout import CollectionLayout
from pipeline.manifest import Manifest
from pipeline.types import ProgressListener, silent_progress

SAMPLE_DOCUMENTS = 256
SAMPLE_CHARACTERS = 40_000
"""Some 10,000 tokens: a second or two of encoding."""


def stored_manifest(layout: CollectionLayout) -> Manifest | None:
    """Return the served generation's manifest, None where nothing was ever published."""
    number = layout.current_generation_number()
    return None if number is None else read_manifest(layout, number)


def stored_settings(root: str | Path, collection: str) -> Mapping[str, Any] | None:
    """Return the settings a collection was built with, None where there is no such collection yet."""
    manifest = stored_manifest(CollectionLayout(Path(root), collection))
    return manifest.settings if manifest else None


def plan_index(
    sources: Sequence[str], root: str | Path, collection: str, config: IngestConfig, progress: ProgressListener = silent_progress
) -> dict[str, int | float | str]:
    """Return the counts :func:`jobs.build_index.build_index` would report, with estimated tokens and seconds of encoding."""
    layout = CollectionLayout(Path(root), collection)
    scan = scan_sources(sources, config.corpus)
    published = stored_manifest(layout)
    require_same_settings(published, config)
    with tempfile.TemporaryDirectory(prefix="cairn-plan-") as folder, Ledger(Path(folder) / "ledger.sqlite") as ledger:
        if published:
            tables = LanceTables.open_or_create(layout, scan.metadata_fields, published.vector_dim)
            hashes = tables.published_hashes(published.lance_versions)
            ledger.load_published((batch.column("doc_id").to_pylist(), batch.column("content_sha256").to_pylist()) for batch in hashes)
        planned = plan_changes(scan, config.corpus, ledger, progress=progress)
        deleted = sum(map(len, ledger.vanished_ids())) if config.sync and planned.is_complete else 0
    tokens, seconds = _estimate(scan, config, planned.characters, published) if planned.characters else (0, 0.0)
    return {
        "rows": planned.rows,
        "indexed": planned.indexed,
        "new": planned.new,
        "changed": planned.changed,
        "unchanged": planned.unchanged,
        "quarantined": planned.quarantined,
        "quarantine_reasons": describe_reasons(planned.quarantine_reasons) or "none",
        "deleted": deleted,
        "estimated_tokens": tokens,
        "estimated_encode_seconds": seconds,
    }


def _estimate(scan: Scan, config: IngestConfig, characters: int, published: Manifest | None) -> tuple[int, float]:
    from pipeline.encode.documents import DocumentEncoder  # torch comes in here

    rows = (text for batch in read_checked(scan, config.corpus) for text in batch.rows.column("text").to_pylist())
    sample = [text[:SAMPLE_CHARACTERS] for text in islice(rows, SAMPLE_DOCUMENTS)]
    kept: list[str] = []
    budget = SAMPLE_CHARACTERS
    for text in sample:
        kept.append(text[:budget])
        budget -= len(kept[-1])
        if budget <= 0:
            break
    # Context moves vectors, not time enough to matter here; there may be none yet.
    encoder = DocumentEncoder(replace(config.encoder, use_context=False))
    encoder.encode(kept[:1])
    started = time.monotonic()
    tokens = int(encoder.encode(kept).num_tokens.sum())
    measured = tokens / (time.monotonic() - started)
    total = round(characters * tokens / max(1, sum(map(len, kept))))
    speed = published.encode_tokens_per_second if published and published.encode_tokens_per_second else measured
    return total, total / speed
