"""A server in a process of its own over collections of random vectors, and a client of the standard library.

The server is forked: starting an interpreter and importing costs twenty times what a server's start does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Generator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.server import bind, server_of
from cairn.pipeline.serve.settings import ServeSettings

from tests.index import stones
from tests.nightly.campaign import require
from tests.nightly.forks import start

SEARCH = "/v1/collections/stones/search"
START_SECONDS = 120.0
SHED = frozenset({"overloaded", "deadline", "collection-opening", "stopping"})
"""Problems by which a server says that it is busy; the same request may be sent again."""


class StoneEncoder:
    """The vector of the document that a query names."""

    fingerprint = "e" * 64
    vector_dim = stones.VECTOR_DIM

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors that depend on the texts alone."""
        return np.concatenate([stones.unit_vectors(text, 1) for text in texts])

    encode_documents = encode_queries

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count words."""
        return sum(len(text.split()) for text in texts)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def serve(root: Path, port: int) -> None:
    """Serve until killed."""
    os.environ["CAIRN_CACHE"] = str(root.parent / "cache")
    settings = ServeSettings(root=root, port=port, deadline_seconds=60.0)
    app = create_app(settings, load_encoder=lambda _: StoneEncoder())
    with bind(settings) as listener:
        server_of(app, settings).run(sockets=[listener])


class Client:
    """Asks on a connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(
        self, path: str, body: dict[str, Any] | None = None, *, method: str | None = None, key: str = ""
    ) -> tuple[int, Any]:
        """Return status and JSON of one request: a POST if it has a body; ``key`` makes a write one."""
        headers = {"Idempotency-Key": key} if key else {}
        if body is None:
            self._connection.request(method or "GET", path, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            self._connection.request(method or "POST", path, json.dumps(body), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read() or b"null")

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return status and JSON of one request on a connection of its own."""
    client = Client(port)
    try:
        return client.ask(path, body)
    finally:
        client.close()


def is_right(hit: dict[str, Any], versions: Collection[int]) -> bool:
    """Tell whether the passages of a hit are parts of its document in one of these versions."""
    texts = [stones.text_of(hit["doc_id"], version) for version in versions]
    return any(
        all(text[part["start_char"] : part["end_char"]] == part["text"] for part in hit["passages"])
        for text in texts
    )


def kind_of(reply: Any) -> str:
    """Return the short name of a problem."""
    return str(reply.get("type", "")).rpartition(":")[2] if isinstance(reply, dict) else ""


@contextlib.contextmanager
def server(root: Path, work: Callable[..., None] = serve, *arguments: Any) -> Generator[tuple[int, int]]:
    """Serve a root until the block ends and the server is killed; gives its port and its process id."""
    port = free_port()
    process = start(work, root, port, *arguments)
    assert process.pid is not None
    try:
        _wait_until_up(process, port)
        yield port, process.pid
        require(process.is_alive(), "the server ended by itself")
    finally:
        process.kill()
        process.join()


def _wait_until_up(process: BaseProcess, port: int) -> None:
    """Wait for a server that has tried its collections."""
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit and process.is_alive():
        try:
            _, reply = ask(port, "/readyz")
            if reply.get("detail") != "collections are being opened":
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.02)
    require(condition=False, sentence="the server does not start")
