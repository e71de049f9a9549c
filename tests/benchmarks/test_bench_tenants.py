"""One of 10,000 tenants of a collection, found by a filter, against a collection that holds it alone.

    python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_tenants.py

``CAIRN_BENCH_TENANTS`` (10,000) tenants have ten documents of a chunk each; vectors and texts are those of
``test_bench_search.py``. Queries arrive as vectors and texts. Both collections are asked in turn. Goal: p50
at most 1.3 times that of the tenant alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions

from tests.benchmarks import test_bench_search as maker

pytestmark = pytest.mark.bench

TENANTS = int(os.environ.get("CAIRN_BENCH_TENANTS", "10000"))
DOCUMENTS_A_TENANT = 10
NUM_QUERIES = 300


def test_bench_search_of_one_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    count = TENANTS * DOCUMENTS_A_TENANT
    topics = maker.normalised(rng.standard_normal((maker.NUM_TOPICS, maker.VECTOR_DIM), dtype=np.float32))
    vectors = maker.around(topics[rng.integers(0, maker.NUM_TOPICS, count)], 0.8, rng)
    monkeypatch.setattr(maker, "CHUNKS_PER_DOCUMENT", 1)
    texts = maker.zipf_texts(count, rng)
    owners = np.arange(count) % TENANTS
    of_one = np.flatnonzero(owners == 0)
    searchers: list[Searcher] = []
    for name, rows in (("all", np.arange(count)), ("one", of_one)):
        monkeypatch.setattr(maker, "NUM_DOCUMENTS", len(rows))
        layout = CollectionLayout(tmp_path / name, "bench")
        tenants = pa.array([f"tenant-{owners[row]}" for row in rows])
        own = [texts[row] for row in rows]
        maker.publish(layout, own, vectors[rows], vectors[rows], {"tenant": tenants})
        searchers.append(Searcher(layout, maker.NoEncoder()))
    seconds: list[list[float]] = [[], []]
    queries = [" ".join(f"word{i}" for i in rng.integers(20, 2_000, 6)) for _ in range(NUM_QUERIES)]
    query_vectors = maker.around(vectors[rng.integers(0, count, NUM_QUERIES)], 2.0, rng)
    for number, query in enumerate([*queries[:10], *queries]):
        vector = query_vectors[number % NUM_QUERIES][None]
        for place, filters in enumerate(({"tenant": "tenant-0"}, None)):
            started = time.perf_counter()
            searchers[place].answer([query], SearchOptions(filters=filters), encoded=vector)
            seconds[place].append(time.perf_counter() - started)
    for name, taken in zip((f"one of {TENANTS:,} tenants", "the tenant alone"), seconds, strict=True):
        maker.line(name, *(1e3 * np.percentile(taken[10:], [50, 99])))
    shared, alone = (float(np.median(taken[10:])) for taken in seconds)
    print(f"\nratio of the medians {shared / alone:.2f} (goal <= 1.3)")
