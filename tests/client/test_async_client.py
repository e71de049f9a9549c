"""The async client gives the same answers as the sync one."""

from __future__ import annotations

import asyncio

import pytest
from cairn.pipeline.client.clients import AsyncCairnClient, CairnClient
from cairn.pipeline.client.errors import NotFoundError

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_every_method_answers_as_the_client_that_waits(stones_address: str) -> None:
    with CairnClient(stones_address, timeout_seconds=300.0) as waiting:
        expected = waiting.collection("stones")
        async with AsyncCairnClient(stones_address, timeout_seconds=300.0) as client:
            stones = client.collection("stones")
            assert await client.collections() == waiting.collections()
            assert await stones.describe() == expected.describe()
            assert await stones.search("slate", top_k=3) == expected.search("slate", top_k=3)
            assert await stones.search_batch(["slate", "chalk"]) == expected.search_batch(["slate", "chalk"])
            assert [page async for page in stones.search_pages("slate", top_k=7)] == list(
                expected.search_pages("slate", top_k=7)
            )
            assert await stones.read_document("stones/slate/2") == expected.read_document("stones/slate/2")
            assert await stones.read_document("stones/slate/99") is None
            assert await stones.lineage("stones/slate/2") == expected.lineage("stones/slate/2")
            assert await stones.lineage("stones/slate/99") is None
            assert await stones.click("slate", "stones/slate/2", rank=1) is False  # it keeps no log
            assert expected.click("slate", "stones/slate/2") is False
            assert (await stones.encode_queries(["slate"]) == expected.encode_queries(["slate"])).all()
            assert (await stones.encode_documents(["slate"]) == expected.encode_documents(["slate"])).all()
            with pytest.raises(NotFoundError):
                await client.collection("pebbles").read_document("1")


async def test_concurrent_searches_share_a_client(stones_address: str) -> None:
    async with AsyncCairnClient(stones_address, timeout_seconds=300.0) as client:
        stones = client.collection("stones")
        results = await asyncio.gather(*(stones.search(f"stone {number}", top_k=1) for number in range(20)))
        assert [result.query for result in results] == [f"stone {number}" for number in range(20)]
