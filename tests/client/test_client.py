"""The clients: addresses and keys, calls and their answers, waited for and awaited."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from cairn.pipeline.client.clients import AsyncCairnClient, CairnClient
from cairn.pipeline.client.errors import CursorExpiredError, InvalidRequestError, NotFoundError
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import ConfigError, UsageError
from cairn.pipeline.types import FilterColumn

QUERY = "granite and slate"


@pytest.fixture(scope="module")
def client(stones_address):
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        yield client


@pytest.fixture(scope="module")
def stones(client):
    return client.collection("stones")


def ranked(result):
    return [
        (hit.doc_id, [(passage.start_char, passage.end_char, passage.text) for passage in hit.passages])
        for hit in result.hits
    ]


def test_search_answers_as_python_does(stones, stones_root):
    filters = {"type": "gte", "key": "year", "value": 2003}
    over_http = stones.search(QUERY, top_k=4, passages=2, filters=filters, weights={"bm25": 0.5})
    in_process = open_collection("stones", root=stones_root).search(
        QUERY, top_k=4, passages=2, filters=filters, weights={"bm25": 0.5}
    )
    assert len(over_http.hits) == 4
    assert ranked(over_http) == ranked(in_process)
    assert [hit.score for hit in over_http.hits] == pytest.approx(
        [hit.score for hit in in_process.hits], abs=1e-5
    )
    assert over_http.generation == in_process.generation
    assert over_http.hits[0].metadata["year"] == in_process.hits[0].metadata["year"]


def test_batch_answers_each_query_in_its_order(stones):
    queries = [f"stone {number}" for number in range(35)]  # two requests
    results = stones.search_batch(queries, top_k=2, granularity="document", hybrid=False)
    assert [result.query for result in results] == queries
    assert ranked(results[33]) == ranked(
        stones.search(queries[33], top_k=2, granularity="document", hybrid=False)
    )


@pytest.mark.parametrize(("top_k", "sizes"), [(5, [5, 5, 2]), (6, [6, 6])])
def test_pages_are_one_ranking(stones, top_k, sizes):
    pages = list(stones.search_pages(QUERY, top_k=top_k))
    assert [len(page.hits) for page in pages] == sizes
    assert len({hit.doc_id for page in pages for hit in page.hits}) == 12


def test_documents_are_listed_beyond_one_request(stones, monkeypatch):
    listed = [each.doc_id for each in stones.list_documents()]
    monkeypatch.setattr("cairn.pipeline.client.clients.MAX_DOCUMENTS", 5)
    assert [each.doc_id for each in stones.list_documents()] == listed
    assert len(listed) == 12


def test_document_comes_whole_whatever_a_request_may_give_and_is_none_where_there_is_none(
    stones, monkeypatch
):
    monkeypatch.setattr("cairn.pipeline.client.clients.STRETCH_CHARACTERS", 17)
    document = stones.read_document("stones/slate/2")
    assert document is not None
    assert document.text.startswith("stone 2 é: slate")
    assert len(document.text) > 3 * 17
    assert document.metadata == {"year": 2002, "found": "2002-01-01"}
    assert [stones.read_document(doc_id) for doc_id in ("stones/../slate", ".")] == [None, None]


def test_lineage_is_what_the_server_says(stones):
    found = stones.lineage("stones/slate/2")
    assert found is not None
    assert (found.doc_id, found.collection, found.generation) == ("stones/slate/2", "stones", 1)
    assert found.run is not None
    assert found.run.run_id == found.published_by
    assert stones.lineage("stones/slate/99") is None


def test_unknown_collection_is_an_error_of_its_own(client):
    with pytest.raises(NotFoundError, match="There is no such collection") as caught:
        client.collection("pebbles").search(QUERY)
    assert (caught.value.status, caught.value.type) == (404, "urn:problem-type:cairn:unknown-collection")
    with pytest.raises(NotFoundError):
        client.collection("pebbles").read_document("1")
    with pytest.raises(InvalidRequestError):
        client.collection("Pebbles").search(QUERY)


def test_invalid_request_names_the_field(stones):
    with pytest.raises(InvalidRequestError, match="#/top_k") as caught:
        stones.search(QUERY, top_k=1_000)
    assert [field.pointer for field in caught.value.errors] == ["#/top_k"]
    assert caught.value.exit_code == 2
    with pytest.raises(InvalidRequestError, match="#/filters Input should be an object"):
        stones.search(QUERY, filters="year>=2020")


def test_error_of_another_process_says_the_same(client):
    with pytest.raises(NotFoundError) as caught:
        client.collection("pebbles").describe()
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied), vars(copied)) == (NotFoundError, str(caught.value), vars(caught.value))


def test_collections_are_listed_and_described(client):
    assert [(each.name, each.status, each.documents) for each in client.collections()] == [
        ("stones", "ready", 12)
    ]
    described = client.collection("stones").describe()
    assert described.landmark_interval == 16
    assert FilterColumn(name="year", type="int64") in described.filter_columns


def test_vectors_are_those_of_the_collection_in_the_order_of_the_texts(stones, stones_root, monkeypatch):
    monkeypatch.setattr("cairn.pipeline.client.clients.MAX_INPUTS", 2)
    texts = ["granite", "a river", "old marks", "the mat", "cat"]
    vectors = stones.encode_queries(texts)
    assert vectors.shape == (5, stones.describe().vector_dim)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(vectors[3], stones.encode_documents(["the mat"])[0], atol=1e-5)
    assert stones.encode_queries([]).shape == (0, vectors.shape[1])


def test_cursor_of_another_generation_is_an_error_of_its_own(stones, monkeypatch):
    monkeypatch.setattr("cairn.pipeline.client.clients.FIRST_CURSOR", "no-such-cursor")
    with pytest.raises((CursorExpiredError, InvalidRequestError)):
        next(iter(stones.search_pages(QUERY)))


def nothing_is_sent(request):
    raise AssertionError("a request was sent")


async def first(found):
    return await anext(found) if isinstance(found, AsyncIterator) else await found


@pytest.fixture(params=["waits", "awaited"])
def call(request):
    """Return ``call(act)``: the outcome of ``act(client)``."""

    def waits(act):
        with CairnClient(transport=httpx2.MockTransport(nothing_is_sent)) as client:
            found = act(client)
            return next(found) if hasattr(found, "__next__") else found

    async def awaited(act):
        async with AsyncCairnClient(transport=httpx2.MockTransport(nothing_is_sent)) as client:
            return await first(act(client))

    return waits if request.param == "waits" else lambda act: asyncio.run(awaited(act))


@pytest.mark.parametrize("value", [None, 5, b"x", ["a"], ""])
def test_what_names_nothing_is_refused(call, value):
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
def test_what_is_no_list_of_texts_is_refused(call, value, sentence):
    for method in ("search_batch", "encode_queries", "encode_documents"):
        with pytest.raises(UsageError, match=sentence):
            call(lambda client, method=method: getattr(client.collection("stones"), method)(value))


def test_parameters_that_json_does_not_have_are_refused(call):
    endless: dict[str, Any] = {"type": "and"}
    endless["filters"] = [endless]
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"filters": deep}
    plain = {"value": object()}, {(1, 2): 3}, {1, 2}
    for wrong in (endless, deep, {"value": float("nan")}, *plain):
        kind = "of JSON, dates, decimals, UUIDs" if wrong in plain else "JSON without NaN and not nested"
        with pytest.raises(UsageError, match=f"must be {kind}.*, got"):
            call(lambda client, wrong=wrong: client.collection("stones").search("slate", filters=wrong))


def test_client_that_is_closed_is_refused():
    waiting, awaited = CairnClient(transport=httpx2.MockTransport(nothing_is_sent)), AsyncCairnClient()
    waiting.close()
    waiting.close()
    with pytest.raises(UsageError, match=r"^the client is closed; make a new one$"):
        waiting.collection("stones").search("slate")

    async def closed_and_asked():
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
def test_settings_no_client_can_be_made_with_are_refused(kind, settings):
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))} must") as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_every_method_answers_as_the_client_that_waits(stones_address):
    with CairnClient(stones_address, timeout_seconds=300.0) as waiting:
        expected = waiting.collection("stones")
        async with AsyncCairnClient(stones_address, timeout_seconds=300.0) as client:
            stones = client.collection("stones")
            assert await client.collections() == waiting.collections()
            assert await stones.describe() == expected.describe()
            assert await stones.search("slate", top_k=3) == expected.search("slate", top_k=3)
            assert await stones.search_batch(["slate", "chalk"]) == expected.search_batch(["slate", "chalk"])
            assert [page async for page in stones.search_pages("slate", top_k=7)] == list(
                expected.search_pages("slate", top_k=7)
            )
            assert await stones.read_document("stones/slate/2") == expected.read_document("stones/slate/2")
            assert await stones.read_document("stones/slate/99") is None
            assert await stones.lineage("stones/slate/2") == expected.lineage("stones/slate/2")
            assert await stones.lineage("stones/slate/99") is None
            assert await stones.click("slate", "stones/slate/2", rank=1) is False  # it keeps no log
            assert expected.click("slate", "stones/slate/2") is False
            assert (await stones.encode_queries(["slate"]) == expected.encode_queries(["slate"])).all()
            assert (await stones.encode_documents(["slate"]) == expected.encode_documents(["slate"])).all()
            with pytest.raises(NotFoundError):
                await client.collection("pebbles").read_document("1")


@pytest.mark.anyio
async def test_concurrent_searches_share_a_client(stones_address):
    async with AsyncCairnClient(stones_address, timeout_seconds=300.0) as client:
        stones = client.collection("stones")
        results = await asyncio.gather(*(stones.search(f"stone {number}", top_k=1) for number in range(20)))
        assert [result.query for result in results] == [f"stone {number}" for number in range(20)]
