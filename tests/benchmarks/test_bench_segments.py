"""What one changed document costs, and what segments cost a search; synthetic vectors, no encoder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.search.reader import (
    LocalReader,
    NearestAsked,
    best_documents,
    bm25_documents,
    bm25_passages,
    words_asked,
)
from cairn.pipeline.types import TOKEN_FIELDS, chunks_schema, documents_schema

from tests.benchmarks.clustered import batch, matrix
from tests.benchmarks.timing import in_turn
from tests.index.stones import publish_rows
from tests.late_models import random_codebook

pytestmark = pytest.mark.bench

VECTOR_DIM = 384
CHUNKS_A_DOCUMENT = 10
WORDS_A_CHUNK = 20
CHUNK_CHARACTERS = 6 * WORDS_A_CHUNK
WORDS = np.array([f"{number:05d}" for number in range(30_000)])
CODE_BYTES = 64 * 25
"""Token codes of a chunk of 64 tokens, as the default model makes them; their content is random."""
BATCH_DOCUMENTS = 2_000
CODEBOOK = random_codebook(num_bytes=24, model_dim=384)
TOPICS_TV = np.random.default_rng(9).standard_normal((64, VECTOR_DIM)).astype(np.float32)


def vectors_of(rng: np.random.Generator, topics: np.ndarray) -> np.ndarray:
    vectors = TOPICS_TV[topics] + rng.standard_normal((len(topics), VECTOR_DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rows(first: int, end: int, version: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield batches of both tables: documents of ten chunks, words by Zipf's law."""
    for start in range(first, end, BATCH_DOCUMENTS):
        count = min(BATCH_DOCUMENTS, end - start)
        rng = np.random.default_rng([start, version])
        drawn = np.minimum(rng.zipf(1.15, (count, CHUNKS_A_DOCUMENT * WORDS_A_CHUNK)), len(WORDS)) - 1
        texts = [" ".join(WORDS[row]) + " " for row in drawn]
        ids = [f"document-{number}" for number in range(start, start + count)]
        topics = rng.integers(0, len(TOPICS_TV), count)
        documents = {
            "doc_id": ids,
            "title": [text[:30] for text in texts],
            "text": texts,
            "content_sha256": ["0" * 64] * count,
            "source_file": ["part.parquet"] * count,
            "cluster_id": topics,
            "num_tokens": [len(drawn[0])] * count,
            "num_chunks": [CHUNKS_A_DOCUMENT] * count,
            "vector": matrix(vectors_of(rng, topics)),
        }
        owners = np.repeat(np.arange(count), CHUNKS_A_DOCUMENT)
        ordinals = np.tile(np.arange(CHUNKS_A_DOCUMENT), count)
        chunks = {
            "chunk_id": [f"{ids[owner]}#{ordinal}" for owner, ordinal in zip(owners, ordinals, strict=True)],
            "doc_id": [ids[owner] for owner in owners],
            "ordinal": ordinals,
            "start_char": ordinals * CHUNK_CHARACTERS,
            "end_char": (ordinals + 1) * CHUNK_CHARACTERS,
            "vector": matrix(vectors_of(rng, topics[owners])),
            "token_codes": [rng.bytes(CODE_BYTES) for _ in owners],
            "title_codes": [b""] * len(owners),
        }
        yield (
            batch(documents, documents_schema((), VECTOR_DIM)),
            batch(chunks, chunks_schema(VECTOR_DIM, TOKEN_FIELDS)),
        )


def publish(
    layout: CollectionLayout, first: int, end: int, version: int = 0, *, whole: bool = False
) -> float:
    """Write documents, replacing those that stand; return the seconds from the first commit to the last."""
    with layout.writer_lock():
        started = time.perf_counter()
        publish_rows(
            layout,
            prepare_writer(layout),
            lambda _: rows(first, end, version),
            VECTOR_DIM,
            counts=(end - first, (end - first) * CHUNKS_A_DOCUMENT),
            added=TOKEN_FIELDS,
            deleted=[f"document-{number}" for number in range(first, end)] if version else [],
            codebook=CODEBOOK,
            shares=not whole,
        )
        return time.perf_counter() - started


@pytest.mark.parametrize("num_chunks", [100_000, 1_000_000, 2_000_000])
def test_bench_publishing_one_changed_document(tmp_path: Path, num_chunks: int) -> None:
    layout = CollectionLayout(tmp_path / "root", "bench")
    first = publish(layout, 0, num_chunks // CHUNKS_A_DOCUMENT)
    used = -time.process_time()
    changed = [publish(layout, number, number + 1, version=1) for number in (5, 50, 500, 5_000, 9_000)]
    used += time.process_time()
    whole = publish(layout, 7, 8, version=1, whole=True)
    print(
        f"\n{num_chunks:,} chunks: first {first:.1f} s, one changed document "
        f"{' '.join(f'{seconds:.2f}' for seconds in changed)} s, {used / len(changed):.2f} s of a processor, "
        f"made whole {whole:.1f} s"
    )
    shutil.rmtree(layout.folder)


def test_bench_searching_twelve_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200,000 chunks in one segment, and in twelve: a large one, and small ones of three sizes."""
    sizes = [17_000, *[300] * 4, *[200] * 4, *[20] * 3]
    bounds = np.cumsum([0, *sizes])
    monkeypatch.setattr(tiers, "FACTOR", 100)
    layouts = {name: CollectionLayout(tmp_path / name, "bench") for name in ("one", "twelve")}
    publish(layouts["one"], 0, int(bounds[-1]))
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        publish(layouts["twelve"], first, end)
    generations = {name: open_generation(layout) for name, layout in layouts.items()}
    assert [len(each.segments) for each in generations.values()] == [1, 12]
    rng = np.random.default_rng(1)
    queries = vectors_of(rng, rng.integers(0, len(TOPICS_TV), 300))
    texts = [" ".join(WORDS[np.minimum(rng.zipf(1.3, 6), 3_000)]) for _ in queries]
    asked = NearestAsked(num_documents=50, num_chunks=200, min_documents=50, allowed=None)

    def nominate(generation: Generation, number: int) -> None:
        LocalReader(generation).nominate(queries[number][None], asked)
        words = words_asked(texts[number], generation.query_languages)
        best_documents(generation, bm25_documents(generation, words, None), None, 50)
        bm25_passages(generation, words, 2, None)

    calls = {name: partial(nominate, generation) for name, generation in generations.items()}
    taken = in_turn(calls, len(queries), warm=0)
    one, twelve = (1e3 * float(np.median(taken[name].clock)) for name in ("one", "twelve"))
    print(f"\none segment {one:.2f} ms, twelve {twelve:.2f} ms: {twelve / one:.2f} x")
