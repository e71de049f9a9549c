"""A server mends a damaged collection by itself where no row is lost, and touches nothing where one is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.index import held_files, tiers
from pipeline.index.layout import CHUNKS_FAISS, CollectionLayout
from pipeline.index.maintenance import verify_collection
from pipeline.serve.settings import ServeSettings
from tests.serve.test_collections import asked, damage

CUT = "import os, sys; os.truncate(sys.argv[1], 10)"


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


@pytest.mark.usefixtures("unhealed")
def test_large_collection_is_left_to_the_keeper(own_root: Path, serve: Callable[..., TestClient]) -> None:
    client = serve(ServeSettings(root=own_root))
    damage(own_root, "stones")
    assert asked(client, "stones") == (503, "collection-damaged")


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(held_files._Leases, "is_on", False)
    before = signal.getsignal(signal.SIGIO)
    held_files.lease_held_files()
    yield
    signal.signal(signal.SIGIO, before if callable(before) else signal.SIG_IGN)


@pytest.mark.usefixtures("leases")
def test_file_that_another_program_waits_to_cut_is_made_again_meanwhile(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    client = serve(ServeSettings(root=own_root))
    before = hits(client)
    path = CollectionLayout(own_root, "stones").generation_folder(1) / CHUNKS_FAISS
    with subprocess.Popen([sys.executable, "-c", CUT, os.fspath(path)]) as cutting:
        for _ in range(10_000):
            if cutting.poll() is not None:
                break
            assert hits(client) == before
        assert cutting.wait(60) == 0
    assert path.stat().st_size == 10
    assert hits(client) == before
