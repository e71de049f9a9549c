"""The MCP server, asked by the SDK's own client."""

from __future__ import annotations

import re
from functools import partial

import pytest
from cairn.pipeline.frameworks.mcp_server import OneCollection, make_server
from mcp import Client

from tests.frameworks.conftest import QUERY
from tests.serve.test_mcp_routes import connected

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(params=["here", "behind the API", "at /mcp", "at /mcp with a handshake"])
def connect(request, local_stones, stones_client, stones_address):
    """Return what opens a client of tools for the collection ``stones``."""
    if request.param.startswith("at /mcp"):
        options = {"mode": "legacy"} if request.param.endswith("handshake") else {}
        return partial(connected, f"{stones_address}/mcp", **options)
    source = local_stones if request.param == "here" else stones_client.collection("stones")
    return lambda: Client(make_server(lambda _: OneCollection(source)))


async def answer_of(client, tool, **asked):
    """Return what a tool answers."""
    answer = (await client.call_tool(tool, asked)).structured_content
    assert answer is not None
    return answer


async def test_tools_read_and_nothing_else(connect):
    async with connect() as client:
        tools = (await client.list_tools()).tools
        assert (await client.call_tool("list_collections", {})).structured_content == {"result": ["stones"]}
    assert {tool.name for tool in tools} == {
        *("list_collections", "search", "get_document"),
        *("list_columns", "count_documents", "list_documents"),
    }
    for tool in tools:
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is True
        assert tool.output_schema is not None


async def test_search_finds_what_the_collection_does_and_get_document_reads_it(connect, local_stones):
    filters = {"type": "gte", "key": "year", "value": 2003}
    asked = {"query": QUERY, "top_k": 3, "max_characters": 400, "filters": filters}
    async with connect() as client:
        answer = await answer_of(client, "search", **asked)
        first = answer["documents"][0]
        passage = first["passages"][0]
        place = {"doc_id": first["doc_id"], "start_char": passage["start_char"]}
        read = await answer_of(client, "get_document", **place, max_characters=len(passage["text"]))
    expected = local_stones.search(**asked)
    assert answer["collection"] == "stones"
    assert [each["doc_id"] for each in answer["documents"]] == [
        hit.doc_id for hit in expected.hits if hit.passages
    ]
    assert passage["text"] == expected.hits[0].passages[0].text == read["text"]
    assert first["metadata"]["year"] >= 2003
    passages = [each for document in answer["documents"] for each in document["passages"]]
    assert sum(len(each["text"]) for each in passages) <= 400
    assert read["num_characters"] >= read["end_char"]


async def test_search_within_too_small_a_budget_names_the_smallest_that_answers(connect):
    async with connect() as client:
        answer = await answer_of(client, "search", query=QUERY, max_characters=1)
        assert answer["documents"] == []
        [warning] = answer["warnings"]
        smallest = max(map(int, re.findall(r"\d+", warning)))
        assert (await answer_of(client, "search", query=QUERY, max_characters=smallest))["documents"]


@pytest.mark.parametrize(
    ("tool", "asked", "sentence"),
    [
        ("get_document", {"doc_id": "nowhere"}, "there is no document of this id"),
        ("search", {"query": "  "}, "blank|white space|pattern"),
        ("search", {"query": "x", "filters": {"type": "eq", "key": "no_such_column", "value": 1}}, "key"),
        ("search", {"query": "x", "top_k": 1_000}, "less than or equal to 50"),
        ("search", {"query": "x", "collection": "pebbles"}, "only collection is|no such collection"),
        ("search", {"query": "x", "collection": "../stones"}, "pattern"),
    ],
)
async def test_what_cannot_be_answered_is_a_sentence(connect, tool, asked, sentence):
    async with connect() as client:
        result = await client.call_tool(tool, asked)
    assert result.is_error
    text = " ".join(block.text for block in result.content if block.type == "text")
    assert re.search(sentence, text), text
    assert "Traceback" not in text
    assert "\n" not in text
