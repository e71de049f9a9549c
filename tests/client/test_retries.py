"""What is tried again, how often, after how long; every claim for both clients."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from cairn.pipeline.client.clients import AsyncCairnClient, CairnClient
from cairn.pipeline.client.errors import (
    AccessError,
    CursorExpiredError,
    InvalidRequestError,
    NotFoundError,
    ServerFailedError,
    ServerUnreachableError,
    UnavailableError,
)

ANSWER = {"query": "q", "generation": 3, "hits": [], "warnings": [], "next_cursor": None}
Reply = tuple[int, Any, dict[str, str]] | Exception


def problem(status, name, **headers):
    body = {
        "type": f"urn:problem-type:cairn:{name}",
        "title": "Title",
        "status": status,
        "detail": "a sentence",
    }
    return status, body, {"content-type": "application/problem+json", **headers}


class Script:
    """A server that gives one reply after another and keeps what it was sent."""

    def __init__(self, replies):
        self.replies = list(replies)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        status, body, headers = reply
        return httpx2.Response(
            status, content=body if isinstance(body, bytes) else json.dumps(body).encode(), headers=headers
        )


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that clients waited, without waiting."""
    waited: list[float] = []

    async def pause(_, seconds):
        waited.append(seconds)

    for kind in (CairnClient, AsyncCairnClient):
        monkeypatch.setattr(kind, "_pause", pause)
    return waited


def search_now(script, **settings):
    with CairnClient("http://cairn.test", transport=httpx2.MockTransport(script), **settings) as client:
        return client.collection("stones").search("q")


def search_awaited(script, **settings):
    async def search():
        async with AsyncCairnClient(
            "http://cairn.test", transport=httpx2.MockTransport(script), **settings
        ) as client:
            return await client.collection("stones").search("q")

    return asyncio.run(search())


both = pytest.mark.parametrize("search", [search_now, search_awaited])
Search = Callable[..., Any]


@both
@pytest.mark.parametrize(
    "first",
    [
        httpx2.ConnectError("refused"),
        httpx2.ConnectTimeout("slow"),
        httpx2.RemoteProtocolError("closed"),
        problem(503, "overloaded", **{"Retry-After": "1"}),
        problem(429, "too-many", **{"Retry-After": "1"}),
        (502, b"<html>a proxy's page</html>", {}),
        (503, b"", {}),
    ],
)
def test_what_may_pass_is_tried_again(search, pauses, first):
    script = Script([first, first, (200, ANSWER, {})])
    assert search(script).generation == 3
    assert len(pauses) == 2
    assert [request.content for request in script.requests] == [script.requests[0].content] * 3


@both
def test_server_says_how_long_to_wait(search, pauses):
    search(Script([problem(503, "overloaded", **{"Retry-After": "7"}), (200, ANSWER, {})]))
    assert 7.0 < pauses[0] < 7.5
    soon = problem(503, "overloaded", **{"Retry-After": "3600"})
    with pytest.raises(UnavailableError) as caught:
        search(Script([soon]))
    assert caught.value.retry_after_seconds == 3600.0


@both
def test_waits_grow_where_the_server_says_nothing(search, pauses):
    search(Script([httpx2.ConnectError("refused")] * 4 + [(200, ANSWER, {})]), max_retries=4)
    assert all(0.125 * 2**step <= pause <= 0.125 * 2**step + 0.25 for step, pause in enumerate(pauses))


