"""What ``/readyz`` says of damaged and removed collections, and of keys that cannot be read."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.serve.test_collections import asked, damage

pytestmark = pytest.mark.usefixtures("unhealed")


def test_server_is_ready_when_one_of_all_collections_is(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    damage(own_root, "stones")
    assert serve(ServeSettings(root=own_root)).get("/readyz").status_code == 200


def test_server_is_not_ready_without_a_collection_it_was_started_for(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    damage(own_root, "stones")
    response = serve(ServeSettings(root=own_root, collections=("stones", "pebbles"))).get("/readyz")
    assert (response.status_code, response.json()["type"]) == (503, "urn:problem-type:cairn:not-ready")
    assert response.json()["detail"] == "1 of 2 collection(s) cannot be served; the server's log says more"


def test_removed_collection_is_missed_by_a_server_that_was_started_for_it(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    of_all = serve(ServeSettings(root=own_root))
    of_both = serve(ServeSettings(root=own_root, collections=("stones", "pebbles")))
    shutil.rmtree(own_root / "stones")
    assert of_all.get("/readyz").json() == {"status": "ready"}
    assert of_both.get("/readyz").status_code == 503
    for client in (of_all, of_both):
        assert asked(client, "stones") == (404, "unknown-collection")
    assert of_all.get("/readyz").json() == {"status": "ready"}
    assert of_both.get("/readyz").status_code == 503


def test_ready_server_no_longer_collects_what_it_was_started_with(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    gc.unfreeze()
    try:
        assert serve(ServeSettings(root=own_root)).get("/readyz").status_code == 200
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


def test_server_over_an_empty_root_is_ready_and_lists_nothing(
    tmp_path: Path, serve: Callable[..., TestClient]
) -> None:
    client = serve(ServeSettings(root=tmp_path / "none"))
    assert client.get("/readyz").status_code == 200
    assert client.get("/v1/collections").json() == {"collections": [], "is_writable": False}


@pytest.mark.usefixtures("private")
def test_collections_that_are_listed_as_damaged_degrade_the_server_before_they_are_asked(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    (own_root / "unlocked" / ".lock").mkdir(parents=True)
    client = serve(ServeSettings(root=own_root))
    listed = {each["name"]: each["status"] for each in client.get("/v1/collections").json()["collections"]}
    assert listed == {"pebbles": "ready", "private": "damaged", "stones": "ready", "unlocked": "damaged"}
    health = client.get("/readyz").json()
    assert health["status"] == "degraded"
    assert all(name in health["reason"] for name in ("'private'", "'unlocked'"))
    assert "'stones'" not in health["reason"]


def test_server_whose_keys_cannot_be_read_is_not_ready_until_they_can(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    settings = ServeSettings(root=own_root)
    KeyFile(settings.keys_path).create("app")
    client = serve(settings)
    assert client.get("/readyz").json() == {"status": "ready"}
    content = settings.keys_path.read_bytes()
    settings.keys_path.write_bytes(content[:40])
    response = client.get("/readyz")
    assert (response.status_code, response.json()["detail"]) == (
        503,
        "the server's keeper has to restore the file of keys",
    )
    settings.keys_path.write_bytes(content)
    assert client.get("/readyz").json() == {"status": "ready"}
