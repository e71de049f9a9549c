"""What a client writes is found by its next search, and refused in the errors of a client."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.client import clients as client_module
from cairn.pipeline.client import errors
from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.errors import ModelError, TryAgainError, UsageError
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.settings import ServeSettings

from tests.served_stones import Held, serving


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def client(stones_root, tmp_path_factory, sources):
    root = Path(shutil.copytree(stones_root, tmp_path_factory.mktemp("written") / "root"))
    settings = ServeSettings(
        root=root, port=0, deadline_seconds=120.0, writable=True, allowed_sources=(str(sources),)
    )
    with serving(settings) as address, CairnClient(address, timeout_seconds=120) as opened:
        yield opened


@pytest.fixture
def stones(client):
    return client.collection("stones")


def test_added_document_is_found_updated_and_deleted(stones):
    report = stones.add([{"id": "new", "text": "obsidian", "year": np.int64(2024)}])
    assert report.status == "searchable"
    assert stones.search("obsidian").hits[0].doc_id == "new"
    stones.update("new", {"year": 1})
    document = stones.read_document("new")
    assert document is not None
    assert document.metadata["year"] == 1
    assert document.content_sha256 != report.documents[0].content_sha256
    with pytest.raises(errors.ConflictError):
        stones.update("new", {"year": 2}, if_match=report.documents[0].content_sha256)
    assert stones.delete(["new", "none"]).missing == ("none",)
    assert stones.read_document("new") is None


def test_documents_of_another_collection_are_taken(client, stones):
    document = stones.read_document("stones/granite/0")
    assert document is not None
    client.create("copies", settings={"cluster": {"num_clusters": 1}})
    copies = client.collection("copies")
    with pytest.raises(errors.ConflictError):
        copies.search("granite")
    copies.add([document])
    copied = copies.read_document("stones/granite/0")
    assert copied is not None
    assert (copied.text, copied.metadata["found"]) == (document.text, document.metadata["found"])
    copies.drop()
    with pytest.raises(errors.NotFoundError):
        copies.describe()


def test_many_documents_are_several_requests_and_no_id_comes_twice_in_them(stones, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_DOCUMENTS", 2)
    report = stones.add({"id": f"many-{number}", "text": "obsidian"} for number in range(5))
    assert [document.doc_id for document in report.documents] == [f"many-{number}" for number in range(5)]
    report = stones.delete(["none", "many-0", "many-1", "nor this", "many-2"])
    assert (report.deleted, report.missing, report.status) == (3, ("none", "nor this"), "searchable")
    assert stones.delete({"type": "contains", "key": "doc_id", "value": "many-"}).deleted == 2
    monkeypatch.setattr(client_module, "MAX_DOCUMENTS", 1)
    with pytest.raises(UsageError, match="an id must come once, got 'twice' 2 times"):
        stones.add([{"id": "twice", "text": "obsidian"}, {"id": "twice", "text": "jade"}])


def test_what_became_of_every_request_is_told(stones, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_DOCUMENTS", 1)
    rows = [{"id": "mixed", "text": "obsidian", "kinds": [1, "a"]}, {"id": "plain", "text": "jade"}]
    report = stones.add(rows)
    assert len(report.warnings) == 1, report.warnings
    assert "kinds" in report.warnings[0]
    build = LiveWriter._build

    def failing(writer, writes):
        if any(each.rows is not None and "mixed" in each.rows["doc_id"].to_pylist() for each in writes):
            raise ModelError("the model cannot read it")
        return build(writer, writes)

    monkeypatch.setattr(LiveWriter, "_build", failing)
    with pytest.raises(errors.InvalidRequestError, match="the model cannot read it"):
        stones.add([{**rows[0], "text": "opal"}, rows[1]])
    monkeypatch.undo()
    stones.delete(["mixed", "plain"])


def test_document_that_cannot_be_stored_names_its_fault(stones):
    with pytest.raises(errors.InvalidRequestError, match="#/documents/0 the text is empty"):
        stones.add([{"id": "new", "text": " "}])
    with pytest.raises(UsageError, match=r"must be of JSON, .*, got a value of type bytes"):
        stones.add([{"id": "new", "text": "obsidian", "year": b"1"}])
    with pytest.raises(UsageError, match="an id, under the name id or doc_id, and a text"):
        stones.add([{"id": True, "text": "obsidian"}])
    read = stones.read_document("stones/granite/0")
    assert read is not None
    with pytest.raises(errors.InvalidRequestError, match="Cairn's own name text"):
        stones.add([replace(read, metadata={"text": "another text"})])
    with pytest.raises(errors.InvalidRequestError, match="#/documents List should have at least 1 item"):
        stones.add([])
    with pytest.raises(errors.InvalidRequestError, match="#/metadata Input should be an object"):
        stones.update("stones/granite/0", 5)


@pytest.mark.parametrize("documents", [{"id": "a", "text": "one"}, 5, None, "a", ["a"], [None]])
def test_documents_that_are_no_list_of_them_are_refused_before_anything_is_sent(documents):
    nowhere = CairnClient("http://nowhere.invalid").collection("stones")
    with pytest.raises(UsageError, match="document"):
        nowhere.add(documents)


def test_what_python_takes_as_documents_is_taken(stones):
    own = uuid.uuid4()
    rows = [
        {"id": None, "doc_id": 7, "text": "obsidian", "weight": float("nan"), "sizes": [1.5, 2]},
        {"id": own, "text": "jade", "made_by": own, "at": np.datetime64("2020-01-01T10:00", "ns")},
    ]
    report = stones.add(rows)
    frame = pa.table({"id": ["framed"], "text": ["opal"], "weight": [2.5], "__index_level_0__": [0]})
    report = stones.add(frame)
    assert [document.doc_id for document in report.documents] == ["framed"]
    read = [stones.read_document(doc_id) for doc_id in ("7", str(own), "framed")]
    assert [(each.text, each.metadata["weight"]) for each in read if each is not None] == [
        ("obsidian", None),
        ("jade", None),
        ("opal", 2.5),
    ]
    assert read[0] is not None
    assert read[0].metadata["sizes"] == [1.5, 2.0]
    assert read[1] is not None
    assert (read[1].metadata["made_by"], read[1].metadata["at"]) == (str(own), "2020-01-01T10:00:00")
    stones.delete(["7", str(own), "framed"])


def test_write_that_is_not_published_is_not_waited_for_without_end(stones, monkeypatch):
    monkeypatch.setattr("cairn.pipeline.serve.write_routes.WAITING_SHARE", 0.0)
    monkeypatch.setattr("cairn.pipeline.client.clients.SEARCHABLE_SECONDS", 0.0)
    building = Held(monkeypatch, LiveWriter, "_build")
    with pytest.raises(TryAgainError, match="must be searchable within 0 seconds"):
        stones.add([{"id": "held", "text": "feldspar"}])
    building.goes_on.set()


def test_write_that_takes_longer_than_a_request_may_is_waited_for(stones, monkeypatch):
    monkeypatch.setattr("cairn.pipeline.serve.write_routes.WAITING_SHARE", 0.0)
    assert stones.add([{"id": "slow", "text": "obsidian"}]).status == "searchable"
    assert stones.search("obsidian").hits[0].doc_id == "slow"

    def fail(*_, **__):
        raise ModelError("the model must encode it, got a fault")

    monkeypatch.setattr("cairn.pipeline.line.live.build_index", fail)
    with pytest.raises(errors.InvalidRequestError, match="cannot be published: the model must encode it"):
        stones.add([{"id": "bad", "text": "obsidian"}])
    monkeypatch.undo()
    stones.delete("slow")


@pytest.mark.parametrize("share", [0.8, 0.0])
def test_ingested_source_is_told_of_with_its_warnings_however_long_it_takes(
    stones, sources, monkeypatch, share
):
    monkeypatch.setattr("cairn.pipeline.serve.write_routes.WAITING_SHARE", share)
    (sources / "latin.txt").write_bytes("der Stein heißt Obsidian".encode("latin-1"))
    report = stones.ingest(str(sources / "latin.txt"))
    assert report.ingested is not None
    assert any("latin.txt" in each for each in report.warnings), report.warnings
    stones.delete("latin.txt")


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"id": "b", "text": None}, "at position 1"),
        *(
            ({"id": "b", "text": "beryl", "price": price}, "column 'price' of document 'b' must be JSON")
            for price in (float("inf"), [1, float("nan")], [[np.float32("-inf")]], {"eur": float("inf")})
        ),
        (
            {"id": "b", "text": "beryl", "in": reduce(lambda inner, _: [inner], range(3_000), 0)},
            "'b' must be JSON .* not nested so deep",
        ),
    ],
)
def test_document_that_cannot_be_sent_is_named(document, told):
    with pytest.raises(UsageError, match=told):
        CairnClient().collection("stones").add([{"id": "a", "text": "agate"}, document])
