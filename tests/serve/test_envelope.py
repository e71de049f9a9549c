"""The envelope of every request: bounds, deadlines, headers, figures.

The event loop stays free, and no error leaves as it is.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from cairn.pipeline.collection import load_query_encoder
from cairn.pipeline.errors import StorageError, TryAgainError
from cairn.pipeline.search import filters
from cairn.pipeline.serve.middleware import Envelope
from cairn.pipeline.serve.page_routes import PAGE_PATHS
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import problem
from tests.served_stones import raising, wait_until

SEARCH = "/v1/collections/stones/search"
SECRET = "granite secretword"
FILTER = {"type": "gte", "key": "year", "value": 2000}


class Stubborn:
    """The collection's encoder, which waits or fails when told to."""

    def __init__(self, generation):
        self._real = load_query_encoder(generation)
        self.go_on, self.has_begun = threading.Event(), threading.Event()
        self.go_on.set()
        self.error: BaseException | None = None

    def __getattr__(self, name):
        if name == "encode_query_tokens":  # so that queries come by the method below
            raise AttributeError(name)
        return getattr(self._real, name)

    def encode_queries(self, texts):
        self.has_begun.set()
        assert self.go_on.wait(300)
        if self.error is not None:
            raise self.error
        return self._real.encode_queries(texts)


@pytest.fixture
def stubborn(served_root, serve):
    """Return a starter of servers over ``stones`` with an encoder that can be held up."""

    def start(**settings):
        made: list[Stubborn] = []

        def load(generation):
            made.append(Stubborn(generation))
            return made[-1]

        client = serve(
            ServeSettings(root=served_root, collections=("stones",), **settings), load_encoder=load
        )
        return client, made[0]

    return start


def ask(client):
    return client.post(SEARCH, json={"query": SECRET})


