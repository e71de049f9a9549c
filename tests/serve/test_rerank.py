"""Reranking over HTTP: equal to Python's, off unless asked for; a failing model is the server's fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

SEARCH = "/v1/collections/stones/search"


class ByLength:
    """Prefers short passages; fails where it is told to."""

    fault: str | None = None

    def score(self, query: str, texts: Sequence[str]) -> np.ndarray:
        scores = np.array([1.0 / (1 + len(text)) for text in texts])
        return np.full_like(scores, np.nan) if self.fault == "nan" else scores


@pytest.fixture
def reranker() -> ByLength:
    return ByLength()


@pytest.fixture
def reranking(served_root: Path, serve: Callable[..., TestClient], reranker: ByLength) -> TestClient:
    return serve(create_app(ServeSettings(root=served_root, deadline_seconds=300.0), reranker=reranker))


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_k": 2, "passages": 0}, {"max_characters": 300}, {"granularity": "chunk"}]
)
def test_reranked_answer_is_the_one_python_gives(
    reranking: TestClient, served_root: Path, reranker: ByLength, options: dict
) -> None:
    given = reranking.post(SEARCH, json={"query": "granite", "rerank": True, **options}).json()
    expected = open_collection("stones", root=served_root).search("granite", rerank=reranker, **options)
    assert [hit["doc_id"] for hit in given["hits"]] == [hit.doc_id for hit in expected.hits]
    assert given["hits"][0]["scores"]["rerank"] == pytest.approx(expected.hits[0].score)
    lists = reranking.post(SEARCH, json={"query": ["granite", "slate"], "rerank": True, **options}).json()
    assert lists["answers"][0]["hits"] == given["hits"]


def test_nothing_is_reranked_unless_asked(reranking: TestClient, client: TestClient) -> None:
    body = {"query": "granite", "top_k": 3}
    assert reranking.post(SEARCH, json=body).json() == client.post(SEARCH, json=body).json()


def test_server_without_a_model_says_so(client: TestClient) -> None:
    response = client.post(SEARCH, json={"query": "granite", "rerank": True})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "#/rerank"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"cursor": "*"}, "invalid-cursor"),
        ({"top_k": 200, "passages": 6}, "invalid-request"),
        ({"query": ["a"] * 12}, "invalid-request"),
    ],
)
def test_more_than_can_be_judged_is_refused(reranking: TestClient, change: dict, kind: str) -> None:
    response = reranking.post(SEARCH, json={"query": "granite", "rerank": True, **change})
    assert response.json()["type"].endswith(kind), response.text


def test_model_that_gives_nan_is_the_servers_problem(reranking: TestClient, reranker: ByLength) -> None:
    reranker.fault = "nan"
    response = reranking.post(SEARCH, json={"query": "granite", "rerank": True})
    assert (response.status_code, response.json()["type"]) == (500, "urn:problem-type:cairn:reranker-failed")
    assert reranking.post(SEARCH, json={"query": "granite"}).status_code == 200
