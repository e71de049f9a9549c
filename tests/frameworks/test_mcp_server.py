"""The MCP server, asked by the SDK's own client."""

from __future__ import annotations

import re

import pytest
from cairn.pipeline.frameworks.mcp_server import OneCollection, make_server
from mcp import Client

pytestmark = pytest.mark.anyio
QUERY = "granite and slate"


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_tools_read_and_nothing_else(stones):
    async with Client(make_server(lambda _: OneCollection(stones))) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {
            *("list_collections", "search", "get_document"),
            *("list_columns", "count_documents", "list_documents"),
        }
        for tool in tools:
            assert tool.annotations is not None
            assert tool.annotations.read_only_hint is True
            assert tool.output_schema is not None


async def test_search_finds_documents_that_get_document_reads(stones):
    async with Client(make_server(lambda _: OneCollection(stones))) as client:
        filters = {"type": "gte", "key": "year", "value": 2003}
        asked = {"query": QUERY, "top_k": 3, "max_characters": 400, "filters": filters}
        answer = (await client.call_tool("search", asked)).structured_content
        assert answer is not None
        assert answer["collection"] == "stones"
        assert 1 <= len(answer["documents"]) <= 3
        first = answer["documents"][0]
        passage = first["passages"][0]
        assert first["metadata"]["year"] >= 2003
        assert (
            sum(len(each["text"]) for document in answer["documents"] for each in document["passages"]) <= 400
        )
        place = {
            "doc_id": first["doc_id"],
            "start_char": passage["start_char"],
            "max_characters": len(passage["text"]),
        }
        read = (await client.call_tool("get_document", place)).structured_content
        assert read is not None
        assert read["text"] == passage["text"]
        assert read["num_characters"] >= read["end_char"]


async def test_search_names_the_words_that_answered(late_stones):
    async with Client(make_server(lambda _: OneCollection(late_stones))) as client:
        answer = (await client.call_tool("search", {"query": "granite"})).structured_content
        assert answer is not None
        passages = [each for document in answer["documents"] for each in document["passages"]]
        assert any(passage["highlights"] for passage in passages)
        assert all(word in passage["text"] for passage in passages for word in passage["highlights"])
        assert answer["warnings"] == []


async def test_search_within_too_small_a_budget_names_the_smallest_that_answers(stones):
    async with Client(make_server(lambda _: OneCollection(stones))) as client:
        asked = {"query": QUERY, "max_characters": 1}
        answer = (await client.call_tool("search", asked)).structured_content
        assert answer is not None
        assert answer["documents"] == []
        [warning] = answer["warnings"]
        smallest = max(map(int, re.findall(r"\d+", warning)))
        asked["max_characters"] = smallest
        answer = (await client.call_tool("search", asked)).structured_content
        assert answer is not None
        assert answer["documents"]


@pytest.mark.parametrize(
    ("tool", "asked", "sentence"),
    [
        ("get_document", {"doc_id": "nowhere"}, "there is no document of this id"),
        ("search", {"query": "  "}, "blank|white space|pattern"),
        ("search", {"query": "x", "filters": {"type": "eq", "key": "no_such_column", "value": 1}}, "key"),
        ("search", {"query": "x", "top_k": 1_000}, "less than or equal to 50"),
        ("search", {"query": "x", "collection": "pebbles"}, "the only collection is 'stones'"),
        ("search", {"query": "x", "collection": "../stones"}, "pattern"),
    ],
)
async def test_what_cannot_be_answered_is_a_sentence(stones, tool, asked, sentence):
    async with Client(make_server(lambda _: OneCollection(stones))) as client:
        result = await client.call_tool(tool, asked)
        assert result.is_error
        text = " ".join(block.text for block in result.content if block.type == "text")
        assert re.search(sentence, text), text
        assert "Traceback" not in text
