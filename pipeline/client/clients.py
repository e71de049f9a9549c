"""The client that waits, ``CairnClient(…).collection("handbook").search("…")``, and the one to await.

Methods are written once, as coroutines: the client that waits runs them to their end, since nothing in them
waits for an event loop then. What cannot be sent raises :class:`UsageError` first. What an answer says beyond
its record is passed over.

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
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache, partial, wraps
from itertools import chain
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_type_hints,
    overload,
)
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from cairn.pipeline.client import errors
from cairn.pipeline.errors import CairnError, ConfigError, TryAgainError, UsageError, extra_missing
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
    Lineage,
    ListedDocument,
    SearchResult,
    WriteReport,
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
_Waited = TypeVar("_Waited")
_Awaited = TypeVar("_Awaited")


class _Method(Generic[_Arguments, _Waited, _Awaited]):
    """A method of both kinds of clients: called on one it waits, on the other it is awaited."""

    def __init__(self, waits: Callable[..., _Waited], awaited: Callable[..., _Awaited]) -> None:
        self._waits, self._awaited = waits, awaited

    if TYPE_CHECKING:  # type checkers compare a protocol's method with the attribute itself

        def __call__(self, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Waited: ...

    @overload
    def __get__(self, own: CairnClient | RemoteCollection, kind: type) -> Callable[_Arguments, _Waited]: ...
    @overload
    def __get__(
        self, own: AsyncCairnClient | AsyncRemoteCollection, kind: type
    ) -> Callable[_Arguments, _Awaited]: ...
    def __get__(self, own: Any, kind: type) -> Any:
        is_awaited = issubclass(kind, AsyncCairnClient | AsyncRemoteCollection)
        method: Any = self._awaited if is_awaited else self._waits
        return method if own is None else MethodType(method, own)


def _asks(
    method: Callable[Concatenate[Any, _Arguments], Coroutine[Any, Any, _Waited]],
) -> _Method[_Arguments, _Waited, Coroutine[Any, Any, _Waited]]:
    @wraps(method)
    async def awaited(*args: Any, **keywords: Any) -> _Waited:
        answer = method(*args, **keywords)
        with _of_cairn():
            return await answer

    @wraps(method)
    def waits(*args: Any, **keywords: Any) -> _Waited:
        return _run(awaited(*args, **keywords))

    return _Method(waits, awaited)


def _yields(
    method: Callable[Concatenate[Any, _Arguments], AsyncIterator[_Waited]],
) -> _Method[_Arguments, Iterator[_Waited], AsyncIterator[_Waited]]:
    @wraps(method)
    def waits(*args: Any, **keywords: Any) -> Iterator[_Waited]:
        answers: Any = method(*args, **keywords)
        with suppress(StopAsyncIteration):
            while True:
                yield _run(anext(answers))

    own: Any = inspect.signature(method)
    vars(waits)["__signature__"] = own.replace(return_annotation=own.return_annotation.removeprefix("Async"))
    return _Method(waits, method)


@contextmanager
def _of_cairn() -> Generator[None]:
    """Say of an answer that cannot be read that another server gave it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CairnError):
            raise
        title = "the answer is not one of Cairn's search API"
        told = {"title": title, "detail": "check the base URL, and both versions"}
        raise errors.api_error(200, told) from error


def _run(awaitable: Any) -> Any:
    """Run what waits for no event loop."""
    try:
        awaitable.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a client that waits needs no event loop")


