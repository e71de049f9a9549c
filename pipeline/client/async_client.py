"""The client to await: ``await AsyncCairnClient(...).collection("handbook").search("…")``.

Its methods are those of ``sync_client``.
"""

from __future__ import annotations

from asyncio import sleep
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
from cairn.pipeline.client import calls
from cairn.pipeline.client.connection import (
    DEFAULT_TIMEOUT_SECONDS,
    DEFAULT_URL,
    connection_to,
    httpx2,
    is_slow,
    json_of,
    require_open,
)
from cairn.pipeline.client.errors import NotFoundError
from cairn.pipeline.client.records import CollectionDescription, CollectionSummary, SearchParameters
from cairn.pipeline.client.retries import Attempts, RetryPolicy
from cairn.pipeline.types import Document, Lineage, SearchResult
from jaxtyping import Float32


class AsyncCairnClient:
    """A client of one server for one event loop, closed by ``aclose`` or at the end of ``async with``.

    The arguments are those of :class:`cairn.pipeline.client.sync_client.CairnClient`.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = 3,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.connection = connection_to(base_url, api_key, timeout_seconds)
        self._retries = RetryPolicy(max_retries=max_retries)
        self._http = httpx2.AsyncClient(**self.connection.settings(), transport=transport)

    def collection(self, name: str) -> AsyncRemoteCollection:
        """Return a collection to ask; nothing is sent yet."""
        return AsyncRemoteCollection(self, name)

    async def collections(self) -> list[CollectionSummary]:
        """List the collections this key may ask, by name."""
        return calls.summaries_of(await self.send(calls.list_call()))

    async def send(self, call: calls.Call) -> Any:
        """Return the JSON that answers a call, after as many attempts as the policy grants."""
        attempts = Attempts(self._retries)
        while True:
            require_open(self._http)
            try:
                headers = {"Content-Type": "application/json"} if call.body is not None else {}
                response = await self._http.request(
                    call.method, call.path, content=call.body, params=dict(call.parameters), headers=headers
                )
            except httpx2.RequestError as error:
                seconds = attempts.after_break(self.connection.shown_url, error, is_slow=is_slow(error))
            else:
                if response.is_success:
                    return json_of(response)
                seconds = attempts.after_response(response.status_code, json_of(response), response.headers)
            await sleep(seconds)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncRemoteCollection:
    """A collection behind the API, to await."""

    def __init__(self, client: AsyncCairnClient, name: str) -> None:
        self._client = client
        self.name = name

    async def describe(self) -> CollectionDescription:
        """Say what it holds and how it may be asked."""
        return calls.description_of(await self._client.send(calls.describe_call(self.name)))

    async def search(self, query: str, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Rank documents for a query, each with its best passages."""
        return calls.result_of(await self._client.send(calls.search_call(self.name, query, parameters)))

    async def search_batch(
        self, queries: Sequence[str], **parameters: Unpack[SearchParameters]
    ) -> list[SearchResult]:
        """Answer several queries; each 32 of them are one request, answered from one generation."""
        found: list[SearchResult] = []
        for batch in calls.query_batches(queries):
            found += calls.results_of(await self._client.send(calls.batch_call(self.name, batch, parameters)))
        return found

    async def search_pages(
        self, query: str, **parameters: Unpack[SearchParameters]
    ) -> AsyncIterator[SearchResult]:
        """Turn the pages of one ranking, ``top_k`` documents each, up to 200 documents."""
        cursor: str | None = calls.FIRST_CURSOR
        while cursor is not None:
            answer = await self._client.send(calls.search_call(self.name, query, parameters, cursor))
            yield calls.result_of(answer)
            cursor = calls.next_cursor_of(answer)

    async def read_document(self, doc_id: str) -> Document | None:
        """Return a document with its whole text, None where there is none."""
        reading = calls.DocumentReading(self.name, doc_id)
        while (call := reading.next_call()) is not None:
            try:
                reading.take(await self._client.send(call))
            except NotFoundError as error:
                if calls.is_unknown_document(error):
                    return None
                raise
        return reading.document()

    async def lineage(self, doc_id: str) -> Lineage | None:
        """Say where a document came from, None where there is none."""
        try:
            return calls.lineage_of(await self._client.send(calls.lineage_call(self.name, doc_id)))
        except NotFoundError as error:
            if calls.is_unknown_document(error):
                return None
            raise

    async def click(self, query: str, doc_id: str, *, rank: int | None = None) -> bool:
        """Tell the server's feedback log that a hit was opened; false where the server keeps none.

        ``rank`` is its place in the answer, from 1.
        """
        return calls.is_logged(await self._client.send(calls.click_call(self.name, query, doc_id, rank)))

    async def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's queries, L2-normalised; the key needs the scope embed."""
        return await self._encode(texts, "query")

    async def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's documents, L2-normalised; the key needs the scope embed."""
        return await self._encode(texts, "document")

    async def _encode(self, texts: Sequence[str], input_type: calls.InputType) -> Float32[np.ndarray, "N V"]:
        batches = list(calls.input_batches(texts))
        found = [
            calls.vectors_of(await self._client.send(calls.embed_call(self.name, batch, input_type)))
            for batch in batches
        ]
        return (
            np.concatenate(found) if found else np.zeros((0, (await self.describe()).vector_dim), np.float32)
        )
