"""A collection of synthetic vectors in clusters, documents around topics and chunks around their document.

The ten best chunks of a query come from four or five documents, at cosines of 0.27 to 0.34. Words follow
Zipf's law; a query has six words of ranks 21 to 2,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import EncoderConfig, IngestConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.types import chunks_schema, documents_schema

from tests.index.stones import publish_rows

CHUNKS_A_DOCUMENT, VECTOR_DIM, NUM_TOPICS, NUM_QUERIES = 10, 384, 500, 300
WORDS_A_CHUNK, VOCABULARY = 40, 20_000
FINGERPRINT = "b" * 64
SETTINGS = IngestConfig(encoder=EncoderConfig(landmark_interval=64))


@dataclass(frozen=True)
class Clustered:
    layout: CollectionLayout
    chunk_vectors: np.ndarray
    query_vectors: np.ndarray
    queries: list[str]


class NoEncoder:
    """Stands for an encoder whose work is done: the benchmark brings vectors."""

    def __init__(self, fingerprint: str = FINGERPRINT) -> None:
        self.fingerprint = fingerprint

    def encode_queries(self, texts: object) -> np.ndarray:
        raise AssertionError("queries arrive as vectors")


def normalised(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def around(centres: np.ndarray, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Return unit vectors around unit centres, at a cosine of about 1 / sqrt(1 + spread²)."""
    noise = rng.standard_normal(centres.shape, dtype=np.float32) / np.sqrt(centres.shape[-1])
    return normalised(centres + spread * noise)


def centres_of(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return vectors of so many documents, each around one of the topics."""
    topics = normalised(rng.standard_normal((NUM_TOPICS, VECTOR_DIM), dtype=np.float32))
    return around(topics[rng.integers(0, NUM_TOPICS, count)], 0.8, rng)


def zipf_texts(count: int, num_chunks: int, rng: np.random.Generator) -> list[str]:
    shape = (count, WORDS_A_CHUNK * num_chunks)
    ids = np.minimum((rng.pareto(1.0, shape) * 4).astype(np.int64), VOCABULARY - 1)
    return [" ".join(f"word{i}" for i in row) for row in ids.tolist()]


def word_queries(count: int, rng: np.random.Generator) -> list[str]:
    return [" ".join(f"word{i}" for i in rng.integers(20, 2_000, 6)) for _ in range(count)]


def make(root: Path, num_documents: int, fingerprint: str = FINGERPRINT) -> Clustered:
    """Publish the collection ``bench``; give what it was made of, and queries."""
    rng = np.random.default_rng(0)
    centres = centres_of(num_documents, rng)
    chunk_vectors = around(np.repeat(centres, CHUNKS_A_DOCUMENT, axis=0), 1.2, rng)
    query_vectors = around(centres[rng.integers(0, num_documents, NUM_QUERIES)], 2.0, rng)
    documents = chunk_vectors.reshape(num_documents, CHUNKS_A_DOCUMENT, VECTOR_DIM).mean(axis=1)
    texts, layout = zipf_texts(num_documents, CHUNKS_A_DOCUMENT, rng), CollectionLayout(root, "bench")
    publish(layout, texts, normalised(documents), chunk_vectors, fingerprint=fingerprint)
    return Clustered(layout, chunk_vectors, query_vectors, word_queries(NUM_QUERIES, rng))


def publish(
    layout: CollectionLayout,
    texts: list[str],
    document_vectors: np.ndarray,
    chunk_vectors: np.ndarray,
    metadata: Mapping[str, pa.Array] = MappingProxyType({}),
    fingerprint: str = FINGERPRINT,
) -> None:
    num_documents, num_chunks = len(texts), len(chunk_vectors) // len(texts)
    doc_ids = [f"doc{i:06d}" for i in range(num_documents)]
    fields = [pa.field(name, column.type) for name, column in metadata.items()]
    documents = {
        "doc_id": doc_ids,
        "title": [None] * num_documents,
        "text": texts,
        "content_sha256": ["0" * 64] * num_documents,
        "source_file": ["bench.parquet"] * num_documents,
        "cluster_id": np.arange(num_documents) % NUM_TOPICS,
        "num_tokens": [WORDS_A_CHUNK * num_chunks] * num_documents,
        "num_chunks": [num_chunks] * num_documents,
        "vector": matrix(document_vectors),
        **metadata,
    }
    bounds = [chunk_bounds(text) for text in texts]
    owners = np.repeat(doc_ids, num_chunks).tolist()
    ordinals = np.tile(np.arange(num_chunks), num_documents)
    chunks = {
        "chunk_id": [f"{doc_id}#{ordinal}" for doc_id, ordinal in zip(owners, ordinals, strict=True)],
        "doc_id": owners,
        "ordinal": ordinals,
        "start_char": np.concatenate([b[:-1] for b in bounds]),
        "end_char": np.concatenate([b[1:] for b in bounds]),
        "vector": matrix(chunk_vectors),
    }
    batches = [
        (batch(documents, documents_schema(fields, VECTOR_DIM)), batch(chunks, chunks_schema(VECTOR_DIM)))
    ]
    with layout.writer_lock():
        publish_rows(
            layout,
            prepare_writer(layout),
            lambda _: batches,
            VECTOR_DIM,
            fields=fields,
            settings=SETTINGS,
            encoder=fingerprint,
        )


def chunk_bounds(text: str) -> np.ndarray:
    """Return where a text's chunks of so many words begin, and its end."""
    begins = np.cumsum([0, *(len(word) + 1 for word in text.split(" "))])
    return np.append(begins[:-1:WORDS_A_CHUNK], len(text))


def matrix(vectors: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])


def batch(columns: Mapping[str, object], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
