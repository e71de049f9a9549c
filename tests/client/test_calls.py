"""Arguments that cannot be sent are one sentence each, before anything is sent.

Every claim for both clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from cairn.pipeline.client.clients import AsyncCairnClient, CairnClient
from cairn.pipeline.errors import ConfigError, UsageError


def nothing_is_sent(request: httpx2.Request) -> httpx2.Response:
    raise AssertionError("a request was sent")


async def first(found: Any) -> Any:
    return await anext(found) if isinstance(found, AsyncIterator) else await found


@pytest.fixture(params=["waits", "awaited"])
def call(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], Any]], Any]:
    """Return ``call(act)``: the outcome of ``act(client)``."""

    def waits(act: Callable[[Any], Any]) -> Any:
        with CairnClient(transport=httpx2.MockTransport(nothing_is_sent)) as client:
            found = act(client)
            return next(found) if hasattr(found, "__next__") else found

    async def awaited(act: Callable[[Any], Any]) -> Any:
        async with AsyncCairnClient(transport=httpx2.MockTransport(nothing_is_sent)) as client:
            return await first(act(client))

    return waits if request.param == "waits" else lambda act: asyncio.run(awaited(act))


@pytest.mark.parametrize("value", [None, 5, b"x", ["a"], ""])
def test_what_names_nothing_is_refused(call: Callable[..., Any], value: Any) -> None:
    acts: list[tuple[str, Callable[[Any], Any]]] = [
        ("doc_id", lambda client: client.collection("stones").read_document(value)),
        ("the name of a collection", lambda client: client.collection(value).search("slate")),
    ]
    for what, act in acts:
        with pytest.raises(UsageError, match=f"^{what} must be a text of at least one character, got"):
            call(act)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "must be a list of texts, got a value of type NoneType"),
        (5, "must be a list of texts, got a value of type int"),
        ("slate", "must be a list of texts, got a value of type str"),
        (["slate", None], "must be a list of texts, got a value of type NoneType"),
        (b"slate", "must be a list of texts, got a value of type int"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(call: Callable[..., Any], value: Any, sentence: str) -> None:
    for method in ("search_batch", "encode_queries", "encode_documents"):
        with pytest.raises(UsageError, match=sentence):
            call(lambda client, method=method: getattr(client.collection("stones"), method)(value))


def test_parameters_that_json_does_not_have_are_refused(call: Callable[..., Any]) -> None:
    endless: dict[str, Any] = {"type": "and"}
    endless["filters"] = [endless]
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"filters": deep}
    plain = {"value": object()}, {(1, 2): 3}, {1, 2}
    for wrong in (endless, deep, {"value": float("nan")}, *plain):
        kind = "of JSON, dates, UUIDs and arrays" if wrong in plain else "JSON without NaN and not nested .*"
        with pytest.raises(UsageError, match=f"must be {kind}, got"):
            call(lambda client, wrong=wrong: client.collection("stones").search("slate", filters=wrong))


def test_client_that_is_closed_is_refused() -> None:
    waiting, awaited = CairnClient(transport=httpx2.MockTransport(nothing_is_sent)), AsyncCairnClient()
    waiting.close()
    waiting.close()
    with pytest.raises(UsageError, match=r"^the client is closed; make a new one$"):
        waiting.collection("stones").search("slate")

    async def closed_and_asked() -> None:
        await awaited.aclose()
        await awaited.collection("stones").search("slate")

    with pytest.raises(UsageError, match=r"^the client is closed; make a new one$"):
        asyncio.run(closed_and_asked())


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"base_url": url}
            for url in (
                None,
                5,
                b"http://x",
                "",
                "x",
                "http://",
                "http://[::1",
                "http://a b",
                "http://x:99999",
            )
        ),
        *(
            {"base_url": url}
            for url in ("http://x:y", "http://x..y", "http://" + "a" * 300, "http://x/\n", "http://\ud800")
        ),
        *({"timeout_seconds": seconds} for seconds in (None, "3", float("nan"), 0, -1, True, 10**400, [1])),
        *({"max_retries": retries} for retries in (None, "3", 1.5, -1, True)),
        *({"api_key": key} for key in (5, b"x", "é", "two\nlines", " ")),
    ],
)
@pytest.mark.parametrize("kind", [CairnClient, AsyncCairnClient])
def test_settings_no_client_can_be_made_with_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))} must") as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)


def test_filter_given_as_a_text_names_what_a_filter_is(call: Callable[[Callable[[Any], Any]], Any]) -> None:
    with pytest.raises(UsageError, match=r"filters must be a mapping such as \{'year': 2020\}.*got a text"):
        call(lambda client: client.collection("c").search("q", filters="year>=2020"))
