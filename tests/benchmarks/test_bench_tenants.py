"""One of 10,000 tenants of a collection, found by a filter, against a collection that holds it alone.

    python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_tenants.py

``CAIRN_BENCH_TENANTS`` (10,000) tenants have ten documents of a chunk each; vectors and texts are those of
``clustered.py``. Queries arrive as vectors and texts. Both collections are asked in turn, and with
hidden word statistics too, for the tenant and for half of the documents. Goal: p50 at most 1.3 times that of
the tenant alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions

from tests.benchmarks.clustered import (
    NUM_QUERIES,
    NoEncoder,
    around,
    centres_of,
    publish,
    word_queries,
    zipf_texts,
)
from tests.benchmarks.timing import in_turn, line

pytestmark = pytest.mark.bench

TENANTS = int(os.environ.get("CAIRN_BENCH_TENANTS", "10000"))
DOCUMENTS_A_TENANT = 10


def test_bench_search_of_one_tenant(tmp_path: Path) -> None:
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    count = TENANTS * DOCUMENTS_A_TENANT
    vectors, texts = centres_of(count, rng), zipf_texts(count, 1, rng)
    owners = np.arange(count) % TENANTS
    queries = word_queries(NUM_QUERIES, rng)
    query_vectors = around(vectors[rng.integers(0, count, NUM_QUERIES)], 2.0, rng)

    def opened(name: str, rows: np.ndarray) -> Searcher:
        layout = CollectionLayout(tmp_path / name, "bench")
        columns = {
            "tenant": pa.array([f"tenant-{owners[row]}" for row in rows]),
            "half": pa.array((owners[rows] % 2).astype(str)),
        }
        publish(layout, [texts[row] for row in rows], vectors[rows], vectors[rows], columns)
        return Searcher(layout, NoEncoder())

    def searching(searcher: Searcher, **options: Any) -> Callable[[int], Any]:
        asked = SearchOptions(**options)
        return lambda i: searcher.answer([queries[i]], asked, encoded=query_vectors[i : i + 1])

    shared, alone = opened("all", np.arange(count)), opened("one", np.flatnonzero(owners == 0))
    tenant, half = {"tenant": "tenant-0"}, {"half": "0"}
    for calls in (
        {
            f"one of {TENANTS:,} tenants": searching(shared, restriction=tenant),
            "the tenant alone": searching(alone),
            "one tenant, hidden": searching(shared, restriction=tenant, hide_word_statistics=True),
        },
        {
            "half": searching(shared, restriction=half),
            "half, hidden": searching(shared, restriction=half, hide_word_statistics=True),
        },
    ):
        taken = in_turn(calls, NUM_QUERIES)
        for name in calls:
            line(f"{name}, by the clock", taken[name].clock)
            line(f"{name}, of a processor", taken[name].processor)
