"""Requests that no client means: malformed, cut, doubled, deep, endless, of other protocols.

JSON of any shape is what ``tests/serve/test_fuzz.py`` sends. Each of these is answered by a 4xx, a declared
refusal of a busy server, or by a closed connection; the server answers a search rightly afterwards.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from pathlib import Path

from cairn.pipeline.index.layout import CollectionLayout

from tests.index import stones
from tests.nightly import served
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import forked

REQUESTS = 650
SEARCHED_EVERY = 25
SECONDS = 5.0
MAX_RESIDENT_BYTES = 1_500 << 20
PATHS = (
    served.SEARCH, "/v1/collections/stones", "/v1/collections/stones/documents/d0",
    "/v1/collections/..%2f..%2fetc/search", "/v1/vector_stores/stones/search", "/v1/embeddings",
    "/v1/collections/stones/map", "/healthz", "/readyz", "/metrics", "/", "//", "/%00", "/" + "a" *
    9_000,
)  # fmt: skip
METHODS = (
    "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "X" * 40,
    "\x00",
)  # fmt: skip
HEADERS = (
    "Content-Length: 5", "Content-Length: -1", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Host: evil.example", "Origin: https://evil.example",
    "Authorization: Bearer " + "k" * 5_000,
    "Expect: 100-continue", "Upgrade: websocket", "Connection: Upgrade", "X: " + "y" * 70_000,
    "Range: bytes=0-", ": empty", "no colon",
)  # fmt: skip


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Send many such requests to one server, and a search now and then."""
    root = folder / "root"
    forked(_publish, root)
    with served.server(root) as (port, pid):
        for number in range(REQUESTS):
            if number % SEARCHED_EVERY == 0:
                _require_answer(port)
                tally["requests"] += 1
            request = rng.choice(_MAKERS)(rng)
            status = _send(port, request, is_cut=rng.random() < 0.1)
            tally["requests"] += 1
            tally[f"status {status}"] += 1
            is_allowed = status is None or status < 500 or status in (503, 504, 505)
            require(is_allowed, f"status {status} to {request[:300]!r}")
        _require_answer(port)
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        tally["peak_resident_mb"] = max(tally["peak_resident_mb"], resident >> 20)
        require(resident < MAX_RESIDENT_BYTES, f"the server holds {resident >> 20} MB")


def _publish(root: Path) -> None:
    stones.publish_documents(CollectionLayout(root, "stones"), stones.document_ids(20))


def _require_answer(port: int) -> None:
    body = {"query": "d0/0", "top_k": 1, "hybrid": False, "granularity": "document"}
    status, reply = served.ask(port, served.SEARCH, body)
    found = [hit["doc_id"] for hit in reply.get("hits", [])]
    require((status, found) == (200, ["d0"]), f"a search among them ends in {status} {found}")


def _send(port: int, request: bytes, *, is_cut: bool) -> int | None:
    """Return the status, None where the connection was closed without an answer."""
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=SECONDS) as connection, contextlib.suppress(OSError):
        connection.sendall(request[: len(request) // 2] if is_cut else request)
        connection.shutdown(socket.SHUT_WR)
        head = connection.recv(4_096).split(b"\r\n", 1)[0].split()
        return int(head[1]) if len(head) > 1 and head[1].isdigit() else None
    return None


def _head(rng: random.Random, method: str, path: str, length: int, *more: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/{rng.choice(('1.1', '1.1', '1.1', '1.0', '2.0', '9'))}",
        "Host: 127.0.0.1",
    ]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join([*lines, *more]) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def _no_json(rng: random.Random) -> bytes:
    content = rng.choice(
        (
            b"[" * 100_000,
            b'{"query": NaN}',
            b"\xff\xfe",
            b'{"query": "\\ud800"}',
            b'{"a":' * 5_000,
            rng.randbytes(rng.randint(0, 3_000)),
        )
    )
    return _head(rng, "POST", rng.choice(PATHS), len(content)) + content


def _odd_head(rng: random.Random) -> bytes:
    more = rng.choices(HEADERS, k=rng.randint(1, 4))
    return _head(rng, rng.choice(METHODS), rng.choice(PATHS), 2, *more) + b"{}"


def _chunks(rng: random.Random) -> bytes:
    size = rng.choice((b"5", b"ffffffffffffffff", b"-1", b"zz", b"5;" + b"x" * 5_000))
    head = f"{rng.choice(('POST', 'GET', 'DELETE'))} {rng.choice(PATHS)} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return (
        head.encode()
        + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        + size
        + b"\r\nhello\r\n0\r\n\r\n"
    )


def _noise(rng: random.Random) -> bytes:
    return rng.choice(
        (rng.randbytes(rng.randint(1, 4_000)), b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\n")
    )


_MAKERS: tuple[Callable[[random.Random], bytes], ...] = (
    _no_json,
    _odd_head,
    _chunks,
    _noise,
)
