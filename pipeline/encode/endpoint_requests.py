"""One embeddings endpoint: lists of texts in, checked vectors out, whatever the server does in between.

    {"model", "input": [text, …]}                      OpenAI's /v1/embeddings; TEI, vLLM and Ollama speak it
    {"model", "inputs": [[chunk, …], …], "input_type"} a contextual API: a document's chunks are one list

The second shape is Voyage's, and is spoken where the address ends in ``contextualizedembeddings``. A model is
written ``https://HOST/v1/embeddings#NAME``; the fragment is never sent as part of the address. The key comes
from the environment, goes into one header, and stands in no other place: no redirect is followed.

Requests are tasks of one event loop, on a thread that holds up no end of the process: an interrupt, a
deadline or a close cancels them, a name that is being looked up included. Those that may have been answered
are given some seconds first, since what they are answered is paid for.

Broken connections and the statuses of :data:`PASSING` are tried again after Retry-After, which holds for all
requests, else after pauses that double. An answer that cannot be used is tried again, too, but not for long.
A batch that is refused for its size is halved, and later ones are no larger, unless it was one text that the
server refused. Where requests are answered too late, half as many are sent at once, and one more after every
:data:`GOOD_ANSWERS` in time. How long all this goes on is a :class:`Patience`.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
import logging
import os
import random
import re
import socket
import threading
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import numpy as np
from cairn.pipeline.errors import (
    CairnError,
    ConfigError,
    EndpointDownError,
    FingerprintMismatchError,
    ModelError,
    install_command,
)
from cairn.pipeline.token_vectors.projection import unit
from cairn.pipeline.version import installed_version
from jaxtyping import Float32

if TYPE_CHECKING:  # an extra
    import httpx2

log = logging.getLogger(__name__)

KEY_VARIABLE: Final = "CAIRN_ENDPOINT_KEY"
SCHEMES: Final = frozenset({"http", "https"})
PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
TOO_LARGE: Final = frozenset({400, 413, 422})
"""Statuses with which servers refuse a batch of more texts or tokens than they take."""
REFUSED_KEY: Final = frozenset({401, 403})
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 60.0
LONGEST_LIMIT_SECONDS: Final = 3_600.0
"""The longest Retry-After that is obeyed; a server that means more says so again."""
ANSWER_SECONDS: Final = 120.0
"""How long one attempt waits for data."""
CONNECT_SECONDS: Final = 5.0
REACH_SECONDS: Final = 30.0
"""How long a server is tried that no request has reached: its address is more often wrong than it is down."""
SILENT_SECONDS: Final = 2.0
"""How long requests fail before that is said: shorter blips are of no interest."""
SLOW_SECONDS: Final = 30.0
"""How long a request hangs before that is said: batches on slow machines take some seconds."""
CLOSE_SECONDS: Final = 1.0
"""How long an interrupted run waits for answers that are on their way: they are paid for."""
MOST_UNUSABLE: Final = 3
"""Attempts after which answers that cannot be used are believed to be the server's way."""
GOOD_ANSWERS: Final = 32
"""Answers in time after which one more request is sent at once; one that is late then costs two minutes."""
MOST_SHOWN: Final = 200
"""Characters of a server's own message in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """No attempt of a request begins after ``retry_seconds``, and none lasts past ``total_seconds``."""

    retry_seconds: float
    total_seconds: float

    @property
    def is_query(self) -> bool:
        """Tell whether someone waits for the answer."""
        return self.total_seconds <= ANSWER_SECONDS


INGEST: Final = Patience(retry_seconds=900.0, total_seconds=900.0 + ANSWER_SECONDS)
WRITE: Final = Patience(retry_seconds=30.0, total_seconds=30.0 + ANSWER_SECONDS)
"""For documents written through a server, which tries again later and says why they wait."""
QUERY: Final = Patience(retry_seconds=10.0, total_seconds=10.0)

Unit = tuple[str, ...]
"""What is embedded together: one text, or the chunks of a document for a contextual API."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where an endpoint is, what its model is called ("" for the server's only one), and what it takes."""

    url: str
    name: str
    is_contextual: bool

    @classmethod
    def of(cls, model: str, verb: str = "embeddings", key_variable: str = KEY_VARIABLE) -> Address:
        """Read ``https://HOST/v1/VERB#NAME``; raise :class:`ConfigError` for anything else."""
        parts, is_address = None, False
        try:
            parts = urlsplit(model)
            is_address = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            pass
        if parts is None or not is_address or not model.isascii() or not model.isprintable():
            raise ConfigError(
                f"an endpoint must be an http or https address such as https://HOST/v1/{verb}#MODEL, got "
                "another one; write it so"
            )
        if parts.username is not None or parts.query:
            raise ConfigError(
                "the address of an endpoint must hold no user, password or query, since it is stored, got "
                f"some; put the key into {key_variable}"
            )
        path = parts.path.rstrip("/")
        path = f"{path}/{verb}" if path.endswith("/v1") else path
        return cls(
            url=f"{parts.scheme}://{parts.netloc}{path}",
            name=parts.fragment,
            is_contextual=path.endswith("contextualizedembeddings"),
        )

    def describe(self) -> str:
        """Name the endpoint for a person."""
        return f"{self.name} at {self.url}" if self.name else self.url


