"""Where a server listens, whom it serves without a key, and the bounds of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
from cairn.pipeline.errors import ConfigError, StorageError
from cairn.pipeline.serve import server
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.server import bind, require_key, run_server
from cairn.pipeline.serve.settings import ServeSettings, is_loopback
from fastapi import FastAPI, Response

from tests.served_stones import serving


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST"])
def test_own_addresses_need_no_key(tmp_path, host):
    assert is_loopback(host)
    require_key(ServeSettings(root=tmp_path, host=host))


BEYOND = ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "search.example", "localhost.example", "", "fe80::1"]


@pytest.mark.parametrize("host", BEYOND)
def test_address_beyond_this_machine_needs_a_key(tmp_path, host):
    settings = ServeSettings(root=tmp_path, host=host)
    with pytest.raises(ConfigError, match="cairn keys create NAME --root"):
        require_key(settings)
    key, _ = KeyFile(settings.keys_path).create("reader")
    require_key(settings)
    KeyFile(settings.keys_path).revoke(key.key_id)
    with pytest.raises(ConfigError, match="no API key"):
        require_key(settings)


def test_lost_file_of_keys_opens_no_server(tmp_path):
    settings = ServeSettings(root=tmp_path)
    require_key(settings)
    KeyFile(settings.keys_path).create("reader")
    settings.keys_path.unlink()
    with pytest.raises(ConfigError, match=r"got no keys\.json; restore it or make new keys"):
        require_key(settings)
    (tmp_path / "keys.json.made").unlink()
    require_key(settings)


def test_port_that_is_free_is_bound_and_holds_no_answer_back_and_another_is_one_sentence(tmp_path):
    with bind(ServeSettings(root=tmp_path, port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=f"port {port} of 127.0.0.1 cannot be listened on"):
            bind(ServeSettings(root=tmp_path, port=port)).close()
        with socket.create_connection(taken.getsockname()[:2]), taken.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with pytest.raises(StorageError, match=r"no-such-host\.invalid cannot be listened on"):
        bind(ServeSettings(root=tmp_path, host="no-such-host.invalid", port=0))


def test_sixth_version_is_bound(tmp_path):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind(ServeSettings(root=tmp_path, host="::1", port=0)) as listener:
        assert listener.family == socket.AF_INET6


def test_rerank_model_that_is_not_there_is_told_before_anything_is_served(tmp_path):
    with pytest.raises(ConfigError, match="cairn models get cross-encoder/none"):
        run_server(ServeSettings(root=tmp_path, port=0, rerank_model="cross-encoder/none"), pytest.fail)


@pytest.mark.parametrize(
    "wrong",
    [
        {"collections": ("../up",)},
        {"port": -1},
        {"port": 65_536},
        {"deadline_seconds": 0.0},
        {"deadline_seconds": float("nan")},
        {"deadline_seconds": 601.0},
        {"max_requests": 0},
        {"encoder_threads": 0},
        {"search_threads": 257},
    ],
)
def test_settings_out_of_bounds_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError):
        ServeSettings(root=tmp_path, **wrong)


HEAD = b"GET /v1/collections HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
OK = b"HTTP/1.1 200 OK"
ASKED = HEAD.replace(b"Connection: close\r\n", b"")


@pytest.fixture
def serve_real(tmp_path):
    """Return a starter of servers on a port of this machine.

    ``serve_real(app, **settings)`` gives what connects to it.
    """
    with ExitStack() as stack:

        def start(app=None, **changes):
            settings = replace(ServeSettings(root=tmp_path, port=0, deadline_seconds=300.0), **changes)
            address = stack.enter_context(serving(settings, app, is_forced=True))
            place = "127.0.0.1", int(address.rpartition(":")[2])
            return lambda: stack.enter_context(socket.create_connection(place, timeout=300.0))

        yield start


def answered(connection):
    """Return all that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127"])
def test_connection_that_asks_nothing_is_closed(serve_real, monkeypatch, sent):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    idle = serve_real()()
    with contextlib.suppress(ConnectionError):  # it may be closed before this thread gets so far
        idle.sendall(sent)
        assert answered(idle) == b""


