"""A name that answers from another collection: moved in one step and back, and every request answered."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import CollectionNotFoundError, ConfigError, DamageError, IntegrityError
from cairn.pipeline.index.aliases import ALIASES_NAME, Alias, switch, target_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.serve.collections import Collections
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import stone_rows
from tests.served_stones import wait_until

SECONDS = 300.0


def answering(client, name="stones"):
    """Return which collection answers: ``pebbles`` has four documents."""
    answer = client.post(f"/v1/collections/{name}/search", json={"query": "slate", "top_k": 20})
    assert answer.status_code == 200, answer.text
    return "pebbles" if len(answer.json()["hits"]) == 4 else "stones"


def test_name_is_switched_to_whole_collections_only(own_root):
    switch(own_root, "rocks", "stones")
    with pytest.raises(ConfigError, match="'rocks' must have answered from a collection before, got none"):
        switch(own_root, "rocks", None)
    with pytest.raises(ConfigError, match="answers from 'stones'; name that one"):
        switch(own_root, "other", "rocks")
    with pytest.raises(CollectionNotFoundError, match="known collections: pebbles, stones"):
        switch(own_root, "rocks", "nowhere")
    with pytest.raises(ConfigError, match="a collection's name must match"):
        switch(own_root, "../rocks", "stones")
    with pytest.raises(ConfigError, match="must be under a root that is a folder"):
        switch("s3://bucket/prefix", "rocks", "stones")
    layout = CollectionLayout(own_root, "pebbles")
    damaged = layout.generation_folder(1) / "documents.faiss"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises((DamageError, IntegrityError)):
        switch(own_root, "rocks", "pebbles")
    assert target_of(own_root, "rocks") == "stones"


@pytest.mark.parametrize("collections", [(), ("stones",)])
def test_server_follows_and_every_request_between_is_answered(own_root, serve, monkeypatch, collections):
    client = serve(ServeSettings(root=own_root, collections=collections))
    assert answering(client) == "stones"
    go_on = threading.Event()
    open_now = Collections._open_now

    def slowly(self, name):
        assert go_on.wait(SECONDS)
        return open_now(self, name)

    monkeypatch.setattr(Collections, "_open_now", slowly)
    switch(own_root, "stones", "pebbles")
    if collections:  # a server of all collections has the target open
        assert [answering(client) for _ in range(3)] == ["stones"] * 3
    go_on.set()
    wait_until(lambda: answering(client) == "pebbles")
    assert client.get("/readyz").status_code == 200
    go_on.clear()
    switch(own_root, "stones", None)
    assert answering(client) == "stones"


@pytest.mark.parametrize("change", ["switched", "made anew"])
def test_cursor_of_the_collection_before_is_refused(own_root, serve, change):
    """Both are in generation 1, so that the number alone does not tell them apart."""
    client = serve(ServeSettings(root=own_root))
    asked = {"query": "slate", "top_k": 1}
    address = "/v1/collections/stones/search"
    first = client.post(address, json={**asked, "cursor": "*"}).json()
    next_page = {**asked, "cursor": first["next_cursor"]}
    assert client.post(address, json=next_page).status_code == 200
    if change == "switched":
        switch(own_root, "stones", "pebbles")
    else:
        (own_root / "stones").rename(own_root / ".gone")
        shutil.copytree(own_root / "pebbles", own_root / "stones")
    wait_until(lambda: answering(client) == "pebbles")
    assert client.post(address, json=asked).json()["generation"] == first["generation"] == 1
    refused = client.post(address, json=next_page)
    assert (refused.status_code, refused.json()["type"]) == (410, "urn:problem-type:cairn:cursor-expired")


def test_server_answers_for_a_name_that_is_no_collection_and_lists_it(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    assert client.get("/v1/collections/rocks").status_code == 404
    switch(own_root, "rocks", "pebbles")
    assert answering(client, "rocks") == "pebbles"
    listed = client.get("/v1/collections").json()["collections"]
    assert [(each["name"], each["documents"]) for each in listed] == [
        ("pebbles", 4),
        ("rocks", 4),
        ("stones", 20),
    ]
    (own_root / ALIASES_NAME).unlink()
    assert client.get("/v1/collections/rocks").status_code == 404


def test_target_that_is_gone_leaves_the_collection_before(own_root, serve):
    client = serve(ServeSettings(root=own_root, collections=("stones",)))
    assert answering(client) == "stones"
    switch(own_root, "stones", "pebbles")
    (own_root / "pebbles").rename(own_root / ".gone")
    assert answering(client) == "stones"
    (own_root / ".gone").rename(own_root / "pebbles")
    wait_until(lambda: answering(client) == "pebbles")


def test_switch_verb_moves_lists_and_goes_back_and_searches_follow(own_root, capsys):
    def call(*arguments):
        code = run(cairn, ["switch", *arguments, "--root", str(own_root)], "cairn")
        return code, capsys.readouterr().out.strip()

    assert call() == (0, f"no switched names under {own_root}")
    assert call("rocks", "stones") == (0, "rocks answers from stones; before from none")
    (own_root / ALIASES_NAME).unlink()
    assert call("stones", "pebbles") == (0, "stones answers from pebbles; before from stones")
    assert len(open_collection("stones", root=own_root).documents) == 4
    assert call("--json") == (0, json.dumps({"stones": {"to": "pebbles", "before": "stones"}}))
    assert "stones  pebbles" in call()[1]
    back = {"name": "stones", "to": "stones", "before": "pebbles"}
    assert call("stones", "--back", "--json") == (0, json.dumps(back))
    assert len(open_collection("stones", root=own_root).documents) == 20
    assert call("stones")[0] == call("stones", "pebbles", "--back")[0] == 2
    assert switch(own_root, "stones", None) == Alias(to="pebbles", before="stones")


def test_ingest_into_a_switched_name_says_where_its_documents_are_not(own_root, ingest):
    def told(count):
        warnings = ingest(own_root, "stones", stone_rows(count)).warnings
        return [each for each in warnings if "answers from" in each]

    assert told(21) == []
    switch(own_root, "stones", "pebbles")
    (said,) = told(22)
    assert said.startswith("stones answers from pebbles; `cairn switch stones stones --root ")
    assert len(open_collection("stones", root=own_root).documents) == 4
    assert CollectionLayout(own_root, "stones").current_generation_number() == 3


def test_write_by_a_switched_name_reaches_neither_collection(own_root, serve):
    client = serve(ServeSettings(root=own_root, writable=True))
    address = "/v1/collections/{}/documents?wait=searchable"
    documents = {"documents": [{"doc_id": "new", "text": "A grey slate."}]}
    before = client.post(address.format("stones"), json=documents).json()
    switch(own_root, "stones", "pebbles")
    store = {"file_id": "none"}
    for answer in (
        client.post(address.format("stones"), json=documents),
        client.delete("/v1/collections/stones/documents/stone-1"),
        client.delete("/v1/collections/stones"),
        client.post("/v1/vector_stores/stones/files", json=store),
        client.delete("/v1/vector_stores/stones"),
    ):
        assert answer.status_code == 409, answer.text
        assert "write to that one by its own name" in answer.text
    assert client.get(f"/v1/collections/stones/writes/{before['write']}").json()["status"] == "searchable"
    assert answering(client) == "pebbles"
    assert client.post(address.format("pebbles"), json=documents).json()["status"] == "searchable"
    switch(own_root, "stones", None)
    written = client.post(address.format("stones"), json=documents).json()
    assert (written["write"], written["status"]) == (before["write"] + 1, "searchable")


@pytest.mark.parametrize("address", ["/v1/collections/pebbles", "/v1/vector_stores/pebbles"])
def test_collection_that_another_name_answers_from_is_not_removed(own_root, serve, address):
    client = serve(ServeSettings(root=own_root, writable=True))
    switch(own_root, "stones", "pebbles")
    refused = client.delete(address)
    assert refused.status_code == 409, refused.text
    assert "another name answers from it" in refused.text
    assert answering(client) == "pebbles"
    switch(own_root, "stones", None)
    assert client.delete(address).status_code == 200
    assert client.delete(address).status_code == 404
