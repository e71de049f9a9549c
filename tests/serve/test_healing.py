"""A server mends a damaged collection by itself where no row is lost, and touches nothing where one is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CHUNKS_FAISS
from cairn.pipeline.index.repartition import repartition
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.serve import collections
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.serve.test_collections import asked, damage


@pytest.fixture(autouse=True)
def nothing_is_looked_at_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes to mend: what is mended is taken up at once."""
    monkeypatch.setattr("cairn.pipeline.search.served.RETRY_SECONDS", 10_000.0)


def hits(client: TestClient) -> list[str]:
    reply = client.post("/v1/collections/stones/search", json={"query": "slate", "top_k": 20})
    assert reply.status_code == 200, reply.text
    return [hit["doc_id"] for hit in reply.json()["hits"]]


def test_only_generation_damaged_while_it_is_served_costs_no_answer(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    client = serve(ServeSettings(root=own_root))
    before = hits(client)
    for number in (1, 2):
        damage(own_root, "stones", number)
        assert hits(client) == before
        assert client.get("/readyz").json() == {"status": "ready"}
    assert verify_collection(CollectionLayout(own_root, "stones")) == []


def test_server_started_over_a_damaged_collection_mends_it(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    damage(own_root, "stones")
    client = serve(ServeSettings(root=own_root))
    assert len(hits(client)) == 20
    assert client.get("/readyz").json() == {"status": "ready"}


def test_file_that_both_generations_share_costs_no_answer(
    own_root: Path,
    serve: Callable[..., TestClient],
    ingest: Callable[..., None],
    make_rows: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    ingest(own_root, "stones", [*make_rows(), {"id": "new", "text": "tuff"}])
    folder = CollectionLayout(own_root, "stones").generation_folder(2)
    assert (folder / CHUNKS_FAISS).stat().st_nlink == 2
    client = serve(ServeSettings(root=own_root))
    before = set(hits(client))
    damage(own_root, "stones", 2)
    assert set(hits(client)) == before


def generation_of(client: TestClient) -> int:
    reply = client.post("/v1/collections/stones/search", json={"query": "slate"})
    assert reply.status_code == 200, reply.text
    return reply.json()["generation"]


def wait_for(client: TestClient, generation: int) -> None:
    """Search until a generation answers; each search before is answered, too."""
    until = time.monotonic() + 300.0
    while generation_of(client) != generation:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.usefixtures("two_generations")
def test_newest_generation_is_mended_while_the_older_one_answers(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    client = serve(ServeSettings(root=own_root))
    damage(own_root, "stones", 2)
    assert generation_of(client) == 1
    wait_for(client, 3)
    assert len(hits(client)) == 20
    assert client.get("/readyz").json() == {"status": "ready"}


@pytest.mark.usefixtures("two_generations", "unhealed")
def test_newest_generation_that_cannot_be_mended_is_told_of_once(
    own_root: Path, serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    # Not caplog: other tests of the process may have turned the logger off.
    monkeypatch.setattr(collections.log, "warning", lambda text, *values: said.append(text % values))
    client = serve(ServeSettings(root=own_root))
    damage(own_root, "stones", 2)
    until = time.monotonic() + 300.0
    while not said:
        assert generation_of(client) == 1
        assert time.monotonic() < until
    for _ in range(5):
        assert generation_of(client) == 1
    assert [line.partition(" exceeds")[0] for line in said] == [
        "serve.not_healed collection=stones sentence=generation 2"
    ]


def test_damaged_file_of_a_partition_is_mended(own_root: Path, serve: Callable[..., TestClient]) -> None:
    layout = CollectionLayout(own_root, "stones")
    repartition(layout, 2)
    client = serve(ServeSettings(root=own_root))
    before = set(hits(client))
    (file, *_) = layout.partitions_folder.glob(f"*/generations/*/{CHUNKS_FAISS}")
    file.write_bytes(b"")
    assert set(hits(client)) == before
    wait_for(client, 3)
    assert set(hits(client)) == before
    assert verify_collection(layout) == []


def written(folder: Path) -> dict[Path, int]:
    """Return when each file was written, but for the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_lost_rows_are_left_to_the_keeper(own_root: Path, serve: Callable[..., TestClient]) -> None:
    client = serve(ServeSettings(root=own_root))
    (rows,) = (own_root / "stones" / "lance" / "documents.lance" / "data").iterdir()
    rows.write_bytes(b"")
    damage(own_root, "stones")
    before = written(own_root / "stones")
    assert asked(client, "stones") == (503, "collection-damaged")
    assert written(own_root / "stones") == before


def test_collection_that_is_being_written_is_not_mended(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    client = serve(ServeSettings(root=own_root))
    with CollectionLayout(own_root, "stones").writer_lock():
        damage(own_root, "stones")
        assert asked(client, "stones") == (503, "collection-damaged")


@pytest.fixture
def two_generations(own_root: Path, ingest: Callable[..., None], make_rows: Callable[..., Any]) -> None:
    """Publish a second generation of ``stones``, with files of its own."""
    ingest(own_root, "stones", make_rows(version=2))


@pytest.mark.parametrize("name", ["context.arrow", "MANIFEST.json"])
def test_small_file_is_mended_by_its_second_copy_while_requests_wait(
    own_root: Path, serve: Callable[..., TestClient], name: str
) -> None:
    client = serve(ServeSettings(root=own_root))
    before = hits(client)
    path = CollectionLayout(own_root, "stones").generation_folder(1) / name
    path.write_bytes(path.read_bytes()[:10])
    for served in (client, serve(ServeSettings(root=own_root))):
        assert hits(served) == before
        assert served.get("/readyz").json()["status"] == "ready"
