"""Collections that cannot be served.

Each its own problem, without a path, while the server goes on with the others.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cairn.pipeline.collection import list_statuses, load_query_encoder
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, repartition
from cairn.pipeline.index.names import CHUNKS_FAISS
from cairn.pipeline.index.publish import remove_generations
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.search import searcher
from cairn.pipeline.search.calibration import GENERAL_QUESTIONS
from cairn.pipeline.serve import collections
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.damages import put
from tests.serve.conftest import problem, problem_everywhere, stone_rows

pytestmark = pytest.mark.usefixtures("unhealed")


def flip(path):
    """Change a bit in the middle of a file, in its place: other names of it show that, too."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage(root, name, number=1):
    flip(CollectionLayout(root, name).generation_folder(number) / CHUNKS_FAISS)


def asked(client, name):
    response = client.post(f"/v1/collections/{name}/search", json={"query": "slate"})
    return response.status_code, response.json().get("type", "").rpartition(":")[2]


def require_refused(client, name, status, kind):
    """Every route says the same, and the other collection answers."""
    assert problem_everywhere(client, name) == (status, kind)
    assert asked(client, "pebbles") == (200, "")
    return client.get(f"/v1/collections/{name}")


def test_unknown_collection_and_a_linked_one_that_is_not_followed(own_root, tmp_path, serve):
    shutil.move(own_root / "stones", tmp_path / "elsewhere")
    (own_root / "stones").symlink_to(tmp_path / "elsewhere")
    client = serve(ServeSettings(root=own_root))
    for name in ("nowhere", "stones"):
        require_refused(client, name, 404, "unknown-collection")


def test_collection_being_built_and_one_whose_first_ingest_was_killed(own_root, serve, ingest):
    client = serve(ServeSettings(root=own_root))
    assert asked(client, "coming") == (404, "unknown-collection")
    with CollectionLayout(own_root, "coming").writer_lock():
        reply = require_refused(client, "coming", 503, "collection-building")
        assert reply.headers["Retry-After"] == "30"
        assert listed(client)["coming"] == "building"
        assert "has not finished yet" in reply.json()["detail"]
    # What a killed run leaves: the file, and no lock.
    reply = require_refused(client, "coming", 503, "collection-unfinished")
    assert "Retry-After" not in reply.headers
    assert "run `cairn ingest` again" in reply.json()["detail"]
    assert listed(client) == {"coming": "unfinished", "pebbles": "ready", "stones": "ready"}
    ingest(own_root, "coming", [{"id": "a", "text": "granite"}])
    assert asked(client, "coming") == (200, "")
    assert listed(client)["coming"] == "ready"


def test_lost_partition_is_left_out_only_of_a_search_that_asks_for_the_others(own_root, serve):
    layout = CollectionLayout(own_root, "stones")
    repartition(layout, 3)
    remove_generations(layout, layout.kept_generations()[:-1])  # which would answer, being whole
    shutil.rmtree(next(layout.partitions_folder.iterdir()))
    for state in ("lost", "repaired"):
        client = serve(ServeSettings(root=own_root))
        assert asked(client, "stones") == (503, "partitions-missing"), state
        refused = client.post("/v1/collections/stones/search", json={"query": "slate"})
        assert "`partial`" in refused.json()["detail"]
        assert str(own_root) not in refused.text
        assert client.get("/v1/collections/stones").status_code == 503
        assert listed(client)["stones"] == "damaged"
        request = {"query": "slate", "partial": True, "top_k": 100}
        answer = client.post("/v1/collections/stones/search", json=request)
        assert answer.status_code == 200
        assert 0 < len(answer.json()["hits"]) < 20
        assert "leaves out" in answer.json()["warnings"][0]
        repair_collection(layout)


def test_collection_without_a_readable_manifest(own_root, serve):
    layout = CollectionLayout(own_root, "stones")
    for folder in (layout.generation_folder(1), layout.copies_folder(1)):
        (folder / "MANIFEST.json").write_text("{")
    client = serve(ServeSettings(root=own_root))
    require_refused(client, "stones", 503, "collection-damaged")
    assert listed(client) == {"pebbles": "ready", "stones": "damaged"}


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda model, _: shutil.rmtree(model), "encoder-unavailable"),
        (lambda model, _: (model / "model.safetensors").write_bytes(b"no weights"), "encoder-unavailable"),
        (lambda model, other: shutil.copytree(other, model, dirs_exist_ok=True), "encoder-mismatch"),
    ],
    ids=["gone", "damaged", "another"],
)
def test_collection_whose_model_is_gone_damaged_or_another(
    own_root, tmp_path, serve, ingest, make_bert, model_size, harm, kind
):
    model = shutil.copytree(make_bert(model_size(layers=1)), tmp_path / "model")
    ingest(own_root, "orphan", stone_rows(4), model)
    harm(model, make_bert(model_size(layers=2)))
    require_refused(serve(ServeSettings(root=own_root)), "orphan", 503, kind)


@pytest.mark.parametrize("is_due", [False, True])
def test_failure_is_remembered_until_the_retry_is_due(own_root, serve, monkeypatch, is_due):
    if is_due:
        monkeypatch.setattr(collections, "RETRY_SECONDS", 0.0)
        monkeypatch.setattr(searcher, "RETRY_SECONDS", 0.0)
    damage(own_root, "stones")
    client = serve(ServeSettings(root=own_root))
    assert asked(client, "stones") == (503, "collection-damaged")
    damage(own_root, "stones")  # flips the same bit back
    assert asked(client, "stones") == ((200, "") if is_due else (503, "collection-damaged"))


