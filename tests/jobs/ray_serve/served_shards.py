"""`cairn serve --engine ray` in a process of its own, and searches that go on meanwhile."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.served_stones import serving_process, wait_until
from tests.small_ingests import WORDS, ingest_rows, settings, text_of

START_SECONDS = 300
SHARDS, REPLICAS = 2, 2
REQUESTS: tuple[dict[str, Any], ...] = (
    {"query": "the old stone path"},
    {"query": "a river by the hill", "filters": {"type": "gte", "key": "year", "value": 2003}},
    {"query": "cat on the mat", "granularity": "chunk", "hybrid": False, "top_k": 30},
    {"query": ["mountain walk", "old mark"], "chunk_tokens": 16, "passages": 2},
    {"query": "walk the way", "max_characters": 300},
)


def ingest(root: Path, model: Path, numbers: range) -> None:
    rows = [
        {
            "id": f"d{number:03d}",
            "title": WORDS[number % 11] if number % 3 else None,
            "text": text_of(number, 20 + number % 90),
            "year": 2000 + number % 7,
        }
        for number in numbers
    ]
    few = {"context_documents": 2, "max_document_tokens": 16, "partitions": SHARDS}
    ingest_rows(rows, root, settings(model, use_context=False, token_bytes=8, **few), "stones")


def shard_processes(pid: int) -> set[int]:
    """Return the processes of living shards below a process."""
    children = psutil.Process(pid).children(recursive=True)
    return {child.pid for child in children if child.name().startswith("ray::ShardActo")}


def _has_accepted(pid: int) -> bool:
    """Tell whether a process has a connection that bears the name it listens at: one without a file."""
    names = [each.laddr for each in psutil.Process(pid).net_connections("unix")]
    return any(name.startswith("@") and names.count(name) > 1 for name in names)


@dataclass(frozen=True)
class Served:
    """A server of shards on a Ray of its own."""

    root: Path
    model: Path
    address: str
    process: subprocess.Popen[bytes]

    def ask(self, request: dict[str, Any]) -> tuple[int, Any]:
        answer = httpx2.post(
            f"{self.address}/v1/collections/stones/search", json=request, timeout=START_SECONDS
        )
        return answer.status_code, answer.json() if answer.is_success else answer.content

    def shards(self) -> set[int]:
        """Return the processes of living shards."""
        return shard_processes(self.process.pid)

    def lines(self) -> set[int]:
        """Return the processes of shards that have accepted a connection to the address they listen at."""
        return {pid for pid in self.shards() if _has_accepted(pid)}

    def await_shards(self, without: set[int]) -> None:
        """Wait until there is a process for every replica, none of them one of some."""
        wait_until(lambda: len(self.shards() - without) >= SHARDS * REPLICAS)


@contextmanager
def serve_shards(folder: Path, root: Path, model: Path, *options: str) -> Iterator[Served]:
    """Run `cairn serve --engine ray`, and stop it as a user does."""
    words = ("--engine", "ray", "--root", root, "--shards", str(SHARDS), "--shard-replicas", str(REPLICAS))
    with serving_process(folder, *words, *options) as (process, address, _):
        yield Served(root, model, address, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(START_SECONDS) == 0


def expected(root: Path) -> list[Any]:
    """Return the answers of a server in this process."""
    with TestClient(create_app(ServeSettings(root=root)), base_url="http://localhost") as client:
        answers = [client.post("/v1/collections/stones/search", json=request) for request in REQUESTS]
    assert [answer.status_code for answer in answers] == [200] * len(REQUESTS)
    return [answer.json() for answer in answers]


@dataclass
class Searches:
    """Searches one after another on a thread of their own, until told to stop."""

    served: Served
    answers: list[tuple[int, int, Any]] = field(default_factory=list[tuple[int, int, Any]])
    stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Searches:
        self.thread = threading.Thread(target=self._search)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _search(self) -> None:
        while not self.stopped.is_set():
            number = len(self.answers) % len(REQUESTS)
            self.answers.append((number, *self.served.ask(REQUESTS[number])))

    def await_answers(self, count: int) -> None:
        """Wait for so many further answers."""
        wanted = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= wanted)
