"""How soon a reader answers with a publication of one document in an object store, and what crosses the wire.

``CAIRN_BENCH_CHUNKS`` (300,000) of synthetic vectors; no encoder. The store is the tests' server on this
machine, so its latency and bandwidth are none. The reader is another process with a copy of its own, which
looks for publications as a server does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cairn.pipeline.index.layout import CollectionLayout

from tests.benchmarks.test_bench_segments import CHUNKS_A_DOCUMENT, publish

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

pytestmark = pytest.mark.bench

CHUNKS = int(os.environ.get("CAIRN_BENCH_CHUNKS", "300000"))
ROOT = "s3://cairn/indexes"

# Follow the collection as a server does; say when the first answer of each generation came.
READER = """
import sys, time
import numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_bench_segments import VECTOR_DIM, vectors_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.reader import NearestAsked
from cairn.pipeline.search.served import ServedGeneration
class Encoder:
    fingerprint, vector_dim = "e" * 64, VECTOR_DIM
    def encode_queries(self, queries):
        raise AssertionError("queries are vectors here")
served = ServedGeneration(CollectionLayout.at(Path(sys.argv[2]), "bench"), Encoder())
rng, seen = np.random.default_rng(1), 0
while True:
    taken = served.take()
    query = vectors_of(rng, np.zeros(1, np.int64))
    asked = NearestAsked(num_documents=50, num_chunks=200, min_documents=50, allowed=None)
    taken.reader.nominate(query, asked)
    if taken.generation.number != seen:
        seen = taken.generation.number
        print(seen, time.time(), flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests five minutes, not half of one: the tests' server takes one to join parts of 2 GB."""
    from obstore import store

    opened: Any = store.from_url

    def from_url(uri: str, **settings: Any) -> Any:
        return opened(uri, **{**settings, "client_options": {"allow_http": True, "timeout": "300s"}})

    monkeypatch.setattr(store, "from_url", from_url)


@pytest.mark.usefixtures("patient")
def test_bench_reader_of_a_store_after_one_document(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "reader"))
    reading = dict(os.environ)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "writer"))
    layout = CollectionLayout.at(Path(ROOT), "bench")
    first_seconds = publish(layout, 0, CHUNKS // CHUNKS_A_DOCUMENT)
    uploaded = object_store.traffic()["came"]
    command = [sys.executable, "-c", READER, str(Path(__file__).parent), ROOT]
    started = time.time()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=reading) as reader:
        assert reader.stdout is not None

        def heard() -> float:
            assert reader.stdout is not None
            number, at = reader.stdout.readline().split()
            assert int(number) == layout.current_generation_number()
            return float(at)

        pulled_seconds = heard() - started
        downloaded = object_store.traffic()["went"]
        print(
            f"\n{CHUNKS:,} chunks: first publication {first_seconds:.1f} s and {uploaded / 1e6:,.1f} MB up, "
            f"first pull {pulled_seconds:.1f} s and {downloaded / 1e6:,.1f} MB down"
        )
        for document in (5, 50, 500, 1_000):
            seconds = publish(layout, document, document + 1, version=1)
            published = time.time()
            answered = heard() - published
            traffic = object_store.traffic()
            print(
                f"one document: published in {seconds:.2f} s, answered {answered:.2f} s later (goal <= 3), "
                f"{traffic['came'] / 1e3:,.0f} kB up, {traffic['went'] / 1e3:,.0f} kB down, "
                f"{traffic['requests']} requests"
            )
        reader.kill()
    for machine in ("reader", "writer"):
        shutil.rmtree(tmp_path / machine)