@both
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (problem(400, "invalid-json"), InvalidRequestError),
        (problem(401, "key-missing"), AccessError),
        (problem(403, "scope-missing"), AccessError),
        (problem(404, "unknown-collection"), NotFoundError),
        (problem(410, "cursor-expired"), CursorExpiredError),
        (problem(422, "invalid-request"), InvalidRequestError),
        (problem(500, "internal-error"), ServerFailedError),
        (problem(503, "collection-damaged"), UnavailableError),
        (problem(503, "overloaded", **{"Retry-After": "3600"}), UnavailableError),
        ((302, b"", {"location": "http://elsewhere.test"}), ServerFailedError),
        ((200, b"<html>another server</html>", {}), ServerFailedError),
        ((200, {"hits": [{}], "query": "q", "generation": 1}, {}), ServerFailedError),
        ((200, [], {}), ServerFailedError),
        ((418, ["?"], {}), ServerFailedError),
        ((500, {"errors": 5}, {}), ServerFailedError),
        ((422, {"errors": [1, {"pointer": 3}], "title": None}, {}), InvalidRequestError),
        pytest.param((200, b"[" * 100_000, {}), ServerFailedError, id="deep"),
    ],
)
def test_what_stays_as_it_is_is_an_error_at_once(search, pauses, reply, kind):
    script = Script([reply])
    with pytest.raises(kind) as caught:
        search(script)
    assert type(caught.value) is kind
    assert len(script.requests) == 1
    assert pauses == []


@both
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (httpx2.ReadTimeout("slow"), "no answer came in time"),
        (httpx2.DecodingError("incorrect header"), "must answer, got: incorrect header"),
    ],
)
def test_answer_that_takes_too_long_or_cannot_be_decompressed_is_not_asked_for_again(
    search, pauses, error, sentence
):
    with pytest.raises(ServerUnreachableError, match=sentence) as caught:
        search(Script([error]), max_retries=0 if "header" in sentence else 2)
    assert caught.value.exit_code == 75


@both
def test_attempts_end(search, pauses):
    script = Script([httpx2.ConnectError("connection refused")] * 3)
    with pytest.raises(
        ServerUnreachableError, match=r"http://cairn\.test .* connection refused; is `cairn serve` running"
    ):
        search(script, max_retries=2)
    assert len(script.requests) == 3
    with pytest.raises(UnavailableError):
        search(Script([problem(503, "overloaded", **{"Retry-After": "1"})]), max_retries=0)


@both
def test_key_is_sent_and_never_shown(search, pauses, monkeypatch):
    script = Script([(200, ANSWER, {})] * 3)
    monkeypatch.delenv("CAIRN_API_KEY", raising=False)
    search(script)
    monkeypatch.setenv("CAIRN_API_KEY", "from-the-environment")
    search(script)
    search(script, api_key="given")
    sent = [request.headers.get("authorization") for request in script.requests]
    assert sent == [None, "Bearer from-the-environment", "Bearer given"]
    with CairnClient(api_key="a-secret") as client:
        assert "a-secret" not in repr(client.connection)


def test_dates_are_sent_as_iso_8601():
    script = Script([(200, ANSWER, {})])
    with CairnClient("http://cairn.test", transport=httpx2.MockTransport(script)) as client:
        client.collection("stones").search(
            "q", filters={"type": "gte", "key": "found", "value": dt.date(2004, 1, 1)}
        )
    assert json.loads(script.requests[0].content)["filters"]["value"] == "2004-01-01"


def test_password_of_an_address_is_not_shown():
    for kind in (CairnClient, AsyncCairnClient):
        client = kind("http://somebody:secret@cairn.test:1", max_retries=0)
        assert client.connection.shown_url == "http://cairn.test:1"
        assert "secret" not in repr(client.connection)
    refused = httpx2.MockTransport(Script([httpx2.ConnectError("refused")]))
    with (
        CairnClient("http://somebody:secret@cairn.test", max_retries=0, transport=refused) as client,
        pytest.raises(ServerUnreachableError, match=r"http://cairn\.test must answer"),
    ):
        client.collections()


def test_write_that_is_tried_again_is_one_write(pauses):
    told = {"write": 1, "status": "durable", "generation": None, "documents": [], "deleted": 0}
    written = {**told, "missing": [], "warnings": [], "ingested": None}
    script = Script([httpx2.ConnectError("refused"), *[(200, written, {})] * 2])
    with CairnClient("http://cairn.test", transport=httpx2.MockTransport(script)) as client:
        for _ in range(2):
            client.collection("stones").delete("slate", wait="durable")
    first, again, other = (request.headers["idempotency-key"] for request in script.requests)
    assert first == again != other
