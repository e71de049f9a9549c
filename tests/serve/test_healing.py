"""Damage: a server mends a collection where no row is lost, and says in /readyz what it cannot mend."""

from __future__ import annotations

import gc
import os
import random
import shutil
from pathlib import Path

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import repartition
from cairn.pipeline.index.names import CHUNKS_FAISS, TOKENS_ARROW
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.serve import collections
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import problem, stone_rows
from tests.serve.test_collections import asked, damage, flip
from tests.served_stones import wait_until


@pytest.fixture(autouse=True)
def nothing_is_looked_at_again_by_itself(monkeypatch):
    """However long a busy machine takes to mend: what is mended is taken up at once."""
    monkeypatch.setattr("cairn.pipeline.search.searcher.RETRY_SECONDS", 10_000.0)


def answer(client):
    reply = client.post("/v1/collections/stones/search", json={"query": "slate", "top_k": 20})
    assert reply.status_code == 200, reply.text
    return reply.json()


def hits(client):
    return [hit["doc_id"] for hit in answer(client)["hits"]]


def generation_of(client):
    return answer(client)["generation"]


def test_only_generation_damaged_while_or_before_it_is_served_costs_no_answer(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    before = hits(client)
    for number in (1, 2, 3):
        damage(own_root, "stones", number)
        if number == 3:
            client = serve(ServeSettings(root=own_root))
        assert hits(client) == before
        assert client.get("/readyz").json() == {"status": "ready"}
    assert verify_collection(CollectionLayout(own_root, "stones")) == []


def test_file_that_both_generations_share_costs_no_answer(own_root, serve, ingest, monkeypatch):
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    ingest(own_root, "stones", [*stone_rows(), {"id": "new", "text": "tuff"}])
    folder = CollectionLayout(own_root, "stones").generation_folder(2)
    assert (folder / CHUNKS_FAISS).stat().st_nlink == 2
    client = serve(ServeSettings(root=own_root))
    before = set(hits(client))
    damage(own_root, "stones", 2)
    assert set(hits(client)) == before


@pytest.mark.usefixtures("two_generations")
def test_newest_generation_is_mended_while_the_older_one_answers(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    damage(own_root, "stones", 2)
    assert generation_of(client) == 1
    wait_until(lambda: generation_of(client) == 3)  # each search before is answered, too
    assert len(hits(client)) == 20
    assert client.get("/readyz").json() == {"status": "ready"}


@pytest.mark.usefixtures("two_generations", "unhealed")
def test_newest_generation_that_cannot_be_mended_is_told_of_once(own_root, serve, monkeypatch):
    said: list[str] = []
    # Not caplog: other tests of the process may have turned the logger off.
    monkeypatch.setattr(collections.log, "warning", lambda text, *values: said.append(text % values))
    client = serve(ServeSettings(root=own_root))
    damage(own_root, "stones", 2)
    wait_until(lambda: generation_of(client) == 1 and said)
    for _ in range(5):
        assert generation_of(client) == 1
    assert [line.partition(" exceeds")[0] for line in said] == [
        "serve.not_healed collection=stones sentence=generation 2"
    ]


def test_damaged_file_of_a_partition_is_mended(own_root, serve):
    layout = CollectionLayout(own_root, "stones")
    repartition(layout, 2)
    client = serve(ServeSettings(root=own_root))
    before = set(hits(client))
    (file, *_) = layout.partitions_folder.glob(f"*/generations/*/{CHUNKS_FAISS}")
    file.write_bytes(b"")
    assert set(hits(client)) == before
    wait_until(lambda: generation_of(client) == 3)  # each search before is answered, too
    assert set(hits(client)) == before
    wait_until(lambda: not verify_collection(layout))  # it names what is damaged until that is removed


def written(folder):
    """Return when each file was written, but for the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_lost_rows_are_left_to_the_keeper(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    (rows,) = (own_root / "stones" / "lance" / "documents.lance" / "data").iterdir()
    rows.write_bytes(b"")
    damage(own_root, "stones")
    before = written(own_root / "stones")
    assert asked(client, "stones") == (503, "collection-damaged")
    assert written(own_root / "stones") == before


def test_collection_that_is_being_written_is_not_mended(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    with CollectionLayout(own_root, "stones").writer_lock():
        damage(own_root, "stones")
        assert asked(client, "stones") == (503, "collection-damaged")


@pytest.fixture
def two_generations(own_root, ingest):
    """Publish a second generation of ``stones``, with files of its own."""
    ingest(own_root, "stones", stone_rows(version=2))


@pytest.mark.parametrize("name", ["context.arrow", "MANIFEST.json"])
def test_small_file_is_mended_by_its_second_copy_while_requests_wait(own_root, serve, name):
    client = serve(ServeSettings(root=own_root))
    before = hits(client)
    path = CollectionLayout(own_root, "stones").generation_folder(1) / name
    path.write_bytes(path.read_bytes()[:10])
    for served in (client, serve(ServeSettings(root=own_root))):
        assert hits(served) == before
        assert served.get("/readyz").json()["status"] == "ready"


def test_token_vectors_that_both_generations_share_are_made_again(
    tmp_path, tiny_model_folder, serve, ingest, monkeypatch
):
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    root = tmp_path / "root"
    changed = stone_rows(1, version=1)
    for rows in (stone_rows(), changed, [{"id": "new", "text": "tuff"}]):
        ingest(root, "stones", rows, tiny_model_folder, token_bytes=8)
    layout = CollectionLayout(root, "stones")
    path = layout.generation_folder(3) / TOKENS_ARROW
    assert path.stat().st_nlink == 2

    def scores():
        return [(hit["doc_id"], hit["score"]) for hit in answer(client)["hits"]]

    client = serve(ServeSettings(root=root))
    before = scores()
    path.write_bytes(path.read_bytes()[:-1])
    assert len(scores()) == len(before)
    wait_until(lambda: scores() == before and client.get("/readyz").json() == {"status": "ready"})
    wait_until(lambda: not verify_collection(layout))  # it names what is damaged until that is removed
    assert open_generation(layout).token_vectors is not None


def test_server_that_verifies_refuses_flipped_rows(own_root, serve):
    (rows,) = (own_root / "stones" / "lance" / "documents.lance" / "data").iterdir()
    content = rows.read_bytes()
    rows.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    statuses = [
        serve(ServeSettings(root=own_root, collections=("stones",), verify=verify)).get("/readyz").status_code
        for verify in (False, True)
    ]
    assert statuses == [200, 503]


SEARCHES = 3


def replace(path):
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(random.Random(path.name).randbytes(size))


DAMAGES = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 3),
    "removed": Path.unlink,
    "replaced": replace,
}


@pytest.mark.faults
@pytest.mark.parametrize("damage", DAMAGES)
def test_destroyed_file_costs_no_answer_but_rows_that_nothing_else_holds(
    served_root, tmp_path, serve, ingest, monkeypatch, damage
):
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    whole = tmp_path / "whole"
    shutil.copytree(served_root / "stones", whole / "stones")
    ingest(whole, "stones", [*stone_rows(), {"id": "new", "text": "tuff"}])
    data = sorted((whole / "stones" / "lance" / "documents.lance" / "data").iterdir(), key=os.path.getmtime)
    files = [path for path in sorted((whole / "stones").rglob("*")) if path.is_file() and path.stat().st_size]
    refused = list[Path]()
    for number, path in enumerate(files):
        root = tmp_path / str(number)
        shutil.copytree(whole, root)
        client = serve(ServeSettings(root=root))
        assert asked(client, "stones") == (200, "")
        DAMAGES[damage](root / path.relative_to(whole))
        said = {asked(client, "stones") for _ in range(SEARCHES)}
        if said != {(200, "")}:
            assert said == {(503, "collection-damaged")}, path
            assert client.get("/readyz").status_code == 503
            refused.append(path)
        shutil.rmtree(root, ignore_errors=True)  # the server may be mending it still
    assert refused == [data[0]]


@pytest.mark.usefixtures("unhealed")
def test_server_is_not_ready_without_a_collection_it_was_started_for(own_root, serve):
    damage(own_root, "stones")
    assert serve(ServeSettings(root=own_root)).get("/readyz").status_code == 200
    response = serve(ServeSettings(root=own_root, collections=("stones", "pebbles"))).get("/readyz")
    assert problem(response) == (503, "not-ready")
    assert response.json()["detail"] == "1 of 2 collection(s) cannot be served; the server's log says more"


def test_removed_collection_is_missed_by_a_server_that_was_started_for_it(own_root, serve):
    of_all = serve(ServeSettings(root=own_root))
    of_both = serve(ServeSettings(root=own_root, collections=("stones", "pebbles")))
    shutil.rmtree(own_root / "stones")
    for _ in range(2):
        assert of_all.get("/readyz").json() == {"status": "ready"}
        assert of_both.get("/readyz").status_code == 503
        for client in (of_all, of_both):
            assert [asked(client, "stones") for _ in range(2)] == [(404, "unknown-collection")] * 2
            assert asked(client, "pebbles") == (200, "")


def test_ready_server_no_longer_collects_what_it_was_started_with(own_root, serve):
    gc.unfreeze()
    try:
        assert serve(ServeSettings(root=own_root)).get("/readyz").status_code == 200
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


def test_server_over_an_empty_root_is_ready_and_lists_nothing(tmp_path, serve):
    client = serve(ServeSettings(root=tmp_path / "none"))
    assert client.get("/readyz").status_code == 200
    assert client.get("/v1/collections").json() == {"collections": [], "is_writable": False}


@pytest.mark.usefixtures("private")
def test_collections_that_are_listed_as_damaged_degrade_the_server_before_they_are_asked(
    own_root, serve, monkeypatch
):
    (own_root / "unlocked" / ".lock").mkdir(parents=True)
    client = serve(ServeSettings(root=own_root))
    listed = {each["name"]: each["status"] for each in client.get("/v1/collections").json()["collections"]}
    assert listed == {"pebbles": "ready", "private": "damaged", "stones": "ready", "unlocked": "damaged"}
    health = client.get("/readyz").json()
    assert health["status"] == "degraded"
    assert all(name in health["reason"] for name in ("'private'", "'unlocked'"))
    assert "'stones'" not in health["reason"]
    with monkeypatch.context() as patched:  # the next probes read no manifest again
        patched.setattr(collections.Collections, "summarise", None)
        assert client.get("/readyz").json() == health
