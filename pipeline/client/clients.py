"""The client that waits, ``CairnClient(…).collection("handbook").search("…")``, and the one to await.

Calls are written once, as coroutines of the client to await. The client that waits runs them to their end,
since its connections wait by themselves: nothing in them waits for an event loop then. What an answer says
beyond its record is passed over.

Every call can be sent twice: failed or broken connections and the statuses 429, 502, 503 and 504 are retried
after Retry-After, or after pauses that double. A problem of Cairn's own without a Retry-After is not, since a
damaged collection stays damaged. Timeouts are not retried.
"""

# pyright: reportPrivateUsage=false
# A collection sends through its client.

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import inspect
import json
import math
import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from decimal import Decimal
from functools import cache, partial, wraps
from itertools import chain, pairwise
from typing import (
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_type_hints,
)
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from cairn.pipeline.client import errors
from cairn.pipeline.errors import ConfigError, TryAgainError, UsageError, extra_missing
from cairn.pipeline.options import About, check_options, option, shown
from cairn.pipeline.search_options import SearchParameters
from cairn.pipeline.types import (
    ArrowStream,
    CollectionDescription,
    CollectionSummary,
    ColumnSummary,
    Document,
    DocumentPage,
    Hit,
    IngestedSource,
    Lineage,
    ListedDocument,
    SearchResult,
    WriteReport,
    is_filterable,
    read_frame,
)
from cairn.pipeline.version import installed_version
from jaxtyping import Float32

try:
    import httpx2
    import tenacity
except ModuleNotFoundError as error:
    missing = error.name or "httpx2"
    raise extra_missing(error, what="the client", module=missing, package=missing, extra="client") from None

DEFAULT_URL: Final = "http://127.0.0.1:8400"
KEY_VARIABLE: Final = "CAIRN_API_KEY"
FIRST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 30.0
"""Beyond which waiting is the caller's business: the error is raised at once."""
_PAUSES: Final = tenacity.wait_exponential(multiplier=FIRST_SECONDS / 2, max=LONGEST_SECONDS)
_JITTER: Final = tenacity.wait_random(0, FIRST_SECONDS)
"""So that clients that were turned away together come back apart."""
MAX_QUERIES: Final = 32
MAX_INPUTS: Final = 256
MAX_DOCUMENTS: Final = 1_000
MAX_DOCUMENTS_BYTES: Final = 7 << 20
MAX_INPUT_BYTES: Final = 128 << 10
"""Queries, texts and bytes of texts that a server takes in one request."""
STRETCH_CHARACTERS: Final = 1_000_000
"""Of a document's text, what one request may give."""
FIRST_CURSOR: Final = "*"
LONGEST_POLL_SECONDS: Final = 4.0
"""Between two looks at a write that takes longer than a request may."""
SEARCHABLE_SECONDS: Final = 3_600.0
"""What a call waits for a write: a server whose disk stays full never publishes it."""
WRITE_FAILED: Final = "urn:problem-type:cairn:write-failed"
_MISSING: Final = frozenset({"NaTType", "NAType"})
"""What frames have in the place of a value."""
_OF_JSON: Final = frozenset({str, int, float, bool, type(None)})
Wait = Literal["durable", "searchable"]
"""Until when a write waits: that it outlives a kill of the server, or that the next search sees it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A server's address, and what is sent with every request; the key is never shown."""

    base_url: str = field(repr=False)
    timeout_seconds: float = option(30.0, About(above=0, high=3_600))
    max_retries: int = option(3, About(low=0, high=100))
    api_key: str | None = field(default=None, repr=False)
    principals: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        try:
            url = httpx2.URL(self.base_url)
            url.host.encode("idna")  # as the resolver will
        except (httpx2.InvalidURL, UnicodeError):
            url = httpx2.URL()
        is_address = url.scheme in ("http", "https") and url.host and "%" not in url.host
        if not is_address or (url.port or 0) > 65_535:
            raise ConfigError(
                f"base_url must be an address such as {DEFAULT_URL}, got {shown(self.base_url)}"
            )
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ConfigError(
                "api_key must be one line of printable ASCII, got something else; `cairn keys create` "
                "shows one"
            )

    @property
    def shown_url(self) -> str:
        """The address without a name and password that it may hold."""
        return re.sub(r"//[^/]*@", "//", self.base_url)

    def settings(self) -> dict[str, Any]:
        """Return what httpx2's clients are made with; no redirect is followed: it would get the key."""
        headers = {"Accept": "application/json", "User-Agent": f"cairn/{installed_version()}"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key.strip()}"
        if self.principals is not None:  # of none the server must not take that anyone asks
            headers["X-Cairn-Principal"] = ",".join(quote(name, safe=":@.") for name in self.principals)
        base_url = self.base_url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients have it
        timeout = httpx2.Timeout(self.timeout_seconds)
        return {"base_url": base_url, "headers": headers, "timeout": timeout, "follow_redirects": False}


