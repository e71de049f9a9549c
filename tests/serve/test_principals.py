"""What a request sees that says for whom it asks: over every address, only what that reader may read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.client.clients import Connection
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

STONES = "/v1/collections/stones"
ACME = {"X-Cairn-Principal": "nobody, acme"}


def is_acmes(doc_id: str) -> bool:
    return int(doc_id.rpartition("/")[2]) % 2 == 1


@pytest.fixture
def asked(own_root: Path, serve: Callable[..., TestClient]) -> Callable[..., TestClient]:
    """Return ``asked(column, scopes)``: a client whose key has these scopes."""

    def start(column: str | None = "tenant", scopes: tuple[str, ...] = ("search", "principal")) -> TestClient:
        token = KeyFile(own_root / "keys.json").create("portal", scopes=scopes)[1]
        client = serve(ServeSettings(root=own_root, readers_column=column))
        client.headers["Authorization"] = f"Bearer {token}"
        return client

    return start


def test_principal_sees_only_what_it_may_read(asked: Callable[..., TestClient]) -> None:
    client = asked()
    client.headers.update(ACME)

    def post(path: str, **body: Any) -> Any:
        response = client.post(path, json=body)
        assert response.status_code == 200
        return response.json()

    hits = post(f"{STONES}/search", query="granite", top_k=200)["hits"]
    listed = post(f"{STONES}/documents/list", limit=1_000)
    stored = post("/v1/vector_stores/stones/search", query="slate", max_num_results=50)["data"]
    own = {hit["doc_id"] for hit in hits}
    assert own
    assert all(map(is_acmes, own | {each["file_id"] for each in stored}))
    assert {each["doc_id"] for each in listed["documents"]} == own
    assert post(f"{STONES}/count")["documents"] == listed["total"] == len(own)
    (tenant,) = post(f"{STONES}/facets", columns=["tenant"])["columns"]
    assert tenant["values"] == [{"value": "acme", "documents": len(own)}]
    assert client.get(STONES).json()["documents"] == len(own)
    assert client.get(f"{STONES}/documents/{min(own)}").status_code == 200
    for part in ("documents", "lineage"):
        assert client.get(f"{STONES}/{part}/stones/granite/0").status_code == 404
    others = {"type": "eq", "key": "tenant", "value": "zenith"}
    assert post(f"{STONES}/search", query="granite", filters=others)["hits"] == []


def test_principal_without_documents_finds_none(asked: Callable[..., TestClient]) -> None:
    headers = {"X-Cairn-Principal": "j%C3%B6rg"}
    response = asked().post(f"{STONES}/search", json={"query": "granite"}, headers=headers)
    assert (response.status_code, response.json()["hits"]) == (200, [])


@pytest.mark.parametrize(
    ("column", "scopes", "headers", "problem"),
    [
        ("tenant", ("search", "principal"), {}, "principal-missing"),
        ("tenant", ("search", "principal"), {"X-Cairn-Principal": " , "}, "principal-missing"),
        ("tenant", ("search", "principal"), {"X-Cairn-Principal": "a," * 300}, "principal-missing"),
        ("tenant", ("search",), ACME, "principal-missing"),
        (None, ("search", "principal"), ACME, "principal-missing"),
        ("readers", ("search", "principal"), ACME, "restriction-unusable"),
    ],
)
def test_request_that_may_not_say_for_whom_it_asks_is_refused(
    asked: Callable[..., TestClient], column: str, scopes: Any, headers: dict[str, str], problem: str
) -> None:
    client = asked(column, scopes)
    response = client.post(f"{STONES}/search", json={"query": "granite"}, headers=headers)
    assert response.status_code == 403
    assert response.json()["type"].endswith(f":{problem}")


@pytest.mark.parametrize("other", ["write", "admin"])
def test_key_that_asks_for_others_only_reads(tmp_path: Path, other: str) -> None:
    with pytest.raises(ConfigError, match="a key with the scope principal must only read"):
        KeyFile(tmp_path / "keys.json").create("portal", scopes=("principal", other))


def test_empty_list_of_principals_is_refused_without_keys(
    own_root: Path, serve: Callable[..., TestClient]
) -> None:
    client = serve(ServeSettings(root=own_root, readers_column="tenant"))
    sent = Connection(base_url="http://127.0.0.1", principals=()).settings()["headers"]
    headers = {name: value for name, value in sent.items() if name == "X-Cairn-Principal"}
    response = client.post(f"{STONES}/count", json={}, headers=headers)
    assert response.status_code == 403
    assert response.json()["type"].endswith(":principal-missing")