def test_connection_that_asks_nothing_more_is_closed(serve_real, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 1)
    idle = serve_real()()
    idle.sendall(HEAD.replace(b"Connection: close", b"Content-Length: 9") + b"a")
    assert answered(idle).count(OK) == 1


def test_request_that_came_in_time_may_take_long_to_answer(serve_real, monkeypatch):
    ends: list[asyncio.TimerHandle] = []
    slow = FastAPI()

    @slow.get("/v1/collections")
    async def look():
        return all(end.cancelled() for end in ends)

    wait = server.PunctualProtocol._wait
    monkeypatch.setattr(
        server.PunctualProtocol, "_wait", lambda self: (wait(self), ends.append(self._waiting))
    )
    connection = serve_real(slow)()
    connection.sendall(HEAD)
    assert answered(connection).endswith(b"true")


def test_connection_of_who_does_not_read_is_closed(serve_real, monkeypatch):
    large = FastAPI()
    num_bytes = 32 << 20  # more than the kernel keeps

    @large.get("/v1/collections")
    async def give():
        return Response(b"x" * num_bytes)

    closed = threading.Event()
    look = server.PunctualProtocol._look

    def look_and_tell(self, unread_bytes):
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


def test_too_many_connections_keep_no_health_check_out(connect):
    idle = [connect(), connect()]
    refused, health = connect(), connect()
    health.sendall(HEAD.replace(b"/v1/collections", b"/healthz"))
    assert OK in answered(health)
    refused.sendall(ASKED)
    head, _, body = answered(refused).partition(b"\r\n\r\n")
    assert b"HTTP/1.1 503" in head
    assert b"retry-after: 1" in head.lower()
    assert json.loads(body)["type"] == "urn:problem-type:cairn:overloaded"
    assert OK in sent(idle[0], HEAD)


@pytest.mark.parametrize(
    ("length", "frame"),
    [
        ("Content-Length: %d", b"%s"),
        ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n"),
        ("Transfer-Encoding: chunked", b"%x\r\n%s\r\nff\r\n "),
    ],
)
def test_body_that_breaks_off_is_not_written_even_where_it_is_json(own_root, serve_real, length, frame):
    connect = serve_real(root=own_root, writable=True)
    address = b"/v1/collections/stones/documents"

    def post(doc_id, length, frame, missing):
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


def answer(connection):
    """Return one answer whole."""
    parts = b""
    while not parts.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, parts
        parts += part
    return parts


@pytest.fixture
def connect(serve_real, monkeypatch):
    """Return what connects to a server that takes two connections, and closes none for its silence."""
    monkeypatch.setattr(server, "CONNECTIONS_A_REQUEST", 2)
    for name in ("HEAD_SECONDS", "KEEP_ALIVE_SECONDS"):
        monkeypatch.setattr(server, name, 300)
    return serve_real(max_requests=1)


def sent(connection, head):
    """Send a request and return its answer whole."""
    connection.sendall(head)
    return answer(connection)


def test_new_connection_takes_the_place_of_the_idlest_or_of_one_that_never_asked(connect, monkeypatch):
    idle = [connect(), connect()]
    for connection in idle:
        assert sent(connection, ASKED).startswith(OK)
    assert sent(connect(), HEAD).startswith(OK)
    assert idle[0].recv(1 << 16) == b""
    assert sent(idle[1], HEAD).startswith(OK)
    silent = [connect(), connect()]
    assert sent(connect(), HEAD).startswith(b"HTTP/1.1 503 ")
    monkeypatch.setattr(server, "FIRST_REQUEST_SECONDS", 0.0)
    assert sent(connect(), HEAD).startswith(OK)
    assert silent[0].recv(1 << 16) == b""


@pytest.mark.parametrize(("limit", "connections_at_most"), [(64, 16), (1_024, 768), (1 << 20, 1_000)])
def test_connections_leave_descriptors_for_files(monkeypatch, limit, connections_at_most):
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    assert server.max_connections(1_000) == connections_at_most
