"""A client or a collection that was used before: in a forked child, another event loop, a copy."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import subprocess
import sys
from typing import cast

import httpx2
import pytest
from cairn.pipeline.client.clients import AsyncCairnClient, CairnClient, RemoteCollection
from cairn.pipeline.collection import open_collection

ASKED = """
import json, multiprocessing, sys
import cairn
from cairn.pipeline.client.clients import CairnClient

method, used, address, root = sys.argv[1:]
QUERIES = ["slate", "granite", "chalk", "basalt"] * 10

def over_http(query):
    return CLIENT.collection("stones").search(query, top_k=2).query

def in_process(query):
    try:
        return STONES.search(query, top_k=2, filters={"type": "gte", "key": "year", "value": 0}).query
    except cairn.CairnError as error:
        return str(error)

CLIENT, STONES = CairnClient(address, timeout_seconds=300.0), cairn.open_collection("stones", root=root)
if __name__ == "__main__":
    for ask in [over_http, in_process][: int(used)]:
        ask("slate")
    with multiprocessing.get_context(method).Pool(2) as pool:
        answers = [pool.map_async(ask, QUERIES).get(600) for ask in (over_http, in_process)]
    print(json.dumps([answer == QUERIES or sorted(set(answer)) for answer in answers]))
"""
REFUSED = [
    (
        "this process was forked from one that had used collections, which LanceDB does not survive: start "
        "processes by `spawn` or `forkserver`, or use collections only after the fork"
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "used", "in_process"),
    [("fork", 1, True), ("fork", 2, REFUSED), ("spawn", 2, True), ("forkserver", 2, True)],
)
def test_children_answer_for_themselves(method, used, in_process, stones_address, stones_root, tmp_path):
    (tmp_path / "asked.py").write_text(ASKED)
    done = subprocess.run(
        [sys.executable, "asked.py", method, str(used), stones_address, str(stones_root)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=1_200,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout or "null")) == (0, [True, in_process]), done.stderr[
        -2000:
    ]


def opened_here(client):
    client.collections()
    return id(client._http)  # pyright: ignore[reportPrivateUsage]


def no_collections(_):
    return httpx2.Response(200, json={"collections": []})


def test_client_in_a_forked_process_opens_connections_of_its_own(monkeypatch):
    client = CairnClient(transport=httpx2.MockTransport(no_collections))
    before = opened_here(client)
    assert opened_here(client) == before
    parents = client._http  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert opened_here(client) != before
    client.close()
    assert not parents.is_closed
    monkeypatch.undo()
    unused = CairnClient(transport=httpx2.MockTransport(no_collections))
    opened_here(unused)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    unused.close()
    assert not unused._opened.is_closed  # pyright: ignore[reportPrivateUsage]


def test_awaited_client_answers_in_another_event_loop():
    client = AsyncCairnClient(transport=httpx2.MockTransport(no_collections))
    assert [asyncio.run(client.collections()) for _ in range(2)] == [[], []]


def test_used_client_and_collection_can_be_copied(stones_address, stones_root):
    local = open_collection("stones", root=stones_root)
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        for used in (local, client.collection("stones")):
            expected = [hit.doc_id for hit in used.search("slate", top_k=2).hits]
            for copied in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used)):
                assert [hit.doc_id for hit in copied.search("slate", top_k=2).hits] == expected
                if isinstance(copied, RemoteCollection):
                    cast("CairnClient", copied.client).close()