async def _ended(found: Any) -> Any:
    return await found if isinstance(found, Coroutine) else found


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

    @_asks
    async def collections(self) -> list[CollectionSummary]:
        """List the collections this key may ask, by name."""
        answer = await self._ask("GET", "/v1/collections")
        return [_read(CollectionSummary, found) for found in answer["collections"]]

    @_asks
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
        return _read(CollectionSummary, await self._ask("POST", "/v1/collections", body, is_write=True))

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        is_write: bool = False,
        **sent: Any,
    ) -> Any:
        """Send a request, again where that may help, and return its JSON; None of a document not there.

        A write that is sent again is one write.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex} if is_write else {}
        if body is not None:
            sent["content"] = body if isinstance(body, bytes) else _json(body)
            headers["Content-Type"] = "application/json"
        headers |= sent.pop("headers", {})
        return await self._attempts.copy()(self._attempt, method, path, headers=headers, **sent)

    async def _attempt(self, method: str, path: str, **sent: Any) -> Any:
        if self._is_closed:
            raise UsageError("the client is closed; make a new one")
        try:
            response = await _ended(self._http.request(method, path, **sent))
        except httpx2.RequestError as error:
            why = "no answer came in time" if _is_slow(error) else str(error) or type(error).__name__
            url = self.connection.shown_url
            raise errors.ServerUnreachableError(
                f"the server at {url} must answer, got: {why}; is `cairn serve` running?"
            ) from error
        try:
            content = response.json()
        except (ValueError, RecursionError):
            content = None
        if response.is_success:
            return content
        wait = response.headers.get("retry-after", "").strip()
        problem = errors.api_error(response.status_code, content, float(wait) if wait.isdecimal() else None)
        if method == "GET" and problem.type.endswith(":unknown-document"):
            return None
        raise problem

    async def _pause(self, seconds: float) -> None:
        await _ended(self._sleep(seconds))


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

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        if self._place == self._here():
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        self._is_closed = True
        if self._place == self._here():
            await self._opened.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Collection:
    def __init__(self, client: _Client, name: str) -> None:
        self.client, self.name = client, name

    @_asks
    async def describe(self) -> CollectionDescription:
        """Say what it holds and how it may be asked."""
        return _read(CollectionDescription, await self.client._ask("GET", self._path()))

    @_asks
    async def search(self, query: str, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Rank documents for a query, each with its best passages."""
        return _read(SearchResult, await self._search(query, parameters))

    @_asks
    async def search_batch(
        self, queries: Sequence[str], **parameters: Unpack[SearchParameters]
    ) -> list[SearchResult]:
        """Answer several queries; each 32 of them are one request, answered from one generation."""
        batches = _batches(_texts(queries, "queries"), MAX_QUERIES)
        answers = [await self._search(batch, parameters) for batch in batches]
        return [_read(SearchResult, each) for answer in answers for each in answer["answers"]]

    @_yields
    async def search_pages(
        self, query: str, **parameters: Unpack[SearchParameters]
    ) -> AsyncIterator[SearchResult]:
        """Turn the pages of one ranking, ``top_k`` documents each, up to 200 documents.

        Raises :class:`cairn.pipeline.client.errors.CursorExpiredError` where the collection changes in
        between.
        """
        cursor: str | None = FIRST_CURSOR
        while cursor is not None:
            with _of_cairn():
                answer = await self._search(query, parameters, cursor=cursor)
                result, cursor = _read(SearchResult, answer), answer["next_cursor"]
            yield result

    @_asks
    async def columns(self) -> list[ColumnSummary]:
        """Describe the columns that filters can name: type, most frequent values with counts, range."""
        answer = await self.client._ask("GET", self._path("columns"))
        return [_read(ColumnSummary, column) for column in answer["columns"]]

    @_asks
    async def facets(
        self, columns: Sequence[str], *, filters: Mapping[str, Any] | None = None, num_values: int = 20
    ) -> list[ColumnSummary]:
        """Count the values of some columns over the documents that match ``filters``."""
        body = {"columns": _texts(columns, "columns"), "filters": filters, "num_values": num_values}
        answer = await self.client._ask("POST", self._path("facets"), body)
        return [_read(ColumnSummary, column) for column in answer["columns"]]

    @_asks
    async def count(self, filters: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match a filter tree, all without one."""
        answer = await self.client._ask("POST", self._path("count"), {"filters": filters})
        return int(answer["documents"])

    @_yields
    async def list_documents(
        self, filters: Mapping[str, Any] | None = None, *, after: str | None = None
    ) -> AsyncIterator[ListedDocument]:
        """Yield all documents that match, in the order of their ids behind ``after``, without texts."""
        is_last = False
        while not is_last:
            body = {"filters": filters, "after": after, "limit": MAX_DOCUMENTS}
            with _of_cairn():
                page: DocumentPage = _read(
                    DocumentPage, await self.client._ask("POST", self._path("documents/list"), body)
                )
            for document in page.documents:
                yield document
            after, is_last = page.next_after, page.next_after is None

    @_asks
    async def read_document(self, doc_id: str) -> Document | None:
        """Return a document with its whole text, None where there is none."""
        path, text, before = self._path("documents", _quoted(doc_id, "doc_id")), "", None
        while before is None or len(text) < before["num_characters"]:
            span = {"start_char": len(text), "max_characters": STRETCH_CHARACTERS}
            stretch = await self.client._ask("GET", path, params=span)
            if stretch is None:
                return None
            # Where the collection changed in between, the text may have: it is read again.
            is_same = before is None or before["generation"] == stretch["generation"]
            text, before = (text + stretch["text"], stretch) if is_same else ("", None)
        return _read(Document, {**before, "text": text})

    @_asks
    async def lineage(self, doc_id: str) -> Lineage | None:
        """Say where a document came from, None where there is none."""
        answer = await self.client._ask("GET", self._path("lineage", _quoted(doc_id, "doc_id")))
        return None if answer is None else _read(Lineage, answer)

    @_asks
    async def add(
        self, documents: Iterable[Document | Mapping[str, Any]] | ArrowStream, *, wait: Wait = "searchable"
    ) -> WriteReport:
        """Add documents, and replace those of the same ids; each 1,000 of them are one request.

        A mapping has ``id`` or ``doc_id``, ``text`` and, where there is one, ``title``; all else is metadata.
        So have the columns of a table or frame. Where one of a request cannot be stored, none of that request
        is; those of requests before it are.
        """
        rows = [_document(document, place) for place, document in enumerate(_rows(documents))]
        if not rows:
            raise UsageError("documents must be at least one, got none")
        doc_id, times = Counter(doc_id for doc_id, _ in rows).most_common(1)[0]
        if times > 1:
            raise UsageError(f"an id must come once, got {doc_id!r} {times:,} times; leave out all but one")
        batches = _batches([row for _, row in rows], MAX_DOCUMENTS, MAX_DOCUMENTS_BYTES)
        bodies = [b'{"documents": [%b]}' % b", ".join(batch) for batch in batches]
        return await self._write("POST", self._path("documents"), bodies, wait)

    @_asks
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
        if not isinstance(cast("Any", metadata), Mapping):
            raise UsageError(f"metadata must be a mapping, got {shown(metadata)}")
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        body = {"metadata": dict(metadata)}
        return await self._write(
            "PATCH", self._path("documents", _quoted(doc_id, "doc_id")), [body], wait, headers=headers
        )

    @_asks
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
            bodies = [{"doc_ids": batch} for batch in batches] or [{"doc_ids": []}]
        return await self._write("POST", self._path("documents/delete"), bodies, wait)

    @_asks
    async def ingest(self, source: str, *, wait: Wait = "searchable") -> WriteReport:
        """Let the server ingest a source that it may read, such as a folder or a URI.

        ``ingested`` of the report says what became of its rows, once it is searchable.
        """
        return await self._write("POST", self._path("sources"), [{"source": source}], wait)

    @_asks
    async def drop(self) -> None:
        """Remove the collection with all it holds."""
        await self.client._ask("DELETE", self._path(), is_write=True)

    async def _write(
        self, method: str, path: str, bodies: Sequence[Mapping[str, Any] | bytes], wait: Wait, **sent: Any
    ) -> WriteReport:
        """Send a write, perhaps in several requests, which are published in their order; report of all."""
        waits = ["durable"] * (len(bodies) - 1) + [wait]
        answers = [
            await self.client._ask(method, path, body, is_write=True, params={"wait": until}, **sent)
            for body, until in zip(bodies, waits, strict=True)
        ]
        for answer in answers:
            if wait == "searchable" and answer["status"] != wait:  # it takes longer than a request may
                state = await self._searchable(answer["write"])
                answer |= {name: state[name] for name in ("status", "generation", "ingested")}
                answer["warnings"] += state["warnings"]
        told = {
            name: list(chain.from_iterable(answer[name] for answer in answers))
            for name in ("documents", "missing", "warnings")
        }
        told["warnings"] = list(dict.fromkeys(told["warnings"]))
        deleted = sum(answer["deleted"] for answer in answers)
        return _read(WriteReport, {**answers[-1], **told, "deleted": deleted})

    async def _searchable(self, number: int) -> Any:
        """Return the state of a write once it is searchable; of one that failed, raise why."""
        pause, until = FIRST_SECONDS, time.monotonic() + SEARCHABLE_SECONDS
        while True:
            state = await self.client._ask("GET", self._path(f"writes/{number}"))
            if state["status"] == "failed":
                told = {"type": WRITE_FAILED, "title": "The write was kept, and cannot be published"}
                raise errors.api_error(422, {**told, "detail": state["detail"] or ""})
            if state["status"] == "searchable":
                return state
            if time.monotonic() >= until:
                raise TryAgainError(
                    f"write {number} must be searchable within {SEARCHABLE_SECONDS:,.0f} seconds, got none "
                    "yet; it is kept, and the server's log says what it waits for"
                )
            await self.client._pause(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)

    @_asks
    async def click(self, query: str, doc_id: str, *, rank: int | None = None) -> bool:
        """Tell the server's feedback log that a hit was opened; false where the server keeps none.

        ``rank`` is its place in the answer, from 1.
        """
        body = {"query": query, "doc_id": doc_id, "rank": rank}
        return bool((await self.client._ask("POST", self._path("clicks"), body))["logged"])

    @_asks
    async def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's queries, L2-normalised; the key needs the scope embed."""
        return await self._encode(texts, "query")

    @_asks
    async def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts as the collection's documents, L2-normalised; the key needs the scope embed."""
        return await self._encode(texts, "document")

    async def _encode(self, texts: Sequence[str], input_type: str) -> Float32[np.ndarray, "N V"]:
        asked = {"model": self.name, "input_type": input_type, "encoding_format": "base64"}
        vectors: list[np.ndarray] = []
        for batch in _batches(_texts(texts, "texts"), MAX_INPUTS, MAX_INPUT_BYTES):
            answer = await self.client._ask("POST", "/v1/embeddings", {**asked, "input": batch})
            rows = sorted(answer["data"], key=lambda row: row["index"])
            encoded = [base64.b64decode(row["embedding"], validate=True) for row in rows]
            vectors += [np.frombuffer(vector, "<f4") for vector in encoded]
        if vectors:
            return np.stack(vectors).astype(np.float32)
        return np.zeros((0, (await self.client._ask("GET", self._path()))["vector_dim"]), np.float32)

    async def _search(self, query: str | Sequence[str], parameters: SearchParameters, **more: str) -> Any:
        if isinstance(parameters.get("filters"), str):
            raise UsageError(
                "filters must be a mapping such as {'year': 2020} or {'type': 'gte', 'key': 'year', "
                "'value': 2020}, got a text; expressions such as year>=2020 are for the command line"
            )
        return await self.client._ask("POST", self._path("search"), {"query": query, **parameters, **more})

    def _path(self, *parts: str) -> str:
        return "/".join(["/v1/collections", _quoted(self.name, "the name of a collection"), *parts])


class RemoteCollection(_Collection):
    """A collection behind the API: what :class:`Collection` offers, asked over HTTP."""


class AsyncRemoteCollection(_Collection):
    """A collection behind the API, to await."""


def _rows(documents: Any) -> list[Any]:
    """Return what holds documents as a list of them: a list, or a table or frame that Arrow can read."""
    if hasattr(documents, "__arrow_c_stream__") or hasattr(documents, "__arrow_c_array__"):
        table = pa.table(documents)
        return table.select([name for name in table.column_names if "__index_level" not in name]).to_pylist()
    if not isinstance(documents, Iterable) or isinstance(documents, str | bytes | Mapping):
        raise UsageError(f"documents must be a list of them, got {shown(documents)}")
    return list(cast("Iterable[Any]", documents))


def _document(given: Any, place: int) -> tuple[str, bytes]:
    """Return a document's id and the document as the API takes it; NaN is no value, as in a frame."""
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
    title = None if _is_missing(title) else title
    document = {"doc_id": doc_id, "title": title, "text": text, "metadata": row}
    try:
        return doc_id, _json(document)
    except UsageError:  # a column is at fault, or a list has NaN
        own = {name: _finite(value, f"column {name!r} of document {doc_id!r}") for name, value in row.items()}
        return doc_id, _json({**document, "metadata": own})


def _finite(value: Any, what: str) -> Any:
    """Return a value as JSON has it, None in the place of NaN."""

    def none(constant: str) -> None:
        if constant != "NaN":
            raise UsageError(f"{what} must hold finite numbers, got {float(constant)}; give None")

    return json.loads(_json(value, what, allow_nan=True), parse_constant=none)


def _is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float | np.floating) and bool(value != value)
    return value is None or is_nan or type(value).__name__ in _MISSING


