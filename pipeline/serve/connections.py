"""Bounds on a connection that uvicorn has no settings for.

    connected ──▶ head of a request ──▶ the application ──▶ answer
                  │                 └─ too many connections └─ nothing read within READ_SECONDS: closed
                  │                    the idlest is closed, else 503 with Retry-After
                  └─ not there after HEAD_SECONDS: closed

uvicorn's ``timeout_keep_alive`` begins after the first answer: it waits for a first head without limit, and
keeps an answer without limit for a client that does not read it. Its ``limit_concurrency`` refuses health
checks, too. Without these bounds one client could keep a server from all others by opening connections.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Final

from cairn.pipeline.serve.envelope import UNBOUNDED_PATHS
from cairn.pipeline.serve.problems import OVERLOADED, ProblemError, problem_response
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS: Final = 10.0
"""Within which the head of a request must have arrived, from the connection or its first byte on."""
READ_SECONDS: Final = 30.0
"""Within which some of an answer must have been read."""


DESCRIPTORS_BESIDE: Final = 256
"""Descriptors left for the files of collections, where a process may have that many."""


def max_connections(wanted: int) -> int:
    """Return how many connections may be open so that files can still be opened."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        wanted
        if limit == resource.RLIM_INFINITY
        else min(wanted, max(limit - DESCRIPTORS_BESIDE, limit // 4))
    )


class PunctualProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits on the head of a request and on reading the answer."""

    _answered_at = 0.0
    _waiting: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Note a connection; one beyond the bound takes the place of an idle one, or is refused."""
        super().connection_made(transport)
        bound, self.limit_concurrency = self.limit_concurrency, None
        if bound is not None and len(self.connections) > bound and not self._close_idlest():
            self.app = _crowded(self.app)
        self._wait()

    def _close_idlest(self) -> bool:
        """Close the connection whose last answer is longest ago; False where all are at work."""
        idle = [
            other
            for other in self.connections
            if isinstance(other, PunctualProtocol)
            and other.cycle is not None  # pyright: ignore[reportUnnecessaryComparison] - before the first
            and other.cycle.response_complete
            and not other.transport.is_closing()
        ]
        if idle:
            min(idle, key=lambda other: other._answered_at).timeout_keep_alive_handler()
        return bool(idle)

    @override
    def data_received(self, data: bytes) -> None:
        """Take what has come; the time runs while no request is under way."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison] - before the first
            self._wait()
        else:
            self._stop_waiting()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the connection."""
        self._stop_waiting()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    @override
    def on_response_complete(self) -> None:
        """Watch whether the client reads the answer."""
        self._answered_at = time.monotonic()
        super().on_response_complete()
        if self._reading is None and self.transport.get_write_buffer_size():
            self._watch(self.transport.get_write_buffer_size())

    def _watch(self, unread_bytes: int) -> None:
        self._reading = self.loop.call_later(READ_SECONDS, self._look, unread_bytes)

    def _look(self, unread_bytes: int) -> None:
        """Cut the connection of a client that has read nothing since the last check."""
        self._reading = None
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes >= unread_bytes:
            self.transport.abort()
        elif left_bytes:
            self._watch(left_bytes)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _crowded(app: ASGIApp) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in UNBOUNDED_PATHS:
            await app(scope, receive, send)
            return
        problem = ProblemError(OVERLOADED, "too many connections are open", headers={"Connection": "close"})
        await problem_response(problem)(scope, receive, send)

    return refuse
