"""Requests that are refused before they reach a route, and what the refusals say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from cairn.pipeline.serve import middleware
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import problem, problem_everywhere

SEARCH = "/v1/collections/stones/search"
JSON = {"Content-Type": "application/json"}


NO_JSON = [
    *(b"", b"{", b"\x00\x01\x02\x89PNG", b"[" * 200_000, b'{"filters":' * 10_000),
    *(b'{"query": NaN}', b'{"query": "a", "top_k": Infinity}'),
    b'{"query": "a", "weights": {"chunk": -Infinity}}',
    *(b'{"query": "\\ud800"}', b'{"query": "a\\udfffb"}', b'{"query": "\xff"}'),
    *('{"query": "a"}'.encode("utf-16"), b'{"query": "a"} trailing', b'{"query": 1' + b"0" * 5_000 + b"}"),
]
TWICE = [b'{"query": "a", "query": "b"}', b'{"query": "a", "filters": {"a": 1, "\\u0061": 2}}']


@pytest.mark.parametrize(
    ("body", "told"),
    [
        *((body, "send UTF-8 JSON") for body in NO_JSON),
        *((body, "every key of an object once") for body in TWICE),
    ],
)
def test_body_that_is_no_json_or_has_a_key_twice_is_refused(client, body, told):
    response = client.post(SEARCH, content=body, headers=JSON)
    assert problem(response) == (400, "invalid-json")
    assert told in response.json()["detail"]


WITHOUT_BODY = [("GET", "/v1/collections"), ("HEAD", "/healthz"), ("DELETE", SEARCH)]
MEDIA_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]


@pytest.mark.parametrize(
    "headers",
    [
        *({"Content-Type": media_type} for media_type in (*MEDIA_TYPES, "application/octet-stream", "")),
        {**JSON, "Content-Encoding": "gzip"},
    ],
)
def test_body_of_another_type_or_compressed_is_refused(client, headers):
    body = '{"query": "é"}'.encode()
    with_charset = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post(SEARCH, content=body, headers=with_charset).status_code == 200
    assert problem(client.post(SEARCH, content=body, headers=headers)) == (415, "media-type-refused")


@pytest.mark.parametrize("in_chunks", [False, True])
def test_body_over_one_mebibyte_is_refused(client, in_chunks):
    body = json.dumps({"query": "slate", "filters": None, "cursor": None}).encode()
    padding = b" " * ((1 << 20) - len(body))
    assert client.post(SEARCH, content=body[:-1] + padding + b"}", headers=JSON).status_code == 200
    content = iter([body, padding, b" "]) if in_chunks else body + padding + b" "
    assert problem(client.post(SEARCH, content=content, headers=JSON)) == (413, "body-too-large")


async def never():
    await asyncio.Event().wait()


async def gone():
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("path", "media_type", "receive", "told"),
    [
        (SEARCH, b"application/json", never, (408, "body-slow")),
        (SEARCH, b"application/json", gone, (400, "invalid-json")),
        ("/v1/files", b"multipart/form-data; boundary=x", never, (408, "body-slow")),
        ("/v1/files", b"multipart/form-data; boundary=x", gone, (408, "body-slow")),
    ],
)
def test_body_that_does_not_arrive_is_given_up(served_root, monkeypatch, path, media_type, receive, told):
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.01)
    app = create_app(ServeSettings(root=served_root, writable=True))
    headers = [(b"host", b"127.0.0.1"), (b"content-type", media_type)]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    asyncio.run(app({**scope, "query_string": b"", "headers": headers}, receive, send))
    assert (sent[0]["status"], json.loads(sent[1]["body"])["type"].rpartition(":")[2]) == told


REBOUND = [
    *("evil.example", "evil.localhost.", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.2"),
    *("[::2]", "evil.example:8400"),
]


def test_own_names_are_answered_and_a_rebound_one_refused_also_behind_one_of_them(client):
    for host in ("127.0.0.1", "127.0.0.1:8400", "localhost:1", "LOCALHOST", "localhost.", "[::1]:8400", ""):
        assert client.get("/v1/collections", headers={"Host": host}).status_code == 200, host
    for host in REBOUND:
        for path in ("/v1/collections", "/openapi.json"):
            for headers in ({"Host": host}, [("Host", "localhost"), ("Host", host)]):
                assert problem(client.get(path, headers=headers)) == (421, "host-refused"), host


def test_named_host_beyond_loopback_takes_away_no_address(own_root, serve):
    client = serve(ServeSettings(root=own_root, host="0.0.0.0", allowed_hosts=("search.example",)), key={})
    own = ("Search.Example:443", "localhost", "127.0.0.1:8400", "10.0.0.5:8400", "[::1]")
    for host, status in (*((each, 200) for each in own), ("evil.example", 421)):
        assert client.get("/v1/collections", headers={"Host": host}).status_code == status
        assert client.get("/healthz", headers={"Host": host}).status_code == 200


NAMED, OTHER = "https://search.example:8443", "https://other.example"


def test_page_behind_a_proxy_is_answered_where_its_host_is_known_and_one_of_another_origin_refused(
    client, served_root, serve
):
    named = serve(ServeSettings(root=served_root, allowed_hosts=("search.example",)))
    for asked, origin, others, status in (
        (named, NAMED, {}, 200),
        (named, NAMED, {"Host": "search.example"}, 200),
        (named, OTHER, {"X-Forwarded-Host": "other.example"}, 200),
        (named, OTHER, {}, 403),
        (named, "http://localhost:3000", {}, 403),
        (named, OTHER, {"X-Forwarded-Host": "search.example"}, 403),
        *((client, other, {}, 403) for other in ("http://evil.example", "null", "file://", "")),
        *((client, other, {}, 403) for other in ("http://127.0.0.1:1", "http://localhost:8400")),
    ):
        response = asked.get("/v1/collections", headers={"Origin": origin, **others})
        assert response.status_code == status, (origin, others)
        assert status == 200 or problem(response) == (403, "origin-refused")


def test_page_of_the_server_itself_is_answered_without_cors_and_no_preflight_is_granted(client):
    headers = {"Origin": "http://127.0.0.1:8400", "Access-Control-Request-Method": "POST"}
    response = client.get("/v1/collections", headers=headers)
    preflight = client.options(SEARCH, headers=headers)
    assert response.status_code == 200
    assert problem(preflight) == (405, "method-refused")
    names = {*response.headers, *preflight.headers}
    assert [name for name in names if name.startswith("access-control")] == []


@pytest.fixture
def keyed(own_root, serve):
    """Return ``keyed(**key)``: a client whose requests carry a key made so."""
    client = serve(ServeSettings(root=own_root))
    file = KeyFile(own_root / "keys.json")
    file.create("another's")

    def with_key(**key):
        client.headers["Authorization"] = f"Bearer {file.create('own', **key)[1]}"
        return client

    return with_key


def test_request_without_a_key_is_refused_once_there_is_one(own_root, serve):
    client = serve(ServeSettings(root=own_root))
    assert client.get("/v1/collections").status_code == 200
    KeyFile(own_root / "keys.json").create("reader")
    for path in ("/v1/collections", "/v1/collections/stones", "/metrics", "/nowhere"):
        response = client.get(path)
        assert problem(response) == (401, "key-missing")
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
    assert problem(client.post(SEARCH, json={"query": "slate"})) == (401, "key-missing")
    assert [client.get(path).status_code for path in ("/healthz", "/readyz", "/openapi.json")] == [200] * 3


TOKENS = ["cairn_0123456789ab_" + "a" * 43, "nonsense", "é"]


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        *((header, "key-missing") for header in ("Bearer", "Bearer  ", "Basic dXNlcjpwYXNz", "cairn_x", "")),
        *((f"Bearer {token}", "key-unknown") for token in TOKENS),
    ],
)
def test_header_without_a_key_or_with_an_unknown_one_is_refused(keyed, header, kind):
    response = keyed().get("/v1/collections", headers={"Authorization": header.encode()})
    assert problem(response) == (401, kind)
    assert not any(token in response.text for token in TOKENS)


ASKED = {
    "search": ("POST", SEARCH, {"query": "slate"}),
    "embed": ("POST", "/v1/embeddings", {"model": "stones", "input": "slate"}),
    "admin": ("GET", "/metrics", None),
}
PLACES = {
    **dict.fromkeys(("name", "vector_store_id"), "stones"),
    **dict.fromkeys(("doc_id", "file_id", "batch_id"), "a"),
    "number": "1",
}


@pytest.mark.parametrize("scope", ASKED)
def test_key_opens_the_routes_of_its_scope_and_no_others(keyed, scope):
    client = keyed(scopes=[scope])
    method, path, body = ASKED[scope]
    assert client.request(method, path, json=body).status_code == 200
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            needed = {"/v1/embeddings": "embed", "/metrics": "admin"}.get(path, "search")
            is_write = method in ("patch", "delete") or "files" in operations[method]["tags"]
            is_write |= "writes" in operations[method]["tags"]
            if path in middleware.OPEN_PATHS or (needed == scope and not is_write):
                continue
            sent = {"files": {"file": b"x"}} if (method, path) == ("post", "/v1/files") else {"json": {}}
            sent = sent if method in ("post", "patch") else {}
            refused = client.request(method, path.format(**PLACES), **sent)
            assert problem(refused) == (403, "scope-missing"), (method, path)


def test_only_the_page_and_what_says_how_the_server_is_are_open():
    page = {path for path in middleware.OPEN_PATHS if path == "/" or path.startswith("/page/")}
    assert page | {"/healthz", "/readyz", "/openapi.json"} == middleware.OPEN_PATHS


def test_key_for_one_collection_learns_nothing_of_another(keyed):
    client = keyed(scopes=["search", "embed"], collections=["stones"])
    assert [c["name"] for c in client.get("/v1/collections").json()["collections"]] == ["stones"]
    assert client.post(SEARCH, json={"query": "slate"}).status_code == 200
    for name in ("pebbles", "nowhere"):
        assert problem_everywhere(client, name) == (404, "unknown-collection")


def test_keys_that_cannot_be_read_let_nobody_in_and_make_the_server_not_ready_until_they_can(keyed, own_root):
    client = keyed()
    keys = own_root / "keys.json"
    content = keys.read_bytes()
    keys.write_bytes(content[:40])
    response = client.get("/v1/collections")
    assert problem(response) == (503, "keys-unreadable")
    assert str(own_root) not in response.text
    ready = client.get("/readyz")
    told = (503, "the server's keeper has to restore the file of keys")
    assert (ready.status_code, ready.json()["detail"]) == told
    keys.write_bytes(content)
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/v1/collections").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", SEARCH, {**JSON, "Transfer-Encoding": "chunked", "Content-Length": "18"}),
        *((method, path, {"Transfer-Encoding": "chunked"}) for method, path in WITHOUT_BODY),
    ],
)
def test_body_of_two_lengths_or_where_none_is_taken_is_refused_and_the_connection_closed(
    client, method, path, headers
):
    content = b'{"query": "slate"}' if method == "POST" else None
    response = client.request(method, path, content=content, headers=headers)
    assert response.status_code == 400
    assert method != "POST" or problem(response) == (400, "body-ambiguous")
    assert response.headers["Connection"] == "close"
