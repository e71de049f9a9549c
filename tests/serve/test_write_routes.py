"""Writes over HTTP: found by the next search, refused in a sentence, and bound to rights."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.corpus import schema
from cairn.pipeline.durable import remove_folder
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import CollectionBusyError, ModelError, StorageError
from cairn.pipeline.index import publish
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import drop_collection, retype_columns
from cairn.pipeline.line import build_index, live
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve import writers
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import RESERVED_COLUMNS
from starlette.testclient import TestClient

from tests.serve.conftest import problem
from tests.served_stones import Held, let_happen_before, raising, wait_until

Serve = Callable[..., TestClient]
STONES = "/v1/collections/stones"
DOCUMENTS = f"{STONES}/documents"
NOW = {"wait": "searchable"}


@pytest.fixture
def writable(own_root, serve):
    return serve(ServeSettings(root=own_root, writable=True))


@pytest.mark.parametrize("searches_wait", [False, True])
def test_writes_are_accepted_one_by_one_and_less_often_while_searches_wait(tmp_path, searches_wait):
    every: Any = writers.Writers(ServeSettings(root=tmp_path), object(), lambda: searches_wait)
    accepted = list[tuple[float, float]]()
    writer = type("Writer", (), {})()

    def accept(number):
        begun = time.monotonic()
        time.sleep(0.05)
        accepted.append((begun, time.monotonic()))
        if not number:
            raise StorageError("the disk is away")

    async def accept_all():
        calls = (every.accept(writer, partial(accept, number)) for number in range(5))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) is type(None) for outcome in outcomes] == [False, True, True, True, True]

    asyncio.run(accept_all())
    pauses = [begun - ended for (_, ended), (begun, _) in pairwise(accepted)]
    assert len(pauses) == 4
    assert min(pauses) >= (writers.LONGEST_REST_SECONDS if searches_wait else 0.0)
    assert searches_wait or min(pauses) < writers.LONGEST_REST_SECONDS


def send(client, *documents, **options):
    return client.post(DOCUMENTS, json={"documents": list(documents)}, **options)


def write(client, *documents, **headers):
    return send(client, *documents, params=NOW, headers=headers)


def state(client, number):
    return client.get(f"{STONES}/writes/{number}").json()["status"]


def found_ids(client, query):
    answer = client.post(f"{STONES}/search", json={"query": query, "top_k": 5})
    assert answer.status_code == 200, answer.text
    return [hit["doc_id"] for hit in answer.json()["hits"]]


def make(client, name, **headers):
    settings = {"encoder": {"landmark_interval": 32}, "cluster": {"num_clusters": 1}}
    return client.post("/v1/collections", json={"name": name, "settings": settings}, headers=headers)


def stone(doc_id, text, **metadata):
    return {"doc_id": doc_id, "text": text, "metadata": metadata}


def test_written_document_is_found_by_the_next_search_and_gone_once_deleted(writable):
    metadata = {"tenant": "acme", "year": 2024, "colour": "black"}
    answer = write(writable, stone("new", "obsidian obsidian", **metadata))
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "searchable"
    assert found_ids(writable, "obsidian")[0] == "new"
    document = writable.get(f"{DOCUMENTS}/new").json()
    assert document["metadata"] == metadata
    assert document["content_sha256"] == answer.json()["documents"][0]["content_sha256"]
    assert writable.get(f"{DOCUMENTS}/stones/granite/0").json()["metadata"]["colour"] is None
    assert writable.delete(f"{DOCUMENTS}/new", params=NOW).json()["deleted"] == 1
    assert "new" not in found_ids(writable, "obsidian")
    assert writable.delete(f"{DOCUMENTS}/new", params=NOW).status_code == 404
    body = {"doc_ids": ["stones/granite/0", "none"]}
    answer = writable.post(f"{DOCUMENTS}/delete", json=body, params=NOW).json()
    assert (answer["deleted"], answer["missing"]) == (1, ["none"])


def test_collection_is_made_once_empty_until_it_is_filled_and_removed_once(writable):
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda _: make(writable, "new"), range(4))]
    assert sorted(answer.status_code for answer in made) == [201, 409, 409, 409]
    assert [answer.json()["status"] for answer in made if answer.status_code == 201] == ["empty"]
    listed = {each["name"]: each["status"] for each in writable.get("/v1/collections").json()["collections"]}
    assert listed["new"] == "empty"
    empty = writable.post("/v1/collections/new/search", json={"query": "ruby"})
    assert problem(empty)[1] == "collection-empty"
    for _ in range(2):
        removed = writable.delete("/v1/collections/new", headers={"Idempotency-Key": "c"})
        assert removed.status_code == 200
    assert writable.get("/v1/collections/new").status_code == 404
    assert writable.delete("/v1/collections/stones", headers={"Idempotency-Key": "c"}).status_code == 422
    assert writable.delete("/v1/collections/new").status_code == 404
    again = [make(writable, "new", **{"Idempotency-Key": key}).status_code for key in "aab"]
    assert again == [201, 201, 409]
    other = writable.post("/v1/collections", json={"name": "new"}, headers={"Idempotency-Key": "a"})
    assert other.status_code == 422


def test_durable_write_is_answered_before_it_is_published_and_a_change_of_it_is_of_its_last_content(writable):
    answer = send(writable, stone("new", "obsidian"))
    assert answer.status_code == 202
    assert answer.json()["generation"] is None
    number = answer.json()["write"]
    write(writable, stone("later", "pumice"))
    assert state(writable, number) == "searchable"
    send(writable, stone("new", "obsidian", tenant="acme", year=1))
    writable.patch(f"{DOCUMENTS}/new", json={"metadata": {"year": None}}, params=NOW)
    document = writable.get(f"{DOCUMENTS}/new").json()
    assert (document["text"], document["metadata"]) == ("obsidian", {"tenant": "acme", "year": None})


def test_deletion_by_filter_takes_writes_before_it_also_the_first_of_a_collection(writable):
    make(writable, "gems")
    body = {"filters": {"type": "eq", "key": "tenant", "value": "acme"}}
    documents = [stone("ruby", "a red ruby", tenant="acme"), stone("opal", "a milky opal", tenant="zenith")]
    for name, deleted, left in (("gems", 1, 1), ("stones", 11, 11)):
        address = f"/v1/collections/{name}"
        writable.post(f"{address}/documents", json={"documents": documents})
        answer = writable.post(f"{address}/documents/delete", json=body, params=NOW)
        assert answer.json()["deleted"] == deleted, answer.text
        assert writable.get(address).json()["documents"] == left
    hits = writable.post("/v1/collections/gems/search", json={"query": "opal"}).json()["hits"]
    assert [hit["doc_id"] for hit in hits] == ["opal"]
    assert writable.get("/v1/collections/gems").json()["landmark_interval"] == 32


def test_changed_metadata_encodes_nothing(writable, own_root):
    def vector():
        found = open_collection("stones", root=own_root)
        rows = found.documents.to_arrow(["doc_id", "vector", "year"]).to_pylist()
        (row,) = [row for row in rows if row["doc_id"] == "stones/granite/0"]
        assert row["year"] in (None, 1999)
        return row["vector"]

    before = vector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.pipeline.encode.documents.DocumentEncoder.encode", None)
        body = {"metadata": {"year": 1999}}
        answer = writable.patch(f"{DOCUMENTS}/stones/granite/0", json=body, params=NOW)
    assert answer.status_code == 200, answer.text
    assert vector() == before
    assert writable.get(f"{DOCUMENTS}/stones/granite/0").json()["metadata"]["year"] == 1999
    assert found_ids(writable, "granite granite")


def test_metadata_that_cannot_be_stored_is_left_out_and_warned_of(writable):
    odd = [("a.b", 1), ("a`b", 1), (" ", 1), ("object", {"a": 1}), ("nested", [[1]]), ("e", [])]
    documents = [
        stone(f"odd-{number}", "obsidian", **{name: value, "mixed": [1, "a"]})
        for number, (name, value) in enumerate(odd)
    ]
    warnings = write(writable, *documents).json()["warnings"]
    left_out = [each for each in warnings if "left out" in each]
    (mixed,) = {*warnings} - {*left_out}
    assert "'mixed' holds numbers and texts" in mixed
    for document, (name, _) in zip(documents, odd, strict=True):
        assert [repr(name) in each for each in left_out].count(True) == 1, name
        metadata = writable.get(f"{DOCUMENTS}/{document['doc_id']}").json()["metadata"]
        assert (name in metadata, metadata["mixed"]) == (False, ["1", "a"])


def test_same_idempotency_key_is_one_write_and_if_match_refuses_another_content(writable):
    first = write(writable, stone("new", "obsidian"), **{"Idempotency-Key": "a"})
    again = write(writable, stone("new", "obsidian"), **{"Idempotency-Key": "a"})
    other = write(writable, stone("new", "pumice"), **{"Idempotency-Key": "a"})
    assert first.json()["write"] == again.json()["write"]
    assert other.status_code == 422
    assert problem(other)[1] == "key-reused"
    sha = write(writable, stone("new", "obsidian")).json()["documents"][0]["content_sha256"]
    assert write(writable, stone("new", "pumice"), **{"If-Match": f'"{sha}"'}).status_code == 200
    refused = write(writable, stone("new", "obsidian", colour=1), **{"If-Match": f'"{sha}"'})
    assert refused.status_code == 412
    grey = write(writable, stone("new", "pumice", colour="grey"), **{"If-Match": '"no", "*"'})
    assert grey.status_code == 200
    assert write(writable, stone("none", "pumice"), **{"If-Match": "*"}).status_code == 412
    headers = {"If-Match": sha}
    assert writable.delete(f"{DOCUMENTS}/new", headers=headers).status_code == 412
    assert writable.get(f"{DOCUMENTS}/new").json()["text"] == "pumice"


def test_document_that_must_be_new_replaces_none_and_none_comes_twice(writable):
    new = {"If-None-Match": "*"}
    assert write(writable, stone("new", "obsidian"), **new).status_code == 200
    assert write(writable, stone("new", "pumice"), **new).status_code == 412
    assert writable.get(f"{DOCUMENTS}/new").json()["text"] == "obsidian"
    assert write(writable, stone("a", "x"), stone("b", "x"), **new).status_code == 422
    assert write(writable, stone("a", "x"), **{"If-None-Match": "abc"}).status_code == 422
    assert write(writable, stone("new", "obsidian"), stone("new", "pumice")).status_code == 422


def test_document_that_cannot_be_stored_is_refused_with_all_of_its_request(writable):
    for document, told in (
        (stone("bad", " "), "empty"),
        (stone(" ", "obsidian"), "id is empty"),
        (stone("bad", "obsidian", year="long ago"), "year"),
        (stone("bad", "obsidian", cluster_id=1), "own name"),
        (stone("bad", "obsidian\0"), "NUL"),
        *((stone(doc_id, "obsidian"), "the id must not be . or ..") for doc_id in (".", "..")),
    ):
        answer = write(writable, stone("good", "obsidian"), document)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "#/documents/1"
        assert told in error["detail"]
    assert writable.get(f"{DOCUMENTS}/good").status_code == 404


@pytest.mark.parametrize("num_before", [0, 3], ids=["in one request", "beside columns that wait"])
def test_document_that_would_bring_more_columns_than_a_collection_may_have_is_refused_before_it_is_logged(
    writable, monkeypatch, num_before
):
    columns = writable.get(f"{STONES}/columns").json()["columns"]
    stored = len({column["name"] for column in columns} - RESERVED_COLUMNS)
    monkeypatch.setattr(schema, "MAX_METADATA_COLUMNS", stored + 5)
    before = send(writable, stone("few", "x", **names(0, num_before)))
    assert before.status_code == 202
    answer = write(writable, stone("wide", "obsidian", **names(num_before, 6)))
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["pointer"] == "#/documents/0"
    assert f"at most {stored + 5} metadata columns" in error["detail"]
    allowed = write(writable, stone("wide", "obsidian", **names(num_before, 5)))
    assert (allowed.status_code, allowed.json()["write"]) == (200, before.json()["write"] + 1)
    assert write(writable, stone("next", "pumice", **names(0, 5))).status_code == 200
    assert writable.patch(f"{DOCUMENTS}/next", json={"metadata": {"further": 1}}).status_code == 422


def names(first, stop):
    return {f"column_{number}": number for number in range(first, stop)}


def test_write_whose_check_takes_longer_than_a_request_may_is_told_with_its_number(
    own_root, serve, monkeypatch
):
    client = serve(ServeSettings(root=own_root, writable=True, deadline_seconds=3.0))
    send(client, stone("first", "pumice"))
    building = Held(monkeypatch, LiveWriter, "_build")
    let_happen_before(monkeypatch, LiveWriter, "_checked", lambda *_: time.sleep(3.5))
    try:
        answer = write(client, stone("new", "obsidian"))
        assert (answer.status_code, answer.json()["status"]) == (202, "durable")
    finally:
        building.goes_on.set()
    wait_until(lambda: state(client, answer.json()["write"]) == "searchable")


def test_oversized_body_is_refused_and_a_full_queue_asks_to_come_again(writable, monkeypatch):
    monkeypatch.setattr("cairn.pipeline.serve.middleware.MAX_WRITE_BYTES", 1_000)
    assert write(writable, stone("new", "x" * 1_000)).status_code == 413
    monkeypatch.setattr("cairn.pipeline.line.waiting_writes.MAX_WAITING_DOCUMENTS", 0)
    answer = write(writable, stone("new", "obsidian"))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


ODD_IDS = [
    *("a/b", "/lead", "trail/", "a//b", "a?b#c&d=e", "a/b?c#d", "é 日本", "é\u202e", "100%", "a\nb", "end\n"),
    *("a..b", "../..", "delete", "content", "a/content", "'; --", "💎" * 100, "x" * 1_024),
]


def test_document_of_any_id_is_found_and_read_and_its_content_at_openais_address(writable):
    documents = [stone(doc_id, f"obsidian {number}") for number, doc_id in enumerate(ODD_IDS)]
    assert write(writable, *documents).status_code == 200
    answer = writable.post(f"{STONES}/search", json={"query": "obsidian", "top_k": len(ODD_IDS)})
    assert {hit["doc_id"] for hit in answer.json()["hits"]} == {*ODD_IDS}
    for document in documents:
        place = quote(document["doc_id"], safe="")
        found = writable.get(f"{DOCUMENTS}/{place}").json()
        assert (found["doc_id"], found["text"]) == (document["doc_id"], document["text"])
        address = f"/v1/vector_stores/stones/files/{place}"
        assert writable.get(address).json()["object"] == "vector_store.file"
        content = writable.get(f"{address}/content").json()["data"]
        assert content == [{"type": "text", "text": document["text"]}]


def test_collection_that_another_server_takes_writes_of_is_neither_written_nor_removed(
    writable, own_root, serve
):
    write(writable, stone("new", "obsidian"))
    other = serve(ServeSettings(root=own_root, writable=True))
    assert problem(write(other, stone("new", "pumice"))) == (409, "collection-busy")
    answer = other.delete(STONES)
    assert problem(answer) == (409, "collection-busy")
    assert answer.json()["detail"] == "collection 'stones' must be written and removed by one server"
    with pytest.raises(CollectionBusyError, match="ask that one, or stop it"):
        drop_collection(CollectionLayout.at(own_root, "stones"))
    assert found_ids(writable, "obsidian")[0] == "new"
    assert writable.delete(STONES).status_code == 200


def test_collection_that_was_removed_elsewhere_and_made_again_has_a_log(writable, own_root):
    write(writable, stone("new", "obsidian"))
    with CollectionLayout.at(own_root, "stones").writer_lock():  # the writer tidies up behind its answer
        remove_folder(own_root / "stones")
    assert make(writable, "stones").status_code == 201
    answer = send(writable, stone("new", "obsidian"))
    assert answer.status_code == 202, answer.text
    assert CollectionLayout.at(own_root, "stones").writes_path.exists()


def test_model_in_a_folder_is_not_loaded_for_a_request(writable, tiny_model_folder):
    folder = str(tiny_model_folder)
    encoders = [{"model": folder}, {"sparse_model": folder}]
    for asked in ({"model": folder}, *({"settings": {"encoder": encoder}} for encoder in encoders)):
        assert writable.post("/v1/collections", json={"name": "gems", **asked}).status_code == 422


def test_collection_is_removed_while_its_documents_are_encoded(writable, own_root, monkeypatch):
    encode, is_encoding, goes_on = DocumentEncoder.encode, threading.Event(), threading.Event()

    def slow(encoder, texts, on_tokens, **others):
        is_encoding.set()
        while not goes_on.wait(0.01):
            on_tokens(1)
        return encode(encoder, texts, on_tokens, **others)

    monkeypatch.setattr(DocumentEncoder, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write, writable, stone("new", "obsidian"))
        assert is_encoding.wait(300)
        try:
            assert writable.delete(STONES).json() == {"name": "stones", "deleted": True}
            assert waiting.result(60).json()["type"].endswith("write-failed")
        finally:
            goes_on.set()
    assert not (own_root / "stones").exists()
    assert write(writable, stone("new", "obsidian")).status_code == 404
    assert not (own_root / "stones").exists(), "nothing of it comes back"


def test_removal_that_would_take_too_long_removes_nothing_later(own_root, serve, monkeypatch):
    encoding = Held(monkeypatch, DocumentEncoder, "encode")
    monkeypatch.setattr(writers, "DROP_SHARE", 0.001)
    client = serve(ServeSettings(root=own_root, writable=True))
    number = send(client, stone("new", "obsidian")).json()["write"]
    assert encoding.began.wait(300)
    assert problem(client.delete(STONES))[1] == "collection-busy"
    encoding.goes_on.set()
    wait_until(lambda: client.get(f"{STONES}/writes/{number}").status_code != 409)
    assert write(client, stone("later", "pumice")).status_code == 200
    assert state(client, number) == "searchable"
    assert found_ids(client, "obsidian")[0] == "new"


def test_removal_of_a_collection_holds_up_no_write_of_another_and_one_made_again_is_found_at_once(
    writable, monkeypatch
):
    assert found_ids(writable, "granite")
    write(writable, stone("new", "obsidian"))
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        stopping = Held(patch, LiveWriter, "stop")
        removal = pool.submit(writable.delete, STONES)
        assert stopping.began.wait(300)
        try:
            body = {"documents": [stone("new", "obsidian")]}
            assert writable.post("/v1/collections/pebbles/documents", json=body).status_code == 202
            assert not removal.done()
        finally:
            stopping.goes_on.set()
        assert removal.result(300).status_code == 200
    assert make(writable, "stones").status_code == 201
    assert writable.get("/v1/collections").json()["collections"][1]["status"] == "empty"
    assert problem(writable.get(STONES)) == (409, "collection-empty")
    assert write(writable, stone("new", "obsidian")).status_code == 200
    assert found_ids(writable, "obsidian") == ["new"]


def test_write_that_meets_the_end_of_its_writer_is_to_be_sent_again(writable, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        let_happen_before(patch, LiveWriter, "write", lambda writer, *_: writer.stop(0.0))
        answer = write(writable, stone("new", "obsidian"))
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "5")
    assert answer.json()["detail"].endswith("write once more")
    assert "writes.refused" not in caplog.text
    assert write(writable, stone("new", "obsidian")).json()["write"] == 1


def test_stopped_server_publishes_what_waits_and_its_writes_are_known_after_a_restart(
    own_root, serve, monkeypatch
):
    monkeypatch.setattr(writers, "STOP_SECONDS", 300.0)
    settings = ServeSettings(root=own_root, writable=True)
    first = serve(settings)
    numbers = [write(first, stone("n0", "obsidian")).json()["write"]]
    answer = send(first, stone("n1", "obsidian"))
    numbers.append(answer.json()["write"])
    first.__exit__(None, None, None)
    assert open_collection("stones", root=own_root).documents["n1"].text == "obsidian"
    assert CollectionLayout.at(own_root, "stones").writes_path.exists()
    second = serve(settings)
    states = [state(second, number) for number in numbers]
    assert states == ["searchable", "searchable"]
    assert second.get(f"{STONES}/writes/{numbers[1] + 1}").status_code == 404


def test_source_is_ingested_where_it_is_allowed_and_links_out_of_it_are_not_read(own_root, serve, tmp_path):
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    common = {"title": None, "tenant": "acme", "year": 1}
    rows = [{"id": "gem", "text": "obsidian", **common}, {"id": "bad", "text": " ", **common}]
    for folder, own in ((allowed, rows), (secret, [{"id": "key", "text": "obsidian", **common}])):
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist(own), folder / "gems.parquet")
    client = serve(ServeSettings(root=own_root, writable=True, allowed_sources=(str(allowed),)))

    def ingest(path):
        return client.post(f"{STONES}/sources", json={"source": str(path)}, params=NOW)

    counts = ingest(allowed / "gems.parquet").json()["ingested"]
    assert (counts["rows"], counts["indexed"], counts["quarantine_reasons"]) == (2, 1, {"empty_text": 1})
    assert found_ids(client, "obsidian")[0] == "gem"
    out = f"{allowed}/../secret/gems.parquet"
    for elsewhere in (secret / "gems.parquet", out, "s3://elsewhere/gems.parquet"):
        assert ingest(elsewhere).status_code == 403
    assert ingest(allowed / "none.parquet").json()["type"].endswith("write-failed")
    assert write(client, stone("after", "pumice")).status_code == 200
    (allowed / "file.parquet").symlink_to(secret / "gems.parquet")
    (allowed / "folder").symlink_to(secret)
    for source in ("", "/**/*.parquet", "/f*/*.parquet", "/f*.parquet"):
        ingest(f"{allowed}{source}")
        assert client.get(f"{DOCUMENTS}/key").status_code == 404
    assert client.get(f"{DOCUMENTS}/gem").status_code == 200


def test_writes_that_wait_while_a_column_is_retyped_are_of_its_new_type(writable, own_root, monkeypatch):
    building = Held(monkeypatch, LiveWriter, "_build")
    number = send(writable, stone("early", "obsidian", year=2001)).json()["write"]
    retype_columns(CollectionLayout.at(own_root, "stones"), {"year": "string"})
    building.goes_on.set()
    write(writable, stone("late", "pumice", year="2002"))
    years = [writable.get(f"{DOCUMENTS}/{name}").json()["metadata"]["year"] for name in ("early", "late")]
    assert (state(writable, number), years) == ("searchable", ["2001", "2002"])


@pytest.mark.parametrize(
    ("year", "became", "after"), [(2001, "searchable", 2001.0), (2**60 + 1, "failed", None)]
)
def test_write_is_fitted_to_a_column_that_is_retyped_while_it_is_read(
    writable, own_root, monkeypatch, year, became, after
):
    scan, types = build_index.scan_sources, ["double"]

    def overtaken(*given):
        found = scan(*given)
        if types:
            retype_columns(CollectionLayout.at(own_root, "stones"), {"year": types.pop()})
        return found

    monkeypatch.setattr(build_index, "scan_sources", overtaken)
    number = send(writable, stone("early", "obsidian", year=year)).json()["write"]
    write(writable, stone("late", "pumice"))
    told = state(writable, number)
    found = writable.get(f"{DOCUMENTS}/early").json().get("metadata", {}).get("year")
    assert (told, found, type(found)) == (became, after, type(after))


def test_write_needs_the_right_and_the_list_says_whether_the_key_may_fill_a_new_collection(own_root, serve):
    keys = KeyFile(own_root / "keys.json")
    _, reader = keys.create("reader")
    scopes = ("search", "write")
    _, anywhere = keys.create("anywhere", scopes=scopes)
    _, named = keys.create("named", scopes=scopes, collections=("stones", "gems"))
    client = serve(ServeSettings(root=own_root, writable=True))

    def status(token, name):
        body = {"documents": [stone("new", "obsidian")]}
        headers = {"Authorization": f"Bearer {token}"}
        return client.post(f"/v1/collections/{name}/documents", json=body, headers=headers).status_code

    def is_writable(token):
        headers = {"Authorization": f"Bearer {token}"}
        return client.get("/v1/collections", headers=headers).json()["is_writable"]

    assert [status(reader, "stones"), status(named, "pebbles"), status(named, "stones")] == [403, 404, 202]
    assert [is_writable(anywhere), is_writable(named)] == [True, False]
    assert make(client, "gems", Authorization=f"Bearer {named}").status_code == 201
    assert is_writable(named)


def test_full_disk_takes_no_write_and_loses_none_and_makes_no_collection_nor_does_one_only_to_be_read(
    writable, monkeypatch
):
    with monkeypatch.context() as patch:
        read_only = raising([OSError(30, "Read-only file system")] * 9)
        patch.setattr("cairn.pipeline.line.write_log.WriteLog._open", read_only)
        assert problem(write(writable, stone("lost", "obsidian"))) == (503, "writes-refused")
    write(writable, stone("kept", "obsidian"))
    with monkeypatch.context() as patch:
        full = raising([OSError(28, "No space left on device")] * 9)
        patch.setattr("cairn.pipeline.line.write_log.os.pwrite", full)
        assert write(writable, stone("lost", "pumice")).status_code == 507
        assert make(writable, "new", **{"Idempotency-Key": "a"}).status_code == 507
    assert "new" not in {each["name"] for each in writable.get("/v1/collections").json()["collections"]}
    assert make(writable, "new", **{"Idempotency-Key": "a"}).status_code == 201
    assert write(writable, stone("later", "pumice")).status_code == 200
    assert writable.get(f"{DOCUMENTS}/lost").status_code == 404
    assert writable.get(f"{DOCUMENTS}/kept").status_code == 200


def test_eight_writers_leave_what_each_wrote_last_and_a_batch_ingest_waits_its_turn(writable, own_root):
    def run(client_number):
        random, own = Random(client_number), dict[str, str | None]()
        for step in range(20):
            doc_id, waits = f"{client_number}-{random.randrange(4)}", random.random() < 0.1
            asked, status = ({"params": NOW}, 200) if waits else ({}, 202)
            if random.random() < 0.3 and own.get(doc_id) is not None:
                assert writable.delete(f"{DOCUMENTS}/{doc_id}", **asked).status_code == status
                own[doc_id] = None
            else:
                own[doc_id] = f"obsidian {step}"
                assert send(writable, stone(doc_id, f"obsidian {step}"), **asked).status_code == status
        return own

    batch = {f"batch-{number}": f"pumice {number}" for number in range(5)}
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(run, number) for number in range(8)]
        for doc_id, text in batch.items():
            open_collection("stones", root=own_root).add([{"id": doc_id, "text": text}])
        expected = {doc_id: text for own in writing for doc_id, text in own.result().items()} | batch
    write(writable, stone("last", "pumice"))
    stored = {each.doc_id: each.text for each in open_collection("stones", root=own_root).documents}
    assert {doc_id: stored.get(doc_id) for doc_id in expected} == expected
    assert len(stored) == 21 + sum(text is not None for text in expected.values())


@pytest.mark.usefixtures("private")
def test_folder_that_cannot_be_read_is_left_alone_and_keeps_no_acknowledged_write_from_being_published(
    own_root, serve, monkeypatch, caplog
):
    (own_root / "odd").symlink_to(own_root / "nowhere")
    os.mkfifo(own_root / "fifo")
    (own_root / "file").write_bytes(b"")
    body = {"documents": [stone("new", "obsidian")]}
    with monkeypatch.context() as patch:
        patch.setattr(writers, "STOP_SECONDS", 0.0)
        patch.setattr(LiveWriter, "_publish", lambda *_: time.sleep(0.01))
        client = serve(ServeSettings(root=own_root, writable=True))
        assert client.post(DOCUMENTS, json=body).status_code == 202
        client.__exit__(None, None, None)
    assert "new" not in open_collection("stones", root=own_root).documents
    client = serve(ServeSettings(root=own_root, writable=True))
    wait_until(lambda: client.get(f"{DOCUMENTS}/new").status_code == 200)
    assert "writes.not_replayed collection=private" in caplog.text
    caplog.clear()
    for answer in (
        client.delete("/v1/collections/private"),
        client.post("/v1/collections", json={"name": "private"}),
        client.post("/v1/collections/private/documents", json=body),
    ):
        assert problem(answer) == (503, "storage-failed")
    assert caplog.text.count("reading collection 'private' failed: Permission denied") == 3


def test_writer_that_outlives_its_server_ends_without_a_warning(writable, monkeypatch):
    building = Held(monkeypatch, LiveWriter, "_build")
    monkeypatch.setattr(writers, "STOP_SECONDS", 0.0)
    send(writable, stone("new", "obsidian"))
    assert building.began.wait(300)
    writable.__exit__(None, None, None)
    building.goes_on.set()
    building.thread.join(300)
    assert not building.thread.is_alive()


def test_request_that_was_cut_off_stops_no_later_one(writable, monkeypatch):
    taken = LiveWriter.write

    def cancelled(*arguments, **keywords):
        receipt = taken(*arguments, **keywords)
        receipt.published.cancel()
        return receipt

    with monkeypatch.context() as patch:
        patch.setattr(LiveWriter, "write", cancelled)
        send(writable, stone("cut", "obsidian"))
    assert write(writable, stone("later", "pumice")).status_code == 200
    assert writable.get(f"{DOCUMENTS}/cut").status_code == 200


def test_write_that_fails_after_a_pause_stops_no_later_one_and_is_failed_after_a_restart(
    own_root, serve, monkeypatch
):
    faults = [StorageError("the disk is away"), ModelError("the model cannot read it")]
    let_happen_before(monkeypatch, live, "build_index", raising(faults))
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.01)
    settings, key = ServeSettings(root=own_root, writable=True), {"Idempotency-Key": "a"}
    client = serve(settings)
    assert problem(write(client, stone("bad", "obsidian"), **key)) == (422, "write-failed")
    assert write(client, stone("later", "pumice")).status_code == 200
    client.__exit__(None, None, None)
    assert problem(write(serve(settings), stone("bad", "obsidian"), **key)) == (422, "write-failed")


def test_kept_document_that_an_ingest_refuses_now_is_no_searchable_write(writable, monkeypatch):
    stage = build_index.stage_changes

    def refusing(scan, config, *others):
        return stage(scan, replace(config, max_document_bytes=10), *others)

    monkeypatch.setattr(build_index, "stage_changes", refusing)
    assert write(writable, stone("bad", "obsidian obsidian")).json()["type"].endswith("write-failed")
    assert write(writable, stone("good", "pumice")).json()["generation"] == 2


def test_write_is_searchable_before_older_generations_are_removed(writable, monkeypatch):
    pruning = Held(monkeypatch, publish, "prune_generations")
    assert write(writable, stone("new", "obsidian")).json()["status"] == "searchable"
    assert found_ids(writable, "obsidian")[0] == "new"
    pruning.goes_on.set()


def test_writer_that_is_being_opened_is_stopped_with_the_others(writable, monkeypatch):
    opening, stopped = Held(monkeypatch, LiveWriter, "__init__"), list[float]()
    let_happen_before(monkeypatch, LiveWriter, "stop", lambda _, seconds, *__: stopped.append(seconds))
    let_happen_before(monkeypatch, writers.Writers, "close", lambda _: opening.goes_on.set())
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, writable, stone("new", "obsidian"))
        assert opening.began.wait(300)
        writable.__exit__(None, None, None)
        sent.exception(300)  # answered or not, as the server ends
    assert stopped == [writers.STOP_SECONDS]
