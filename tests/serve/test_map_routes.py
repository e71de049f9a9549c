"""The map and the health of a collection over HTTP, and that a key sees its own documents in both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.context.drift import measure_drift
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import SIZES, CollectionLayout
from cairn.pipeline.serve import map_routes
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

OWN = {"type": "eq", "key": "tenant", "value": "acme"}


@pytest.fixture
def tenant(served_root: Path, serve: Callable[..., TestClient], tmp_path: Path) -> TestClient:
    """A client whose key sees acme's documents: those of odd numbers."""
    _, token = KeyFile(tmp_path / "keys.json").create("acme", restriction=OWN)
    client = serve(ServeSettings(root=served_root, keys_file=tmp_path / "keys.json"))
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def drawn(client: TestClient, path: str, **params: Any) -> dict[str, Any]:
    """Ask until the map is drawn."""
    while (reply := client.get(f"/v1/collections/stones/{path}", params=params).json())[
        "status"
    ] == "drawing":
        time.sleep(0.05)
    return reply


def test_map_has_every_document_once(
    client: TestClient, make_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    reply = drawn(client, "map")
    points = reply["points"]
    assert sorted(zip(points["doc_id"], points["title"], strict=True)) == sorted(
        (row["id"], row["title"]) for row in make_rows()
    )
    assert {len(column) for column in points.values()} == {20} == {reply["documents"]}
    assert all(-1 <= value <= 1 for value in points["x"] + points["y"])
    assert sorted(set(points["cluster"])) == [cluster["cluster"] for cluster in reply["clusters"]]
    assert (reply["generation"], sum(cluster["documents"] for cluster in reply["clusters"])) == (1, 20)


def test_map_that_is_being_drawn_says_so(own_client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.pipeline.serve.map_routes.MAP_WAIT_SECONDS", 0.0)
    for path in ("map", "map/places?doc_id=a"):
        reply = own_client.get(f"/v1/collections/pebbles/{path}").json()
        assert (reply["status"], reply["documents"], reply["points"]) == ("drawing", 4, None)
        assert reply["progress"] == 0.0
        if path == "map":
            monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MapCache.get", never_ready)


async def never_ready(*_: Any) -> None:
    """Stand for a drawing that is not there yet."""


def test_documents_stand_where_the_map_has_them(client: TestClient) -> None:
    points = drawn(client, "map")["points"]
    wanted = [points["doc_id"][7], "nobody", points["doc_id"][3]]
    found = drawn(client, "map/places", doc_id=wanted)["points"]
    for doc_id in (wanted[0], wanted[2]):
        here, there = found["doc_id"].index(doc_id), points["doc_id"].index(doc_id)
        assert [found[name][here] for name in found] == [points[name][there] for name in points]
    assert len(found["doc_id"]) == 2


def test_document_that_is_not_on_the_map_is_placed(
    own_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MAX_DOCUMENTS", 10)
    shown = drawn(own_client, "map")
    assert (len(shown["points"]["doc_id"]), shown["documents"]) == (10, 20)
    missing = next(
        f"stones/basalt/{n}" for n in (1, 11) if f"stones/basalt/{n}" not in shown["points"]["doc_id"]
    )
    placed = drawn(own_client, "map/places", doc_id=missing)["points"]
    assert placed["doc_id"] == [missing]
    assert -1 <= placed["x"][0] <= 1


def test_new_generation_has_a_map_of_its_own(
    own_root: Path, serve: Callable[..., TestClient], ingest: Callable[..., None], make_rows: Any
) -> None:
    client = serve(ServeSettings(root=own_root))
    assert drawn(client, "map")["documents"] == 20
    ingest(
        own_root,
        "stones",
        [*make_rows(), {"id": "new", "title": "New", "text": "pumice", "tenant": "acme", "year": 1}],
    )
    reply = drawn(client, "map")
    assert (reply["generation"], reply["documents"], len(reply["points"]["doc_id"])) == (2, 21, 21)


def test_map_is_drawn_once_while_the_server_runs(
    own_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn(own_client, "map")
    monkeypatch.delattr("cairn.pipeline.serve.corpus_map.lay_out")
    assert drawn(own_client, "map") == before


def test_request_that_comes_late_with_an_older_generation_leaves_the_map_of_the_newer_one(
    own_root: Path,
    serve: Callable[..., TestClient],
    ingest: Callable[..., None],
    make_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = serve(ServeSettings(root=own_root))
    older = open_generation(CollectionLayout(own_root, "stones"), checks=SIZES)
    ingest(own_root, "stones", [*make_rows(), {"id": "new", "text": "pumice"}])
    expected = drawn(client, "map")
    monkeypatch.delattr("cairn.pipeline.serve.corpus_map.lay_out")
    with monkeypatch.context() as late:
        late.setattr(map_routes, "visible_documents", lambda *_: (older, np.arange(20)))
        reply = client.get("/v1/collections/stones/map").json()
    assert (reply["generation"], reply["status"]) == (1, "drawing")
    assert client.get("/v1/collections/stones/map").json() == expected


def test_health_that_meets_damage_is_that_of_the_generation_before_and_holds_up_no_other_request(
    own_root: Path,
    serve: Callable[..., TestClient],
    ingest: Callable[..., None],
    make_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingest(own_root, "stones", [*make_rows(), {"id": "new", "text": "pumice"}])
    client = serve(ServeSettings(root=own_root))
    path = next(CollectionLayout(own_root, "stones").generation_folder(2).glob("*documents.arrow"))

    def measured(*read: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        if path.stat().st_size:
            path.write_bytes(b"")
            raise StorageError("the rows cannot be read")
        return measure_drift(*read)

    monkeypatch.setattr("cairn.pipeline.serve.map_routes.measure_drift", measured)
    found = client.get("/v1/collections/stones/health").json()
    assert (found["generation"], found["documents"], found["is_outdated"]) == (1, 20, True)


def test_health_is_what_the_generation_holds(client: TestClient, served_root: Path) -> None:
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    manifest = generation.manifest
    found = client.get("/v1/collections/stones/health").json()
    for name in (
        "generation",
        "created_at",
        "documents",
        "chunks",
        "tokens",
        "vector_dim",
        "context_documents",
    ):
        assert found[name] == getattr(manifest, name), name
    sizes = [
        generation.cluster_ids.tolist().count(cluster)
        for cluster in range(len(manifest.context_cluster_sizes))
    ]
    expected = measure_drift(manifest.context_cluster_sizes, sizes, manifest.documents_at_context)
    assert (found["drift"]["verdict"], found["drift"]["total_variation"]) == (
        expected.verdict,
        expected.total_variation,
    )


def test_drift_is_seen_after_an_ingest_that_moved_the_corpus(
    own_root: Path, serve: Callable[..., TestClient], ingest: Callable[..., None], make_rows: Any
) -> None:
    ingest(
        own_root,
        "stones",
        [*make_rows(), *({"id": f"new/{n}", "text": f"chert number {n}"} for n in range(30))],
    )
    found = serve(ServeSettings(root=own_root)).get("/v1/collections/stones/health").json()
    assert (found["generation"], found["drift"]["verdict"]) == (2, "re-contextualise")
    assert found["drift"]["added_share"] == pytest.approx(0.6)


def test_key_sees_its_own_documents_on_the_map_and_in_the_figures(
    tenant: TestClient, client: TestClient
) -> None:
    points = drawn(tenant, "map")["points"]
    assert len(points["doc_id"]) == 10
    assert {int(doc_id.rpartition("/")[2]) % 2 for doc_id in points["doc_id"]} == {1}
    assert drawn(tenant, "map/places", doc_id=["stones/granite/0", "stones/basalt/1"])["points"][
        "doc_id"
    ] == ["stones/basalt/1"]
    own, whole = (each.get("/v1/collections/stones/health").json() for each in (tenant, client))
    assert (own["documents"], own["drift"]) == (10, None)
    assert 0 < own["chunks"] < whole["chunks"]
    assert 0 < own["tokens"] < whole["tokens"]


@pytest.mark.parametrize("path", ["map", "map/places?doc_id=a", "health"])
def test_key_that_may_not_look_is_refused(
    served_root: Path, serve: Callable[..., TestClient], tmp_path: Path, path: str
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    wrong = {"type": "eq", "key": "owner", "value": "acme"}
    tokens = [
        keys.create("embeds", scopes=("embed",))[1],
        keys.create("elsewhere", collections=("pebbles",))[1],
        keys.create("odd", restriction=wrong)[1],
    ]
    client = serve(ServeSettings(root=served_root, keys_file=tmp_path / "keys.json"))
    replies = [
        client.get(f"/v1/collections/stones/{path}", headers={"Authorization": f"Bearer {token}"})
        for token in tokens
    ]
    kinds = [reply.json()["type"].rpartition(":")[2] for reply in replies]
    assert kinds == ["scope-missing", "unknown-collection", "restriction-unusable"]


@pytest.mark.parametrize("params", [{}, {"doc_id": ["x" * 1025]}, {"doc_id": [""]}, {"doc_id": ["a"] * 201}])
def test_places_are_asked_for_within_limits(client: TestClient, params: dict[str, Any]) -> None:
    response = client.get("/v1/collections/stones/map/places", params=params)
    assert (response.status_code, response.json()["type"].rpartition(":")[2]) == (422, "invalid-request")
