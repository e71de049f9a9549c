"""Search in shards beside one process: equal answers, latency for one and sixteen clients, killed shards.

    python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_shards.py

Collection, queries and clients are those of ``test_bench_serve.py``. `cairn serve` and
`cairn serve --engine ray` run at the same time and are asked in turn, so that other work on the machine
meets both. Each part has one process, and two where they are killed.

Goals: the answers are equal, shards on one machine add at most 5 ms at p50, and no answer is lost when shards
are killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
from cairn.pipeline.index.repartition import repartition

from tests.benchmarks.test_bench_serve import (
    DENSE,
    HYBRID,
    NUM_CLIENTS,
    Bench,
    Client,
    Serving,
    ask_at_once,
    line,
    make_bench,
    serving,
)
from tests.jobs.ray_serve.served_shards import shard_processes

pytestmark = pytest.mark.bench

QUERIES_AT_ONCE = 50
KILLS = 8
SECONDS_BETWEEN_KILLS = 5.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = make_bench(tmp_path_factory.mktemp("bench"))
    repartition(made.layout, 4)
    return made


@pytest.fixture(scope="module")
def local(bench: Bench) -> Iterator[Serving]:
    """`cairn serve`."""
    with serving(bench.layout.root) as process:
        yield process


def processor_seconds(pid: int) -> float:
    """Return what a process and those below it have used so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_bench_shards_beside_one_process(bench: Bench, local: Serving, num_shards: int) -> None:
    options = ("--engine", "ray", "--shards", str(num_shards), "--shard-replicas", "1")
    with serving(bench.layout.root, *options) as sharded:
        for name, asked in (("dense", DENSE), ("hybrid", HYBRID)):
            print(f"\n{num_shards} shards, {name}", end="")
            compare_one_client(bench, local.port, sharded.port, asked)
            for place, server in (("one process", local), ("shards", sharded)):
                used = -processor_seconds(server.pid)
                seconds, throughput = ask_at_once(server.port, bench.queries[:QUERIES_AT_ONCE], asked)
                used = (used + processor_seconds(server.pid)) / (NUM_CLIENTS * (QUERIES_AT_ONCE + 10))
                rest = f"{throughput:6.1f} queries/s   {1e3 * used:.1f} ms of a processor each"
                line(f"{NUM_CLIENTS} clients, {place}", seconds, rest)


def compare_one_client(bench: Bench, local: int, sharded: int, asked: dict[str, Any]) -> None:
    """Ask both servers the same queries in turn, after ten to warm up."""
    seconds: dict[int, list[float]] = {local: [], sharded: []}
    with closing(Client(local)) as one, closing(Client(sharded)) as other:
        clients = {local: one, sharded: other}
        for query in [*bench.queries[:10], *bench.queries]:
            answers = []
            for port, client in clients.items():
                start = time.perf_counter()
                answers.append(client.search(query, asked))
                seconds[port].append(time.perf_counter() - start)
            assert answers[0] == answers[1], query
    p50, _ = line("one client, one process", seconds[local][10:])
    sharded_p50, _ = line("one client, shards", seconds[sharded][10:])
    print(f"added at p50 {sharded_p50 - p50:.2f} ms (goal 5 ms)", end="", flush=True)


def test_bench_killed_shards_cost_no_answer(bench: Bench, local: Serving) -> None:
    stopped = threading.Event()
    seconds: list[float] = []
    wrong: list[str] = []
    with closing(Client(local.port)) as client:
        expected = {query: client.search(query, HYBRID) for query in bench.queries}

    def ask(first: int) -> None:
        with closing(Client(sharded.port)) as own:
            for query in itertools.cycle([*bench.queries[first:], *bench.queries[:first]]):
                if stopped.is_set():
                    return
                start = time.perf_counter()
                try:
                    is_right = own.search(query, HYBRID) == expected[query]
                except (AssertionError, OSError):
                    is_right = False
                seconds.append(time.perf_counter() - start)
                if not is_right:
                    wrong.append(query)

    options = ("--engine", "ray", "--shards", "2", "--shard-replicas", "2")
    with serving(bench.layout.root, *options) as sharded:
        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(KILLS):
            time.sleep(SECONDS_BETWEEN_KILLS)
            os.kill(max(shard_processes(sharded.pid)), signal.SIGKILL)
        stopped.set()
        for thread in threads:
            thread.join()
    line(f"4 clients, {KILLS} shards killed", seconds, f"{len(seconds)} answers, {len(wrong)} failed")
    print(f"   slowest {max(seconds):.2f} s", end="")
    assert not wrong
