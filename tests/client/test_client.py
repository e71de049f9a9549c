"""The client against a real server: what it returns is what Python's own search returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.client.clients import CairnClient, RemoteCollection
from cairn.pipeline.client.errors import CursorExpiredError, InvalidRequestError, NotFoundError
from cairn.pipeline.collection import open_collection
from cairn.pipeline.types import FilterColumn, SearchResult

QUERY = "granite and slate"


@pytest.fixture(scope="module")
def client(stones_address: str) -> Iterator[CairnClient]:
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        yield client


@pytest.fixture(scope="module")
def stones(client: CairnClient) -> RemoteCollection:
    return client.collection("stones")


def ranked(result: SearchResult) -> list[tuple[str, list[tuple[int, int, str]]]]:
    return [
        (hit.doc_id, [(passage.start_char, passage.end_char, passage.text) for passage in hit.passages])
        for hit in result.hits
    ]


def test_search_answers_as_python_does(stones: RemoteCollection, stones_root: Path) -> None:
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


def test_batch_answers_each_query_in_its_order(stones: RemoteCollection) -> None:
    queries = [f"stone {number}" for number in range(35)]  # two requests
    results = stones.search_batch(queries, top_k=2, granularity="document", hybrid=False)
    assert [result.query for result in results] == queries
    assert ranked(results[33]) == ranked(
        stones.search(queries[33], top_k=2, granularity="document", hybrid=False)
    )


@pytest.mark.parametrize(("top_k", "sizes"), [(5, [5, 5, 2]), (6, [6, 6])])
def test_pages_are_one_ranking(stones: RemoteCollection, top_k: int, sizes: list[int]) -> None:
    pages = list(stones.search_pages(QUERY, top_k=top_k))
    assert [len(page.hits) for page in pages] == sizes
    assert len({hit.doc_id for page in pages for hit in page.hits}) == 12


def test_documents_are_listed_beyond_one_request(
    stones: RemoteCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [each.doc_id for each in stones.list_documents()]
    monkeypatch.setattr("cairn.pipeline.client.clients.MAX_DOCUMENTS", 5)
    assert [each.doc_id for each in stones.list_documents()] == listed
    assert len(listed) == 12


def test_document_comes_whole_whatever_a_request_may_give(
    stones: RemoteCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.client.clients.STRETCH_CHARACTERS", 17)
    document = stones.read_document("stones/slate/2")
    assert document is not None
    assert document.text.startswith("stone 2 é: slate")
    assert len(document.text) > 3 * 17
    assert document.metadata == {"year": 2002, "found": "2002-01-01"}


def test_lineage_is_what_the_server_says(stones: RemoteCollection) -> None:
    found = stones.lineage("stones/slate/2")
    assert found is not None
    assert (found.doc_id, found.collection, found.generation) == ("stones/slate/2", "stones", 1)
    assert found.run is not None
    assert found.run.run_id == found.published_by
    assert stones.lineage("stones/slate/99") is None


def test_document_that_is_not_there_is_none(stones: RemoteCollection) -> None:
    assert stones.read_document("stones/../slate") is None
    assert stones.read_document(".") is None


def test_unknown_collection_is_an_error_of_its_own(client: CairnClient) -> None:
    with pytest.raises(NotFoundError, match="There is no such collection") as caught:
        client.collection("pebbles").search(QUERY)
    assert (caught.value.status, caught.value.type) == (404, "urn:problem-type:cairn:unknown-collection")
    with pytest.raises(NotFoundError):
        client.collection("pebbles").read_document("1")
    with pytest.raises(InvalidRequestError):
        client.collection("Pebbles").search(QUERY)


def test_invalid_request_names_the_field(stones: RemoteCollection) -> None:
    with pytest.raises(InvalidRequestError, match="#/top_k") as caught:
        stones.search(QUERY, top_k=1_000)
    assert [field.pointer for field in caught.value.errors] == ["#/top_k"]
    assert caught.value.exit_code == 2


def test_collections_are_listed_and_described(client: CairnClient) -> None:
    assert [(each.name, each.status, each.documents) for each in client.collections()] == [
        ("stones", "ready", 12)
    ]
    described = client.collection("stones").describe()
    assert described.landmark_interval == 16
    assert FilterColumn(name="year", type="int64") in described.filter_columns


def test_vectors_are_those_of_the_collection_in_the_order_of_the_texts(
    stones: RemoteCollection, stones_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.client.clients.MAX_INPUTS", 2)
    texts = ["granite", "a river", "old marks", "the mat", "cat"]
    vectors = stones.encode_queries(texts)
    assert vectors.shape == (5, stones.describe().vector_dim)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(vectors[3], stones.encode_documents(["the mat"])[0], atol=1e-5)
    assert stones.encode_queries([]).shape == (0, vectors.shape[1])


def test_cursor_of_another_generation_is_an_error_of_its_own(
    stones: RemoteCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.client.clients.FIRST_CURSOR", "no-such-cursor")
    with pytest.raises((CursorExpiredError, InvalidRequestError)):
        next(iter(stones.search_pages(QUERY)))