def _json(value: Any, what: str = "a request", *, allow_nan: bool = False) -> bytes:
    try:
        return json.dumps(value, allow_nan=allow_nan, default=_plain).encode()
    except TypeError as error:
        raise UsageError(
            f"{what} must be of JSON, dates, UUIDs and arrays, got {str(error)[:80]}; change it to one"
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
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"a value of type {type(value).__name__}")


_Item = TypeVar("_Item", str, bytes)


def _batches(items: Sequence[_Item], most: int, most_bytes: float = math.inf) -> Iterator[Sequence[_Item]]:
    """Cut a list into what one request may hold."""
    start = num_bytes = 0
    for end, item in enumerate(items):
        size = len(item if isinstance(item, bytes) else item.encode(errors="replace"))
        if end > start and (end - start == most or num_bytes + size > most_bytes):
            yield items[start:end]
            start, num_bytes = end, 0
        num_bytes += size
    if items:
        yield items[start:]


_hints = cache(get_type_hints)


def _read(kind: Any, answer: Any) -> Any:
    """Read an answer as a record, and the records within it."""
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: _read(hint, answer[name]) for name, hint in _hints(kind).items()})
    if isinstance(answer, list):
        made = [_read(get_args(kind)[0], each) for each in cast("list[Any]", answer)]
        return made if get_args(kind)[0] is Hit else tuple(made)
    inner = [each for each in get_args(kind) if is_dataclass(each)]
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