def test_collections_share_an_encoder_and_measuring_one_takes_its_turn_at_it(served_root, serve):
    loaded: list[str] = []
    passes: list[tuple[str, int]] = []

    def load(generation):
        loaded.append(generation.manifest.collection)
        encoder = load_query_encoder(generation)
        encode = encoder.encode_query_tokens

        def noted(texts):
            passes.append((threading.current_thread().name, len(texts)))
            return encode(texts)

        encoder.encode_query_tokens = noted
        return encoder

    client = serve(ServeSettings(root=served_root), load_encoder=load)
    assert asked(client, "pebbles") == (200, "")
    body = {"query": "granite", "min_probability": 0.5}
    assert client.post("/v1/collections/stones/search", json=body).status_code == 200
    assert len(loaded) == 1
    assert {thread for thread, _ in passes} == {"cairn-encoder"}
    assert sum(size for _, size in passes) > len(GENERAL_QUESTIONS)


def test_requests_while_a_model_is_loaded_wait_and_are_told_to_try_again(served_root, monkeypatch):
    go_on = threading.Event()

    def load(generation):
        go_on.wait(300)
        return load_query_encoder(generation)

    app = create_app(ServeSettings(root=served_root, deadline_seconds=300.0), load_encoder=load)
    with TestClient(app, base_url="http://127.0.0.1") as client, ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as hurried:
            hurried.setattr(collections, "OPENING_SHARE", 0.0)
            response = client.post("/v1/collections/stones/search", json={"query": "slate"})
            assert problem(response) == (503, "collection-opening")
            assert response.headers["Retry-After"] == "2"
            assert client.get("/readyz").json()["detail"] == "collections are being opened"
        waiting = pool.submit(asked, client, "stones")
        go_on.set()
        assert waiting.result() == (200, "")


def test_unknown_names_leave_nothing_behind(client):
    collections = client.app.state.server.collections  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    before = json.dumps(sorted(collections._opened))
    for number in range(20):
        assert client.get(f"/v1/collections/name-{number}").status_code == 404
    assert json.dumps(sorted(collections._opened)) == before


@pytest.mark.parametrize("kind", ["folder", "link to itself", "FIFO"])
def test_entry_of_another_kind_is_damage_of_its_collection_alone(own_root, serve, kind):
    (own_root / "coming").mkdir()
    put(own_root / "coming" / ".lock", kind)
    client = serve(ServeSettings(root=own_root))
    put(own_root / "stones" / "CURRENT", kind)
    require_refused(client, "coming", 503, "collection-damaged")
    assert asked(client, "stones") == (200, "")
    assert listed(client) == {"coming": "damaged", "pebbles": "ready", "stones": "ready"}
    assert client.get("/readyz").json()["status"] == "degraded"
    reports = {found["collection"]: found["status"] for found in list_statuses(own_root)}
    assert reports == {"coming": "damaged", "pebbles": "ready", "stones": "damaged"}


def test_collection_whose_file_is_cut_while_it_is_open(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    assert asked(client, "stones") == (200, "")
    os.truncate(CollectionLayout(own_root, "stones").generation_folder(1) / CHUNKS_FAISS, 10)
    assert asked(client, "stones") == (503, "collection-damaged")
    assert asked(client, "pebbles") == (200, "")
    assert listed(client) == {"stones": "damaged", "pebbles": "ready"}
    assert client.get("/readyz").json() == {
        "status": "degraded",
        "reason": "collection 'stones' cannot be served: The collection's files are damaged",
    }


def test_collection_with_a_generation_before_answers_on_when_a_file_is_cut_and_after_its_repair(
    own_root, serve
):
    layout = CollectionLayout(own_root, "stones")
    compact_collection(layout)
    client = serve(ServeSettings(root=own_root, collections=("stones",)))
    assert asked(client, "stones") == (200, "")
    os.truncate(layout.generation_folder(2) / CHUNKS_FAISS, 10)
    assert asked(client, "stones") == (200, "")
    assert client.get("/v1/collections/stones").json()["is_outdated"] is True
    assert client.get("/readyz").json() == {
        "status": "degraded",
        "reason": "collection 'stones' serves an older generation: the published one is damaged",
    }
    repair_collection(layout)
    assert asked(client, "stones") == (200, "")
    assert client.get("/v1/collections/stones").json()["is_outdated"] is False
    assert client.get("/readyz").json() == {"status": "ready"}


def test_collection_whose_tables_are_gone_is_damaged_and_the_log_says_so(
    own_root, serve, caplog, monkeypatch
):
    monkeypatch.setattr("cairn.pipeline.serve.map_routes.MAP_WAIT_SECONDS", 300.0)
    client = serve(ServeSettings(root=own_root))
    shutil.rmtree(own_root / "stones" / "lance")
    for path in ("/map", "/map/places?doc_id=stones/granite/0", "/documents/stones/granite/0"):
        caplog.clear()
        assert problem(client.get(f"/v1/collections/stones{path}")) == (503, "collection-damaged")
        assert "serve.read_failed collection=stones error=DamageError" in caplog.text
    assert asked(client, "stones") == (503, "collection-damaged")
    assert asked(client, "pebbles") == (200, "")


def listed(client):
    return {found["name"]: found["status"] for found in client.get("/v1/collections").json()["collections"]}
