"""The collection ``stones``, opened on this machine and behind the API: every retriever gets both."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Before the frameworks are imported: they read these once, and no test may reach the network.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["LANGSMITH_TRACING"] = "false"

from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.line.build_index import build_index

QUERY = "granite and slate"


@pytest.fixture(scope="session")
def local_stones(stones_root):
    return open_collection("stones", root=stones_root)


@pytest.fixture(scope="session")
def late_stones(tmp_path_factory, tiny_model_folder):
    """A collection with token vectors."""
    folder = tmp_path_factory.mktemp("late")
    texts = ("granite and slate", "the sea and the salt", "an old mill", "marble stairs")
    rows = {"id": list("abcd"), "title": ["Granite", "Sea", None, "Marble"], "text": texts}
    pq.write_table(pa.table(rows), folder / "stones.parquet")
    config = IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, use_context=False, token_bytes=8
        ),
        cluster=ClusterConfig(num_clusters=1),
        context=ContextConfig(context_documents=2, max_document_tokens=16),
    )
    build_index([str(folder / "stones.parquet")], folder / "root", "late", config)
    return open_collection("late", root=folder / "root")


@pytest.fixture(scope="session")
def stones_client(stones_address):
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        yield client


@pytest.fixture(params=["local", "remote"])
def stones(request, local_stones, stones_client):
    return local_stones if request.param == "local" else stones_client.collection("stones")
