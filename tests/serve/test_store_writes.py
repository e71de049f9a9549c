"""Writes over HTTP to a collection in an object store: found by other machines, and not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import CollectionBusyError, StorageError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import drop_collection
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.replica import Lease
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve import writers
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.object_stores import STORE_ROOT
from tests.served_stones import raising, wait_until
from tests.small_ingests import ingest_rows, settings

Serve = Callable[..., TestClient]
STONES = "/v1/collections/stones"
NOW = {"wait": "searchable"}
NEW = {"documents": [{"doc_id": "new", "text": "obsidian"}]}


@pytest.fixture
def store(object_store, tmp_path, tiny_model_folder, monkeypatch):
    """A root in an object store with a collection, whose copies are this test's own."""
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cairn.pipeline.index.replica.REFRESH_SECONDS", 0.0)  # every reader looks
    rows = [{"id": f"s{number}", "text": f"granite stone {number} on the path"} for number in range(8)]
    ingest_rows(rows, STORE_ROOT, settings(tiny_model_folder, precision="fp32"), "stones")
    return STORE_ROOT


def once_free(call):
    """Call once the writer has let go of its lease, which it does after the answer."""

    def is_called():
        with suppress(CollectionBusyError):
            call()
            return True

    wait_until(is_called)


def add_elsewhere(doc_id, store, tmp_path, monkeypatch):
    """Write a document from another machine by an ingest."""
    with monkeypatch.context() as another:
        another.setenv("CAIRN_CACHE", str(tmp_path / "another machine"))
        rows = [{"id": doc_id, "text": "a pumice stone"}]
        once_free(lambda: open_collection("stones", root=store).add(rows))


def test_collection_that_another_machine_removed_stays_removed(store, serve, tmp_path, monkeypatch):
    server = serve(ServeSettings(root=Path(store), writable=True))
    assert server.post(f"{STONES}/documents", json=NEW, params=NOW).status_code == 200
    with monkeypatch.context() as another:
        another.setenv("CAIRN_CACHE", str(tmp_path / "another machine"))
        once_free(lambda: drop_collection(CollectionLayout.at(store, "stones")))
    assert server.get("/v1/collections").json()["collections"] == []
    wait_until(lambda: server.post(f"{STONES}/documents", json=NEW).status_code != 202)
    answer = server.post(f"{STONES}/documents", json=NEW)
    assert answer.json()["type"] == "urn:problem-type:cairn:writes-refused"
    assert [server.delete(STONES).status_code for _ in range(2)] == [200, 404]


def test_writes_reach_other_machines_and_go_on_from_what_those_published(store, serve, tmp_path, monkeypatch):
    server = serve(ServeSettings(root=Path(store), writable=True))
    assert server.get(STONES).json()["is_writable"]
    documents = [{"doc_id": "new", "text": "obsidian", "metadata": {"kind": "glass"}}]
    answer = server.post(f"{STONES}/documents", json={"documents": documents}, params=NOW)
    assert (answer.status_code, answer.json()["status"]) == (200, "searchable"), answer.text
    assert server.post(f"{STONES}/search", json={"query": "obsidian"}).json()["hits"][0]["doc_id"] == "new"
    add_elsewhere("other", store, tmp_path, monkeypatch)
    changed = server.patch(f"{STONES}/documents/new", json={"metadata": {"kind": "rock"}}, params=NOW)
    assert changed.status_code == 200, changed.text
    assert server.delete(f"{STONES}/documents/s0", params=NOW).status_code == 200
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "third machine"))
    reader = open_collection("stones", root=store)
    assert reader.search("obsidian").hits[0].doc_id == "new"
    assert reader.documents["new"].metadata["kind"] == "rock"
    assert ("s0" in reader.documents, "other" in reader.documents, "s1" in reader.documents) == (
        False,
        True,
        True,
    )


def test_write_that_was_found_is_not_published_again_after_a_kill(store, serve, tmp_path, monkeypatch):
    server, is_killed = serve(ServeSettings(root=Path(store), writable=True)), threading.Event()

    def kill(*_):
        is_killed.set()
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(LiveWriter, "_settle", kill)
        assert server.post(f"{STONES}/documents", json=NEW, params=NOW).json()["status"] == "searchable"
        assert is_killed.wait(60)
    add_elsewhere("new", store, tmp_path, monkeypatch)
    body = {"documents": [{"doc_id": "other", "text": "basalt"}]}
    assert server.post(f"{STONES}/documents", json=body, params=NOW).json()["status"] == "searchable"
    assert server.get(f"{STONES}/documents/new").json()["text"] == "a pumice stone"


def test_first_writes_outlive_a_kill(store, serve, monkeypatch):
    paths = [f"/v1/collections/{collection}" for collection in ("gems", "stones")]
    with monkeypatch.context() as patch:
        patch.setattr(LiveWriter, "_build", raising([StorageError("nothing is published")] * 10_000))
        patch.setattr(writers, "STOP_SECONDS", 0.0)
        killed = serve(ServeSettings(root=Path(store), writable=True))
        assert killed.post("/v1/collections", json={"name": "gems"}).status_code == 201
        for path in paths:
            assert killed.post(f"{path}/documents", json=NEW).status_code == 202
        killed.__exit__(None, None, None)
    server = serve(ServeSettings(root=Path(store), writable=True))
    for path in paths:
        wait_until(lambda: server.get(f"{path}/documents/new").status_code == 200)  # noqa: B023
        assert server.get(f"{path}/documents/new").json()["text"] == "obsidian"
        wait_until(lambda: server.delete(path).status_code == 200)  # noqa: B023 - the lease may be held
    assert server.get("/v1/collections").json()["collections"] == []


@pytest.mark.parametrize("trouble", ["no answer", "lease"])
def test_write_is_published_once_the_store_lets_it(store, serve, object_store, monkeypatch, trouble):
    monkeypatch.setattr("cairn.pipeline.line.live.RETRY_SECONDS", 0.05)
    server = serve(ServeSettings(root=Path(store), writable=True))
    lease = Lease(ObjectFolder(f"{store}/stones"), "stones").held() if trouble == "lease" else nullcontext()
    if trouble == "no answer":
        object_store.fault("PUT", "/cairn/indexes/stones/CURRENT", "refuse", 20)
    with lease:
        number = server.post(f"{STONES}/documents", json=NEW).json()["write"]
        time.sleep(0.5)
        assert server.get(f"{STONES}/writes/{number}").json()["status"] == "waiting"
    if trouble == "no answer":
        object_store.request("PUT", "/-/faults", b"[]")
    wait_until(lambda: server.get(f"{STONES}/writes/{number}").json()["status"] == "searchable")
    assert server.post(f"{STONES}/search", json={"query": "obsidian"}).json()["hits"][0]["doc_id"] == "new"
