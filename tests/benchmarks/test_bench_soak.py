"""Measure memory, answers and latency of `cairn serve` over half an hour, while an ingest publishes.

    python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_soak.py

``CAIRN_BENCH_MINUTES`` (30) and ``CAIRN_BENCH_RATE`` (10 requests per second) set the load. One collection of
3,000 sample passages does not change. A second one grows by 100 passages per minute, ingested by its own
process, so that the server opens one generation after another. Clients search both, by vectors and with BM25,
and never repeat a query. Goals: no growth of memory, no 5xx. Only anonymous memory counts, since the system
can take back the pages of mapped vector files.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.bench

MINUTES = float(os.environ.get("CAIRN_BENCH_MINUTES", "30"))
RATE = float(os.environ.get("CAIRN_BENCH_RATE", "10"))
NUM_CLIENTS, NUM_PASSAGES, GROWTH = 4, 3_000, 100
SAMPLE_SECONDS, ROUND_SECONDS = 10.0, 60.0
WARM_SHARE = 1 / 3
"""The first third of the time is not compared: caches fill, both collections are opened."""
NEVER_KEPT = {**os.environ, "HF_HUB_OFFLINE": "1"}


@dataclass
class Load:
    """What the clients saw."""

    seconds: list[float] = field(default_factory=list[float])
    statuses: Counter[int] = field(default_factory=Counter[int])
    generations: set[str] = field(default_factory=set[str])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, port: int, work: queue.SimpleQueue[tuple[str, dict[str, object]] | None]) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            while (asked := work.get()) is not None:
                path, body = asked
                start = time.perf_counter()
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read())
                with self.lock:
                    self.seconds.append(time.perf_counter() - start)
                    self.statuses[response.status] += 1
                    self.generations.add(f"{path} {answer.get('generation')}")


def ingest(corpus: str, collection: str, root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cairn.cli.main",
        "ingest",
        corpus,
        "--collection",
        collection,
        "--root",
        str(root),
        "--quiet",
    ]
    subprocess.run(command, check=True, env={**NEVER_KEPT, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def queries(passages: list[str]) -> Iterator[str]:
    """Yield seven words from somewhere in a passage; with the number of the query no two are alike."""
    rng = np.random.default_rng(0)
    for number in itertools.count():
        words = passages[int(rng.integers(len(passages)))].split()
        start = int(rng.integers(max(1, len(words) - 7)))
        yield " ".join([*words[start : start + 7], str(number)])


@pytest.fixture
def root(
    tmp_path: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
) -> Path:
    passages = sample_passages(NUM_PASSAGES)
    for name, own in (("resting", passages), ("growing", passages[:GROWTH])):
        ingest(write_passages(tmp_path / f"{name}.parquet", own), name, tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def server(root: Path) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-m", "cairn.cli.main", "serve", "--quiet", "--port", "0", "--root", str(root)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=NEVER_KEPT)
    assert process.stderr is not None
    found = re.search(r":(\d+)$", process.stderr.readline().strip())
    assert found is not None
    yield int(found[1]), psutil.Process(process.pid)
    process.terminate()
    process.communicate()


def test_bench_half_an_hour_of_steady_load(
    root: Path,
    server: tuple[int, psutil.Process],
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
    tmp_path: Path,
) -> None:
    port, process = server
    passages = sample_passages(NUM_PASSAGES)
    load, stop = Load(), threading.Event()
    work: queue.SimpleQueue[tuple[str, dict[str, object]] | None] = queue.SimpleQueue()
    rounds: list[float] = []

    def grow() -> None:
        for number in itertools.count(2):
            if stop.is_set():
                return
            start = time.monotonic()
            # Past the sample's end passages come again with another beginning: new texts.
            texts = [
                f"{place // NUM_PASSAGES} {passages[place % NUM_PASSAGES]}"
                for place in range(number * GROWTH)
            ]
            ingest(write_passages(tmp_path / "growing.parquet", texts), "growing", root)
            rounds.append(time.monotonic() - start)
            stop.wait(max(0.0, ROUND_SECONDS - rounds[-1]))

    threads = [threading.Thread(target=load.ask, args=(port, work)) for _ in range(NUM_CLIENTS)]
    threads.append(threading.Thread(target=grow))
    for thread in threads:
        thread.start()
    anonymous, resident = [], []
    start = next_sample = time.monotonic()
    for number, query in enumerate(queries(passages)):
        now = time.monotonic()
        if now - start > MINUTES * 60:
            break
        if now >= next_sample:
            memory = re.search(
                r"Anonymous:\s+(\d+) kB", Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            )
            assert memory is not None
            anonymous.append(int(memory[1]) / 1024)
            resident.append(process.memory_info().rss / 2**20)
            next_sample += SAMPLE_SECONDS
        name = ("resting", "growing")[number % 2]
        work.put((f"/v1/collections/{name}/search", {"query": query, "hybrid": number % 4 < 2}))
        time.sleep(max(0.0, start + (number + 1) / RATE - time.monotonic()))
    stop.set()
    for _ in range(NUM_CLIENTS):
        work.put(None)
    for thread in threads:
        thread.join()

    compared = np.array(anonymous[int(len(anonymous) * WARM_SHARE) :])
    slope = np.polyfit(np.arange(len(compared)) * SAMPLE_SECONDS / 60, compared, 1)[0]
    halves = np.median(compared[: len(compared) // 2]), np.median(compared[len(compared) // 2 :])
    p50, p99 = 1e3 * np.percentile(load.seconds, [50, 99])
    print(
        f"\n{sum(load.statuses.values()):,} requests in {MINUTES:g} minutes: statuses "
        f"{dict(load.statuses)}, p50 {p50:.1f} p99 {p99:.1f} ms"
    )
    print(
        f"{len(rounds)} ingests beside it, {len(load.generations)} generations seen; load of the machine "
        f"{os.getloadavg()[1]:.1f}"
    )
    print(
        "anonymous memory over the time, MiB: "
        f"{[round(value) for value in anonymous[:: max(1, len(anonymous) // 10)]]}"
    )
    print(
        f"after the first third: medians of its halves {halves[0]:.0f} and {halves[1]:.0f} MiB, slope "
        f"{slope:+.2f} MiB a minute;",
        end=" ",
    )
    print(f"resident {resident[len(resident) // 3]:.0f} then, {resident[-1]:.0f} MiB at the end")
    assert load.statuses.total() == load.statuses[200], load.statuses
