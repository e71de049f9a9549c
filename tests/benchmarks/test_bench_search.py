"""Measure search latency and recall on 200,000 chunk vectors of 384 dimensions, with one thread.

Run ``python -m pytest -m bench -s tests/benchmarks/test_bench_search.py`` (about three minutes). Goals: p50
at most 5 ms, with BM25 at most 7 ms, recall@10 at least 0.97.

Queries arrive as vectors, so the encoder's time is not included. Vectors lie in clusters, documents around
topics and chunks around their document, as those of a text encoder do. The ten best chunks of a query come
from four or five documents, at cosines of 0.27 to 0.34. Passages are windows of two landmarks, the default.
Words follow Zipf's law; a query has six words of ranks 21 to 2,000.
"""

# pyright: reportArgumentType=false
# Keywords of searches come from tables of cases.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.config import EncoderConfig, IndexConfig, IngestConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import GenerationFacts, publish_generation
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import LanceTables
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.types import chunks_schema, documents_schema

from tests.exact_search import nearest

pytestmark = pytest.mark.bench

NUM_DOCUMENTS, CHUNKS_PER_DOCUMENT, VECTOR_DIM, NUM_TOPICS = 20_000, 10, 384, 500
NUM_QUERIES, TOP_K = 300, 10
WORDS_PER_CHUNK, VOCABULARY = 40, 20_000
FINGERPRINT = "b" * 64


@dataclass(frozen=True)
class Bench:
    layout: CollectionLayout
    searcher: Searcher
    chunk_vectors: np.ndarray
    query_vectors: np.ndarray
    queries: list[str]


class NoEncoder:
    """Stands for an encoder whose work is done: the benchmark brings vectors."""

    fingerprint = FINGERPRINT

    def encode_queries(self, texts: object) -> np.ndarray:
        raise AssertionError("queries arrive as vectors")


