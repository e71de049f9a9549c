"""Each file of a served collection of two segments, destroyed in each way, and searches that go on."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.serve.test_collections import asked

pytestmark = pytest.mark.faults
SEARCHES = 3


def flip(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes([content[len(content) // 2] ^ 1]))


def replace(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(random.Random(path.name).randbytes(size))


DAMAGES = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 3),
    "removed": Path.unlink,
    "replaced": replace,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_destroyed_file_costs_no_answer_but_rows_that_nothing_else_holds(
    served_root: Path,
    tmp_path: Path,
    serve: Callable[..., TestClient],
    ingest: Callable[..., None],
    make_rows: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    whole = tmp_path / "whole"
    shutil.copytree(served_root / "stones", whole / "stones")
    ingest(whole, "stones", [*make_rows(), {"id": "new", "text": "tuff"}])
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
