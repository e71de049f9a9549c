"""MCP at /mcp, asked over loopback by the SDK's own client."""

from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import httpx2
import pytest
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.served_stones import serving

pytestmark = pytest.mark.anyio


@contextmanager
def served(settings):
    with serving(replace(settings, port=0, deadline_seconds=300.0)) as address:
        yield f"{address}/mcp"


@asynccontextmanager
async def connected(url, key=None, **options):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=300.0) as http,
        Client(streamable_http_client(url, http_client=http), **options) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ([], "Input should be an object"),
        ({"jsonrpc": "1.0", "id": 1, "method": "tools/list"}, "jsonrpc: Input should be '2.0'"),
        ({"jsonrpc": "2.0", "id": 1}, "method: Field required"),
        (
            {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": 7},
            "params: Input should be an object",
        ),
        ({"jsonrpc": "2.0", "id": [1], "method": "tools/list"}, "id.int: Input should be a valid integer"),
    ],
)
def test_malformed_message_is_answered_with_one_sentence(client, message, sentence):
    response = client.post("/mcp", json=message)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, -32600)
    assert sentence in error["message"]
    assert "\n" not in error["message"]


async def test_key_reaches_its_collection_alone(own_root):
    settings = ServeSettings(root=own_root)
    narrow = KeyFile(settings.keys_path).create("narrow", collections=("stones",))[1]
    with served(settings) as url:
        async with connected(url, narrow) as client:
            names = (await client.call_tool("list_collections", {})).structured_content
            other = await client.call_tool("search", {"query": "stone", "collection": "pebbles"})
    assert names == {"result": ["stones"]}
    assert other.is_error


@pytest.mark.parametrize(("scopes", "status"), [((), 401), (("embed",), 403)])
def test_request_without_a_key_for_searches_is_refused(own_root, serve, scopes, status):
    settings = ServeSettings(root=own_root)
    key = KeyFile(settings.keys_path).create("app", scopes=scopes or ("search",))[1]
    headers = {"Authorization": f"Bearer {key}"} if scopes else {}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    assert serve(settings).post("/mcp", json=message, headers=headers).status_code == status


def test_get_is_refused_for_there_are_no_streams(client):
    response = client.get("/mcp")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_missing_extra_is_named(own_client, monkeypatch):
    monkeypatch.delitem(sys.modules, "cairn.pipeline.frameworks.mcp_server", raising=False)
    for name in ("mcp", "mcp.server", "mcp.server.mcpserver"):
        monkeypatch.setitem(sys.modules, name, None)
    response = own_client.post("/mcp", content=json.dumps({}), headers={"Content-Type": "application/json"})
    assert response.status_code == 404
    assert "the extra mcp" in response.json()["detail"]


async def test_document_added_by_a_model_is_found_and_deleted(own_root):
    with served(ServeSettings(root=own_root, writable=True)) as url:
        async with connected(url) as client:
            found = (await client.call_tool("list_collections", {})).structured_content
            unnamed = await client.call_tool("search", {"query": "x"})
            assert found == {"result": ["pebbles", "stones"]}
            assert unnamed.is_error
            assert "a collection must be named" in unnamed.content[0].text
            here = {"collection": "stones"}
            told = await client.call_tool("add_document", {"doc_id": "new", "text": "obsidian", **here})
            assert not told.is_error, told
            answer = (await client.call_tool("search", {"query": "obsidian", **here})).structured_content
            assert answer["documents"][0]["doc_id"] == "new"
            for doc_id, text, why in (("bad", " ", "the text is empty"), ("..", "obsidian", "must not be .")):
                asked = {"doc_id": doc_id, "text": text, **here}
                refused = await client.call_tool("add_document", asked)
                assert refused.is_error
                assert why in str(refused.content)
            assert not (await client.call_tool("delete_document", {"doc_id": "new", **here})).is_error
            assert (await client.call_tool("delete_document", {"doc_id": "new", **here})).is_error


async def test_key_that_only_reads_lets_no_model_write(own_root):
    _, reader = KeyFile(own_root / "keys.json").create("reader")
    with served(ServeSettings(root=own_root, writable=True)) as url:
        async with connected(url, reader) as client:
            asked = {"doc_id": "new", "text": "obsidian", "collection": "stones"}
            assert "scope write" in str((await client.call_tool("add_document", asked)).content)
