"""Searches during publications: each answer is of one generation, and generations only get newer.

Every publication replaces all documents, so that an answer with two versions is torn. Publications and
servers are killed now and then.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.index.layout import CollectionLayout
from pipeline.index.publish import COMMIT_POINTS
from tests.index import stones
from tests.nightly import served
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import forked

NUM_DOCUMENTS = 12
PUBLICATIONS = 8
NUM_CLIENTS = 3
KILLED_SHARE = 0.3


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Publish eight times under three clients; then kill the server and ask a new one."""
    root = folder / "root"
    ids = stones.document_ids(NUM_DOCUMENTS)
    _publish(root, ids, 0)
    for _ in range(2):
        with served.server(root) as (port, _):
            clients = [_Client(port, rng.randrange(2**32), ids) for _ in range(NUM_CLIENTS)]
            try:
                for _ in range(PUBLICATIONS // 2):
                    tally["publications"] += 1
                    tally["kills"] += _publish_or_die(rng, root, ids, tally["publications"])
                newest = served.ask(port, "/v1/collections/stones")[1]["generation"]
                _wait_until_seen(clients, newest)
            finally:
                for client in clients:
                    client.stop()
                    tally["requests"] += client.num_requests
                    tally["shed"] += client.num_shed
            for client in clients:
                require(not client.faults, "; ".join(client.faults[:3]))
        tally["kills"] += 1  # of the server, while it may be answering


def _publish(root: Path, ids: list[str], version: int) -> None:
    outcome = forked(_write, root, ids, version)
    require(outcome == type(outcome)(), f"a publication ended in {outcome}")


def _publish_or_die(rng: random.Random, root: Path, ids: list[str], version: int) -> int:
    """Publish; where that is killed, once more. Return the number of kills."""
    kill = rng.choice((*COMMIT_POINTS, rng.uniform(0.005, 0.3))) if rng.random() < KILLED_SHARE else None
    was_killed = forked(_write, root, ids, version, kill=kill).was_killed
    if was_killed:
        _publish(root, ids, version)
    return int(was_killed)


def _write(root: Path, ids: list[str], version: int) -> None:
    stones.publish_documents(CollectionLayout(root, "stones"), ids, replaced=ids, version=version)


def _wait_until_seen(clients: list[_Client], generation: int) -> None:
    limit = time.monotonic() + 60
    while any(client.newest < generation and not client.faults for client in clients):
        require(time.monotonic() < limit, f"generation {generation} is not taken up within a minute")
        time.sleep(0.02)


class _Client:
    """One that asks on and on, on a thread of its own."""

    def __init__(self, port: int, seed: int, ids: list[str]) -> None:
        self.faults = list[str]()
        self.newest = self.num_requests = self.num_shed = 0
        self._port, self._rng, self._ids = port, random.Random(seed), ids
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._is_stopping.is_set() and not self.faults:
            try:
                self._ask()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                self.faults.append(f"no answer: {type(error).__name__} {error}")

    def _ask(self) -> None:
        doc_id = self._rng.choice(self._ids)
        body: dict[str, Any] = {"query": f"stone {doc_id}", "top_k": NUM_DOCUMENTS, "include_text": True}
        if self._rng.random() < 0.3:
            body["filters"] = {"type": "gte", "key": "year", "value": 2000}
        status, reply = served.ask(self._port, served.SEARCH, body)
        self.num_requests += 1
        if status in (429, 503, 504) and served.kind_of(reply) in served.SHED:
            self.num_shed += 1
            return
        if status != 200:
            self.faults.append(f"status {status} {served.kind_of(reply)}")
            return
        versions = {hit["metadata"]["year"] - 2000 for hit in reply["hits"]}
        wrong = [hit["doc_id"] for hit in reply["hits"] if not served.is_right(hit, versions)]
        if wrong:
            self.faults.append(f"torn: {wrong[:3]} have passages of other versions than {versions}")
        if len(versions) != 1 or {hit["doc_id"] for hit in reply["hits"]} != set(self._ids):
            self.faults.append(f"torn: versions {versions}, {len(reply['hits'])} documents")
        if reply["generation"] < self.newest:
            self.faults.append(f"generation {reply['generation']} after {self.newest}")
        self.newest = max(self.newest, reply["generation"])