def normalised(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def around(centres: np.ndarray, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Return unit vectors around unit centres, at a cosine of about 1 / sqrt(1 + spread²)."""
    noise = rng.standard_normal(centres.shape, dtype=np.float32) / np.sqrt(centres.shape[-1])
    return normalised(centres + spread * noise)


def zipf_texts(count: int, rng: np.random.Generator) -> list[str]:
    lengths = WORDS_PER_CHUNK * CHUNKS_PER_DOCUMENT
    ids = np.minimum((rng.pareto(1.0, (count, lengths)) * 4).astype(np.int64), VOCABULARY - 1)
    return [" ".join(f"word{i}" for i in row) for row in ids.tolist()]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Bench:
    rng = np.random.default_rng(0)
    topics = normalised(rng.standard_normal((NUM_TOPICS, VECTOR_DIM), dtype=np.float32))
    centres = around(topics[rng.integers(0, NUM_TOPICS, NUM_DOCUMENTS)], 0.8, rng)
    chunk_vectors = around(np.repeat(centres, CHUNKS_PER_DOCUMENT, axis=0), 1.2, rng)
    document_vectors = normalised(
        chunk_vectors.reshape(NUM_DOCUMENTS, CHUNKS_PER_DOCUMENT, VECTOR_DIM).mean(axis=1)
    )
    query_vectors = around(centres[rng.integers(0, NUM_DOCUMENTS, NUM_QUERIES)], 2.0, rng)
    texts = zipf_texts(NUM_DOCUMENTS, rng)
    layout = CollectionLayout(tmp_path_factory.mktemp("bench"), "bench")
    publish(layout, texts, document_vectors, chunk_vectors)
    queries = [" ".join(f"word{i}" for i in rng.integers(20, 2_000, 6)) for _ in range(NUM_QUERIES)]
    return Bench(layout, Searcher(layout, NoEncoder()), chunk_vectors, query_vectors, queries)


def publish(
    layout: CollectionLayout,
    texts: list[str],
    document_vectors: np.ndarray,
    chunk_vectors: np.ndarray,
    metadata: Mapping[str, pa.Array] = MappingProxyType({}),
) -> None:
    doc_ids = [f"doc{i:06d}" for i in range(NUM_DOCUMENTS)]
    fields = [pa.field(name, column.type) for name, column in metadata.items()]
    schema = documents_schema(fields, VECTOR_DIM)
    constant = {"source_file": "bench.parquet", "content_sha256": "0" * 64, "title": None}
    columns = {
        **{
            name: pa.array([value] * NUM_DOCUMENTS, schema.field(name).type)
            for name, value in constant.items()
        },
        "doc_id": pa.array(doc_ids),
        "cluster_id": pa.array(np.arange(NUM_DOCUMENTS, dtype=np.int32) % NUM_TOPICS),
        "text": pa.array(texts, pa.large_string()),
        "num_tokens": pa.array([WORDS_PER_CHUNK * CHUNKS_PER_DOCUMENT] * NUM_DOCUMENTS, pa.int32()),
        "num_chunks": pa.array([CHUNKS_PER_DOCUMENT] * NUM_DOCUMENTS, pa.int32()),
        "vector": vector_column(document_vectors),
        **metadata,
    }
    documents = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    bounds = [chunk_bounds(text) for text in texts]
    ordinals = np.tile(np.arange(CHUNKS_PER_DOCUMENT, dtype=np.int32), NUM_DOCUMENTS)
    owners = np.repeat(doc_ids, CHUNKS_PER_DOCUMENT).tolist()
    chunks = pa.RecordBatch.from_arrays(
        [
            pa.array([f"{doc_id}#{ordinal}" for doc_id, ordinal in zip(owners, ordinals, strict=True)]),
            pa.array(owners),
            pa.array(ordinals),
            pa.array(np.concatenate([b[:-1] for b in bounds])),
            pa.array(np.concatenate([b[1:] for b in bounds])),
            vector_column(chunk_vectors),
        ],
        schema=chunks_schema(VECTOR_DIM),
    )
    with layout.writer_lock():
        prepare_writer(layout)
        tables = LanceTables.open_or_create(layout, fields, VECTOR_DIM)
        versions = tables.commit(
            deleted_ids=[],
            documents=pa.RecordBatchReader.from_batches(documents.schema, [documents]),
            chunks=pa.RecordBatchReader.from_batches(chunks.schema, [chunks]),
            expected_documents=documents.num_rows,
            expected_chunks=chunks.num_rows,
        )
        facts = GenerationFacts(
            run_id="bench",
            side_files={},
            fingerprints={"encoder": FINGERPRINT, "context": "", "clusters": ""},
            settings=IngestConfig(encoder=EncoderConfig(landmark_interval=64)).to_dict(),
            context_documents=0,
            context_cluster_sizes=(),
            documents_at_context=0,
            encode_tokens_per_second=1.0,
        )
        publish_generation(layout, tables, versions, facts, IndexConfig())


def chunk_bounds(text: str) -> np.ndarray:
    """Return where a text's chunks of so many words begin, and its end."""
    begins = np.cumsum([0, *(len(word) + 1 for word in text.split(" "))])
    return np.append(begins[:-1:WORDS_PER_CHUNK], len(text))


def vector_column(vectors: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])


def timed(call: Callable[[int], object], num_rounds: int = 1) -> tuple[float, float, list[object]]:
    """Return p50 and p99 in milliseconds and the answers, after ten calls to warm up.

    Of several rounds the one with the lowest p50 counts: other work on the machine only ever adds.
    """
    for index in range(10):
        call(index)
    rounds, answers = [], []
    for _ in range(num_rounds):
        seconds, answers = [], []
        for index in range(NUM_QUERIES):
            start = time.perf_counter()
            answers.append(call(index))
            seconds.append(time.perf_counter() - start)
        rounds.append((1e3 * np.percentile(seconds, [50, 99])).tolist())
    return *min(rounds), answers


def recall(found: list[np.ndarray], exact: np.ndarray) -> float:
    pairs = zip(found, exact, strict=True)
    return float(np.mean([np.isin(truth, row).mean() for row, truth in pairs]))


def line(name: str, p50: float, p99: float, rest: str = "") -> None:
    print(f"\n{name:<52} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   {rest}", end="")


@pytest.fixture(scope="module")
def exact(bench: Bench) -> np.ndarray:
    return nearest(bench.chunk_vectors, bench.query_vectors, TOP_K)


def test_bench_chunk_index_recall_and_latency_beside_flat(bench: Bench, exact: np.ndarray) -> None:
    chunks = bench.searcher.generation.chunks
    p50, p99, answers = timed(lambda i: chunks.search(bench.query_vectors[i : i + 1], TOP_K)[1][0])
    found = recall(answers, exact)
    kind = bench.searcher.generation.manifest.indexes["chunks"]["kind"]
    line("chunk index alone", p50, p99, f"recall@10 {found:.4f}   {kind}")
    flat = faiss.IndexFlatIP(VECTOR_DIM)
    flat.add(bench.chunk_vectors)
    flat_p50, flat_p99, _ = timed(lambda i: flat.search(bench.query_vectors[i : i + 1], TOP_K))
    line("peer: FAISS flat", flat_p50, flat_p99, "recall@10 1.0000")
    assert found >= 0.97
    assert p50 < flat_p50


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
def test_bench_dense_search_with_texts_stays_within_its_goal(bench: Bench, granularity: Any) -> None:
    p50, p99, _ = timed(
        lambda i: bench.searcher.answer(
            None, SearchOptions(granularity=granularity), encoded=bench.query_vectors[i : i + 1]
        ),
        num_rounds=3,
    )
    line(f"vectors, {granularity}, texts fetched", p50, p99)
    assert p50 <= 5.0


def hybrid(bench: Bench, **options: object) -> Callable[[int], object]:
    """Return a search of one query, its vector and its words."""
    asked = SearchOptions(**options)
    return lambda i: bench.searcher.answer(
        bench.queries[i : i + 1], asked, encoded=bench.query_vectors[i : i + 1]
    )


def test_bench_hybrid_search_with_texts_stays_within_its_goal(bench: Bench) -> None:
    p50, p99, _ = timed(hybrid(bench), num_rounds=3)
    line("vectors, both, hybrid, texts fetched", p50, p99)
    assert p50 <= 7.0


@pytest.mark.parametrize(
    "options", [{"group_by": "cluster_id"}, {"mmr": 0.7}, {"group_by": "cluster_id", "mmr": 0.7}]
)
def test_bench_groups_and_marginal_relevance_beside_the_plain_answer(
    bench: Bench, options: dict[str, Any]
) -> None:
    plain, diverse = hybrid(bench), hybrid(bench, **options)
    spent: dict[str, list[float]] = {"plain": [], "diverse": []}
    for index in [*range(10), *range(NUM_QUERIES)]:
        for name, call in (("plain", plain), ("diverse", diverse)):
            began = time.process_time()
            call(index)
            spent[name].append(1e3 * (time.process_time() - began))
    without, took = (float(np.median(times[10:])) for times in spent.values())
    print(f"\n{options}: {took:.2f} ms of a processor, {without:.2f} without, {took / without:.2f} x", end="")
    assert took <= 1.5 * without
