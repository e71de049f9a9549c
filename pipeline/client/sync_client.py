"""The client that waits: ``CairnClient(...).collection("handbook").search("…")``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import sleep
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


class CairnClient:
    """A client of one server; safe to share between threads, closed by ``close`` or at the end of ``with``.

    ``api_key`` defaults to ``CAIRN_API_KEY``. ``timeout_seconds`` bounds connecting and each wait for data.
    Whatever a call ends with is named in :mod:`cairn.pipeline.client.errors`. ``transport`` replaces the
    network, for tests.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = 3,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.connection = connection_to(base_url, api_key, timeout_seconds)
        self._retries = RetryPolicy(max_retries=max_retries)
        self._http = httpx2.Client(**self.connection.settings(), transport=transport)

    def collection(self, name: str) -> RemoteCollection:
        """Return a collection to ask; nothing is sent yet."""
        return RemoteCollection(self, name)

    def collections(self) -> list[CollectionSummary]:
        """List the collections this key may ask, by name."""
        return calls.summaries_of(self.send(calls.list_call()))

    def send(self, call: calls.Call) -> Any:
        """Return the JSON that answers a call, after as many attempts as the policy grants."""
        attempts = Attempts(self._retries)
        while True:
            require_open(self._http)
            try:
                headers = {"Content-Type": "application/json"} if call.body is not None else {}
                response = self._http.request(
                    call.method, call.path, content=call.body, params=dict(call.parameters), headers=headers
                )
            except httpx2.RequestError as error:
                seconds = attempts.after_break(self.connection.shown_url, error, is_slow=is_slow(error))
            else:
                if response.is_success:
                    return json_of(response)
                seconds = attempts.after_response(response.status_code, json_of(response), response.headers)
            sleep(seconds)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteCollection:
    """A collection behind the API: what :class:`Collection` offers, asked over HTTP."""

    def __init__(self, client: CairnClient, name: str) -> None:
        self._client = client
        self.name = name

    def describe(self) -> CollectionDescription:
        """Say what it holds and how it may be asked."""
        return calls.description_of(self._client.send(calls.describe_call(self.name)))

    def search(self, query: str, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Rank documents for a query, each with its best passages."""
        return calls.result_of(self._client.send(calls.search_call(self.name, query, parameters)))

    def search_batch(
        self, queries: Sequence[str], **parameters: Unpack[SearchParameters]
    ) -> list[SearchResult]:
        """Answer several queries; each 32 of them are one request, answered from one generation."""
        batches = calls.query_batches(queries)
        answers = (self._client.send(calls.batch_call(self.name, batch, parameters)) for batch in batches)
        return [result for answer in answers for result in calls.results_of(answer)]

    def search_pages(self, query: str, **parameters: Unpack[SearchParameters]) -> Iterator[SearchResult]:
        """Turn the pages of one ranking, ``top_k`` documents each, up to 200 documents.

        Raises :class:`cairn.pipeline.client.errors.CursorExpiredError` where the collection changes in
        between.
        """
        cursor: str | None = calls.FIRST_CURSOR
        while cursor is not None:
            answer = self._client.send(calls.search_call(self.name, query, parameters, cursor))
            yield calls.result_of(answer)
            cursor = calls.next_cursor_of(answer)

    def read_document(self, doc_id: str) -> Document | None:
        """Return a document with its whole text, None where there is none."""
        reading = calls.DocumentReading(self.name, doc_id)
        while (call := reading.next_call()) is not None:
            try:
                reading.take(self._client.send(call))
            except NotFoundError as error:
                if calls.is_unknown_document(error):
                    return None
                raise
        return reading.document()

    def lineage(self, doc_id: str) -> Lineage | None:
        """Say where a document came from, None where there is none."""
        try:
            return calls.lineage_of(self._client.send(calls.lineage_call(self.name, doc_id)))
        except NotFoundError as error:
            if calls.is_unknown_document(error):
                return None
            raise

    def click(self, query: str, doc_id: str, *, rank: int | None = None) -> bool:
        """Tell the server's feedback log that a hit was opened; false where the server keeps none.

        ``rank`` is its place in the answer, from 1.
        """
        return calls.is_logged(self._client.send(calls.click_call(self.name, query, doc_id, rank)))

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's queries, L2-normalised; the key needs the scope embed."""
        return self._encode(texts, "query")

    def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's documents, L2-normalised; the key needs the scope embed."""
        return self._encode(texts, "document")

    def _encode(self, texts: Sequence[str], input_type: calls.InputType) -> Float32[np.ndarray, "N V"]:
        batches = calls.input_batches(texts)
        found = [
            calls.vectors_of(self._client.send(calls.embed_call(self.name, batch, input_type)))
            for batch in batches
        ]
        return np.concatenate(found) if found else np.zeros((0, self.describe().vector_dim), np.float32)
