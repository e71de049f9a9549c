"""Idle connections are closed; while too many are open, health checks are still answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.serve import server
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from fastapi import FastAPI, Response

HEAD = b"GET /v1/collections HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
Connect = Callable[[], socket.socket]


@pytest.fixture
def serve_real(tmp_path: Path) -> Iterator[Callable[..., Connect]]:
    """Return a starter of servers on a port of this machine.

    ``serve_real(app, **settings)`` gives what connects to it.
    """
    with ExitStack() as stack:

        def start(app: FastAPI | None = None, **changes: Any) -> Connect:
            settings = replace(ServeSettings(root=tmp_path, port=0, deadline_seconds=300.0), **changes)
            listener = stack.enter_context(server.bind(settings))
            running = server.server_of(app or create_app(settings), settings)
            thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
            thread.start()

            def stop() -> None:
                running.force_exit = running.should_exit = True
                thread.join()

            stack.callback(stop)
            while not running.started:
                time.sleep(0.01)
            return lambda: stack.enter_context(
                socket.create_connection(listener.getsockname()[:2], timeout=300.0)
            )

        yield start


def answered(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127"])
def test_connection_that_asks_nothing_is_closed(
    serve_real: Callable[..., Connect], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    idle = serve_real()()
    with contextlib.suppress(ConnectionError):  # it may be closed before this thread gets so far
        idle.sendall(sent)
        assert answered(idle) == b""


def test_connection_that_asks_nothing_more_is_closed(
    serve_real: Callable[..., Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 1)
    idle = serve_real()()
    idle.sendall(HEAD.replace(b"Connection: close", b"Content-Length: 9") + b"a")
    assert answered(idle).count(b"HTTP/1.1 200 OK") == 1


def test_request_that_came_in_time_may_take_long_to_answer(
    serve_real: Callable[..., Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[asyncio.TimerHandle] = []
    slow = FastAPI()

    @slow.get("/v1/collections")
    async def look() -> bool:
        return all(end.cancelled() for end in ends)

    wait = server.PunctualProtocol._wait
    monkeypatch.setattr(
        server.PunctualProtocol, "_wait", lambda self: (wait(self), ends.append(self._waiting))
    )
    connection = serve_real(slow)()
    connection.sendall(HEAD)
    assert answered(connection).endswith(b"true")


def test_connection_of_who_does_not_read_is_closed(
    serve_real: Callable[..., Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = FastAPI()
    num_bytes = 32 << 20  # more than the kernel keeps

    @large.get("/v1/collections")
    async def give() -> Response:
        return Response(b"x" * num_bytes)

    closed = threading.Event()
    look = server.PunctualProtocol._look

    def look_and_tell(self: server.PunctualProtocol, unread_bytes: int) -> None:
        look(self, unread_bytes)
        if self.transport.is_closing():
            closed.set()

    monkeypatch.setattr(server, "READ_SECONDS", 0.1)
    monkeypatch.setattr(server.PunctualProtocol, "_look", look_and_tell)
    idle = serve_real(large)()
    idle.sendall(HEAD)
    assert closed.wait(300.0)
    with contextlib.suppress(ConnectionResetError):
        assert len(answered(idle)) < num_bytes


def test_too_many_connections_keep_no_health_check_out(
    serve_real: Callable[..., Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_A_REQUEST", 2)
    monkeypatch.setattr(server, "HEAD_SECONDS", 300.0)
    connect = serve_real(max_requests=1)
    idle = [connect(), connect()]
    refused, health = connect(), connect()
    health.sendall(HEAD.replace(b"/v1/collections", b"/healthz"))
    assert b"HTTP/1.1 200 OK" in answered(health)
    refused.sendall(HEAD.replace(b"Connection: close\r\n", b""))
    head, _, body = answered(refused).partition(b"\r\n\r\n")
    assert b"HTTP/1.1 503" in head
    assert b"retry-after: 1" in head.lower()
    assert json.loads(body)["type"] == "urn:problem-type:cairn:overloaded"
    idle[0].sendall(HEAD)
    assert b"HTTP/1.1 200 OK" in answered(idle[0])


@pytest.mark.parametrize(
    ("length", "frame"),
    [
        ("Content-Length: %d", b"%s"),
        ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n"),
        ("Transfer-Encoding: chunked", b"%x\r\n%s\r\nff\r\n "),
    ],
)
def test_body_that_breaks_off_is_not_written_even_where_it_is_json(
    own_root: Path, serve_real: Callable[..., Connect], length: str, frame: bytes
) -> None:
    connect = serve_real(root=own_root, writable=True)
    address = b"/v1/collections/stones/documents"

    def post(doc_id: str, length: str, frame: bytes, missing: int) -> bytes:
        body = json.dumps({"documents": [{"doc_id": doc_id, "text": "A grey slate."}]}).encode()
        framed = frame % ((len(body), body) if b"%x" in frame else body)
        length = length % (len(body) + missing) if "%d" in length else length
        with connect() as sender:
            sender.sendall(
                b"POST %s?wait=searchable HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\n%s\r\n\r\n%s" % (address, length.encode(), framed)
            )
            if missing:
                sender.shutdown(socket.SHUT_WR)
            return answered(sender)

    post("half", length, frame, 1)
    whole = post("whole", "Content-Length: %d", b"%s", 0)
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["write"] == 1
    for doc_id, status in (("half", b"404"), ("whole", b"200")):
        reader = connect()
        reader.sendall(HEAD.replace(b"/v1/collections", b"%s/%s" % (address, doc_id.encode())))
        assert answered(reader).startswith(b"HTTP/1.1 " + status)
