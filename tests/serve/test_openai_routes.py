"""OpenAI's embeddings and vector stores, asked by OpenAI's own client."""

from __future__ import annotations

import base64

import httpx2
import numpy as np
import openai
import pytest
from cairn.pipeline.collection import load_query_encoder, open_collection
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import stone_rows

SEARCH = "/v1/vector_stores/stones/search"


def own_hits(client, query, **options):
    return client.post("/v1/collections/stones/search", json={"query": query, **options}).json()["hits"]


def test_vector_store_search_gives_the_collections_hits_in_openais_shape(client):
    page = client.post(SEARCH, json={"query": "granite slate", "max_num_results": 4}).json()
    assert {key: page[key] for key in ("object", "search_query", "has_more", "next_page")} == {
        "object": "vector_store.search_results.page",
        "search_query": ["granite slate"],
        "has_more": False,
        "next_page": None,
    }
    for result, hit in zip(page["data"], own_hits(client, "granite slate", top_k=4), strict=True):
        assert (result["file_id"], result["filename"]) == (hit["doc_id"], hit["title"] or hit["doc_id"])
        assert result["score"] == pytest.approx(hit["score"])
        assert result["attributes"] == {
            key: value for key, value in hit["metadata"].items() if value is not None
        }
        kept = ("text", "start_char", "end_char", "page", "highlights", "title_highlights")
        assert result["content"] == [
            {"type": "text", **{name: passage[name] for name in kept}} for passage in hit["passages"]
        ]


def test_vector_store_search_of_several_queries_merges_their_best(client):
    found = client.post(SEARCH, json={"query": ["granite", "chalk"], "max_num_results": 6}).json()["data"]
    best: dict[str, float] = {}
    for query in ("granite", "chalk"):
        for hit in own_hits(client, query, top_k=6):
            best[hit["doc_id"]] = max(hit["score"], best.get(hit["doc_id"], 0.0))
    expected = sorted(best, key=lambda doc_id: (-best[doc_id], doc_id))[:6]
    assert [result["file_id"] for result in found] == expected


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_embeddings_are_the_encoders_vectors_in_base64_too(client, served_root, input_type):
    encoder = load_query_encoder(open_generation(CollectionLayout(served_root, "stones")))
    texts = ["granite", "slate and chalk " * 20]
    body = {"model": "stones", "input": texts, "input_type": input_type}
    reply = client.post("/v1/embeddings", json=body).json()
    expected = encoder.encode_queries(texts) if input_type == "query" else encoder.encode_documents(texts)
    vectors = [item["embedding"] for item in reply["data"]]
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert [item["index"] for item in reply["data"]] == [0, 1]
    assert (reply["object"], reply["model"]) == ("list", "stones")
    assert {*reply["usage"].items()} == {
        (name, encoder.count_tokens(texts)) for name in ("prompt_tokens", "total_tokens")
    }
    as_base64 = {**body, "encoding_format": "base64", "dimensions": 32, "user": "u"}
    written = client.post("/v1/embeddings", json=as_base64).json()["data"]
    for item, vector in zip(written, vectors, strict=True):
        found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
        np.testing.assert_array_equal(found, np.array(vector, np.float32))


def test_embeddings_read_the_collections_context(own_root, serve, ingest):
    ingest(own_root, "contextual", stone_rows(), use_context=True)
    client = serve(ServeSettings(root=own_root))
    vectors = [
        client.post("/v1/embeddings", json={"model": name, "input": "granite"}).json()["data"][0]["embedding"]
        for name in ("stones", "contextual")
    ]
    encoder = load_query_encoder(open_generation(CollectionLayout(own_root, "contextual")))
    np.testing.assert_allclose(vectors[1], encoder.encode_queries(["granite"])[0], atol=1e-6)
    assert np.abs(np.subtract(*vectors)).max() > 1e-3
    assert client.get("/v1/collections/contextual").json()["uses_context"] is True


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"dimensions": 8}, "#/dimensions"),
        ({"input": ""}, "#/input"),
        ({"input": " \x1c "}, "#/input"),
        ({"input": ["a", "\t"]}, "#/input/1"),
        ({"input": []}, "#/input"),
        ({"input": [1, 2, 3]}, "#/input"),
        ({"input": "x" * (32 * 1024 + 1)}, "#/input"),
        ({"input": ["x"] * 257}, "#/input"),
        ({"model": "No Such"}, "#/model"),
        ({"encoding_format": "hex"}, "#/encoding_format"),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused_where_it_is_wrong(client, change, pointer):
    response = client.post("/v1/embeddings", json={"model": "stones", "input": "a", **change})
    assert (response.status_code, response.json()["type"]) == (422, "urn:problem-type:cairn:invalid-request")
    assert pointer in [error["pointer"] for error in response.json()["errors"]]
    if change == {"input": [1, 2, 3]}:
        assert "set check_embedding_ctx_length=False" in response.json()["errors"][0]["detail"]


