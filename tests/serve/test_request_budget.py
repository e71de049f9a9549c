"""What a request may cost: its text, its body, its connection, and the memory of its answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.serve import server
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.batching import EncoderQueue
from cairn.pipeline.serve.problems import ProblemError
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

SEARCH = "/v1/collections/stones/search"
HEAD = b"GET /v1/collections HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LAST = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


class NoEncoder:
    """An encoder that is never asked."""

    fingerprint = "e" * 64
    vector_dim = 4

    def encode_queries(self, texts: object) -> np.ndarray:
        """Fail."""
        raise AssertionError(texts)

    encode_documents = encode_queries

    def count_tokens(self, texts: object) -> int:
        """Fail."""
        raise AssertionError(texts)


def test_request_with_more_text_than_its_deadline_allows_is_refused() -> None:
    queue = EncoderQueue(NoEncoder())
    try:
        with pytest.raises(ProblemError, match="131,072 bytes together"):
            asyncio.run(queue.encode(["x" * 8_190] * 32))
    finally:
        queue.stop()


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/collections"), ("HEAD", "/healthz"), ("DELETE", SEARCH)]
)
def test_chunked_body_where_none_is_taken_is_refused_and_the_connection_closed(
    client: TestClient, method: str, path: str
) -> None:
    response = client.request(method, path, headers={"Transfer-Encoding": "chunked"})
    assert response.status_code == 400
    assert response.headers["Connection"] == "close"


def test_memory_is_given_back_after_a_large_answer_and_not_after_a_small_one(
    served_root: Path, serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = threading.Event()
    monkeypatch.setattr("cairn.pipeline.serve.middleware.return_freed_memory", given_back.set)
    monkeypatch.setattr("cairn.pipeline.serve.middleware.GIVE_BACK_SECONDS", 0.0)
    client = serve(ServeSettings(root=served_root))
    assert client.post(SEARCH, json={"query": "slate"}).status_code == 200
    assert not given_back.wait(0.2)
    monkeypatch.setattr("cairn.pipeline.serve.middleware.HEAVY_ANSWER_BYTES", 100)
    assert client.post(SEARCH, json={"query": "slate"}).status_code == 200
    assert given_back.wait(60)


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[], socket.socket]]:
    """Return what connects to a server that takes two connections."""
    monkeypatch.setattr(server, "CONNECTIONS_A_REQUEST", 2)
    settings = ServeSettings(root=tmp_path, port=0, deadline_seconds=300.0, max_requests=1)
    with ExitStack() as stack:
        listener = stack.enter_context(server.bind(settings))
        running = server.server_of(create_app(settings), settings)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        while not running.started:
            time.sleep(0.01)
        address = listener.getsockname()[:2]
        yield lambda: stack.enter_context(socket.create_connection(address, timeout=300.0))
        running.force_exit = running.should_exit = True
        thread.join()


def answer(connection: socket.socket) -> bytes:
    """Return one answer whole."""
    parts = b""
    while not parts.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, parts
        parts += part
    return parts


def test_new_connection_takes_the_place_of_the_idlest(connect: Callable[[], socket.socket]) -> None:
    idle = [connect(), connect()]
    for connection in idle:
        connection.sendall(HEAD)
        assert answer(connection).startswith(b"HTTP/1.1 200 OK")
    new = connect()
    new.sendall(LAST)
    assert answer(new).startswith(b"HTTP/1.1 200 OK")
    assert idle[0].recv(1 << 16) == b""
    idle[1].sendall(LAST)
    assert answer(idle[1]).startswith(b"HTTP/1.1 200 OK")


def test_new_connection_takes_the_place_of_one_that_never_asked(
    connect: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [connect(), connect()]
    early = connect()
    early.sendall(LAST)
    assert answer(early).startswith(b"HTTP/1.1 503 ")
    monkeypatch.setattr(server, "FIRST_REQUEST_SECONDS", 0.0)
    new = connect()
    new.sendall(LAST)
    assert answer(new).startswith(b"HTTP/1.1 200 OK")
    assert silent[0].recv(1 << 16) == b""


@pytest.mark.parametrize(("limit", "connections_at_most"), [(64, 16), (1_024, 768), (1 << 20, 1_000)])
def test_connections_leave_descriptors_for_files(
    monkeypatch: pytest.MonkeyPatch, limit: int, connections_at_most: int
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    assert server.max_connections(1_000) == connections_at_most
