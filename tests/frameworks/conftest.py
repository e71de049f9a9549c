"""The collection ``stones``, opened on this machine and behind the API: every retriever gets both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before the frameworks are imported: they read these once, and no test may reach the network.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"

from pipeline.client import CairnClient
from pipeline.collection import Collection, open_collection
from pipeline.frameworks.source import Searchable

QUERY = "granite and slate"


@pytest.fixture(scope="session")
def local_stones(stones_root: Path) -> Collection:
    return open_collection("stones", root=stones_root)


@pytest.fixture(scope="session")
def stones_client(stones_address: str) -> Iterator[CairnClient]:
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        yield client


@pytest.fixture(params=["local", "remote"])
def stones(
    request: pytest.FixtureRequest, local_stones: Collection, stones_client: CairnClient
) -> Searchable:
    return local_stones if request.param == "local" else stones_client.collection("stones")
