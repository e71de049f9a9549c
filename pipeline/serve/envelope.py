"""The outermost layer: bounds concurrency and time, adds headers, counts, logs, turns errors into problems.

Health checks and metrics pass the bound: they must answer when the server is full. HEAD runs as GET, and the
body is dropped here. The log holds the route but no content of the request. Of an unexpected error it holds
type and place, not the message, which may quote a text.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from typing import Any, Final

from cairn.pipeline.errors import is_panic
from cairn.pipeline.index.allocator import return_freed_memory
from cairn.pipeline.serve.metrics import Metrics
from cairn.pipeline.serve.problems import DEADLINE, INTERNAL_ERROR, OVERLOADED, ProblemError, problem_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

UNBOUNDED_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})

_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""Of every response that does not bring its own: no answer may be stored, framed or sniffed."""


HEAVY_ANSWER_BYTES: Final = 1 << 20
"""An answer from here on is made of a multiple in objects, whose memory is given back afterwards."""
GIVE_BACK_SECONDS: Final = 1.0
"""After the last but one heavy answer: giving back takes some milliseconds, once for many answers."""


class Envelope:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, max_requests: int, deadline_seconds: float) -> None:
        self._app = app
        self._metrics = metrics
        self._max_requests = max_requests
        self._deadline_seconds = deadline_seconds
        self._num_requests = 0
        self._giving_back: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens inside."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_seconds = time.perf_counter()
        status = num_bytes = 0
        method = scope["method"]
        is_head = method == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status, num_bytes
            num_bytes += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(pair for pair in _HEADERS if pair[0] not in present),
                ]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        self._num_requests += 1
        self._metrics.requests_in_flight.set(self._num_requests)
        try:
            problem = await self._run(scope, receive, send_with_headers)
            if problem is not None:
                self._metrics.problems.labels(problem.kind.name).inc()
                if not status:
                    await problem_response(problem, scope["path"])(scope, receive, send_with_headers)
        finally:
            self._num_requests -= 1
            self._metrics.requests_in_flight.set(self._num_requests)
            if num_bytes >= HEAVY_ANSWER_BYTES and self._giving_back is None:
                self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back)
            self._record(method, scope, status, time.perf_counter() - started_seconds)

    def _give_back(self) -> None:
        self._giving_back = None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> ProblemError | None:
        """Run the request; return the problem it ended with where none was answered inside."""
        if self._num_requests > self._max_requests and scope["path"] not in UNBOUNDED_PATHS:
            return ProblemError(OVERLOADED, "too many requests are in flight")
        deadline = asyncio.timeout(self._deadline_seconds)
        try:
            async with deadline:
                await self._app(scope, receive, send)
        except ProblemError as problem:
            return problem
        except Exception as error:  # noqa: BLE001 - no error may leave as it is
            if isinstance(error, TimeoutError) and deadline.expired():
                return ProblemError(DEADLINE, "try again, or ask for less")
            log_failure("serve.request_failed", error)
            return ProblemError(INTERNAL_ERROR, "the server's log says more")
        except BaseException as error:
            if not is_panic(error):
                raise
            log_failure("serve.request_failed", error)
            return ProblemError(INTERNAL_ERROR, "the server's log says more")
        return None

    def _record(self, method: str, scope: Scope, status: int, seconds: float) -> None:
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        route = route_of(scope)
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        log.info(
            "serve.request method=%s route=%s status=%d milliseconds=%.1f",
            method,
            route,
            status,
            1e3 * seconds,
        )


def route_of(scope: Scope) -> str:
    """Return the pattern a request was routed by."""
    route: Any = scope.get("route")
    return getattr(route, "path", None) or "none"


def log_failure(event: str, error: BaseException) -> None:
    """Log an unforeseen error by its type and its places in the code, without its message."""
    places = " < ".join(
        f"{frame.name}:{frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__)[-8:])
    )
    log.error("%s error=%s at=%s", event, type(error).__name__, places)
