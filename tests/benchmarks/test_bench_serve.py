"""Measure HTTP's overhead and latency for one and sixteen clients.

    python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_serve.py

``CAIRN_BENCH_DOCUMENTS`` (20,000) sets the number of documents, of ten chunks each; 2,000 suffice on a busy
machine. The collection is that of ``clustered.py``; all-MiniLM-L6-v2 encodes the queries. The server is
`cairn serve` in its own process on loopback, and the clients are threads of this one. The overhead of HTTP is
measured inside a third process.

Goals: HTTP adds at most 2 ms at p50; one client sees a p50 of at most 12 ms, by vectors 9 ms, and a p99 of
at most 40 ms; sixteen clients get at least twice the throughput of one, with a p99 of at most 150 ms.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.encode.text_encoder import TextEncoder
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings

from tests.benchmarks.clustered import NUM_QUERIES, SETTINGS, Clustered, make
from tests.benchmarks.timing import in_turn, line
from tests.served_stones import serving_process

pytestmark = pytest.mark.bench

NUM_DOCUMENTS = int(os.environ.get("CAIRN_BENCH_DOCUMENTS", "20000"))
NUM_CLIENTS, TOP_K = 16, 10
SEARCH = "/v1/collections/bench/search"
DENSE: dict[str, Any] = {"hybrid": False, "granularity": "chunk", "passages": 1}
HYBRID: dict[str, Any] = {}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Clustered:
    # The settings that the maker publishes.
    fingerprint = TextEncoder(SETTINGS.encoder).fingerprint
    return make(tmp_path_factory.mktemp("bench") / "root", NUM_DOCUMENTS, fingerprint)


def seconds_of(call: Callable[[str], object], queries: Sequence[str]) -> np.ndarray:
    return in_turn({"": lambda number: call(queries[number])}, len(queries))[""].clock


def test_bench_what_http_adds_in_one_process(bench: Clustered) -> None:
    """The same query over the ASGI interface and from Python, in turn.

    The median of the differences, whatever else the machine does.
    """
    queries = bench.layout.root.with_name("queries.json")
    queries.write_text(json.dumps(bench.queries))
    # In a process of its own, as a user's would be: the types of this one are checked at every call.
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.test_bench_serve", str(bench.layout.root), str(queries)],
        check=True,
    )


async def time_http(root: Path, queries: Sequence[str]) -> None:
    """Print what encoding takes, and what searching takes over ASGI and from Python."""
    app = create_app(ServeSettings(root=root))
    served = await app.state.server.collections.get("bench")
    encode = served.encoder.encoder.encode_queries
    line("encoding alone, Cairn", seconds_of(lambda query: encode([query]), queries))
    for name, options in (("dense", DENSE), ("hybrid", HYBRID)):
        over_http, from_python = [], []
        for query in [*queries[:10], *queries]:
            start = time.perf_counter()
            await asgi_search(app, {"query": query, **options})
            between = time.perf_counter()
            served.searcher.search(query, **options)
            over_http.append(between - start)
            from_python.append(time.perf_counter() - between)
        python_p50, _ = line(f"Cairn from Python, {name}", from_python[10:])
        p50, _ = line(f"over ASGI, {name}", over_http[10:])
        print(f"added at p50 {p50 - python_p50:.2f} ms (goal 2 ms)", end="", flush=True)
    await app.state.server.collections.close()


async def asgi_search(app: Any, body: dict[str, Any]) -> None:
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": SEARCH,
        "raw_path": SEARCH.encode(),
        "query_string": b"",
        "headers": headers,
    }
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    assert sent[0]["status"] == 200, sent
    json.loads(sent[1]["body"])


@pytest.fixture(scope="module")
def server(bench: Clustered) -> Iterator[int]:
    """The port of `cairn serve` in its own process."""
    root = bench.layout.root
    with serving_process(root.parent, "--quiet", "--root", root) as (_, address, _):
        yield int(address.rpartition(":")[2])


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def close(self) -> None:
        self._connection.close()

    def search(self, query: str, options: dict[str, Any]) -> Any:
        body = json.dumps({"query": query, "top_k": TOP_K, **options})
        self._connection.request("POST", SEARCH, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer


@pytest.mark.parametrize(("name", "options"), [("dense", DENSE), ("hybrid", HYBRID)])
def test_bench_one_client_and_sixteen(
    bench: Clustered, server: int, name: str, options: dict[str, Any]
) -> None:
    with closing(Client(server)) as client:
        one = seconds_of(lambda query: client.search(query, options), bench.queries)
    line(f"one client, {name}", one, f"{1 / np.mean(one):6.1f} queries/s")

    seconds, throughput = ask_at_once(server, bench.queries, options)
    assert len(seconds) == NUM_CLIENTS * NUM_QUERIES
    line(
        f"{NUM_CLIENTS} clients, {name}",
        seconds,
        f"{throughput:6.1f} queries/s   {throughput * np.mean(one):.2f} x one client (goal 2 x)",
    )


def ask_at_once(port: int, queries: Sequence[str], options: dict[str, Any]) -> tuple[list[float], float]:
    """Let every client ask all queries; return what each answer took, and the queries answered per second."""
    seconds: list[float] = []
    lock = threading.Lock()

    def ask(queries: Sequence[str]) -> None:
        with closing(Client(port)) as own:
            found = seconds_of(lambda query: own.search(query, options), queries)
        with lock:
            seconds.extend(found)

    threads = [
        threading.Thread(target=ask, args=([*queries[shift:], *queries[:shift]],))
        for shift in range(NUM_CLIENTS)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    throughput = NUM_CLIENTS * (len(queries) + 10) / (time.perf_counter() - start)
    return seconds, throughput


if __name__ == "__main__":
    asyncio.run(time_http(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
