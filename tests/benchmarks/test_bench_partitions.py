"""A collection in partitions: searched over Ray beside one process, and changed; synthetic, no encoder.

    python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_partitions.py

``CAIRN_BENCH_CHUNKS`` (200,000) chunks as in ``test_bench_segments.py``, but of 64 dimensions and 8 bytes a
token, are searched in one process and in four partitions, in turn, from one process that asks both. One, two
and four processes hold the partitions. The memory of the process that asks is compared with that of one which
asks for a tenth of the chunks.

Goals: at p50 3 ms more by vectors and 5 ms with BM25 and token vectors; memory independent of the corpus; no
partition above 1.1 times its share of the bytes; a changed document .3 s and one partition.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import find_served, repartition
from cairn.pipeline.index.names import partition_of
from cairn.pipeline.index.partitions import change_collection
from cairn.pipeline.index.publish import GenerationFacts, publish_generation
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import LanceTables
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import EncodedQueries, ProgressListener, QueryTokens

from tests.benchmarks import test_bench_segments as maker
from tests.benchmarks.clustered import NoEncoder
from tests.benchmarks.timing import in_turn
from tests.jobs.ray_serve.served_shards import shard_processes
from tests.late_models import random_codebook

pytestmark = pytest.mark.bench

NUM_CHUNKS = int(os.environ.get("CAIRN_BENCH_CHUNKS", "200000"))
NUM_QUERIES, NUM_WARM, QUERY_TOKENS = 100, 20, 6
VECTOR_DIM, TOKEN_BYTES = 64, 8
SHARDS, PARTITIONS = 4, 8
PROCESSES = (1, 2, 4)
SEARCH_SECONDS = 900
"""For starting Ray and all searches of a collection."""
VECTORS = SearchOptions(hybrid=False, late=False, granularity="chunk", passages=1)
maker.VECTOR_DIM, maker.CODE_BYTES = VECTOR_DIM, 64 * (TOKEN_BYTES + 1)
maker.CODEBOOK = random_codebook(num_bytes=TOKEN_BYTES, model_dim=VECTOR_DIM)
maker.TOPICS_TV = maker.TOPICS_TV[:, :VECTOR_DIM]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Roots of a collection, of the same in partitions, and of a tenth of it in partitions."""
    folder = tmp_path_factory.mktemp("partitions")
    found = {name: folder / name for name in ("one", "four", "tenth")}
    maker.publish(CollectionLayout(found["one"], "bench"), 0, NUM_CHUNKS // maker.CHUNKS_A_DOCUMENT)
    shutil.copytree(found["one"], found["four"])
    maker.publish(CollectionLayout(found["tenth"], "bench"), 0, NUM_CHUNKS // maker.CHUNKS_A_DOCUMENT // 10)
    for name in ("four", "tenth"):
        repartition(CollectionLayout(found[name], "bench"), SHARDS)
    yield found
    shutil.rmtree(folder)


def test_bench_search_over_ray_beside_one_process(roots: dict[str, Path]) -> None:
    asked = [(processes, "four", roots["one"]) for processes in PROCESSES]
    for processes, name, *others in (*asked, (SHARDS, "tenth")):
        # In a process of its own, whose memory is that of what answers.
        command = [sys.executable, "-m", "tests.benchmarks.test_bench_partitions", str(processes)]
        subprocess.run([*command, str(roots[name]), *map(str, others)], check=True, timeout=SEARCH_SECONDS)


def ask(processes: int, root: Path, one: Path | None = None) -> None:
    """Print what searches over shards take, and in one process where there is one, and the memory."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    connection = RayConnection(None)
    from cairn.jobs.ray_serve.shard_calls import ShardCalls, stop_shards

    cluster = ClusterSettings(engine="ray", shards=processes, shard_replicas=1)
    calls = ShardCalls(connection.ray, ServeSettings(root=root), cluster)
    searchers = {
        "shards": Searcher(CollectionLayout(root, "bench"), NoEncoder("e" * 64), open_one=calls.open)
    }
    if one is not None:
        searchers["one process"] = Searcher(CollectionLayout(one, "bench"), NoEncoder("e" * 64))
    rng = np.random.default_rng(1)
    print(f"\n{processes} processes")
    for name, options in (("vectors", VECTORS), ("BM25 and token vectors", SearchOptions())):
        asked = [query(rng) for _ in range(NUM_QUERIES)]

        def search(searcher: Searcher, number: int, asked: Any = asked, options: Any = options) -> None:
            text, encoded = asked[number]
            searcher.answer([text], options, encoded=encoded)

        calls = {each: partial(search, searcher) for each, searcher in searchers.items()}
        in_turn(calls, NUM_WARM, warm=0)
        before = processor_seconds()
        for each, taken in in_turn(calls, NUM_QUERIES, warm=0).items():
            p10, p50 = 1e3 * np.percentile(taken.clock, (10, 50))
            processor = 1e3 * taken.processor.mean()
            print(f"{name}, {each}: p10 {p10:.2f}, p50 {p50:.2f} ms; {processor:.2f} of a processor")
        of_shards = processor_seconds() - before
        print(f"{name}, of a processor in shards: {1e3 * of_shards / NUM_QUERIES:.2f} ms")
    own_mib = psutil.Process().memory_full_info().uss >> 20
    print(f"memory of its own {own_mib} MiB, load {os.getloadavg()[0]:.1f}")
    stop_shards(connection.ray)
    connection.close()


def processor_seconds() -> float:
    """Return what the processes of shards below this one have taken of processors."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in shard_processes(os.getpid()))


def query(rng: np.random.Generator) -> tuple[str, EncodedQueries]:
    words = maker.WORDS[np.minimum(rng.zipf(1.3, QUERY_TOKENS), 3_000)]
    states = rng.standard_normal((QUERY_TOKENS, VECTOR_DIM)).astype(np.float32)
    starts = np.arange(QUERY_TOKENS) * (len(words[0]) + 1)
    tokens = QueryTokens(
        states_TD=states / np.linalg.norm(states, axis=1, keepdims=True),
        ids_T=np.arange(1, QUERY_TOKENS + 1, dtype=np.int32),
        start_char=starts,
        end_char=starts + len(words[0]),
    )
    vectors_1V = maker.vectors_of(rng, rng.integers(0, len(maker.TOPICS_TV), 1))
    return " ".join(words), EncodedQueries(vectors_QV=vectors_1V, tokens=[tokens])


def test_bench_bytes_of_each_partition(roots: dict[str, Path]) -> None:
    folders = [*CollectionLayout(roots["four"], "bench").partitions_folder.iterdir()]
    sizes = [sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in folders]
    shares = [size / (sum(sizes) / len(sizes)) for size in sizes]
    print(f"\nbytes of each partition, of its share: {' '.join(f'{share:.3f}' for share in shares)}")
    assert max(shares) <= 1.1


def test_bench_changed_document_touches_one_partition(roots: dict[str, Path]) -> None:
    layout = CollectionLayout(roots["four"], "bench")
    repartition(layout, PARTITIONS)
    seconds = [change(layout, number) for number in (5, 50, 500, 1_000, 1_500)]
    print(f"\n{NUM_CHUNKS:,} chunks in {PARTITIONS}: {' '.join(f'{each:.2f}' for each in seconds)} s")


def change(layout: CollectionLayout, number: int) -> float:
    """Replace a document; return the seconds from the lock to the publication."""
    started = time.perf_counter()
    with layout.writer_lock():
        base = prepare_writer(layout)
        assert base is not None
        facts = GenerationFacts.of(layout, base, "bench")
        owner = partition_of(f"document-{number}", PARTITIONS)
        made = change_collection(layout, base.partitions, {owner: partial(replaced, facts, number)}, facts)
    seconds = time.perf_counter() - started
    pairs = zip(base.partitions, made.partitions, strict=True)
    assert [place for place, (old, new) in enumerate(pairs) if old != new] == [owner]
    return seconds


def replaced(
    facts: GenerationFacts, number: int, layout: CollectionLayout, base: Any, _: ProgressListener
) -> Manifest:
    tables = LanceTables.open(layout, base.lance_versions)
    tables.compact()
    documents, chunks = (
        pa.RecordBatchReader.from_batches(batch.schema, [batch])
        for batch in next(maker.rows(number, number + 1, 1))
    )
    versions = tables.commit(
        deleted_ids=[f"document-{number}"],
        find_documents=partial(find_served, layout, base),
        documents=documents,
        chunks=chunks,
        expected_documents=1,
        expected_chunks=maker.CHUNKS_A_DOCUMENT,
    )
    return publish_generation(layout, tables, versions, facts, IndexConfig(), shares=True)


if __name__ == "__main__":
    ask(int(sys.argv[1]), *map(Path, sys.argv[2:]))
