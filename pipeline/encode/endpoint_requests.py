"""One embeddings endpoint: lists of texts in, checked vectors out, whatever the server does in between.

    {"model", "input": [text, …]}                      OpenAI's /v1/embeddings; TEI, vLLM and Ollama speak it
    {"model", "inputs": [[chunk, …], …], "input_type"} a contextual API: a document's chunks are one list

The second shape is Voyage's, and is spoken where the address ends in ``contextualizedembeddings``. A model is
written ``https://HOST/v1/embeddings#NAME``; the fragment is never sent as part of the address. The key comes
from the environment, goes into one header, and stands in no other place: no redirect is followed.

Broken connections and the statuses of :data:`PASSING` are tried again after Retry-After, which holds for all
threads, else after pauses that double. An answer that cannot be used is tried again, too, but not for long. A
batch that is refused for its size is halved, and later ones are no larger, unless it was one text that the
server refused. Where requests are answered too late, half as many are sent at once, and one more after every
:data:`GOOD_ANSWERS` in time. How long all this goes on is a :class:`Patience`.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import logging
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
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

    ``is_answer``: it answered with what cannot be used; ``is_model``: with vectors that cannot.
    """

    def __init__(
        self,
        sentence: str,
        wait_seconds: float | None = None,
        *,
        is_answer: bool = False,
        is_model: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.wait_seconds = wait_seconds
        self.is_answer, self.is_model = is_answer, is_model


class RefusedRequestError(Exception):
    """The server refused a request that another one may replace, such as a smaller one."""


_Answer = TypeVar("_Answer")
_Key = TypeVar("_Key", bound=Hashable)


class Server:
    """A client of one address, which gives ``gives``; safe to share between threads.

    A request runs on a thread that holds up no end of the process: one that hangs is left behind.
    """

    def __init__(
        self, address: Address, *, num_requests: int, gives: str, key_variable: str = KEY_VARIABLE
    ) -> None:
        _require_extra()
        import httpx2

        self.address = address
        self._gives, self._key_variable = gives, key_variable
        self._resume_at = 0.0
        self._lock = threading.Lock()
        self._was_reached = False
        self._answered_at = 0.0
        self._silent_since: float | None = None
        self._is_closed = threading.Event()
        self._asking: set[Future[Any]] = set()
        self._threads = ThreadPoolExecutor(num_requests, thread_name_prefix="cairn-endpoint")
        self._turns = threading.Condition()
        self._running, self._num_good = 0, 0
        self._num_requests = self._most_at_once = num_requests
        headers = {"Accept": "application/json", "User-Agent": f"cairn/{installed_version()}"}
        self._key = os.environ.get(key_variable, "").strip()
        if not (self._key.isascii() and (self._key.isprintable() or not self._key)):
            raise ConfigError(f"{key_variable} must be one line of printable ASCII, got something else")
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = httpx2.Limits(max_connections=num_requests + 1, max_keepalive_connections=num_requests + 1)
        self._http = httpx2.Client(headers=headers, limits=limits, follow_redirects=False)
        self._under_way: set[Future[Any]] = set()
        """More than who is waited for: what no one waits for any more may hang."""
        weakref.finalize(self, _close_idle, self._http, self._under_way).atexit = False

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Ask for nothing more; what is under way has so many ``seconds`` to be answered, then it fails."""
        with self._turns:
            self._is_closed.set()
            self._turns.notify_all()
        self._end_asking(seconds)
        _close_idle(self._http, self._under_way)

    def _end_asking(self, seconds: float) -> None:
        """Let who waits for an answer wait no longer than so many ``seconds``."""
        wait([*self._asking], seconds)
        for future in [*self._asking]:
            with suppress(InvalidStateError):  # answered right now
                future.set_exception(self._closed())

    def require_open(self) -> None:
        """Raise :class:`EndpointDownError` once it is closed, so that what goes on beside it ends, too."""
        if self._is_closed.is_set():
            raise self._closed()

    def _closed(self) -> EndpointDownError:
        where = self.address.describe()
        return EndpointDownError(f"the endpoint {where} must answer before its run is ended, got nothing yet")

    def within(self, seconds: float, call: Callable[[Callable[[], bool]], _Answer]) -> _Answer:
        """Return what a call returns that asks this server; raise where it lasts longer, whatever it does.

        It runs on a thread that holds up no end of the process: looking up a name may last longer than any
        limit of a connection. The call is given what tells whether someone still waits for it.
        """
        future = Future[_Answer]()
        self._asking.add(future)
        future.add_done_callback(self._asking.discard)

        def run() -> None:
            answer = error = None
            try:
                answer = call(lambda: not future.done())
            except BaseException as raised:  # noqa: BLE001 - who waits raises it
                error = raised
            self._under_way.discard(future)
            with suppress(InvalidStateError):  # no one waits any more
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(cast("_Answer", answer))

        try:
            self.require_open()
            self._under_way.add(future)
            threading.Thread(target=run, name="cairn-asking", daemon=True).start()
            return future.result(seconds)
        except TimeoutError:
            raise EndpointDownError(
                f"the endpoint {self.address.describe()} must answer in {seconds:.0f} s, got nothing; try "
                "again later"
            ) from None
        finally:
            future.cancel()

    def side_by_side(self, calls: Mapping[_Key, Callable[[], _Answer]]) -> Iterator[tuple[_Key, _Answer]]:
        """Run calls, ``num_requests`` of all callers at once, and yield what each returns as they finish.

        Where one fails, those under way are let finish before the error is raised, since what they are
        answered is kept. An interrupt waits no longer than a close.
        """
        futures = {self._threads.submit(call): key for key, call in calls.items()}
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException as error:
            running = [future for future in futures if not future.cancel()]
            if not isinstance(error, Exception):
                self._end_asking(CLOSE_SECONDS)
                while wait(running, 0.05).not_done:  # some go on to their next request
                    self._end_asking(0.0)
            wait(running)
            raise

    def ask(self, asked: dict[str, Any], read: Callable[[Any], _Answer], patience: Patience) -> _Answer:
        """Send one request until it is answered, and read the answer's JSON.

        ``read`` raises ValueError, KeyError, TypeError and the like for another answer than it wants.
        """
        began_at = time.monotonic()

        def attempts(is_awaited: Callable[[], bool]) -> _Answer:
            for attempt in count(1):
                try:
                    answer = self._once(asked, read, began_at, patience)
                except _PassingError as error:
                    most = patience.retry_seconds
                    most = most if self._was_reached else min(REACH_SECONDS, most)
                    left, pause = began_at + most - time.monotonic(), _pause_of(error, attempt)
                    if pause >= left or (error.is_answer and attempt >= MOST_UNUSABLE):
                        raise self._lasting(error, patience) from None
                    self._note_silence(error, began_at, left)
                    self._is_closed.wait(pause)
                    if not is_awaited():
                        raise self._closed() from None
                else:
                    self._note_answer()
                    return answer
            raise AssertionError("attempts end")

        return self.within(patience.total_seconds, attempts)

    def _lasting(self, error: _PassingError, patience: Patience) -> CairnError:
        """Return what an error means that no further attempt mends."""
        if error.is_model:
            return ModelError(f"{error}; ask who runs it")
        if error.is_answer:
            advice = "ask who runs it"
        elif not self._was_reached:
            advice = "check the address, or try again later"
        else:
            is_query = patience.total_seconds <= ANSWER_SECONDS
            advice = "try again later" + ("" if is_query else ": what it has answered is kept")
        return EndpointDownError(f"{error}; {advice}")

    def _note_silence(self, error: _PassingError, began_at: float, left: float) -> None:
        """Say once that nothing is answered, when that has lasted; it is tried for ``left`` seconds more."""
        with self._lock:
            since = max(began_at, self._answered_at)
            is_new = self._silent_since is None and time.monotonic() - since >= SILENT_SECONDS
            self._silent_since = since if is_new else self._silent_since
        if is_new:
            limit = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
            log.warning("%s; it is tried again for up to %s", error, limit)

    def _note_answer(self) -> None:
        """Say that requests are answered again, where it was said that they are not."""
        with self._lock:
            since, self._silent_since = self._silent_since, None
            self._answered_at = time.monotonic()
        if since is not None:
            seconds = self._answered_at - since
            log.warning("the endpoint %s answers again after %.0f s", self.address.describe(), seconds)

    def _once(
        self, asked: dict[str, Any], read: Callable[[Any], _Answer], began_at: float, patience: Patience
    ) -> _Answer:
        """Send one request and read its answer."""
        import httpx2

        where = self.address.describe()
        with self._place(began_at, patience) as most_at_once:
            self._wait_for_turn(began_at + patience.retry_seconds)
            self.require_open()
            left = min(ANSWER_SECONDS, max(0.05, began_at + patience.total_seconds - time.monotonic()))
            timeout = httpx2.Timeout(left, connect=min(CONNECT_SECONDS, left))
            try:
                response = self._http.post(self.address.url, json=asked, timeout=timeout)
            except httpx2.ReadTimeout:
                self._was_reached = True
                if most_at_once:
                    self._send_fewer(most_at_once)
                sentence = f"the endpoint {where} must answer in {left:.0f} s, got nothing"
                raise _PassingError(sentence) from None
            except httpx2.HTTPError as error:
                raise _PassingError(
                    f"the endpoint {where} must be reachable, got {type(error).__name__}"
                ) from None
            self._was_reached = True
            if response.status_code != 200:
                self._refuse(response)
            if most_at_once:
                self._send_more()
        try:
            return read(json.loads(response.content))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, CairnError):
                raise
            kind = response.headers.get("content-type", "no type").partition(";")[0][:40]
            raise _PassingError(
                f"the endpoint {where} must answer with {self._gives}, got something else ({kind})",
                is_answer=True,
            ) from None

    @contextmanager
    def _place(self, began_at: float, patience: Patience) -> Generator[int]:
        """Hold one of the places for requests at once, and yield how many there are; 0 for a query.

        Requests of documents that were answered too late halve them: a slow server that is asked for less at
        once answers in time. A connection that fails says nothing of that. Queries wait for no place, and
        change nothing.
        """
        if patience.total_seconds <= ANSWER_SECONDS:
            yield 0
            return
        with self._turns:
            left = began_at + patience.retry_seconds - time.monotonic()
            self._turns.wait_for(
                lambda: self._running < self._most_at_once or self._is_closed.is_set(), max(0.0, left)
            )
            self._running += 1
        try:
            yield self._most_at_once
        finally:
            with self._turns:
                self._running -= 1
                self._turns.notify_all()  # there may be a place more than before

    def _send_fewer(self, most_at_once: int) -> None:
        """Halve the places that there were when a request began: several late ones do so once."""
        with self._turns:
            self._most_at_once = min(self._most_at_once, max(1, most_at_once // 2))
            self._num_good = 0

    def _send_more(self) -> None:
        """Count an answer in time, and add a place after :data:`GOOD_ANSWERS` of them."""
        with self._turns:
            self._num_good += 1
            if self._num_good >= GOOD_ANSWERS:
                self._most_at_once = min(self._most_at_once + 1, self._num_requests)
                self._num_good = 0

    def _wait_for_turn(self, ends_at: float) -> None:
        """Wait while the server wants no request, from whatever thread it was told."""
        while (left := self._resume_at - time.monotonic()) > 0 and not self._is_closed.is_set():
            if self._resume_at > ends_at:
                raise EndpointDownError(
                    f"the endpoint {self.address.describe()} must take requests, got its limit for the next "
                    f"{left:.0f} s; try again then"
                )
            self._is_closed.wait(min(left, 1.0))

    def _refuse(self, response: httpx2.Response) -> None:
        """Raise what a status other than 200 means."""
        status, where = response.status_code, self.address.describe()
        if status in PASSING:
            pause = seconds_to_wait(response.headers)
            if pause is not None:
                with self._lock:
                    self._resume_at = max(self._resume_at, time.monotonic() + pause)
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


def _close_idle(http: httpx2.Client, under_way: Collection[Future[Any]]) -> None:
    """Close connections, unless a request hangs: it would be waited for, at the end of a process for ever."""
    if not under_way:
        http.close()


class Endpoint(Server):
    """A client of one embeddings endpoint. ``dims`` is the width that is asked for."""

    def __init__(self, address: Address, *, dims: int | None, num_requests: int) -> None:
        super().__init__(address, num_requests=num_requests, gives="vectors in JSON")
        self.width: int | None = dims
        """The width of all vectors, None until the first answer."""
        self._dims = dims
        self._has_answered = False
        self._most_units: int | None = None

    def embed(self, units: Sequence[Unit], patience: Patience, *, is_query: bool = False) -> Vectors:
        """Return the vectors of units, in order; see :meth:`parts`."""
        parts = self.parts(units, patience, is_query=is_query)
        return [vectors for part, _ in parts for vectors in part]

    def parts(
        self,
        units: Sequence[Unit],
        patience: Patience,
        *,
        is_query: bool = False,
        beside: Sequence[Unit] = (),
    ) -> Iterator[tuple[Vectors, Vectors]]:
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
                vectors = self.ask(asked, partial(self._read, units=sent), patience)
            except RefusedRequestError as error:
                if len(sent) == 1:  # where others were taken, the text is to blame and no setting
                    self._most_units = most_before
                    raise (ModelError if self._has_answered else ConfigError)(str(error)) from None
                with self._lock:
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
                is_answer=True,
            )
        rows = self._checked([_vector(entry["embedding"]) for group in groups for entry in group])
        return np.split(rows, np.cumsum([len(unit) for unit in units])[:-1])

    def _checked(self, vectors: Sequence[Float32[np.ndarray, " V"]]) -> Float32[np.ndarray, "N V"]:
        """Return vectors at length one; raise for one of another width, or that has no direction."""
        where = self.address.describe()
        with self._lock:
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
                is_answer=True,
                is_model=True,
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
    if sorted(indexes) != list(range(len(indexes))) and len(set(indexes)) != len(indexes):
        raise ValueError("two entries have one index")
    return [entry for _, entry in sorted(zip(indexes, entries, strict=True), key=lambda pair: pair[0])]


def _vector(embedding: Any) -> Float32[np.ndarray, " V"]:
    """Read numbers, or float32 in base64; anything else raises ValueError."""
    if isinstance(embedding, str):
        try:
            return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
        except binascii.Error as error:
            raise ValueError("not base64") from error
    vector = np.array([np.nan if number is None else number for number in embedding], np.float32)
    if vector.ndim != 1 or not len(vector):
        raise ValueError("not a list of numbers")
    return vector


def _require_extra() -> None:
    if find_spec("httpx2") is None:
        raise ConfigError(
            "an endpoint must have the package httpx2, got none; install it with "
            f"{install_command('endpoint')}"
        )