Vectors = list[Float32[np.ndarray, "_ V"]]
"""Those of each unit, of length one."""


class _PassingError(Exception):
    """An attempt failed, and another one may not; ``wait_seconds`` is what the server asks for.

    An answer that cannot be used becomes ``lasting`` where it stays so.
    """

    def __init__(
        self,
        sentence: str,
        wait_seconds: float | None = None,
        *,
        is_late: bool = False,
        lasting: type[CairnError] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.wait_seconds, self.is_late, self.lasting = wait_seconds, is_late, lasting


class RefusedRequestError(Exception):
    """The server refused a request that another one may replace, such as a smaller one."""


_Answer = TypeVar("_Answer")
_Key = TypeVar("_Key", bound=Hashable)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that holds up no end of the process, however long a name is looked up."""

    async def getaddrinfo(self, *where: Any, **hints: Any) -> Any:
        """See :func:`socket.getaddrinfo`."""
        found = Future[Any]()

        def look_up() -> None:
            with suppress(InvalidStateError):  # no one waits any more
                try:
                    found.set_result(socket.getaddrinfo(*where, **hints))
                except (OSError, UnicodeError) as error:
                    found.set_exception(error)

        threading.Thread(target=look_up, name="cairn-names", daemon=True).start()
        return await asyncio.wrap_future(found)


@cache
def _loop_of(_process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process, on a thread of its own, which outlives no fork."""
    loop = _Loop()
    threading.Thread(target=loop.run_forever, name="cairn-endpoint", daemon=True).start()
    return loop


_opening: Final = threading.Lock()
"""Held while a loop or connections are opened."""


class Server:
    """A client of one address, which gives ``gives``; safe to share between threads, and after a fork.

    Its coroutines run on the event loop; its other methods wait for them on other threads.
    """

    checking: asyncio.Lock
    """Held by who checks what the server gives."""

    def __init__(
        self, address: Address, *, num_requests: int, gives: str, key_variable: str = KEY_VARIABLE
    ) -> None:
        if find_spec("httpx2") is None:
            command = install_command("endpoint")
            raise ConfigError(
                f"an endpoint must have the package httpx2, got none; install it with {command}"
            )
        self.address = address
        self._gives, self._key_variable = gives, key_variable
        self._key = os.environ.get(key_variable, "").strip()
        if not (self._key.isascii() and (self._key.isprintable() or not self._key)):
            raise ConfigError(f"{key_variable} must be one line of printable ASCII, got something else")
        self._num_requests = self._most_at_once = num_requests
        self._num_good = 0
        self._resume_at = self._answered_at = 0.0
        self._was_reached = self._is_closed = False
        self._silent_since: float | None = None
        self._process: int | None = None

    def _here(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of this process; what a parent has opened and asked stays its own."""
        import httpx2

        process = os.getpid()
        with _opening:
            if self._process != process:
                headers = {"Accept": "application/json", "User-Agent": f"cairn/{installed_version()}"}
                headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
                self._http = httpx2.AsyncClient(headers=headers, limits=httpx2.Limits())
                weakref.finalize(self, _close_connections, self._http, process).atexit = False
                self._calls = asyncio.Semaphore(self._num_requests)
                self._running, self._has_place = 0, asyncio.Event()
                self.checking = asyncio.Lock()
                self._asking, self._sent = set[Any](), set[Any]()
                """The tasks that may ask; those of them whose last request was answered or may yet be."""
                self._process = process
            return _loop_of(process)

    def run(self, asking: Coroutine[Any, Any, _Answer], seconds: float | None = None) -> _Answer:
        """Return what a coroutine returns that asks this server; raise where it lasts longer.

        One that is late or that an interrupt leaves is cancelled, whatever it waits for.
        """

        async def within() -> _Answer:
            self._enlisted(asyncio.current_task())
            try:
                async with asyncio.timeout(seconds):
                    return await asking
            except TimeoutError:
                raise EndpointDownError(
                    f"the endpoint {self.address.describe()} must answer in {seconds:.0f} s, got nothing; "
                    "try again later"
                ) from None

        future = asyncio.run_coroutine_threadsafe(within(), self._here())
        try:
            return future.result()
        except CancelledError:
            raise self._closed() from None
        finally:
            future.cancel()

    def side_by_side(
        self,
        calls: Mapping[_Key, Callable[[], Coroutine[Any, Any, _Answer]]],
        on_answer: Callable[[_Key], None] = lambda _: None,
    ) -> dict[_Key, _Answer]:
        """Return what calls return, ``num_requests`` of all callers at once; ``on_answer`` is told each.

        Where one fails, requests that are on their way are let finish before the error is raised, since what
        they are answered is kept.
        """
        answers = dict[_Key, _Answer]()
        tasks = list[asyncio.Task[None]]()

        async def answer(key: _Key, call: Callable[[], Coroutine[Any, Any, _Answer]]) -> None:
            async with self._calls:
                try:
                    answers[key] = await call()
                except BaseException:
                    self._asking.difference_update(tasks)  # before another takes its place
                    raise
            on_answer(key)

        async def answer_all() -> None:
            tasks.extend(asyncio.create_task(answer(*each)) for each in calls.items())
            try:
                await asyncio.gather(*map(self._enlisted, tasks))
            finally:
                await self._end(tasks, ANSWER_SECONDS)

        self.run(answer_all())
        return answers

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Ask for nothing more; what is under way has so many ``seconds`` to be answered, then it fails."""

        async def end() -> None:
            await self._end(self._asking - {asyncio.current_task()}, seconds)
            await self._http.aclose()

        self._is_closed = True
        if self._process == os.getpid():
            self.run(end())

    def require_open(self) -> None:
        """Raise :class:`EndpointDownError` once it is closed, so that what goes on beside it ends, too."""
        if self._is_closed:
            raise self._closed()

    def _closed(self) -> EndpointDownError:
        where = self.address.describe()
        return EndpointDownError(f"the endpoint {where} must answer before its run is ended, got nothing yet")

    def _enlisted(self, task: asyncio.Task[Any] | None) -> asyncio.Task[Any]:
        """Let a task ask."""
        assert task is not None, "a coroutine runs in a task"
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        task.add_done_callback(self._sent.discard)
        return task

    def _require_asking(self) -> None:
        self.require_open()
        if asyncio.current_task() not in self._asking:
            raise self._closed()

    async def _end(self, tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
        """Let tasks ask no more, and cancel them once what is on its way had so many ``seconds``."""
        self._asking.difference_update(tasks)
        sent = self._sent.intersection(tasks)
        if sent:
            await asyncio.wait(sent, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self, asked: dict[str, Any], read: Callable[[Any], _Answer], patience: Patience) -> _Answer:
        """Send one request until it is answered, and read the answer's JSON.

        ``read`` raises ValueError, KeyError, TypeError and the like for another answer than it wants.
        """
        began_at = time.monotonic()
        for attempt in count(1):
            try:
                answer = await self._once(asked, read, began_at, patience)
            except _PassingError as error:
                self._sent.discard(asyncio.current_task())
                self._require_asking()
                pause = _pause_of(error, attempt)
                is_over = pause >= self._seconds_left(began_at, patience)
                if is_over or (error.lasting is not None and attempt >= MOST_UNUSABLE):
                    raise self._lasting(error, patience) from None
                self._note_silence(str(error), began_at, patience)
                await asyncio.sleep(pause)
            else:
                self._note_answer()
                return answer
        raise AssertionError("attempts end")

    def _lasting(self, error: _PassingError, patience: Patience) -> CairnError:
        """Return what an error means that no further attempt mends."""
        if error.lasting is not None:
            return error.lasting(f"{error}; ask who runs it")
        advice = "try again later" + ("" if patience.is_query else ": what it has answered is kept")
        advice = advice if self._was_reached else "check the address, or try again later"
        return EndpointDownError(f"{error}; {advice}")

    def _seconds_left(self, began_at: float, patience: Patience) -> float:
        """Return for how long another attempt may begin."""
        most = patience.retry_seconds
        return began_at + (most if self._was_reached else min(REACH_SECONDS, most)) - time.monotonic()

    def _note_slow(self, began_at: float, patience: Patience) -> None:
        """Say of a server that takes requests that it answers none, while one is still waited for."""
        self._was_reached = True  # or connecting would have failed by now
        sentence = f"the endpoint {self.address.describe()} must answer, got nothing for {SLOW_SECONDS:.0f} s"
        self._note_silence(sentence, began_at, patience)

    def _note_silence(self, sentence: str, began_at: float, patience: Patience) -> None:
        """Say once that nothing is answered, when that has lasted, and for how long it is tried."""
        since = max(began_at, self._answered_at)
        if self._silent_since is None and time.monotonic() - since >= SILENT_SECONDS:
            self._silent_since, left = since, self._seconds_left(began_at, patience)
            limit = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
            log.warning("%s; it is tried again for up to %s", sentence, limit)

    def _note_answer(self) -> None:
        """Say that requests are answered again, where it was said that they are not."""
        since, self._silent_since = self._silent_since, None
        self._answered_at = time.monotonic()
        if since is not None:
            seconds = self._answered_at - since
            log.warning("the endpoint %s answers again after %.0f s", self.address.describe(), seconds)

    async def _once(
        self, asked: dict[str, Any], read: Callable[[Any], _Answer], began_at: float, patience: Patience
    ) -> _Answer:
        """Send one request and read its answer."""
        import httpx2

        where, task = self.address.describe(), asyncio.current_task()
        self._sent.discard(task)
        async with self._place(patience):
            await self._wait_for_turn(began_at + patience.retry_seconds)
            self._require_asking()
            left = min(ANSWER_SECONDS, max(0.05, began_at + patience.total_seconds - time.monotonic()))
            timeout = httpx2.Timeout(left, connect=min(CONNECT_SECONDS, left))
            self._sent.add(task)
            slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._note_slow, began_at, patience)
            try:
                response = await self._http.post(self.address.url, json=asked, timeout=timeout)
            except httpx2.ReadTimeout:
                self._was_reached = True
                sentence = f"the endpoint {where} must answer in {left:.0f} s, got nothing"
                raise _PassingError(sentence, is_late=True) from None
            except httpx2.HTTPError as error:
                raise _PassingError(
                    f"the endpoint {where} must be reachable, got {type(error).__name__}"
                ) from None
            finally:
                slow.cancel()
            self._was_reached = True
            if response.status_code != 200:
                self._refuse(response)
        try:
            return read(json.loads(response.content))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, CairnError):
                raise
            kind = response.headers.get("content-type", "no type").partition(";")[0][:40]
            raise _PassingError(
                f"the endpoint {where} must answer with {self._gives}, got something else ({kind})",
                lasting=EndpointDownError,
            ) from None

    @asynccontextmanager
    async def _place(self, patience: Patience) -> AsyncGenerator[None]:
        """Hold one of the places for requests at once; queries need none, and change nothing.

        One that is answered too late halves the places that there were when it began, so that several do so
        once: a slow server that is asked for less at once answers in time. After :data:`GOOD_ANSWERS` in
        time there is one more. A connection that fails says nothing of that.
        """
        if patience.is_query:
            yield
            return
        while self._running >= self._most_at_once:
            self._has_place.clear()
            await self._has_place.wait()
        self._running += 1
        most = self._most_at_once
        try:
            yield
            self._num_good += 1
            if self._num_good >= GOOD_ANSWERS:
                self._most_at_once, self._num_good = min(self._most_at_once + 1, self._num_requests), 0
        except _PassingError as error:
            if error.is_late:
                self._most_at_once, self._num_good = min(self._most_at_once, max(1, most // 2)), 0
            raise
        finally:
            self._running -= 1
            self._has_place.set()

    async def _wait_for_turn(self, ends_at: float) -> None:
        """Wait while the server wants no request, whichever it told so."""
        while (left := self._resume_at - time.monotonic()) > 0:
            if self._resume_at > ends_at:
                raise EndpointDownError(
                    f"the endpoint {self.address.describe()} must take requests, got its limit for the next "
                    f"{left:.0f} s; try again then"
                )
            await asyncio.sleep(left)

    def _refuse(self, response: httpx2.Response) -> None:
        """Raise what a status other than 200 means."""
        status, where = response.status_code, self.address.describe()
        if status in PASSING:
            pause = seconds_to_wait(response.headers)
            self._resume_at = max(self._resume_at, time.monotonic() + (pause or 0.0))
            raise _PassingError(f"the endpoint {where} must take requests, got status {status}", pause)
        if status in REFUSED_KEY:
            got = "another key" if self._key else "no key"
            raise ConfigError(
                f"the endpoint {where} must be asked with a key that it takes, got {got} (status {status}); "
                f"put the key into {self._key_variable}"
            )
        message = self._message(response)
        sentence = f"the endpoint {where} must take the request, got status {status}{message}"
        if status in TOO_LARGE:
            raise RefusedRequestError(f"{sentence}; check its model and the length of what is sent")
        raise ConfigError(f"{sentence}; check the address and the model's name")

    def _message(self, response: httpx2.Response) -> str:
        """Return what the server says in JSON, short and without the key; nothing of a page in HTML."""
        try:
            told: Any = json.loads(response.content)
            told = told.get("error", told.get("detail", told.get("message", "")))
            told = told.get("message", "") if isinstance(told, dict) else told
        except (ValueError, AttributeError, RecursionError):
            return ""
        text = re.sub(r"[^\x20-\x7e]+", " ", str(told))
        text = text.replace(self._key, "…") if self._key else text
        return f" ({text[:MOST_SHOWN]})" if text else ""


def _close_connections(http: httpx2.AsyncClient, process: int) -> None:
    """Close the connections that no one can use any more; those of a parent are the parent's."""
    if process == os.getpid():
        asyncio.run_coroutine_threadsafe(http.aclose(), _loop_of(process))


class Endpoint(Server):
    """A client of one embeddings endpoint. ``dims`` is the width that is asked for."""

    def __init__(self, address: Address, *, dims: int | None, num_requests: int) -> None:
        super().__init__(address, num_requests=num_requests, gives="vectors in JSON")
        self.width: int | None = dims
        """The width of all vectors, None until the first answer."""
        self._dims = dims
        self._has_answered = False
        self._most_units: int | None = None

    async def embed(self, units: Sequence[Unit], patience: Patience, *, is_query: bool = False) -> Vectors:
        """Return the vectors of units, in order; see :meth:`parts`."""
        parts = self.parts(units, patience, is_query=is_query)
        return [vectors async for part, _ in parts for vectors in part]

    async def parts(
        self,
        units: Sequence[Unit],
        patience: Patience,
        *,
        is_query: bool = False,
        beside: Sequence[Unit] = (),
    ) -> AsyncIterator[tuple[Vectors, Vectors]]:
        """Yield the vectors of units, in order, request by request, and those of what was sent ``beside``.

        Nothing is sent beside a unit where the server takes one a request.

        Raises :class:`EndpointDownError` where the server does not answer in time;
        :class:`ConfigError` for a key or a request it refuses;
        :class:`ModelError` for vectors that cannot be used, or a text that it refuses.
        """
        waiting, most_before = [list(units)], self._most_units
        while waiting:
            batch = waiting.pop()
            sent, most = [*batch, *beside], self._most_units
            if most is not None and len(sent) > most:
                if len(batch) > 1:
                    first = max(1, most - len(beside))
                    waiting += [batch[first:], batch[:first]]
                    continue
                sent = batch
            try:
                asked = self._request(sent, is_query=is_query)
                vectors = await self.ask(asked, partial(self._read, units=sent), patience)
            except RefusedRequestError as error:
                if len(sent) == 1:  # where others were taken, the text is to blame and no setting
                    self._most_units = most_before
                    raise (ModelError if self._has_answered else ConfigError)(str(error)) from None
                self._most_units = min(self._most_units or len(sent), len(sent) // 2)
                waiting.append(batch)
            else:
                yield vectors[: len(batch)], vectors[len(batch) :]

    def _request(self, units: Sequence[Unit], *, is_query: bool) -> dict[str, Any]:
        asked: dict[str, Any] = {"encoding_format": "base64"}  # a third of the bytes; others send lists
        if self.address.name:
            asked["model"] = self.address.name
        if self.address.is_contextual:
            asked |= {"inputs": [list(unit) for unit in units]}
            asked["input_type"] = "query" if is_query else "document"
            return asked if self._dims is None else {**asked, "output_dimension": self._dims}
        asked["input"] = [text for unit in units for text in unit]
        return asked if self._dims is None else {**asked, "dimensions": self._dims}

    def _read(self, reply: Any, units: Sequence[Unit]) -> Vectors:
        groups = [_in_order(reply["data"])]
        expected = [sum(map(len, units))]
        if self.address.is_contextual:
            groups, expected = [_in_order(entry["data"]) for entry in groups[0]], list(map(len, units))
        if [len(group) for group in groups] != expected:
            raise _PassingError(
                f"the endpoint {self.address.describe()} must give a vector for each of {sum(expected)} "
                f"texts, got {sum(map(len, groups))}",
                lasting=EndpointDownError,
            )
        rows = self._checked([_vector(entry["embedding"]) for group in groups for entry in group])
        return np.split(rows, np.cumsum([len(unit) for unit in units])[:-1])

    def _checked(self, vectors: Sequence[Float32[np.ndarray, " V"]]) -> Float32[np.ndarray, "N V"]:
        """Return vectors at length one; raise for one of another width, or that has no direction."""
        where = self.address.describe()
        self.width = self.width or len(vectors[0])
        other = next((len(vector) for vector in vectors if len(vector) != self.width), None)
        if other is not None:
            raise FingerprintMismatchError(
                f"the endpoint {where} must give vectors of {self.width} numbers, got {other}; choose --dims "
                "that its model has, or use a new collection"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            rows_NV = unit(np.stack(vectors))
        if not np.allclose(np.linalg.norm(rows_NV, axis=1), 1.0, atol=1e-3):
            raise _PassingError(
                f"the endpoint {where} must give vectors that are finite and not zero, got others",
                lasting=ModelError,
            )
        self._has_answered = True
        return rows_NV


def seconds_to_wait(headers: Any) -> float | None:
    """Read Retry-After, as seconds or a date, or OpenAI's ``retry-after-ms``; None where neither is there."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            seconds = float(milliseconds) / 1_000
        elif (told := headers.get("retry-after")) is None:
            return None
        elif re.fullmatch(r"\s*\d+(\.\d+)?\s*", told):
            seconds = float(told)
        else:
            seconds = (parsedate_to_datetime(told) - dt.datetime.now(dt.UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, seconds), LONGEST_LIMIT_SECONDS)


def _pause_of(error: _PassingError, attempt: int) -> float:
    """Return what the server asked for, else pauses that double; both with a part drawn at random."""
    doubled = min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 16), LONGEST_PAUSE_SECONDS)
    pause = doubled if error.wait_seconds is None else error.wait_seconds
    return pause + random.uniform(0, FIRST_PAUSE_SECONDS / 2)  # noqa: S311 - no secret


def _in_order(entries: Sequence[Any]) -> list[Any]:
    """Return entries by their ``index``, as they stand where they have none; others raise ValueError."""
    indexes = [entry.get("index", place) for place, entry in enumerate(entries)]
    if len(set(indexes)) != len(indexes):
        raise ValueError("two entries have one index")
    return [entry for _, entry in sorted(zip(indexes, entries, strict=True), key=lambda pair: pair[0])]


def _vector(embedding: Any) -> Float32[np.ndarray, " V"]:
    """Read numbers, or float32 in base64; anything else raises ValueError."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
    vector = np.array([np.nan if number is None else number for number in embedding], np.float32)
    if vector.ndim != 1 or not len(vector):
        raise ValueError("not a list of numbers")
    return vector