def test_threshold_is_compared_with_the_probability_that_a_result_answers_which_is_the_score(client):
    def search(*queries, threshold=None):
        options = {} if threshold is None else {"ranking_options": {"score_threshold": threshold}}
        body = {"query": [*queries], "max_num_results": 50, **options}
        answer = client.post(SEARCH, json=body).json()
        assert answer["warnings"] == []
        return {result["file_id"]: result["score"] for result in answer["data"]}

    queries = ("granite slate", "chalk", "asdf qwer zxcv")
    relative, probable = search(queries[2]), search(queries[2], threshold=0.5)
    assert max(relative.values()) > 0.5
    assert len(probable) < len(relative)
    assert all(score >= 0.5 for score in probable.values())
    single = [search(query, threshold=0.0001) for query in queries]
    found = search(*queries, threshold=0.0001)
    assert [*found.values()] == sorted(found.values(), reverse=True)
    best = {doc_id: max(each.get(doc_id, 0.0) for each in single) for doc_id in found}
    assert found == pytest.approx(best, abs=1e-4)


def client_over(server, key="none"):
    """Return OpenAI's client, whose requests the application answers in this process."""

    def send(request):
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        content = request.read()
        answer = server.request(request.method, str(request.url), content=content or None, headers=headers)
        return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

    http = httpx2.Client(transport=httpx2.MockTransport(send))
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def stores(client):
    with client_over(client) as opened:
        yield opened.vector_stores


def test_stores_and_models_are_the_collections(stores, client):
    listed = sorted(stores.list(limit=1), key=lambda store: store.id)
    assert [(store.id, store.file_counts.total) for store in listed] == [("pebbles", 4), ("stones", 20)]
    assert stores.retrieve("pebbles") == listed[0]
    assert listed[0].status == "completed"
    assert listed[0].usage_bytes > 0
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["pebbles", "stones"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_hold_every_file_once_and_one_before_an_id_ends_there(stores, served_root, order):
    ids = [file.id for file in stores.files.list("stones", limit=3, order=order)]
    ingested = open_collection("stones", root=served_root).documents.ids()
    assert ids == (ingested if order == "asc" else ingested[::-1])
    page = stores.files.list("stones", limit=3, order=order, before=ids[7])
    assert ([file.id for file in page.data], page.has_more) == (ids[4:7], True)
    assert stores.files.list("stones", limit=7, order=order, before=ids[7]).has_more is False


def test_file_has_attributes_text_and_a_status_to_filter_by(stores, served_root):
    document = open_collection("stones", root=served_root).documents["stones/basalt/1"]
    file = stores.files.retrieve("stones/basalt/1", vector_store_id="stones")
    assert file.attributes == {"tenant": "acme", "year": 2001}
    assert file.usage_bytes == len(document.text.encode())
    content = stores.files.content("stones/basalt/1", vector_store_id="stones")
    assert [part.text for part in content] == [document.text]
    for status, count in (("completed", 4), ("failed", 0)):
        assert len(list(stores.files.list("pebbles", filter=status))) == count


def test_write_is_refused_and_the_part_to_change_named_in_openais_words(stores):
    for write in (
        lambda: stores.create(name="new"),
        lambda: stores.update("stones", name="new"),
        lambda: stores.delete("stones"),
        lambda: stores.files.create("stones", file_id="f"),
        lambda: stores.files.delete("f", vector_store_id="stones"),
        lambda: stores.file_batches.create("stones", file_ids=["f"]),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="start it with --writable") as caught:
            write()
        told = (caught.value.status_code, caught.value.code, caught.value.type)
        assert told == (403, "read-only", "invalid_request_error")
    with pytest.raises(openai.UnprocessableEntityError, match="max_num_results: Input should be") as wrong:
        stores.search("stones", query="x", max_num_results=51)
    assert wrong.value.param == "max_num_results"
    with pytest.raises(openai.UnprocessableEntityError, match="there is no entry of this id"):
        stores.files.list("stones", after="nothing")
    with pytest.raises(openai.NotFoundError, match="There is no such collection"):
        stores.retrieve("marbles")


def test_address_without_a_key_is_refused_in_openais_words(own_root, serve):
    settings = ServeSettings(root=own_root)
    KeyFile(settings.keys_path).create("app")
    with client_over(serve(settings)) as client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.vector_stores.list()