def test_encoding_leaves_the_event_loop_free_and_requests_beyond_the_bound_are_to_come_again(stubborn):
    client, encoder = stubborn(max_requests=3)
    encoder.go_on.clear()
    in_flight = client.app.state.server.metrics.requests_in_flight._value
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ask, client) for _ in range(2)]
        encoder.has_begun.wait()
        assert client.get("/v1/collections/stones").status_code == 200
        waiting.append(pool.submit(ask, client))
        wait_until(lambda: in_flight.get() == 3)
        response = ask(client)
        assert problem(response) == (503, "overloaded")
        assert response.headers["Retry-After"] == "1"
        assert [client.get(path).status_code for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        assert not any(each.done() for each in waiting)
        encoder.go_on.set()
        assert [each.result().status_code for each in waiting] == [200] * 3
    assert ask(client).status_code == 200


def test_request_past_its_deadline_is_given_up_and_the_next_one_answered(stubborn, monkeypatch):
    client, encoder = stubborn()
    layer = client.app.middleware_stack
    while not isinstance(layer, Envelope):
        layer = layer.app
    encoder.go_on.clear()
    settings = layer._settings
    monkeypatch.setattr(layer, "_settings", replace(settings, deadline_seconds=0.05))
    response = ask(client)
    assert problem(response) == (504, "deadline")
    assert response.headers["Retry-After"] == "1"
    encoder.go_on.set()
    monkeypatch.setattr(layer, "_settings", settings)
    assert ask(client).status_code == 200


@pytest.mark.parametrize(
    "error", [RuntimeError(f"cannot encode {SECRET}"), MemoryError(SECRET), ValueError(SECRET)]
)
def test_failing_encoder_is_a_problem_of_its_own_and_nothing_is_told(stubborn, caplog, error, served_root):
    caplog.set_level(logging.INFO)
    client, encoder = stubborn()
    encoder.error = error
    response = ask(client)
    assert problem(response) == (500, "encoder-failed")
    assert "never retrieved" not in caplog.text
    assert "serve.encoder_failed" in caplog.text
    encoder.error = None
    assert ask(client).status_code == 200
    assert client.get("/v1/collections/stones").status_code == 200
    for shown in (response.text, caplog.text):
        assert "secretword" not in shown
        assert str(served_root) not in shown


@pytest.mark.parametrize(
    ("error", "told"),
    [(StorageError, (503, "storage-failed")), (TryAgainError, (504, "deadline"))],
)
def test_failing_read_of_a_filter_is_told_and_others_go_on(stubborn, monkeypatch, caplog, error, told):
    client, _ = stubborn()
    failing = raising([error("reading the filter's documents failed")])
    monkeypatch.setattr(filters, "allowed_documents", failing)
    assert problem(client.post(SEARCH, json={"query": "slate", "filters": FILTER})) == told
    assert ask(client).status_code == 200
    assert "never retrieved" not in caplog.text


def test_unforeseen_error_is_a_problem_without_its_message(client, caplog, monkeypatch):
    monkeypatch.setattr(
        "cairn.pipeline.serve.answers.hit_reply",
        lambda *_, **__: (_ for _ in ()).throw(KeyError("a secretword in /root/x")),
    )
    response = client.post(SEARCH, json={"query": "slate"})
    assert problem(response) == (500, "internal-error")
    assert "serve.request_failed error=KeyError at=" in caplog.text
    assert "secretword" not in caplog.text + response.text


def test_log_and_metrics_have_routes_and_never_what_was_sent(own_client, caplog):
    caplog.set_level(logging.DEBUG)
    own_client.headers["Authorization"] = "Bearer cairn_secretword"
    own_client.post(SEARCH, json={"query": SECRET})
    own_client.post(SEARCH, json={"query": SECRET, "top_k": "secretword"})
    own_client.get("/v1/collections/stones/documents/secretword")
    own_client.get("/v1/collections/secretword")
    ours = [record for record in caplog.records if record.name.startswith("cairn.")]
    assert any("route=/v1/collections/{name}/search status=200" in record.getMessage() for record in ours)
    assert [record.getMessage() for record in ours if "secretword" in record.getMessage()] == []
    own_client.get("/secretword")
    own_client.request("BREW", "/healthz")
    text = own_client.get("/metrics").text
    assert (
        'cairn_http_requests_total{method="POST",route="/v1/collections/{name}/search",status="200"} 1.0'
        in text
    )
    assert 'cairn_problems_total{type="unknown-collection"} 1.0' in text
    assert 'cairn_http_requests_total{method="GET",route="none",status="404"} 1.0' in text
    assert 'cairn_http_requests_total{method="other"' in text
    assert 'cairn_generation{collection="stones"} 1.0' in text
    assert "cairn_encoder_pass_texts_count 1.0" in text
    assert "cairn_http_requests_in_flight 1.0" in text
    assert "secretword" not in text


PATHS = [
    *("/", "/page/page.js", "/v1/collections", "/v1/collections/stones", "/healthz", "/openapi.json"),
    *("/metrics", "/nowhere"),
]


@pytest.mark.parametrize("path", PATHS)
def test_every_response_carries_the_security_headers_and_head_is_get_without_its_body(client, path):
    got, headed = client.get(path), client.head(path)
    assert (headed.status_code, headed.content) == (got.status_code, b"")
    assert path == "/metrics" or headed.headers == got.headers  # whose figures grow
    headers = got.headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "server" not in headers
    if path not in PAGE_PATHS:
        assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["Cache-Control"] == "no-store"


def test_websocket_is_closed_and_head_of_an_address_that_takes_no_get_refused(client):
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/collections"):
        pass
    response = client.head(SEARCH)
    assert (response.status_code, response.headers["allow"], response.content) == (405, "POST", b"")
    assert client.put("/v1/collections").headers["allow"] == "GET, HEAD"


def test_memory_is_given_back_after_a_large_answer_and_not_after_a_small_one(served_root, serve, monkeypatch):
    given_back = threading.Event()
    monkeypatch.setattr("cairn.pipeline.serve.middleware.return_freed_memory", given_back.set)
    monkeypatch.setattr("cairn.pipeline.serve.middleware.GIVE_BACK_SECONDS", 0.0)
    client = serve(ServeSettings(root=served_root))
    assert client.post(SEARCH, json={"query": "slate"}).status_code == 200
    assert not given_back.wait(0.2)
    monkeypatch.setattr("cairn.pipeline.serve.middleware.HEAVY_ANSWER_BYTES", 100)
    assert client.post(SEARCH, json={"query": "slate"}).status_code == 200
    assert given_back.wait(60)
