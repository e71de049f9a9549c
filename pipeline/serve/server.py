"""Bind and serve until stopped; a server that other machines can reach must have a key.

Connections have bounds that uvicorn has no settings for:

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
import shlex
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import uvicorn
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import ConfigError, StorageError
from cairn.pipeline.faiss_device import use_index_device
from cairn.pipeline.index.generation import OpenOne
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.middleware import UNBOUNDED_PATHS
from cairn.pipeline.serve.problems import Kind, problem_response
from cairn.pipeline.serve.settings import MAX_HEADER_BYTES, ServeSettings, num_processors
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_A_REQUEST: Final = 8
"""Connections that may be open, idle ones too, for each request that may be in flight; more are refused."""
BACKLOG: Final = 1_024
KEEP_ALIVE_SECONDS: Final = 30


def run_server(
    settings: ServeSettings, on_listening: Callable[[str], None], open_one: OpenOne | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; ``open_one`` opens generations elsewhere than here."""
    require_key(settings)
    if settings.index_device is not None:
        use_index_device(settings.index_device)
    app = app_of(settings, open_one)
    listener = bind(settings)
    with listener:
        host, port = listener.getsockname()[:2]
        on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        server_of(app, settings).run(sockets=[listener])


def app_of(settings: ServeSettings, open_one: OpenOne | None = None) -> FastAPI:
    """Return the application with the reranker and the threads that the settings ask for."""
    num_threads = settings.encoder_threads or min(torch.get_num_threads(), num_processors())
    reranker = None if settings.rerank_model is None else CrossEncoderReranker(settings.rerank_model)
    return create_app(
        settings,
        reranker=reranker,
        on_encoder_thread=partial(torch.set_num_threads, num_threads),
        open_one=open_one,
    )


def server_of(app: FastAPI, settings: ServeSettings) -> uvicorn.Server:
    """Return what serves an application within the bounds of its settings."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=PunctualProtocol,
            loop="asyncio",  # whatever is installed beside it
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections(CONNECTIONS_A_REQUEST * settings.max_requests),
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(settings.deadline_seconds)),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )


def require_key(settings: ServeSettings) -> None:
    """Refuse to serve others without a key, and anyone where keys were made and their file is gone."""
    keys = KeyFile(settings.keys_path)
    keys.require_kept()
    is_guarded = any(key.revoked_at is None for key in keys.read())
    if not is_guarded and not settings.is_loopback:
        named = (
            ("--keys-file", str(settings.keys_file)) if settings.keys_file else ("--root", str(settings.root))
        )
        command = shlex.join(["cairn", "keys", "create", "NAME", *named])
        raise ConfigError(
            "host must be this machine's own (127.0.0.1) while there is no API key, got "
            f"{settings.host!r}; run `{command}`"
        )


def bind(settings: ServeSettings) -> socket.socket:
    """Return a listening socket; an address that is taken or not this machine's raises a sentence."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, settings.port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise StorageError(
            f"port {settings.port} of {settings.host} cannot be listened on: {error.strerror or error}"
        ) from error
    # Connections take it from here: asyncio leaves it out for a socket it did not make, and an answer's
    # second packet waits 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


HEAD_SECONDS: Final = 10.0
"""Within which the head of a request must have arrived, from the connection or its first byte on."""
FIRST_REQUEST_SECONDS: Final = 1.0
"""How long a new connection keeps its place without a request while others want it."""
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

    _idle_since = 0.0
    _waiting: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Note a connection; one beyond the bound takes the place of an idle one, or is refused."""
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        bound, self.limit_concurrency = self.limit_concurrency, None
        if bound is not None and len(self.connections) > bound and not self._close_idlest():
            self.app = _crowded(self.app)
        self._wait()

    def _close_idlest(self) -> bool:
        """Close the connection that has waited longest for a request; False where none waits."""
        patience = time.monotonic() - FIRST_REQUEST_SECONDS
        idle = [
            other
            for other in self.connections
            if isinstance(other, PunctualProtocol)
            and not other.transport.is_closing()
            and (other._idle_since < patience if _is_new(other) else other.cycle.response_complete)
        ]
        if idle:
            min(idle, key=lambda other: other._idle_since).timeout_keep_alive_handler()
        return bool(idle)

    @override
    def data_received(self, data: bytes) -> None:
        """Take what has come; the time runs while no request is under way."""
        super().data_received(data)
        if _is_new(self) or self.cycle.response_complete:
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
        self._idle_since = time.monotonic()
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


def _is_new(connection: PunctualProtocol) -> bool:
    """Tell whether no request has come through a connection yet."""
    return connection.cycle is None  # pyright: ignore[reportUnnecessaryComparison]


def _crowded(app: ASGIApp) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in UNBOUNDED_PATHS:
            await app(scope, receive, send)
            return
        problem = Kind.OVERLOADED("too many connections are open", headers={"Connection": "close"})
        await problem_response(problem)(scope, receive, send)

    return refuse
