"""A server makes token vectors again that no generation has whole, and looks at rows where it is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import TOKENS_ARROW
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient


def test_token_vectors_that_both_generations_share_are_made_again(
    tmp_path: Path,
    tiny_model_folder: Path,
    serve: Callable[..., TestClient],
    ingest: Callable[..., None],
    make_rows: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    root = tmp_path / "root"
    changed = make_rows(1, version=1)
    for rows in (make_rows(), changed, [{"id": "new", "text": "tuff"}]):
        ingest(root, "stones", rows, tiny_model_folder, token_bytes=8)
    layout = CollectionLayout(root, "stones")
    path = layout.generation_folder(3) / TOKENS_ARROW
    assert path.stat().st_nlink == 2

    def scores() -> list[tuple[str, float]]:
        reply = client.post("/v1/collections/stones/search", json={"query": "slate", "top_k": 20})
        assert reply.status_code == 200, reply.text
        return [(hit["doc_id"], hit["score"]) for hit in reply.json()["hits"]]

    client = serve(ServeSettings(root=root))
    before = scores()
    path.write_bytes(path.read_bytes()[:-1])
    assert len(scores()) == len(before)
    until = time.monotonic() + 300.0
    while (
        scores() != before
        or client.get("/readyz").json() != {"status": "ready"}
        or verify_collection(layout)  # it names the damaged generation until that is removed
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert open_generation(layout).token_vectors is not None


def test_server_that_verifies_refuses_flipped_rows(own_root: Path, serve: Callable[..., TestClient]) -> None:
    (rows,) = (own_root / "stones" / "lance" / "documents.lance" / "data").iterdir()
    content = rows.read_bytes()
    rows.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    statuses = [
        serve(ServeSettings(root=own_root, collections=("stones",), verify=verify)).get("/readyz").status_code
        for verify in (False, True)
    ]
    assert statuses == [200, 503]
