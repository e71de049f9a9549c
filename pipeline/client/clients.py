"""The client that waits, ``CairnClient(…).collection("handbook").search("…")``, and the one to await.

Both run the methods of :mod:`cairn.pipeline.client.calls`. Every call can be sent twice: failed or broken
connections and the statuses 429, 502, 503 and 504 are retried after Retry-After, or after pauses that double.
A problem of Cairn's own without a Retry-After is not, since a damaged collection stays damaged. Timeouts are
not retried.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack

from cairn.pipeline.client import calls, errors
from cairn.pipeline.client.calls import CollectionCalls, CollectionSummary, Method, SearchParameters
from cairn.pipeline.errors import ConfigError, UsageError, extra_missing
from cairn.pipeline.options import About, check_options, option, shown
from cairn.pipeline.types import SearchResult
from cairn.pipeline.version import installed_version

try:
    import httpx2
    import tenacity
except ModuleNotFoundError as error:
    missing = error.name or "httpx2"
    raise extra_missing(error, what="the client", module=missing, package=missing, extra="client") from None

DEFAULT_URL: Final = "http://127.0.0.1:8400"
DEFAULT_TIMEOUT_SECONDS: Final = 30.0
DEFAULT_RETRIES: Final = 3
KEY_VARIABLE: Final = "CAIRN_API_KEY"
FIRST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 30.0
"""Beyond which waiting is the caller's business: the error is raised at once."""
_PAUSES: Final = tenacity.wait_exponential(multiplier=FIRST_SECONDS / 2, max=LONGEST_SECONDS)
_JITTER: Final = tenacity.wait_random(0, FIRST_SECONDS)
"""So that clients that were turned away together come back apart."""
_MAX_PORT: Final = 65_535

_Answer = TypeVar("_Answer")
_Asked = ParamSpec("_Asked")
_Retrying = TypeVar("_Retrying", tenacity.Retrying, tenacity.AsyncRetrying)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A server's address, and what is sent with every request; the key is never shown."""

    base_url: str = field(repr=False)
    timeout_seconds: float = option(DEFAULT_TIMEOUT_SECONDS, About(above=0, high=3_600))
    max_retries: int = option(DEFAULT_RETRIES, About(low=0, high=100))
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        try:
            url = httpx2.URL(self.base_url)
            url.host.encode("idna")  # as the resolver will
        except (httpx2.InvalidURL, UnicodeError):
            url = httpx2.URL()
        is_address = url.scheme in ("http", "https") and url.host and "%" not in url.host
        if not is_address or (url.port or 0) > _MAX_PORT:
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
        return {
            "base_url": self.base_url.rstrip("/").removesuffix("/v1"),  # as OpenAI's clients have it
            "headers": headers,
            "timeout": httpx2.Timeout(self.timeout_seconds),
            "follow_redirects": False,
        }

    def retrying(self, kind: type[_Retrying]) -> _Retrying:
        """Return what makes the attempts of one call."""
        return kind(
            stop=tenacity.stop_after_attempt(1 + self.max_retries),
            retry=tenacity.retry_if_exception(_may_pass),
            wait=_seconds_to_wait,
            reraise=True,
        )


class _Client:
    """What both clients are made of; a ``transport`` replaces the network, for tests."""

    _kind: Callable[..., Any]

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = DEFAULT_RETRIES,
        transport: Any = None,
    ) -> None:
        self.connection = Connection(
            base_url=base_url,
            api_key=api_key or os.environ.get(KEY_VARIABLE) or None,
            timeout_seconds=timeout_seconds,
            max_retries=max_retries,
        )
        self._http = self._kind(**self.connection.settings(), transport=transport)

    @contextmanager
    def _asking(self) -> Generator[None]:
        """Say in one sentence that no answer came, or that the client was closed."""
        if self._http.is_closed:
            raise UsageError("the client is closed; make a new one")
        try:
            yield
        except httpx2.RequestError as error:
            why = "no answer came in time" if _is_slow(error) else str(error) or type(error).__name__
            url = self.connection.shown_url
            raise errors.ServerUnreachableError(
                f"the server at {url} must answer, got: {why}; is `cairn serve` running?"
            ) from error


