"""OpenAI's two addresses: their shapes, and the same answers as the collection's own."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.collection import load_query_encoder
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.ranking import BY_VECTORS_ALONE
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

SEARCH = "/v1/vector_stores/stones/search"


def own_hits(client: TestClient, query: str, **options: Any) -> list[Any]:
    return client.post("/v1/collections/stones/search", json={"query": query, **options}).json()["hits"]


def test_vector_store_search_gives_the_collections_hits_in_openais_shape(client: TestClient) -> None:
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


def test_vector_store_search_says_which_words_answered_and_what_is_missing(
    tmp_path: Path,
    ingest: Callable[..., None],
    make_rows: Callable[..., Any],
    serve: Callable[..., TestClient],
) -> None:
    ingest(tmp_path / "root", "stones", make_rows(4), token_bytes=8, use_context=False)
    client = serve(ServeSettings(root=tmp_path / "root"))
    found = client.post(SEARCH, json={"query": "granite"}).json()
    passage = next(each for result in found["data"] for each in result["content"] if each["highlights"])
    word, text = passage["highlights"][0], passage["text"]
    shown = text[word["start_char"] - passage["start_char"] : word["end_char"] - passage["start_char"]]
    assert shown in text.split()
    assert found["warnings"] == []
    assert client.post(SEARCH, json={"query": ["?!", "?!"]}).json()["warnings"] == [BY_VECTORS_ALONE]


def test_vector_store_search_of_several_queries_merges_their_best(client: TestClient) -> None:
    found = client.post(SEARCH, json={"query": ["granite", "chalk"], "max_num_results": 6}).json()["data"]
    best: dict[str, float] = {}
    for query in ("granite", "chalk"):
        for hit in own_hits(client, query, top_k=6):
            best[hit["doc_id"]] = max(hit["score"], best.get(hit["doc_id"], 0.0))
    expected = sorted(best, key=lambda doc_id: (-best[doc_id], doc_id))[:6]
    assert [result["file_id"] for result in found] == expected


@pytest.mark.parametrize(
    "change",
    [
        {"rewrite_query": True},
        {"max_num_results": 51},
        {"max_num_results": 0},
        {"ranking_options": {"ranker": "mine"}},
    ],
)
def test_what_cannot_be_done_is_refused(client: TestClient, change: dict[str, Any]) -> None:
    assert client.post(SEARCH, json={"query": "slate", **change}).status_code == 422


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_embeddings_are_the_encoders_vectors(client: TestClient, served_root: Path, input_type: str) -> None:
    encoder = load_query_encoder(open_generation(CollectionLayout(served_root, "stones")))
    texts = ["granite", "slate and chalk " * 20]
    body = {"model": "stones", "input": texts, "input_type": input_type}
    reply = client.post("/v1/embeddings", json=body).json()
    expected = encoder.encode_queries(texts) if input_type == "query" else encoder.encode_documents(texts)
    np.testing.assert_allclose([item["embedding"] for item in reply["data"]], expected, atol=1e-6)
    assert [item["index"] for item in reply["data"]] == [0, 1]
    assert (reply["object"], reply["model"]) == ("list", "stones")
    assert reply["usage"] == {
        "prompt_tokens": encoder.count_tokens(texts),
        "total_tokens": encoder.count_tokens(texts),
    }


def test_embeddings_in_base64_are_the_same_numbers(client: TestClient) -> None:
    body = {"model": "stones", "input": "granite"}
    as_numbers = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    as_text = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0][
        "embedding"
    ]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(as_text), "<f4"), np.array(as_numbers, np.float32)
    )


def test_embeddings_read_the_collections_context(
    own_root: Path,
    serve: Callable[..., TestClient],
    ingest: Callable[..., None],
    make_rows: Callable[..., Any],
) -> None:
    ingest(own_root, "contextual", make_rows(), use_context=True)
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
def test_embeddings_that_cannot_be_made_are_refused_where_it_is_wrong(
    client: TestClient, change: dict[str, Any], pointer: str
) -> None:
    response = client.post("/v1/embeddings", json={"model": "stones", "input": "a", **change})
    assert (response.status_code, response.json()["type"]) == (422, "urn:problem-type:cairn:invalid-request")
    assert pointer in [error["pointer"] for error in response.json()["errors"]]


def test_dimensions_of_the_collection_are_accepted(client: TestClient) -> None:
    assert (
        client.post(
            "/v1/embeddings", json={"model": "stones", "input": "a", "dimensions": 32, "user": "u"}
        ).status_code
        == 200
    )


def test_token_ids_are_refused_with_what_to_do(client: TestClient) -> None:
    response = client.post("/v1/embeddings", json={"model": "stones", "input": [[101, 7592, 102]]})
    (told,) = response.json()["errors"]
    assert "set check_embedding_ctx_length=False" in told["detail"]


def test_models_are_the_collections(client: TestClient) -> None:
    assert "stones" in [each["id"] for each in client.get("/v1/models").json()["data"]]


def test_threshold_is_compared_with_the_probability_that_a_result_answers(client: TestClient) -> None:
    address = "/v1/vector_stores/stones/search"
    asked = {"query": "asdf qwer zxcv", "max_num_results": 50}
    relative = client.post(address, json=asked).json()
    assert max(result["score"] for result in relative["data"]) > 0.5
    options = {"ranking_options": {"score_threshold": 0.5}}
    found = client.post(address, json={**asked, **options}).json()
    assert found["warnings"] == []
    assert len(found["data"]) < len(relative["data"])
    assert all(result["score"] >= 0.5 for result in found["data"])


def test_results_over_a_threshold_stand_in_the_order_of_the_scores_that_are_shown(client: TestClient) -> None:
    def search(*queries: str) -> dict[str, float]:
        options = {"ranking_options": {"score_threshold": 0.0001}, "max_num_results": 50}
        answer = client.post(SEARCH, json={"query": [*queries], **options}).json()
        assert answer["warnings"] == []
        return {result["file_id"]: result["score"] for result in answer["data"]}

    queries = ("granite slate", "chalk", "asdf qwer zxcv")
    single, found = [search(query) for query in queries], search(*queries)
    assert [*found.values()] == sorted(found.values(), reverse=True)
    best = {doc_id: max(each.get(doc_id, 0.0) for each in single) for doc_id in found}
    assert found == pytest.approx(best, abs=1e-4)
