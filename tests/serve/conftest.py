"""A small root of real collections, made once by an ingest with a tiny model, and servers over it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import DEFAULT_DEADLINE_SECONDS, ServeSettings
from starlette.testclient import TestClient

from tests.served_stones import stone, wait_until
from tests.small_ingests import WINDOWS, ingest_rows, settings

SERVER = "http://127.0.0.1:8400"


def stone_rows(count=20, version=0):
    """Two tenants' documents; some ids hold slashes, some titles are missing, texts are of several chunks."""
    return [
        {
            **stone(number, 12 + number, f"version {version} of stone"),
            "tenant": "acme" if number % 2 else "zenith",
            "year": 2000 + number if number % 5 else None,
        }
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def patience():
    """Let a busy machine take its time: what is timed on purpose is set in its own test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.pipeline.serve.collections.TABLE_TIMEOUT_SECONDS", 300.0)
        patch.setattr("cairn.pipeline.serve.middleware.BODY_SECONDS", 300.0)
        yield


@pytest.fixture
def unhealed(monkeypatch):
    """Let collections be too large for a server to mend them."""
    monkeypatch.setattr("cairn.pipeline.serve.collections.HEALED_BYTES", 0)


@pytest.fixture(scope="session")
def ingest(tiny_model_folder):
    """Return ``ingest(root, name, rows)``, with the tiny model unless told otherwise; it gives the report."""

    def run(root, name, rows, model=tiny_model_folder, **encoder):
        return ingest_rows(rows, root, settings(model, precision="fp32", **WINDOWS, **encoder), name)

    return run


@pytest.fixture(scope="session")
def served_root(tmp_path_factory, ingest):
    """A root with ``stones`` and ``pebbles`` that no test changes."""
    root = tmp_path_factory.mktemp("served") / "root"
    ingest(root, "stones", stone_rows())
    ingest(root, "pebbles", stone_rows(4))
    return root


@pytest.fixture
def own_root(served_root, tmp_path):
    """A copy of that root which the test may break."""
    return Path(shutil.copytree(served_root, tmp_path / "root"))


@pytest.fixture
def private(own_root, monkeypatch):
    """A folder under that root of which this process may read nothing, whoever runs it."""
    folder = own_root / "private"

    def refusing(call):
        def refused(path, *given, **options):
            if isinstance(path, str | Path) and folder in Path(path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *given, **options)

        return refused

    folder.mkdir()
    monkeypatch.setattr(Path, "stat", refusing(Path.stat))
    monkeypatch.setattr(os, "open", refusing(os.open))
    return folder


@contextmanager
def starter():
    """Give a starter of servers that run until the block ends."""
    with ExitStack() as stack:

        def start(target, *, base_url=SERVER, key=None, **options):
            if isinstance(target, ServeSettings) and target.deadline_seconds == DEFAULT_DEADLINE_SECONDS:
                target = replace(target, deadline_seconds=300.0)
            app = create_app(target, **options) if isinstance(target, ServeSettings) else target
            client = stack.enter_context(TestClient(app, base_url=base_url, raise_server_exceptions=True))
            if key is not None:
                token = KeyFile(target.keys_path).create("own", **key)[1]
                client.headers["Authorization"] = f"Bearer {token}"
            while client.get("/readyz").json().get("detail") == "collections are being opened":
                time.sleep(0.01)
            return client

        yield start


@pytest.fixture
def serve():
    """Return a starter of servers.

    ``serve(settings)`` or ``serve(app)`` gives a client once its collections were tried; with ``key={…}``
    its requests carry a key made so.
    """
    with starter() as start:
        yield start


@pytest.fixture(scope="module")
def client(served_root):
    """A client of a server over both collections, without keys, shared by the tests of a module."""
    with starter() as start:
        yield start(ServeSettings(root=served_root))


@pytest.fixture
def own_client(served_root, serve):
    """A client of such a server of the test's own, for what its state or settings change."""
    return serve(ServeSettings(root=served_root))


class ByLength:
    """A reranker without a model, which prefers short passages and fails where it is told to."""

    fault: str | None = None

    def score(self, _, texts):
        scores = np.array([1.0 / (1 + len(text)) for text in texts])
        return np.full_like(scores, np.nan) if self.fault == "nan" else scores


def problem(response):
    """Return the status and the name of a problem, which says nothing of this machine."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    for place in (tempfile.gettempdir(), f"{Path.home()}/", "site-packages"):
        assert place not in response.text
    return response.status_code, response.json()["type"].removeprefix("urn:problem-type:cairn:")


def problem_everywhere(client, name):
    """Return what every address says of a collection, which must be the same."""
    replies = [
        client.post(f"/v1/collections/{name}/search", json={"query": "slate"}),
        client.post(f"/v1/vector_stores/{name}/search", json={"query": "slate"}),
        client.post("/v1/embeddings", json={"model": name, "input": "slate"}),
        *(client.get(f"/v1/collections/{name}{path}") for path in ("", "/documents/x", "/map", "/health")),
    ]
    (found,) = {problem(reply) for reply in replies}
    return found


def drawn(client, path, **params):
    """Return the map of ``stones``, or places on it, once it is drawn."""

    replies = list[Any]()

    def is_drawn():
        replies.append(client.get(f"/v1/collections/stones/{path}", params=params).json())
        return replies[-1]["status"] != "drawing"

    wait_until(is_drawn)
    return replies[-1]