_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def _run(awaitable: Any) -> Any:
    """Run what waits for no event loop."""
    try:
        awaitable.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a client that waits needs no event loop")


def _waits(
    call: Callable[Concatenate[Any, _Arguments], Coroutine[Any, Any, _Answer]],
) -> Callable[Concatenate[Any, _Arguments], _Answer]:
    """Return a call of the client to await as one of the client that waits."""

    @wraps(call)
    def waits(self: Any, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Answer:
        return _run(call(self, *args, **keywords))

    return waits


def _iterates(
    call: Callable[Concatenate[Any, _Arguments], AsyncIterator[_Answer]],
) -> Callable[Concatenate[Any, _Arguments], Iterator[_Answer]]:
    """Return a call of the client to await that yields answers as one of the client that waits."""

    @wraps(call)
    def iterates(self: Any, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> Iterator[_Answer]:
        answers = call(self, *args, **keywords)
        with suppress(StopAsyncIteration):
            while True:
                yield _run(anext(answers))

    own: Any = inspect.signature(call)
    vars(iterates)["__signature__"] = own.replace(
        return_annotation=own.return_annotation.removeprefix("Async")
    )
    return iterates


class _Client:
    """Connections of one server: those of another process or event loop are left to it, and others opened."""

    _kind: Callable[..., Any]
    _sleep: Callable[[float], Any]
    _loop: Callable[[], Any]

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        max_retries: int = 3,
        principals: Iterable[str] | None = None,
        transport: Any = None,
    ) -> None:
        self.connection = Connection(
            principals=None if principals is None else tuple(_texts(principals, "principals")),
            base_url=base_url,
            api_key=api_key or os.environ.get(KEY_VARIABLE) or None,
            timeout_seconds=timeout_seconds,
            max_retries=max_retries,
        )
        self._transport = transport
        self._is_closed = False
        self._place: Any = None
        self._opened: Any = None
        self._opening = threading.Lock()
        self._attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(1 + max_retries),
            retry=tenacity.retry_if_exception(_may_pass),
            wait=_seconds_to_wait,
            sleep=self._pause,
            reraise=True,
        )

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[()]]:
        """Copy the address and the key, and no connection."""
        return partial(type(self), **asdict(self.connection), transport=self._transport), ()

    def _here(self) -> Any:
        """Return what connections belong to."""
        return os.getpid(), self._loop()

    @property
    def _http(self) -> Any:
        place = self._here()
        with self._opening:
            if self._place != place:
                self._opened = self._kind(**self.connection.settings(), transport=self._transport)
                self._place = place
            return self._opened

    async def _ask(
        self, kind: Any, method: str, path: str, body: Any = None, *, headers: Any = None, **sent: Any
    ) -> Any:
        """Send a request, again where that may help, and read its answer; None of a document not there.

        A write that is sent again is one write, by its key.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex, **(headers or {})}
        if body is not None:
            sent["content"] = body if isinstance(body, bytes) else _json(body)
            headers["Content-Type"] = "application/json"
        answer = await self._attempts.copy()(self._attempt, method, path, headers=headers, **sent)
        try:
            return None if answer is None else _read(kind, answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            title = "the answer is not one of Cairn's search API"
            told = {"title": title, "detail": "check the base URL, and both versions"}
            raise errors.api_error(200, told) from error

    async def _attempt(self, method: str, path: str, **sent: Any) -> Any:
        if self._is_closed:
            raise UsageError("the client is closed; make a new one")
        try:
            found = self._http.request(method, path, **sent)
            response = await found if isinstance(found, Coroutine) else found
        except httpx2.RequestError as error:
            why = "no answer came in time" if _is_slow(error) else str(error) or type(error).__name__
            url = self.connection.shown_url
            raise errors.ServerUnreachableError(
                f"the server at {url} must answer, got: {why}; is `cairn serve` running?"
            ) from error
        try:
            content = response.json()
        except (ValueError, RecursionError):
            content = {}
        if response.is_success:
            return content
        wait = response.headers.get("retry-after", "").strip()
        problem = errors.api_error(response.status_code, content, float(wait) if wait.isdecimal() else None)
        if method == "GET" and problem.type.endswith(":unknown-document"):
            return None
        raise problem

    async def _pause(self, seconds: float) -> None:
        found = self._sleep(seconds)
        if found is not None:
            await found


class AsyncCairnClient(_Client):
    """A client of one server to await, closed by ``aclose`` or at the end of ``async with``.

    The arguments are those of :class:`CairnClient`.
    """

    _kind = httpx2.AsyncClient
    _sleep = staticmethod(asyncio.sleep)
    _loop = staticmethod(asyncio.get_running_loop)

    def collection(self, name: str) -> AsyncRemoteCollection:
        """Return a collection to ask; nothing is sent yet."""
        return AsyncRemoteCollection(self, name)

    async def collections(self) -> list[CollectionSummary]:
        """List the collections this key may ask, by name."""
        kind = {"collections": [CollectionSummary]}
        return (await self._ask(kind, "GET", "/v1/collections"))["collections"]

    async def create(
        self,
        name: str,
        *,
        model: str | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> CollectionSummary:
        """Make a collection without documents; ``settings`` are an ingest's by stage.

        Its first documents draw its clusters and its context: let them be a fair sample.
        """
        body = {"name": name, "model": model, "settings": settings or {}}
        return await self._ask(CollectionSummary, "POST", "/v1/collections", body)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        self._is_closed = True
        if self._place == self._here():
            await self._opened.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class CairnClient(_Client):
    """A client of one server; safe to share between threads, closed by ``close`` or at the end of ``with``.

    ``api_key`` defaults to ``CAIRN_API_KEY``. ``principals`` are the user it asks for and its groups, where
    the key may speak for others. ``timeout_seconds`` bounds connecting and each wait for data.
    Whatever a call ends with is named in :mod:`cairn.pipeline.client.errors`. ``transport`` replaces the
    network, for tests.
    """

    _kind = httpx2.Client
    _sleep = staticmethod(time.sleep)
    _loop = staticmethod(lambda: None)

    def collection(self, name: str) -> RemoteCollection:
        """Return a collection to ask; nothing is sent yet."""
        return RemoteCollection(self, name)

    collections = _waits(AsyncCairnClient.collections)
    create = _waits(AsyncCairnClient.create)

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        if self._place == self._here():
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Collection:
    """What the two collections share: the addresses of one, and requests that several calls send."""

    def __init__(self, client: _Client, name: str) -> None:
        self.client, self.name = client, name

    def _path(self, *parts: str) -> str:
        return "/".join(["/v1/collections", _quoted(self.name, "the name of a collection"), *parts])

    async def _get(self, kind: Any, *parts: str, **sent: Any) -> Any:
        return await self.client._ask(kind, "GET", self._path(*parts), **sent)

    async def _post(self, kind: Any, part: str, body: Mapping[str, Any]) -> Any:
        return await self.client._ask(kind, "POST", self._path(part), body)

    async def _search(
        self, kind: Any, query: str | Sequence[str], parameters: SearchParameters, **more: str
    ) -> Any:
        return await self._post(kind, "search", {"query": query, **parameters, **more})

    async def _encode(self, texts: Sequence[str], input_type: str) -> Float32[np.ndarray, "N V"]:
        asked = {"model": self.name, "input_type": input_type, "encoding_format": "base64"}
        vectors: list[np.ndarray] = []
        for batch in _batches(_texts(texts, "texts"), MAX_INPUTS, MAX_INPUT_BYTES):
            body = {**asked, "input": batch}
            answer = await self.client._ask(
                {"data": [{"embedding": np.ndarray}]}, "POST", "/v1/embeddings", body
            )
            vectors += [each["embedding"] for each in answer["data"]]
        if vectors:
            return np.stack(vectors).astype(np.float32)
        return np.zeros((0, (await self._get(CollectionDescription)).vector_dim), np.float32)

    async def _write(
        self, method: str, path: str, bodies: Sequence[Mapping[str, Any] | bytes], wait: Wait, **sent: Any
    ) -> WriteReport:
        """Send a write, perhaps in several requests, which are published in their order; report of all."""
        waits = ["durable"] * (len(bodies) - 1) + [wait]
        reports: list[WriteReport] = [
            await self.client._ask(WriteReport, method, path, body, params={"wait": until}, **sent)
            for body, until in zip(bodies, waits, strict=True)
        ]
        if wait == "searchable":
            reports = [await self._searchable(each) for each in reports]
        return replace(
            reports[-1],
            documents=tuple(chain.from_iterable(each.documents for each in reports)),
            deleted=sum(each.deleted for each in reports),
            missing=tuple(chain.from_iterable(each.missing for each in reports)),
            warnings=tuple(dict.fromkeys(chain.from_iterable(each.warnings for each in reports))),
        )

    async def _searchable(self, report: WriteReport) -> WriteReport:
        """Return the report of a write once it is searchable; of one that failed, raise why."""
        known = {"status": str, "generation": int, "ingested": IngestedSource | None}
        kind = (known, {"detail": str, "warnings": Sequence[str]})
        pause, until = FIRST_SECONDS, time.monotonic() + SEARCHABLE_SECONDS
        while report.status != "searchable":  # it takes longer than a request may
            state, told = await self._get(kind, f"writes/{report.write}")
            if state["status"] == "failed":
                title = "The write was kept, and cannot be published"
                problem = {"type": WRITE_FAILED, "title": title, "detail": told["detail"] or ""}
                raise errors.api_error(422, problem)
            if state["status"] == "searchable":
                return replace(report, **state, warnings=(*report.warnings, *told["warnings"]))
            if time.monotonic() >= until:
                raise TryAgainError(
                    f"write {report.write} must be searchable within {SEARCHABLE_SECONDS:,.0f} seconds, got "
                    "none yet; it is kept, and the server's log says what it waits for"
                )
            await self.client._pause(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        return report


class AsyncRemoteCollection(_Collection):
    """A collection behind the API, to await."""

    async def describe(self) -> CollectionDescription:
        """Say what it holds and how it may be asked."""
        return await self._get(CollectionDescription)

    async def search(self, query: str, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Rank documents for a query, each with its best passages."""
        return await self._search(SearchResult, query, parameters)

    async def search_batch(
        self, queries: Sequence[str], **parameters: Unpack[SearchParameters]
    ) -> list[SearchResult]:
        """Answer several queries; each 32 of them are one request, answered from one generation."""
        kind = {"answers": [SearchResult]}
        batches = _batches(_texts(queries, "queries"), MAX_QUERIES)
        answers = [await self._search(kind, batch, parameters) for batch in batches]
        return [result for answer in answers for result in answer["answers"]]

    async def search_pages(
        self, query: str, **parameters: Unpack[SearchParameters]
    ) -> AsyncIterator[SearchResult]:
        """Turn the pages of one ranking, ``top_k`` documents each, up to 200 documents.

        Raises :class:`cairn.pipeline.client.errors.CursorExpiredError` where the collection changes in
        between.
        """
        kind = (SearchResult, {"next_cursor": str})
        told = {"next_cursor": FIRST_CURSOR}
        while (cursor := told["next_cursor"]) is not None:
            result, told = await self._search(kind, query, parameters, cursor=cursor)
            yield result

    async def columns(self) -> list[ColumnSummary]:
        """Describe the columns that filters can name: type, most frequent values with counts, range."""
        return (await self._get({"columns": [ColumnSummary]}, "columns"))["columns"]

    async def facets(
        self, columns: Sequence[str], *, filters: Mapping[str, Any] | None = None, num_values: int = 20
    ) -> list[ColumnSummary]:
        """Count the values of some columns over the documents that match ``filters``."""
        body = {"columns": columns, "filters": filters, "num_values": num_values}
        return (await self._post({"columns": [ColumnSummary]}, "facets", body))["columns"]

    async def count(self, filters: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match a filter tree, all without one."""
        return (await self._post({"documents": int}, "count", {"filters": filters}))["documents"]

    async def list_documents(
        self, filters: Mapping[str, Any] | None = None, *, after: str | None = None
    ) -> AsyncIterator[ListedDocument]:
        """Yield all documents that match, in the order of their ids behind ``after``, without texts."""
        is_last = False
        while not is_last:
            body = {"filters": filters, "after": after, "limit": MAX_DOCUMENTS}
            page: DocumentPage = await self._post(DocumentPage, "documents/list", body)
            for document in page.documents:
                yield document
            after, is_last = page.next_after, page.next_after is None

    async def read_document(self, doc_id: str) -> Document | None:
        """Return a document with its whole text, None where there is none."""
        place, text, generation = ("documents", _quoted(doc_id, "doc_id")), "", None
        while True:
            span = {"start_char": len(text), "max_characters": STRETCH_CHARACTERS}
            found = await self._get((Document, {"num_characters": int}), *place, params=span)
            if found is None:
                return None
            document, told = found
            # Where the collection changed in between, the text may have: it is read again.
            is_same = generation in (None, document.generation)
            text, generation = (text + document.text, document.generation) if is_same else ("", None)
            if is_same and len(text) >= told["num_characters"]:
                return replace(document, text=text)

    async def lineage(self, doc_id: str) -> Lineage | None:
        """Say where a document came from, None where there is none."""
        return await self._get(Lineage, "lineage", _quoted(doc_id, "doc_id"))

    async def add(
        self, documents: Iterable[Document | Mapping[str, Any]] | ArrowStream, *, wait: Wait = "searchable"
    ) -> WriteReport:
        """Add documents, and replace those of the same ids; each 1,000 of them are one request.

        A mapping has ``id`` or ``doc_id``, ``text`` and, where there is one, ``title``; all else is metadata.
        So have the columns of a table or frame. Where one of a request cannot be stored, none of that request
        is; those of requests before it are.
        """
        given, types = _rows(documents)
        rows = [_document(document, place) for place, document in enumerate(given)]
        for doc_id, times in Counter(row["doc_id"] for row in rows).most_common(1):
            if times > 1:
                raise UsageError(f"an id must come once, got {doc_id!r} {times:,} times; leave out others")
        types = {name: types[name] for name in types if rows and name in rows[0]["metadata"]}
        head = b'{"types": %b, "documents": ' % _json(types or _written_types(rows))
        batches = _batches([_document_json(row) for row in rows], MAX_DOCUMENTS, MAX_DOCUMENTS_BYTES)
        bodies = [b"%b[%b]}" % (head, b", ".join(batch)) for batch in batches or [[]]]
        return await self._write("POST", self._path("documents"), bodies, wait)

    async def update(
        self,
        doc_id: str,
        metadata: Mapping[str, Any],
        *,
        if_match: str | None = None,
        wait: Wait = "searchable",
    ) -> WriteReport:
        """Change metadata of a document; None takes a value away.

        It is encoded again only where the collection has partitions.

        ``if_match`` is the ``content_sha256`` that it must have; another one raises
        :class:`cairn.pipeline.client.errors.ConflictError`.
        """
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        path = self._path("documents", _quoted(doc_id, "doc_id"))
        return await self._write("PATCH", path, [{"metadata": metadata}], wait, headers=headers)

    async def delete(
        self, documents: str | Iterable[str] | Mapping[str, Any], *, wait: Wait = "searchable"
    ) -> WriteReport:
        """Delete documents by their ids, or those that match a filter tree.

        Each 1,000 ids are one request, and all are waited for alike. Ids that are not there are named in
        the report.
        """
        if isinstance(documents, Mapping):
            bodies: list[Mapping[str, Any]] = [{"filters": documents}]
        else:
            named = [documents] if isinstance(documents, str) else _texts(documents, "ids")
            batches = _batches([*dict.fromkeys(named)], MAX_DOCUMENTS)
            bodies = [{"doc_ids": batch} for batch in batches or [[]]]
        return await self._write("POST", self._path("documents/delete"), bodies, wait)

    async def ingest(self, source: str, *, wait: Wait = "searchable") -> WriteReport:
        """Let the server ingest a source that it may read, such as a folder or a URI.

        ``ingested`` of the report says what became of its rows, once it is searchable.
        """
        return await self._write("POST", self._path("sources"), [{"source": source}], wait)

    async def drop(self) -> None:
        """Remove the collection with all it holds."""
        await self.client._ask({}, "DELETE", self._path())

    async def click(self, query: str, doc_id: str, *, rank: int | None = None) -> bool:
        """Tell the server's feedback log that a hit was opened; false where the server keeps none.

        ``rank`` is its place in the answer, from 1.
        """
        body = {"query": query, "doc_id": doc_id, "rank": rank}
        return (await self._post({"logged": bool}, "clicks", body))["logged"]

    async def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's queries, L2-normalised; the key needs the scope embed."""
        return await self._encode(texts, "query")

    async def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's documents, L2-normalised; the key needs the scope embed."""
        return await self._encode(texts, "document")


class RemoteCollection(_Collection):
    """A collection behind the API: what :class:`Collection` offers, asked over HTTP."""

    describe = _waits(AsyncRemoteCollection.describe)
    search = _waits(AsyncRemoteCollection.search)
    search_batch = _waits(AsyncRemoteCollection.search_batch)
    search_pages = _iterates(AsyncRemoteCollection.search_pages)
    columns = _waits(AsyncRemoteCollection.columns)
    facets = _waits(AsyncRemoteCollection.facets)
    count = _waits(AsyncRemoteCollection.count)
    list_documents = _iterates(AsyncRemoteCollection.list_documents)
    read_document = _waits(AsyncRemoteCollection.read_document)
    lineage = _waits(AsyncRemoteCollection.lineage)
    add = _waits(AsyncRemoteCollection.add)
    update = _waits(AsyncRemoteCollection.update)
    delete = _waits(AsyncRemoteCollection.delete)
    ingest = _waits(AsyncRemoteCollection.ingest)
    drop = _waits(AsyncRemoteCollection.drop)
    click = _waits(AsyncRemoteCollection.click)
    encode_queries = _waits(AsyncRemoteCollection.encode_queries)
    encode_documents = _waits(AsyncRemoteCollection.encode_documents)


def _rows(documents: Any) -> tuple[list[Any], dict[str, str]]:
    """Return what holds documents as a list; of a table or frame that Arrow takes whole, with its types."""
    if not hasattr(documents, "__arrow_c_stream__") and not hasattr(documents, "__arrow_c_array__"):
        if not isinstance(documents, Iterable) or isinstance(documents, str | bytes | Mapping):
            raise UsageError(f"documents must be a list of them, got {shown(documents)}")
        return list(cast("Iterable[Any]", documents)), {}
    try:
        table, types = read_frame(documents), dict[str, str]()
    except (pa.ArrowException, TypeError, ValueError) as error:
        told = str(error).partition("\n")[0]
        raise UsageError(f"documents must be what Arrow takes, got {told[:80]!r}; convert it") from error
    if isinstance(table, list):
        return table, types
    table = table.select([name for name in table.column_names if "__index_level" not in name])
    for place, column in enumerate(table.schema):
        if (name := _type_name(column.type)) is not None:
            types[column.name] = name
        if pa.types.is_timestamp(column.type):  # Python has no nanoseconds, and texts no seconds of a zone
            times = table[place].cast(pa.timestamp(column.type.unit, column.type.tz and "UTC"))
            table = table.set_column(place, column.name, times.cast(pa.string()))
    return table.to_pylist(), types


def _type_name(kind: pa.DataType) -> str | None:
    """Return what the server calls the type of a column, None of one that it does not keep."""
    is_list = any(of(kind) for of in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    item = kind.value_type if is_list else kind
    item = item.value_type if pa.types.is_dictionary(item) else item
    is_kept = pa.types.is_decimal(item) or (is_filterable(item) and not pa.types.is_nested(item))
    return None if not is_kept else f"list[{item}]" if is_list else str(item)


def _written_types(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the types of columns of dates, times or decimals, also in lists, which are texts in JSON."""
    columns: dict[str, list[Any]] = {}
    types: dict[str, str] = {}
    for name, value in chain.from_iterable(row["metadata"].items() for row in rows):
        columns.setdefault(name, []).append([*value] if isinstance(value, tuple) else value)
    for name, values in columns.items():
        if not {*map(type, values)} <= _OF_JSON:
            with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
                column = pa.array(values)
                if any(getattr(value, "nanosecond", 0) for value in values):  # of pandas
                    column = pa.array(values, pa.timestamp("ns", getattr(column.type, "tz", None)))
                kind = _type_name(column.type) or ""
                if re.match(r"(list\[)?(date|time|decimal)", kind) and column.to_pylist() == values:
                    types[name] = kind  # values of several kinds become texts
    return types


def _document(given: Any, place: int) -> dict[str, Any]:
    """Return a document as the API takes it; NaN is no value, as in a frame."""
    if isinstance(given, Document):
        doc_id, title, text, row = given.doc_id, given.title, given.text, given.metadata
    else:
        row = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {}
        doc_id = row.pop("id", None)
        if _is_missing(doc_id):
            doc_id = row.pop("doc_id", None)
        if isinstance(doc_id, int | np.integer | uuid.UUID) and not isinstance(doc_id, bool):
            doc_id = str(doc_id)
        title, text = row.pop("title", None), row.pop("text", None)
    if not isinstance(doc_id, str) or not isinstance(text, str):
        raise UsageError(
            f"a document must have an id, under the name id or doc_id, and a text, got {shown(given)} "
            f"at position {place}; give it both, or leave it out"
        )
    row = {name: None if _is_missing(value) else value for name, value in row.items()}
    return {"doc_id": doc_id, "title": None if _is_missing(title) else title, "text": text, "metadata": row}


def _document_json(document: Mapping[str, Any]) -> bytes:
    try:
        return _json(document)
    except UsageError:
        for name, value in document["metadata"].items():
            _json(value, f"column {name!r} of document {document['doc_id']!r}")
        raise


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float | Decimal | np.floating) and bool(value != value)
    return value is None or is_nan or type(value).__name__ in _MISSING


def _json(value: Any, what: str = "a request") -> bytes:
    try:
        return json.dumps(value, allow_nan=False, default=_plain).encode()
    except TypeError as error:
        raise UsageError(
            f"{what} must be of JSON, dates, decimals, UUIDs and arrays, got {str(error)[:80]}; convert it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{what} must be JSON without NaN and not nested so deep, got {str(error)[:80]!r}"
        ) from None


def _plain(value: Any) -> Any:
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, np.generic | np.ndarray):  # times in nanoseconds would be numbers
        return (value.astype("M8[us]") if value.dtype == "M8[ns]" else value).tolist()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"a value of type {type(value).__name__}")


_Item = TypeVar("_Item", str, bytes)


def _batches(items: Sequence[_Item], most: int, most_bytes: float = math.inf) -> list[Sequence[_Item]]:
    """Cut a list into what one request may hold."""
    starts, num_bytes = [0], 0
    for place, item in enumerate(items):
        size = len(item if isinstance(item, bytes) else item.encode(errors="replace"))
        if place > starts[-1] and (place - starts[-1] == most or num_bytes + size > most_bytes):
            starts.append(place)
            num_bytes = 0
        num_bytes += size
    return [items[start:end] for start, end in pairwise([*starts, len(items)])] if items else []


_hints = cache(get_type_hints)


def _read(kind: Any, answer: Any) -> Any:
    """Read an answer as a record, as a list or a dictionary of some, or in each of several ways."""
    if isinstance(kind, tuple):
        return tuple(_read(each, answer) for each in cast("tuple[Any, ...]", kind))
    if isinstance(kind, list):
        return [_read(kind[0], each) for each in answer]
    if isinstance(kind, dict):
        return {name: _read(each, answer[name]) for name, each in cast("dict[str, Any]", kind).items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**_read(_hints(kind), answer))
    if kind is np.ndarray:
        return np.frombuffer(base64.b64decode(answer, validate=True), "<f4")
    inner = [each for each in get_args(kind) if is_dataclass(each)]
    if isinstance(answer, list):
        made = [_read(inner[0], each) for each in cast("list[Any]", answer)] if inner else answer
        return made if inner == [Hit] else tuple(made)
    return _read(inner[0], answer) if inner and answer is not None else answer


def _texts(values: Any, what: str) -> list[str]:
    """Return a list of texts; a bare text is refused, whose characters are texts as well."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    texts = list(cast("Iterable[Any]", values)) if is_list else []
    wrong = next((text for text in texts if not isinstance(text, str)), None if is_list else values)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{what} must be a list of texts, got a value of type {type(wrong).__name__}")
    return texts


def _quoted(part: Any, what: str) -> str:
    if not isinstance(part, str) or not part:
        raise UsageError(f"{what} must be a text of at least one character, got {shown(part)}")
    # Dots, too: a client may take a segment of dots for a way up.
    return quote(part, safe="", errors="replace").replace(".", "%2E")


def _is_slow(error: BaseException | None) -> bool:
    """Tell whether a request was sent and its answer did not come in time."""
    return isinstance(error, httpx2.ReadTimeout | httpx2.WriteTimeout)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, errors.UnavailableError):
        wait = error.retry_after_seconds
        return error.type == errors.BLANK_TYPE if wait is None else wait <= LONGEST_SECONDS
    return isinstance(error, errors.ServerUnreachableError) and not _is_slow(error.__cause__)


def _seconds_to_wait(state: tenacity.RetryCallState) -> float:
    asked = getattr(state.outcome and state.outcome.exception(), "retry_after_seconds", None)
    return (_PAUSES(state) if asked is None else asked) + _JITTER(state)
