"""What a request sees that says for whom it asks: over every address, only what that reader may read."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from cairn.pipeline.client.clients import CairnClient, Connection
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import stone_rows
from tests.served_stones import serving

STONES = "/v1/collections/stones"
FIGURES = ("/stones", "/stones/health", "/stones/map")
ACME = {"X-Cairn-Principal": "nobody, acme"}


@pytest.fixture
def asked(own_root, serve):
    """Return ``asked(column, scopes)``: a client whose key has these scopes."""

    def start(column="tenant", scopes=("search", "principal")):
        return serve(ServeSettings(root=own_root, readers_column=column), key={"scopes": scopes})

    return start


def test_principal_without_documents_finds_none(asked):
    headers = {"X-Cairn-Principal": "j%C3%B6rg"}
    response = asked().post(f"{STONES}/search", json={"query": "granite"}, headers=headers)
    assert (response.status_code, response.json()["hits"]) == (200, [])


FRENCH = "Le granite est une pierre très dure que l'on trouve dans les montagnes et que l'on taille pour "


def _answers(root, **settings):
    """Return what acme is told over HTTP, MCP and in Python, as it is sent."""
    token = KeyFile(root / "keys.json").create("portal", scopes=("search", "principal"))[1]
    headers = {"Authorization": f"Bearer {token}", "X-Cairn-Principal": "acme"}
    search, store = f"{STONES}/search", "/v1/vector_stores/stones/search"
    tool = {"name": "search", "arguments": {"query": "granite slate", "collection": "stones"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": tool}
    asked: list[tuple[str, dict[str, Any]]] = [
        (search, {"query": "granite slate of version 0 flintement", "top_k": 50}),
        (search, {"query": "granite", "top_k": 3, "chunk_tokens": 32, "max_characters": 400}),
        (search, {"query": "flint", "filters": {"type": "gte", "key": "year", "value": 2008}}),
        (search, {"query": "quartz chalk", "top_k": 50, "min_probability": 0.0}),
        (f"{STONES}/facets", {"columns": ["tenant", "year"]}),
        (f"{STONES}/count", {}),
        (store, {"query": "gneiss or slate"}),
        ("/mcp", message),
    ]
    served = ServeSettings(root=root, port=0, readers_column="tenant", deadline_seconds=300.0, **settings)
    with serving(served) as address:
        with httpx2.Client(base_url=address, headers=headers, timeout=300.0) as client:
            replies = [client.post(path, json=body) for path, body in asked]
            figures = [client.get(f"/v1/collections{path}") for path in ("", *FIGURES)]
        with CairnClient(address, api_key=token, principals=["acme"], timeout_seconds=300.0) as python:
            found = python.collection("stones").search("granite marble")
    assert [reply.status_code for reply in (*replies, *figures)] == [200] * (len(asked) + len(figures))
    # When it was published, and the numbers of the clusters, are the collection's.
    hidden = {"created_at", "points", "clusters", "status", "progress"}
    counts = [{name: value for name, value in each.json().items() if name not in hidden} for each in figures]
    return [*(reply.content for reply in replies), repr(found).encode(), repr(counts).encode()]


@pytest.mark.parametrize("is_hidden", [True, False])
def test_answers_tell_of_hidden_documents_only_where_word_statistics_are_shown(tmp_path, ingest, is_hidden):
    own = [row for row in stone_rows(60) if row["tenant"] == "acme"]
    others = [
        [{**row, "text": f"{FRENCH}{row['text']}", "tenant": "zenith"} for row in stone_rows(120)[60:]],
        [{**row, "text": "mortar and brick", "tenant": "zenith"} for row in stone_rows(80)[60:]],
    ]
    told: list[list[bytes]] = []
    for number, hidden in enumerate(others):
        root = tmp_path / f"root-{number}"
        ingest(root, "stones", [*hidden, *own] if number else [*own, *hidden])
        told.append(_answers(root, hide_word_statistics=is_hidden))
    if is_hidden:
        assert told[0] == told[1]
        assert b'"probability"' in told[0][3]
    else:
        alike = [one == other for one, other in zip(*told, strict=True)]
        assert alike == [False] * 4 + [True] * 2 + [False] * 3 + [True]


@pytest.mark.parametrize(
    ("column", "scopes", "headers", "problem"),
    [
        ("tenant", ("search", "principal"), {}, "principal-missing"),
        ("tenant", ("search", "principal"), {"X-Cairn-Principal": " , "}, "principal-missing"),
        ("tenant", ("search", "principal"), {"X-Cairn-Principal": "a," * 300}, "principal-missing"),
        ("tenant", ("search",), ACME, "principal-missing"),
        ("tenant", ("search", "principal"), {"X-Cairn-Principal": "a" * 10_000}, "restriction-unusable"),
        (None, ("search", "principal"), ACME, "principal-missing"),
        ("readers", ("search", "principal"), ACME, "restriction-unusable"),
    ],
)
def test_request_that_may_not_say_for_whom_it_asks_is_refused(asked, column, scopes, headers, problem):
    client = asked(column, scopes)
    response = client.post(f"{STONES}/search", json={"query": "granite"}, headers=headers)
    assert response.status_code == 403
    assert response.json()["type"].endswith(f":{problem}")


def test_empty_list_of_principals_is_refused_without_keys(own_root, serve):
    client = serve(ServeSettings(root=own_root, readers_column="tenant"))
    sent = Connection(base_url="http://127.0.0.1", principals=()).settings()["headers"]
    headers = {name: value for name, value in sent.items() if name == "X-Cairn-Principal"}
    response = client.post(f"{STONES}/count", json={}, headers=headers)
    assert response.status_code == 403
    assert response.json()["type"].endswith(":principal-missing")
