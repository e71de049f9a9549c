"""Count the bytes that cross a Ray driver's network in an ingest into an object store.

Once workers leave encoded shards in the store, once these pass the driver. Workers see no disk of the
driver's, and use a key of their own, by which the server tells them from it. What an ingest costs whatever
its size is left out: two sizes are compared.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cairn.jobs.engine import open_engine
from cairn.jobs.engine_settings import EngineConfig
from cairn.jobs.ray_cluster import engine as ray_engine
from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.pipeline.config import ClusterConfig, ContextConfig, IngestConfig
from cairn.pipeline.index.segments import parts
from cairn.pipeline.line import encode as encode_corpus
from cairn.pipeline.line.build_index import build_index

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

pytestmark = pytest.mark.bench

ROOT = "s3://cairn/indexes"
PASSAGES_A_DOCUMENT = 10
SIZES = (100, 300)
"""Documents; both are written by workers in as many parts and fragments."""


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """Count what Ray carries between driver and workers, and give workers a key of their own."""
    counted = Counter[str]()
    connection, work = ray_engine.RayConnection, WorkerPool.map

    def connect(address: str | None) -> Any:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "worker")
            return connection(address)

    def count(
        pool: WorkerPool, method: str, arguments: Callable[[int], tuple[Any, ...]], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        def sent(number: int) -> tuple[Any, ...]:
            given = arguments(number)
            counted[f"Ray, {method}: sent"] += len(pickle.dumps(given))
            return given

        for number, answer in work(pool, method, sent, sizes):
            counted[f"Ray, {method}: received"] += len(pickle.dumps(answer))
            yield number, answer

    monkeypatch.setattr(ray_engine, "RayConnection", connect)
    monkeypatch.setattr(ray_engine, "_shared_folder", lambda _: (tmp_path / "elsewhere", "mark"))
    monkeypatch.setattr(WorkerPool, "map", count)
    monkeypatch.setattr(parts, "PART_CHUNKS", 200)
    monkeypatch.setattr(parts, "MAX_PARTS", 2)
    return counted


def test_bench_bytes_of_the_driver_a_chunk(
    object_store: ObjectStore,
    crossed: Counter[str],
    tmp_path: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passages = sample_passages(SIZES[-1] * PASSAGES_A_DOCUMENT)
    texts = ["\n\n".join(passages[start :: SIZES[-1]]) for start in range(SIZES[-1])]
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "driver"))
    config = IngestConfig(
        cluster=ClusterConfig(num_clusters=10), context=ContextConfig(context_documents=SIZES[0] // 2)
    )
    totals: dict[str, float] = {}
    for way in ("in the store", "through the driver"):
        counts: list[Counter[str]] = []
        if way == "through the driver":
            monkeypatch.setattr(encode_corpus, "_shared_area", lambda run, characters: None)
        for size in SIZES:
            crossed.clear()
            object_store.traffic()
            source = write_passages(tmp_path / "corpus.parquet", texts[:size])
            name = f"{'store' if way == 'in the store' else 'driver'}-{size}"
            engine = open_engine(EngineConfig(name="ray", max_workers=1), config)
            report = build_index([source], ROOT, name, config, engine=engine)
            traffic = object_store.traffic()
            stored = {"store: sent": traffic["came"], "store: received": traffic["went"]}
            counts.append(Counter({**crossed, **stored, "chunks": report.chunks}))
        more = {name: counts[1][name] - counts[0][name] for name in counts[1]}
        chunks = more.pop("chunks")
        totals[way] = sum(more.values()) / chunks
        shown = ", ".join(f"{name} {count / chunks:,.0f}" for name, count in sorted(more.items()))
        print(
            f"\nshards {way}: {totals[way]:,.0f} bytes of the driver for each of {chunks:,} further chunks "
            f"({shown})"
        )
    ratio = totals["in the store"] / totals["through the driver"]
    print(f"{100 * ratio:.1f} % of what passes the driver without (goal <= 10)")
