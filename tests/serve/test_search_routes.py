"""Searches and documents over HTTP: answers, pages, what a collection holds, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.client.errors import InvalidRequestError
from cairn.pipeline.collection import open_collection
from cairn.pipeline.serve.schemas import SearchReplies, SearchReply
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import ByLength, problem, starter, stone_rows

SEARCH = "/v1/collections/stones/search"
QUERY = "granite slate stone"


def asked(client, **body):
    response = client.post(SEARCH, json={"query": QUERY, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def reranker():
    return ByLength()


@pytest.fixture(scope="module")
def reranking(served_root, reranker):
    with starter() as start:
        yield start(ServeSettings(root=served_root), reranker=reranker)


def test_query_vector_takes_the_place_of_the_encoding(client, served_root):
    stones = open_collection("stones", root=served_root)
    vector = next(stones.documents.batches(["vector"])).column("vector")[0].as_py()
    answer = asked(client, query_vector=vector, hybrid=False, granularity="document", top_k=1)
    assert answer["hits"][0]["score"] == pytest.approx(1.0, abs=1e-5)
    for body in ({"query_vector": vector[1:]}, {"query_vector": vector, "query": [QUERY]}):
        response = client.post(SEARCH, json={"query": QUERY, **body})
        assert response.status_code == 422, response.text


def require_alike(given, expected):
    """Compare answers, whose scores may differ by rounding."""
    if isinstance(expected, float):
        assert given == pytest.approx(expected, abs=1e-5)
    elif isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            require_alike(given[name], value)
    elif isinstance(expected, list):
        for one, other in zip(given, expected, strict=True):
            require_alike(one, other)
    else:
        assert given == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3, "granularity": "document"},
        {"granularity": "chunk", "passages": 1},
        {"hybrid": False, "chunk_tokens": 32},
        {
            "filters": {
                "type": "and",
                "filters": [
                    {"type": "gte", "key": "year", "value": 2004},
                    {"type": "in", "key": "tenant", "value": ["acme"]},
                ],
            }
        },
        {"weights": {"document": 1.0, "bm25": 0.25}},
        {"passages": 0},
        {"max_characters": 150},
        {"group_by": "tenant", "group_size": 3, "mmr": 0.4},
        {"rerank": True, "top_k": 3},
        {"rerank": True, "top_k": 2, "passages": 0},
        {"rerank": True, "max_characters": 300},
        {"rerank": True, "granularity": "chunk"},
    ],
)
def test_search_gives_what_python_gives(reranking, served_root, reranker, options):
    in_python = {**options, "rerank": reranker} if "rerank" in options else options
    expected = open_collection("stones", root=served_root).search(QUERY, **in_python).to_dict()
    require_alike(asked(reranking, **options), {**expected, "next_cursor": None})


@pytest.mark.parametrize("query", [QUERY, [QUERY, "basalt"]])
def test_answer_is_its_schema_in_json_byte_for_byte(client, query):
    schema = SearchReply if isinstance(query, str) else SearchReplies
    body = client.post("/v1/collections/stones/search", json={"query": query}).content
    assert schema.model_validate_json(body).model_dump_json().encode() == body


def test_search_without_text_gives_the_same_spans(client):
    expected = asked(client)
    for hit in expected["hits"]:
        for passage in hit["passages"]:
            assert passage["text"]
            passage["text"] = ""
    require_alike(asked(client, include_text=False), expected)


@pytest.mark.parametrize("options", [{}, {"rerank": True}])
def test_list_of_queries_gives_their_answers_in_order_from_one_generation(reranking, options):
    queries = ["marble", "chalk quartz", "flint"]
    answer = asked(reranking, query=queries, top_k=4, **options)
    require_alike(answer["answers"], [asked(reranking, query=query, top_k=4, **options) for query in queries])
    assert [found["query"] for found in answer["answers"]] == queries
    assert {found["generation"] for found in answer["answers"]} == {answer["generation"]}


def pages(client, sizes, **options):
    found: list[str] = []
    cursor: str | None = "*"
    for size in sizes:
        answer = asked(client, top_k=size, cursor=cursor, **options)
        found += [hit["doc_id"] for hit in answer["hits"]]
        cursor = answer["next_cursor"]
        if cursor is None:
            return found
    raise AssertionError("there are more pages than sizes")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "chunk"},
        {"hybrid": False},
        {"filters": {"type": "eq", "key": "tenant", "value": "acme"}},
        {"group_by": "tenant", "group_size": 5, "mmr": 0.4},
    ],
)
def test_pages_of_any_size_are_the_whole_ranking_cut(client, options):
    whole = pages(client, [200], **options)
    assert len(whole) == len(set(whole)) == (10 if options.keys() & {"filters", "group_by"} else 20)
    assert pages(client, [3, 1, 7, 2, 5, 5], **options) == pages(client, [1] * 25, **options) == whole


@pytest.mark.parametrize("options", [{"group_by": "colour"}, {"group_size": 2}, {"mmr": 2.0}])
def test_groups_that_cannot_be_made_are_refused(client, options):
    response = client.post(SEARCH, json={"query": QUERY, **options})
    assert response.status_code == 422
    assert next(iter(options)) in response.text


NEVER_GIVEN_OUT = ["x", "e30=", "W10=", "bnVsbA==", "eyJnIjoxLCJvIjotMSwiciI6IiJ9", "é", "****", "=" * 256]


@pytest.mark.parametrize(
    "change",
    [
        {"query": "marble"},
        {"hybrid": False},
        {"mmr": 0.5},
        {"filters": {"type": "eq", "key": "tenant", "value": "acme"}},
        *({"cursor": cursor} for cursor in NEVER_GIVEN_OUT),
        {"cursor": "*", "query": [QUERY]},
        {"cursor": "*", "max_characters": 100},
    ],
)
def test_cursor_of_another_request_or_of_none_is_refused(client, change):
    cursor = asked(client, top_k=1, cursor="*")["next_cursor"]
    response = client.post(SEARCH, json={"query": QUERY, "top_k": 1, "cursor": cursor, **change})
    assert problem(response) == (422, "invalid-cursor")


@pytest.mark.parametrize(
    ("status", "options"),
    [
        (422, {"top_k": 200, "passages": 50, "chunk_tokens": 256}),
        (422, {"top_k": 10, "passages": 1, "chunk_tokens": 1 << 20}),
        (422, {"query": ["slate"] * 32, "top_k": 200, "passages": 3, "chunk_tokens": 128}),
        (422, {"query": ["slate"] * 32, "max_characters": 1_000_000}),
        (200, {"top_k": 200, "passages": 50}),
        (200, {"max_characters": 1_000_000}),
        (200, {"query": ["slate"] * 32}),
    ],
)
def test_answer_that_would_be_too_large_is_refused_and_one_as_large_as_allowed_given(client, status, options):
    response = client.post(SEARCH, json={"query": QUERY, **options})
    assert response.status_code == status
    assert status == 200 or problem(response) == (422, "invalid-request")


def test_published_generation_is_taken_up_with_its_encoder_and_old_cursors_expire(own_root, serve, ingest):
    def vector_dim():
        reply = client.post("/v1/embeddings", json={"model": "stones", "input": "chalk"})
        return len(reply.json()["data"][0]["embedding"])

    client = serve(ServeSettings(root=own_root))
    first = asked(client, top_k=2, cursor="*")
    assert (first["generation"], vector_dim()) == (1, 32)
    ingest(own_root, "stones", stone_rows(version=1))
    second = asked(client, top_k=2)
    assert second["generation"] == 2
    starts = [hit["passages"][0] for hit in second["hits"]]
    assert all("version 1" in passage["text"] or passage["start_char"] for passage in starts)
    response = client.post(SEARCH, json={"query": QUERY, "top_k": 2, "cursor": first["next_cursor"]})
    assert problem(response) == (410, "cursor-expired")
    shutil.rmtree(own_root / "stones")
    ingest(own_root, "stones", stone_rows(version=1), dims=16)
    answer = asked(client)
    assert (answer["generation"], len(answer["hits"]), vector_dim()) == (1, 10, 16)


def test_nothing_is_reranked_unless_asked_nor_by_a_server_without_a_model(reranking, client):
    body = {"query": "granite", "top_k": 3}
    assert reranking.post(SEARCH, json=body).json() == client.post(SEARCH, json=body).json()
    response = client.post(SEARCH, json={**body, "rerank": True})
    assert problem(response) == (422, "invalid-request")
    assert response.json()["errors"][0]["pointer"] == "#/rerank"


def test_more_than_can_be_judged_is_refused_and_a_model_that_gives_nan_the_servers_problem(
    reranking, reranker, monkeypatch
):
    for change, told in (
        ({"cursor": "*"}, (422, "invalid-cursor")),
        ({"top_k": 200, "passages": 6}, (422, "invalid-request")),
        ({"query": ["a"] * 12}, (422, "invalid-request")),
    ):
        response = reranking.post(SEARCH, json={"query": "granite", "rerank": True, **change})
        assert problem(response) == told, change
    monkeypatch.setattr(reranker, "fault", "nan")
    response = reranking.post(SEARCH, json={"query": "granite", "rerank": True})
    assert problem(response) == (500, "reranker-failed")
    assert reranking.post(SEARCH, json={"query": "granite"}).status_code == 200


def test_collections_are_listed_and_described_and_those_that_were_not_named_not_served(
    served_root, serve, client
):
    named = serve(ServeSettings(root=served_root, collections=("pebbles",)))
    assert [c["name"] for c in named.get("/v1/collections").json()["collections"]] == ["pebbles"]
    assert named.get("/v1/collections/pebbles").status_code == 200
    assert named.get("/v1/collections/stones").status_code == 404
    listed = client.get("/v1/collections").json()["collections"]
    assert [(c["name"], c["status"], c["generation"], c["documents"]) for c in listed] == [
        ("pebbles", "ready", 1, 4),
        ("stones", "ready", 1, 20),
    ]
    found = client.get("/v1/collections/stones").json()
    expected = {"name": "stones", "generation": 1, "documents": 20, "vector_dim": 32}
    expected |= {"landmark_interval": 16, "uses_context": False, "is_outdated": False}
    assert {name: found[name] for name in expected} == expected
    assert {"name": "year", "type": "int64"} in found["filter_columns"]


@pytest.mark.parametrize("span", [None, (0, 5), (7, 11), (60, 1_000_000), (10_000, 5)])
def test_every_document_is_read_by_its_id_whole_or_a_stretch_of_its_text(client, span):
    start, count = span or (0, 1_000_000)
    asked = {} if span is None else {"start_char": start, "max_characters": count}
    for row in stone_rows():
        found = client.get(f"/v1/collections/stones/documents/{row['id']}", params=asked).json()
        expected = {
            "doc_id": row["id"],
            "title": row["title"],
            "text": row["text"][start : start + count],
            "num_characters": len(row["text"]),
            "metadata": {"tenant": row["tenant"], "year": row["year"]},
        }
        assert {name: found[name] for name in expected} == expected
        assert found["text"] == row["text"][found["start_char"] : found["end_char"]]
        assert found["end_char"] <= len(row["text"])


@pytest.mark.parametrize("doc_id", ["none", "stones", "stones/granite", "%00", "%ff", "x" * 1024])
def test_unknown_document_is_not_found(client, doc_id):
    response = client.get(f"/v1/collections/stones/documents/{doc_id}")
    assert problem(response) == (404, "unknown-document")


FILTERS = {"type": "gte", "key": "year", "value": 2003}


def plain(records):
    """Return records as JSON has them: dates as text."""
    return json.loads(json.dumps([asdict(each) for each in records], default=lambda date: date.isoformat()))


def test_client_is_told_what_python_is(stones_address, stones_root):
    local = open_collection("stones", root=stones_root)
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        stones = client.collection("stones")
        assert plain(stones.columns()) == plain(local.columns())
        assert stones.facets(["year"], filters=FILTERS, num_values=2) == local.facets(
            ["year"], filters=FILTERS, num_values=2
        )
        assert stones.count(FILTERS) == local.count(FILTERS)
        assert stones.count() == local.count() == len(local.documents)
        listed = list(stones.list_documents(FILTERS))
        assert plain(listed) == plain(local.list_documents(FILTERS))
        assert [each.doc_id for each in listed] == sorted(local.documents.ids(FILTERS))
        after = listed[1].doc_id
        assert list(stones.list_documents(FILTERS, after=after)) == listed[2:]
        with pytest.raises(InvalidRequestError, match="columns must be"):
            stones.facets(["nowhere"])