class CairnClient(_Client):
    """A client of one server; safe to share between threads, closed by ``close`` or at the end of ``with``.

    ``api_key`` defaults to ``CAIRN_API_KEY``. ``timeout_seconds`` bounds connecting and each wait for data.
    Whatever a call ends with is named in :mod:`cairn.pipeline.client.errors`. ``transport`` replaces the
    network, for tests.
    """

    _kind = httpx2.Client

    def collection(self, name: str) -> RemoteCollection:
        """Return a collection to ask; nothing is sent yet."""
        return RemoteCollection(self, name)

    def collections(self) -> list[CollectionSummary]:
        """List the collections this key may ask, by name."""
        return self.run(calls.collections())

    def run(self, method: Method[_Answer]) -> _Answer:
        """Send what a method of :mod:`cairn.pipeline.client.calls` asks for, and return its record."""
        attempts, answer = self.connection.retrying, None
        try:
            while True:
                answer = attempts(tenacity.Retrying)(self._send, _next_call(method, answer))
        except StopIteration as end:
            return end.value

    def _send(self, call: calls.Call) -> Any:
        with self._asking():
            response = self._http.request(**call.request())
        return _answer_of(response, call)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCairnClient(_Client):
    """A client of one server for one event loop, closed by ``aclose`` or at the end of ``async with``.

    The arguments are those of :class:`CairnClient`.
    """

    _kind = httpx2.AsyncClient

    def collection(self, name: str) -> AsyncRemoteCollection:
        """Return a collection to ask; nothing is sent yet."""
        return AsyncRemoteCollection(self, name)

    async def collections(self) -> list[CollectionSummary]:
        """List the collections this key may ask, by name."""
        return await self.run(calls.collections())

    async def run(self, method: Method[_Answer]) -> _Answer:
        """Send what a method of :mod:`cairn.pipeline.client.calls` asks for, and return its record."""
        attempts, answer = self.connection.retrying, None
        try:
            while True:
                answer = await attempts(tenacity.AsyncRetrying)(self._send, _next_call(method, answer))
        except StopIteration as end:
            return end.value

    async def _send(self, call: calls.Call) -> Any:
        with self._asking():
            response = await self._http.request(**call.request())
        return _answer_of(response, call)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _described(method: Callable[..., Method[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a method the name, text and signature of one of :class:`CollectionCalls`, with its answer."""

    def describe(ask: Callable[..., Any]) -> Callable[..., Any]:
        signature, wrapped = inspect.signature(method), wraps(method)(ask)
        answer = str(signature.return_annotation).removeprefix("Method[").removesuffix("]")
        vars(wrapped)["__signature__"] = signature.replace(return_annotation=answer)
        return wrapped

    return describe


def _waits(
    method: Callable[Concatenate[CollectionCalls, _Asked], Method[_Answer]],
) -> Callable[Concatenate[RemoteCollection, _Asked], _Answer]:
    """Return a method that runs one of :class:`CollectionCalls`."""

    @_described(method)
    def ask(self: RemoteCollection, *args: _Asked.args, **keywords: _Asked.kwargs) -> _Answer:
        return self.client.run(method(self.calls, *args, **keywords))

    return ask


def _awaited(
    method: Callable[Concatenate[CollectionCalls, _Asked], Method[_Answer]],
) -> Callable[Concatenate[AsyncRemoteCollection, _Asked], Coroutine[Any, Any, _Answer]]:
    """Return the same to await."""

    @_described(method)
    async def ask(self: AsyncRemoteCollection, *args: _Asked.args, **keywords: _Asked.kwargs) -> _Answer:
        return await self.client.run(method(self.calls, *args, **keywords))

    return ask


class RemoteCollection:
    """A collection behind the API: what :class:`Collection` offers, asked over HTTP."""

    def __init__(self, client: CairnClient, name: str) -> None:
        self.client, self.name, self.calls = client, name, CollectionCalls(name)

    describe = _waits(CollectionCalls.describe)
    search = _waits(CollectionCalls.search)
    search_batch = _waits(CollectionCalls.search_batch)
    read_document = _waits(CollectionCalls.read_document)
    lineage = _waits(CollectionCalls.lineage)
    click = _waits(CollectionCalls.click)
    encode_queries = _waits(CollectionCalls.encode_queries)
    encode_documents = _waits(CollectionCalls.encode_documents)

    def search_pages(self, query: str, **parameters: Unpack[SearchParameters]) -> Iterator[SearchResult]:
        """Turn the pages of one ranking, ``top_k`` documents each, up to 200 documents.

        Raises :class:`cairn.pipeline.client.errors.CursorExpiredError` where the collection changes in
        between.
        """
        cursor: str | None = calls.FIRST_CURSOR
        while cursor is not None:
            result, cursor = self.client.run(self.calls.page(query, parameters, cursor))
            yield result


class AsyncRemoteCollection:
    """A collection behind the API, to await."""

    def __init__(self, client: AsyncCairnClient, name: str) -> None:
        self.client, self.name, self.calls = client, name, CollectionCalls(name)

    describe = _awaited(CollectionCalls.describe)
    search = _awaited(CollectionCalls.search)
    search_batch = _awaited(CollectionCalls.search_batch)
    read_document = _awaited(CollectionCalls.read_document)
    lineage = _awaited(CollectionCalls.lineage)
    click = _awaited(CollectionCalls.click)
    encode_queries = _awaited(CollectionCalls.encode_queries)
    encode_documents = _awaited(CollectionCalls.encode_documents)

    async def search_pages(
        self, query: str, **parameters: Unpack[SearchParameters]
    ) -> AsyncIterator[SearchResult]:
        """Turn the pages of one ranking, ``top_k`` documents each, up to 200 documents."""
        cursor: str | None = calls.FIRST_CURSOR
        while cursor is not None:
            result, cursor = await self.client.run(self.calls.page(query, parameters, cursor))
            yield result


def _next_call(method: Method[Any], answer: Any) -> calls.Call:
    """Hand an answer to a method; one that it cannot read is not of Cairn's search API."""
    try:
        return method.send(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        problem = {
            "title": "the answer is not one of Cairn's search API",
            "detail": "check the base URL, and both versions",
        }
        raise errors.api_error(200, problem) from error


def _answer_of(response: httpx2.Response, call: calls.Call) -> Any:
    """Return a response's JSON, None where it is none; raise the :class:`ApiError` of a problem."""
    try:
        content = response.json()
    except (ValueError, RecursionError):
        content = None
    if response.is_success:
        return content
    wait = retry_after_seconds(response.headers.get("retry-after"))
    problem = errors.api_error(response.status_code, content, wait)
    if call.is_of_document and problem.type.endswith(":unknown-document"):
        return None
    raise problem


def retry_after_seconds(header: str | None) -> float | None:
    """Read the seconds of Retry-After; None where there are none, as in a date."""
    return float(header) if header is not None and header.strip().isdecimal() else None


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
