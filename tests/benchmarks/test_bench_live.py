"""Writes to a server that is being searched: acknowledged, found, and what they cost searches.

``CAIRN_BENCH_LIVE_ROOT`` is a root with the collection ``live``, else one of ``CAIRN_BENCH_LIVE_DOCUMENTS``
(250) documents of some 200 tokens is made, and filled up to ``CAIRN_BENCH_LIVE_CHUNKS`` (100,000) with copies
under other ids, whose vectors are moved. The server is a process of its own. One client writes and asks
for what it wrote, then 16 write while 16 search, for ``CAIRN_BENCH_LIVE_SECONDS`` (20) each.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.client import errors
from cairn.pipeline.client.clients import CairnClient, RemoteCollection
from cairn.pipeline.collection import Collection
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CHUNKS as CHUNKS_TABLE
from cairn.pipeline.index.names import DOCUMENTS as DOCUMENTS_TABLE
from cairn.pipeline.index.publish import GenerationFacts, publish_generation
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import LanceTables, vectors_of

from tests.benchmarks.timing import line
from tests.served_stones import serving_process

pytestmark = pytest.mark.bench

ROOT = os.environ.get("CAIRN_BENCH_LIVE_ROOT")
DOCUMENTS = int(os.environ.get("CAIRN_BENCH_LIVE_DOCUMENTS", "250"))
CHUNKS = int(os.environ.get("CAIRN_BENCH_LIVE_CHUNKS", "100000"))
SECONDS = float(os.environ.get("CAIRN_BENCH_LIVE_SECONDS", "20"))
CLIENTS = int(os.environ.get("CAIRN_BENCH_LIVE_CLIENTS", "16"))
WRITES = 30
WORDS = ("granite", "basalt", "slate", "marble", "flint", "chalk", "quartz", "gneiss", "shale", "chert")
WORDS_A_DOCUMENT = 120
"""Some 200 tokens."""


def text_of(seed: int) -> str:
    rng = np.random.default_rng(seed)
    return f"unique{seed} " + " ".join(rng.choice(WORDS, WORDS_A_DOCUMENT))


def fill(layout: CollectionLayout) -> None:
    """Copy the documents of a collection until it has :data:`CHUNKS`."""
    with layout.writer_lock():
        manifest = prepare_writer(layout)
        assert manifest is not None
        tables = LanceTables.open(layout, manifest.lance_versions)
        copies: dict[str, pa.Table] = {}
        for name, schema in tables.schemas.items():
            rows = pa.Table.from_batches(tables.scan(name, schema.names, manifest.lance_versions))
            made = [copied(rows, number) for number in range(1, CHUNKS // manifest.chunks)]
            copies[name] = pa.concat_tables(made).cast(schema)
        versions = tables.commit(
            documents=copies[DOCUMENTS_TABLE].to_reader(),
            chunks=copies[CHUNKS_TABLE].to_reader(),
            expected_documents=copies[DOCUMENTS_TABLE].num_rows,
            expected_chunks=copies[CHUNKS_TABLE].num_rows,
        )
        facts = GenerationFacts.of(layout, manifest, "bench")
        publish_generation(layout, tables, versions, facts, manifest.index_config)


def copied(rows: pa.Table, number: int) -> pa.Table:
    """Return rows of other ids, with vectors at a cosine of about .9."""
    vectors = vectors_of(rows.column("vector").combine_chunks())
    noise = np.random.default_rng(number).standard_normal(vectors.shape, dtype=np.float32)
    moved = vectors + 0.5 * noise / np.sqrt(vectors.shape[1])
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    columns = {name: rows.column(name) for name in rows.schema.names}
    for name in {"doc_id", "chunk_id"} & columns.keys():
        columns[name] = pa.array([f"{number}-{each}" for each in columns[name].to_pylist()])
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(moved.ravel()), vectors.shape[1])
    return pa.table(columns)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a copy of the collection in a process of its own."""
    root = folder / "root"
    if ROOT is not None:
        shutil.copytree(ROOT, root)
    else:
        rows = [{"id": f"d{number}", "text": text_of(number)} for number in range(DOCUMENTS)]
        live = Collection.create("live", root=root)
        live.add(rows)
        fill(live.layout)
    options = ("--quiet", "--writable", "--max-requests", "512")
    with serving_process(folder, "--root", root, *options) as (_, address, _):
        yield address


def search_for(live: RemoteCollection, seconds: float, seed: int) -> list[float]:
    rng, taken, until = np.random.default_rng(seed), list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.perf_counter()
        live.search(" ".join(rng.choice(WORDS, 6)))
        taken.append(time.perf_counter() - started)
    return taken


def write_for(live: RemoteCollection, seconds: float, seed: int) -> tuple[list[float], int]:
    taken, refused, until = list[float](), 0, time.monotonic() + seconds
    for number in range(1_000_000):
        if time.monotonic() >= until:
            break
        started = time.perf_counter()
        try:
            text = text_of(seed * 1_000_000 + number)
            live.add([{"id": f"{seed}-{number}", "text": text}], wait="durable")
            taken.append(time.perf_counter() - started)
        except errors.UnavailableError as error:
            refused += 1
            time.sleep(error.retry_after_seconds or 1)
    return taken, refused


def test_bench_writes_beside_searches(tmp_path: Path) -> None:
    with served(tmp_path) as address, CairnClient(address, timeout_seconds=120, max_retries=0) as client:
        live = client.collection("live")
        live.add([{"id": "warm", "text": text_of(0)}])
        chunks = live.describe().chunks
        durable, found = list[float](), list[float]()
        for number in range(WRITES):
            document = {"id": f"one-{number}", "text": text_of(10**9 + number)}
            started = time.perf_counter()
            live.add([document], wait="durable")
            durable.append(time.perf_counter() - started)
            time.sleep(1)
        for number in range(WRITES):
            name = f"unique{2 * 10**9 + number}"
            started = time.perf_counter()
            live.add([{"id": name, "text": text_of(2 * 10**9 + number)}])
            hits = live.search(name, top_k=5).hits
            found.append(time.perf_counter() - started)
            assert name in [hit.doc_id for hit in hits]
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            quiet = [*pool.map(lambda seed: search_for(live, SECONDS, seed), range(CLIENTS))]
            begun = time.monotonic()
            writing = [pool.submit(write_for, live, SECONDS, seed) for seed in range(3_000, 3_000 + CLIENTS)]
            busy = [*pool.map(lambda seed: search_for(live, SECONDS, seed), range(CLIENTS))]
            written = [each.result() for each in writing]
        live.add([{"id": "last", "text": text_of(1)}])
        drained = time.monotonic() - begun
        quiet_seconds, busy_seconds = ([one for each in runs for one in each] for runs in (quiet, busy))
        acknowledged = [one for taken, _ in written for one in taken]
        ratio = np.median(busy_seconds) / np.median(quiet_seconds)
        told = f"{sum(refused for _, refused in written)} told to come again"
        print(f"\n{chunks:,} chunks", end="")
        line("one client, acknowledged", durable, "goal p50 <= 20 ms")
        line("one client, written and found", found, "goal p50 <= 400 ms, p99 <= 1 s")
        line(f"{CLIENTS} searching, quiet", quiet_seconds)
        line(f"{CLIENTS} searching beside {CLIENTS} writing", busy_seconds, f"{ratio:.2f} x (goal <= 1.5)")
        line(f"{CLIENTS} writing, acknowledged", acknowledged)
        print(f"\n{told}; {len(acknowledged):,} documents published in {drained:.1f} s")
