"""Searches during publications: each answer is of one generation, and generations only get newer.

Every publication replaces all documents, so that an answer with two versions is torn. Publications are killed
now and then, and so is the server, under its clients, after every few of them.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from pathlib import Path
from typing import Any

from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import COMMIT_POINTS

from tests.index import stones
from tests.nightly import served
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Worker

NUM_DOCUMENTS = 12
SERVERS = 2
PUBLICATIONS = 3
NUM_CLIENTS = 2
KILLED_SHARE = 0.3


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Publish under two clients, server after server."""
    root, port = folder / "root", served.free_port()
    ids = stones.document_ids(NUM_DOCUMENTS)
    with Worker() as writer:
        writer.run(_write, root, ids, 0).value_of("publishing")
        clients = [_Client(port, rng.randrange(2**32), ids) for _ in range(NUM_CLIENTS)]
        try:
            for number in range(SERVERS):
                with served.server(root, port):
                    _allow_no_answer(clients, is_allowed=False)
                    for _ in range(PUBLICATIONS):
                        tally["publications"] += 1
                        tally["kills"] += _publish(rng, writer, root, ids, tally["publications"])
                    newest = served.ask(port, "/v1/collections/stones")[1]["generation"]
                    _wait_until_seen(clients, newest)
                    _allow_no_answer(clients, is_allowed=True)
                tally["kills"] += 1  # of the server, which was answering
                require(not any(client.faults for client in clients), f"with server {number}")
        finally:
            for client in clients:
                client.stop()
                tally["requests"] += client.num_requests
                tally["shed"] += client.num_shed
        for client in clients:
            require(not client.faults, "; ".join(client.faults[:3]))


def _publish(rng: random.Random, writer: Worker, root: Path, ids: list[str], version: int) -> int:
    """Publish; where that is killed, once more. Return the number of kills."""
    kill = rng.choice((*COMMIT_POINTS, rng.uniform(0.005, 0.3))) if rng.random() < KILLED_SHARE else None
    outcome = writer.run(_write, root, ids, version, kill=kill)
    if not outcome.was_killed:
        outcome.value_of("a publication")
        return 0
    writer.run(_write, root, ids, version).value_of("a publication after a kill")
    return 1


def _write(root: Path, ids: list[str], version: int) -> None:
    stones.publish_documents(CollectionLayout(root, "stones"), ids, replaced=ids, version=version)


def _allow_no_answer(clients: list[_Client], *, is_allowed: bool) -> None:
    for client in clients:
        client.may_fail.set() if is_allowed else client.may_fail.clear()


def _wait_until_seen(clients: list[_Client], generation: int) -> None:
    limit = time.monotonic() + 60
    while any(client.newest < generation and not client.faults for client in clients):
        require(time.monotonic() < limit, f"generation {generation} is not taken up within a minute")
        time.sleep(0.02)


class _Client:
    """One that asks on and on, on a thread of its own, also while the server is gone."""

    def __init__(self, port: int, seed: int, ids: list[str]) -> None:
        self.faults = list[str]()
        self.newest = self.num_requests = self.num_shed = 0
        self.may_fail = threading.Event()
        self.may_fail.set()
        self._client, self._rng, self._ids = served.Client(port), random.Random(seed), ids
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()
        self._client.close()

    def _work(self) -> None:
        while not self._is_stopping.is_set() and not self.faults:
            is_expected = self.may_fail.is_set()
            try:
                self._ask()
            except (OSError, http.client.HTTPException) as error:
                self._client.close()
                if not is_expected and not self.may_fail.is_set():
                    self.faults.append(f"no answer: {type(error).__name__} {error}")
                time.sleep(0.02)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                self.faults.append(f"no answer: {type(error).__name__} {error}")

    def _ask(self) -> None:
        doc_id = self._rng.choice(self._ids)
        body: dict[str, Any] = {"query": f"stone {doc_id}", "top_k": NUM_DOCUMENTS, "include_text": True}
        if self._rng.random() < 0.3:
            body["filters"] = {"type": "gte", "key": "year", "value": 2000}
        status, reply = self._client.ask(served.SEARCH, body)
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
