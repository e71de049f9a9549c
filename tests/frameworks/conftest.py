"""The collection ``stones``, opened on this machine and behind the API: every retriever gets both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before the frameworks are imported: they read these once, and no test may reach the network.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"

from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.collection import open_collection
from cairn.pipeline.serve.settings import ServeSettings

from tests.served_stones import serving

QUERY = "granite and slate"


@pytest.fixture
def place(tmp_path, tiny_model_folder):
    """Where a store of this machine writes, and what it encodes with."""
    encoder = {"model": str(tiny_model_folder), "landmark_interval": 16, "precision": "fp32"}
    return {"root": str(tmp_path / "root"), "settings": {"encoder": encoder}}


@pytest.fixture
def server(place):
    """A client of a writable server over that root."""
    root = Path(place["root"])
    root.mkdir()
    settings = ServeSettings(root=root, port=0, deadline_seconds=120.0, writable=True)
    with serving(settings) as address, CairnClient(address, timeout_seconds=120) as client:
        yield client


@pytest.fixture(scope="session")
def local_stones(stones_root):
    return open_collection("stones", root=stones_root)


@pytest.fixture(scope="session")
def stones_client(stones_address):
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        yield client


@pytest.fixture(params=["local", "remote"])
def stones(request, local_stones, stones_client):
    return local_stones if request.param == "local" else stones_client.collection("stones")
