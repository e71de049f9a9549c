"""Ingests of a few documents by a tiny model: their settings, their words and their files."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IndexConfig, IngestConfig
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.types import IngestReport

WORDS = ("stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "mat", "cat")
WINDOWS: Mapping[str, Any] = {"window_tokens": 64, "window_overlap_tokens": 16}


def settings(
    model: Path,
    *,
    num_clusters: int = 2,
    max_sample_documents: int = 32_768,
    context_documents: int = 4,
    max_document_tokens: int = 32,
    partitions: int = 1,
    shard_characters: int = 1 << 18,
    **encoder: Any,
) -> IngestConfig:
    """Return settings for a few short documents; ``encoder`` are those of the encoder."""
    return IngestConfig(
        encoder=EncoderConfig(**{"model": str(model), "landmark_interval": 16, **encoder}),
        cluster=ClusterConfig(num_clusters=num_clusters, max_sample_documents=max_sample_documents),
        context=ContextConfig(context_documents=context_documents, max_document_tokens=max_document_tokens),
        index=IndexConfig(partitions=partitions),
        shard_characters=shard_characters,
    )


def text_of(seed: int | Sequence[int], size: int, words: Sequence[str] = WORDS) -> str:
    """Return so many words that depend on the seed alone."""
    return " ".join(np.random.default_rng(seed).choice(words, size=size))


def document(number: int, version: int = 0) -> dict[str, Any]:
    """Return a document as a row; its text depends on its number and version."""
    words = (*WORDS, "ridge", "valley", "snow", "wind", "lake")
    text = text_of([number, version], 10 + 15 * (number % 5), words)
    title = f"{words[number % len(words)]} {number}"
    return {"id": f"doc-{number:03d}", "title": title, "text": f"{text}.", "year": 2000 + number % 7}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a source."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def write_texts(
    path: str | Path, texts: Sequence[str | None], prefix: str = "d", first: int = 0, **columns: Any
) -> str:
    """Write texts as a source, their ids numbered; ``columns`` are further ones."""
    ids = [f"{prefix}{number}" for number in range(first, first + len(texts))]
    pq.write_table(pa.table({"id": ids, "text": pa.array(texts, pa.string()), **columns}), path)
    return str(path)


def ingest_rows(
    rows: Sequence[Mapping[str, Any]], root: Path, config: IngestConfig, name: str = "c"
) -> IngestReport:
    """Ingest rows without a file."""
    return build_index([TableSource(table=pa.Table.from_pylist(list(rows)))], root, name, config)


@contextmanager
def stopped_at(name: str, times: int = 1) -> Generator[None]:
    """Interrupt the block at the n-th passing of a commit point, as a user may: it ends there."""
    passed = list[str]()

    def observe(point: str) -> None:
        passed.append(point)
        if point == name and passed.count(name) == times:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "_observers", [observe])
        with pytest.raises(KeyboardInterrupt):
            yield
