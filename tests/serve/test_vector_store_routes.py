"""OpenAI's vector stores, asked by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient


def client_over(server: TestClient, key: str = "none") -> openai.OpenAI:
    """Return OpenAI's client, whose requests the application answers in this process."""

    def send(request: httpx2.Request) -> httpx2.Response:
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        content = request.read()
        answer = server.request(request.method, str(request.url), content=content or None, headers=headers)
        return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

    http = httpx2.Client(transport=httpx2.MockTransport(send))
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def stores(client: TestClient) -> Iterator[Any]:
    with client_over(client) as opened:
        yield opened.vector_stores


def test_stores_are_the_collections(stores: Any) -> None:
    listed = sorted(stores.list(limit=1), key=lambda store: store.id)
    assert [(store.id, store.file_counts.total) for store in listed] == [("pebbles", 4), ("stones", 20)]
    assert stores.retrieve("pebbles") == listed[0]
    assert listed[0].status == "completed"
    assert listed[0].usage_bytes > 0


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_hold_every_file_once(stores: Any, served_root: Path, order: str) -> None:
    listed = [file.id for file in stores.files.list("stones", limit=3, order=order)]
    ingested = open_collection("stones", root=served_root).documents.ids()
    assert listed == (ingested if order == "asc" else ingested[::-1])


def test_page_before_an_id_ends_there(stores: Any) -> None:
    ids = [file.id for file in stores.files.list("stones", limit=100, order="asc")]
    page = stores.files.list("stones", limit=3, order="asc", before=ids[7])
    assert [file.id for file in page.data] == ids[4:7]
    assert page.has_more is True
    assert stores.files.list("stones", limit=7, order="asc", before=ids[7]).has_more is False


def test_file_has_attributes_and_text(stores: Any, served_root: Path) -> None:
    document = open_collection("stones", root=served_root).documents["stones/basalt/1"]
    file = stores.files.retrieve("stones/basalt/1", vector_store_id="stones")
    assert file.attributes == {"tenant": "acme", "year": 2001}
    assert file.usage_bytes == len(document.text.encode())
    content = stores.files.content("stones/basalt/1", vector_store_id="stones")
    assert [part.text for part in content] == [document.text]


@pytest.mark.parametrize(("status", "count"), [("completed", 4), ("failed", 0)])
def test_files_are_filtered_by_status(stores: Any, status: str, count: int) -> None:
    assert len(list(stores.files.list("pebbles", filter=status))) == count


def test_search_takes_filters_and_ranking_options(stores: Any) -> None:
    filters = {
        "type": "and",
        "filters": [
            {"type": "in", "key": "tenant", "value": ["acme"]},
            {"type": "gte", "key": "year", "value": 2007},
        ],
    }
    options = {"ranker": "none", "score_threshold": 0.1}
    found = list(stores.search("stones", query=["slate", "chalk"], filters=filters, ranking_options=options))
    assert found
    assert all(hit.attributes["tenant"] == "acme" and hit.attributes["year"] >= 2007 for hit in found)
    assert all(hit.score >= 0.1 and hit.content[0].text for hit in found)


@pytest.mark.parametrize(
    "write",
    [
        lambda stores: stores.create(name="new"),
        lambda stores: stores.update("stones", name="new"),
        lambda stores: stores.delete("stones"),
        lambda stores: stores.files.create("stones", file_id="f"),
        lambda stores: stores.files.delete("f", vector_store_id="stones"),
        lambda stores: stores.file_batches.create("stones", file_ids=["f"]),
    ],
)
def test_write_is_refused_in_openais_words(stores: Any, write: Callable[[Any], Any]) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="start it with --writable") as caught:
        write(stores)
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (
        403,
        "read-only",
        "invalid_request_error",
    )


def test_error_names_the_part_to_change(stores: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="max_num_results: Input should be") as caught:
        stores.search("stones", query="x", max_num_results=51)
    assert caught.value.param == "max_num_results"
    with pytest.raises(openai.UnprocessableEntityError, match="there is no entry of this id"):
        stores.files.list("stones", after="nothing")
    with pytest.raises(openai.NotFoundError, match="There is no such collection"):
        stores.retrieve("marbles")


def test_key_with_a_filter_lists_its_own_files_alone(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    settings = ServeSettings(root=own_root)
    restriction = {"type": "eq", "key": "tenant", "value": "zenith"}
    _, key = KeyFile(settings.keys_path).create("z", collections=("stones",), restriction=restriction)
    with client_over(serve(settings), key) as client:
        assert [store.file_counts.total for store in client.vector_stores.list()] == [10]
        files = list(client.vector_stores.files.list("stones", limit=4))
        assert len(files) == 10
        assert {file.attributes["tenant"] for file in files} == {"zenith"}
        with pytest.raises(openai.UnprocessableEntityError):
            client.vector_stores.files.list("stones", after="stones/basalt/1")
        with pytest.raises(openai.NotFoundError):
            client.vector_stores.files.retrieve("stones/basalt/1", vector_store_id="stones")


def test_address_without_a_key_is_refused_in_openais_words(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    settings = ServeSettings(root=own_root)
    KeyFile(settings.keys_path).create("app")
    with client_over(serve(settings)) as client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.vector_stores.list()
