"""Published collections of random vectors and small texts, and a query encoder without a model."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.config import EncoderConfig, IndexConfig, IngestConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.types import chunks_schema, documents_schema

from tests.index.stones import publish_rows

VECTOR_DIM = 16
FINGERPRINT = "e" * 64
WORDS = (
    "granite",
    "basalt",
    "slate",
    "marble",
    "flint",
    "chalk",
    "quartz",
    "gneiss",
    "shale",
    "chert",
    "tuff",
    "schist",
)
METADATA = (
    pa.field("year", pa.int16()),
    pa.field("price", pa.float32()),
    pa.field("lang", pa.string()),
    pa.field("is_open", pa.bool_()),
    pa.field("day", pa.date32()),
    pa.field("seen_at", pa.timestamp("us", "Europe/Paris")),
    pa.field("made_at", pa.timestamp("ns")),
    pa.field("Odd name", pa.string()),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("sizes", pa.list_(pa.float32())),
)
TAGS = (["a", "b"], ["b"], [], ["it's", None], None)
NASTY = ("it's", "x' OR 1=1 --", 'double "quote"', "back\\slash", "100%", "日本語", "NULL", "`tick`")


def unit(rng: np.random.Generator, count: int) -> np.ndarray:
    vectors = rng.standard_normal((count, VECTOR_DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@dataclass(frozen=True)
class Stones:
    """What was published, as plain Python and numpy: the side of the oracle."""

    layout: CollectionLayout
    rows: list[dict[str, Any]]
    document_vectors: np.ndarray
    chunk_vectors: list[np.ndarray]
    spans: list[list[tuple[int, int]]]

    def index_of(self, doc_id: str) -> int:
        """Return the place of a document among all."""
        return [row["doc_id"] for row in self.rows].index(doc_id)


class StoneEncoder:
    """Vectors by the hash of the text, and a count of the calls."""

    def __init__(self, fingerprint: str = FINGERPRINT) -> None:
        self.fingerprint = fingerprint
        self.calls: list[list[str]] = []

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        self.calls.append(list(texts))
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") for text in texts]
        return np.concatenate([unit(np.random.default_rng(seed), 1) for seed in seeds])


def make_row(index: int, rng: np.random.Generator, version: int) -> dict[str, Any]:
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(12, 30))]
    has_all = index % 5 != 0
    day = dt.date(2020, 1, 1) + dt.timedelta(days=index)
    return {
        "doc_id": f"doc-{version}-{index:03d}",
        "title": f"Title {index}" if index % 3 else None,
        "text": f"stone{index} é " + " ".join(words),
        "content_sha256": hashlib.sha256(f"{version}/{index}".encode()).hexdigest(),
        "source_file": f"part-{index % 2}.parquet",
        "cluster_id": index % 4,
        "num_tokens": len(words),
        "year": 1990 + index % 7 if has_all else None,
        "price": index / 7 if has_all else None,
        "lang": NASTY[index % len(NASTY)] if has_all else None,
        "is_open": index % 2 == 0 if has_all else None,
        "day": day if has_all else None,
        "seen_at": dt.datetime.combine(day, dt.time(12), dt.UTC) if has_all else None,
        "made_at": dt.datetime.combine(day, dt.time(12)) if has_all else None,
        "Odd name": f"o{index % 3}",
        "tags": TAGS[index % len(TAGS)],
        "sizes": [index, index / 2, None][: index % 4] if has_all else None,
    }


def publish_stones(
    layout: CollectionLayout,
    num_documents: int = 60,
    *,
    version: int = 0,
    replaces: Stones | None = None,
    fingerprint: str = FINGERPRINT,
    config: IndexConfig | None = None,
) -> Stones:
    """Do what an ingest does after encoding: commit to Lance, publish a generation."""
    rng = np.random.default_rng(version)
    rows = [make_row(index, rng, version) for index in range(num_documents)]
    counts = rng.integers(1, 8, num_documents)
    stones = Stones(
        layout=layout,
        rows=rows,
        document_vectors=unit(rng, num_documents),
        chunk_vectors=[unit(rng, int(count)) for count in counts],
        spans=[cut(len(row["text"]), int(count)) for row, count in zip(rows, counts, strict=True)],
    )
    deleted = [] if replaces is None else [row["doc_id"] for row in replaces.rows]
    publish_given(
        stones, deleted=deleted, run_id=f"run-{version}", encoder=fingerprint, index=config or IndexConfig()
    )
    return stones


def publish_given(stones: Stones, **given: Any) -> None:
    """Publish these documents in their order."""
    with stones.layout.writer_lock():
        publish_rows(
            stones.layout,
            prepare_writer(stones.layout),
            lambda _: [(documents_batch(stones), chunks_batch(stones))],
            VECTOR_DIM,
            fields=METADATA,
            settings=IngestConfig(encoder=EncoderConfig(landmark_interval=64)),
            **given,
        )


def cut(length: int, count: int) -> list[tuple[int, int]]:
    bounds = np.linspace(0, length, count + 1).astype(int).tolist()
    return list(pairwise(bounds))


def documents_batch(stones: Stones) -> pa.RecordBatch:
    schema = documents_schema(METADATA, VECTOR_DIM)
    columns = {name: [row.get(name) for row in stones.rows] for name in schema.names}
    columns["num_chunks"] = [len(spans) for spans in stones.spans]
    columns["vector"] = list(stones.document_vectors)
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in schema], schema=schema
    )


def chunks_batch(stones: Stones) -> pa.RecordBatch:
    schema = chunks_schema(VECTOR_DIM)
    rows = [
        (f"{row['doc_id']}#{ordinal}", row["doc_id"], ordinal, start, end, vector)
        for row, spans, vectors in zip(stones.rows, stones.spans, stones.chunk_vectors, strict=True)
        for ordinal, ((start, end), vector) in enumerate(zip(spans, vectors, strict=True))
    ]
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


@pytest.fixture(scope="session")
def stones(tmp_path_factory: pytest.TempPathFactory) -> Stones:
    """A collection that no test changes."""
    return publish_stones(CollectionLayout(tmp_path_factory.mktemp("root"), "stones"))


@pytest.fixture
def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path, "own")


@pytest.fixture(scope="session")
def publish() -> Callable[..., Stones]:
    return publish_stones


@pytest.fixture(scope="session")
def make_encoder() -> type[StoneEncoder]:
    return StoneEncoder


@pytest.fixture
def encoder() -> StoneEncoder:
    return StoneEncoder()


@pytest.fixture
def searcher(stones: Stones, encoder: StoneEncoder) -> Searcher:
    return Searcher(stones.layout, encoder)


@pytest.fixture
def alike(stones: Stones, layout: CollectionLayout) -> Callable[[Sequence[str]], CollectionLayout]:
    """Return ``alike(ids)``: a collection of documents that differ in their ids alone, in this order."""

    def published(ids: Sequence[str]) -> CollectionLayout:
        copies = Stones(
            layout=layout,
            rows=[{**stones.rows[0], "doc_id": doc_id} for doc_id in ids],
            document_vectors=stones.document_vectors[[0] * len(ids)],
            chunk_vectors=[stones.chunk_vectors[0]] * len(ids),
            spans=[stones.spans[0]] * len(ids),
        )
        publish_given(copies)
        return layout

    return published
