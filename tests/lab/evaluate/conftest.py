"""Tiny judged corpora made in code, and an encoded set without a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet, read_retrieval_set

DOCUMENTS: tuple[dict[str, Any], ...] = (
    {
        "id": "cat",
        "title": "the cat",
        "text": "the cat sat on the mat. the old cat walked on the path. the mat marks the way.",
    },
    {
        "id": "river",
        "title": "the river",
        "text": "the river walks past the mountain. stones mark the river. the path follows the river.",
    },
    {"id": "stone", "title": "", "text": "old stones mark a way. a stone sat on the mountain."},
    {"id": "way", "title": "way", "text": "a way."},
)
QUERIES: tuple[dict[str, Any], ...] = (
    {"id": "q1", "text": "where sat the cat"},
    {"id": "q2", "text": "what marks the river"},
    {"id": "q3", "text": "old stones"},
)
QRELS: tuple[dict[str, Any], ...] = (
    {"query_id": "q1", "doc_id": "cat", "score": 2, "start": 0, "end": 23},
    {"query_id": "q1", "doc_id": "stone", "score": 1, "start": 23, "end": 51},
    {"query_id": "q2", "doc_id": "river", "score": 1, "start": 35, "end": 57},
    {"query_id": "q2", "doc_id": "way", "score": 0, "start": None, "end": None},
    {"query_id": "q3", "doc_id": "stone", "score": 1, "start": None, "end": None},
)


def write_set(
    folder: Path,
    documents: Sequence[Mapping[str, Any]] = DOCUMENTS,
    queries: Sequence[Mapping[str, Any]] = QUERIES,
    qrels: Sequence[Mapping[str, Any]] = QRELS,
) -> Path:
    """Write the three files of a set."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", documents), ("queries", queries), ("qrels", qrels)):
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), folder / f"{name}.parquet")
    return folder


def retrieval_set(
    ids: Sequence[str],
    queries: Sequence[str],
    texts: Sequence[str],
    titles: Sequence[str] = (),
    judgements: Judgements | None = None,
) -> RetrievalSet:
    """Return a set in memory; its queries are called q0, q1, …"""
    return RetrievalSet(
        name="c",
        doc_ids=tuple(ids),
        titles=tuple(titles or [""] * len(ids)),
        texts=tuple(texts),
        query_ids=tuple(f"q{number}" for number in range(len(queries))),
        queries=tuple(queries),
        judgements=judgements or Judgements.none(),
    )


@pytest.fixture
def judged(tmp_path):
    """Return the tiny set: four documents, three queries, evidence for two of them."""
    return read_retrieval_set(write_set(tmp_path / "tiny"))


@pytest.fixture(scope="session")
def tiny_config(tiny_model_folder):
    """Return settings of the tiny model with landmarks of eight tokens."""
    return EncoderConfig(
        model=str(tiny_model_folder),
        landmark_interval=8,
        window_tokens=64,
        window_overlap_tokens=16,
        precision="fp32",
    )


@pytest.fixture
def encoded():
    """Return random unit vectors of 12 documents, each of one to five short chunks, and 6 queries."""
    generator = np.random.default_rng(3)
    num_chunks = generator.integers(1, 6, 12)
    offsets = np.concatenate([[0], np.cumsum(num_chunks)])
    lengths = generator.integers(10, 31, int(offsets[-1]))
    ends = np.concatenate([np.cumsum(lengths[a:b]) for a, b in itertools.pairwise(offsets)])
    chunk_MV = unit(generator.standard_normal((len(ends), 16)))
    return EncodedSet(
        document_vectors_NV=unit(np.add.reduceat(chunk_MV, offsets[:-1], axis=0)),
        chunk_vectors_MV=chunk_MV,
        query_vectors_QV=unit(generator.standard_normal((6, 16))),
        chunk_offsets=offsets,
        start_char=ends - lengths,
        end_char=ends,
        tokens=100,
        encode_seconds=1.0,
        query_seconds=0.5,
    )


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return the rows as float32 of length one."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
