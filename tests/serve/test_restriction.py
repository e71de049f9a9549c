"""What a reader may see, by its key's filter or as whom it asks: no request gets a document past that."""

from __future__ import annotations

import json
import secrets
from typing import Any

import httpx2
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.client.clients import CairnClient, Connection
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.search.test_filters import matches
from tests.serve.conftest import drawn, problem, starter, stone_rows
from tests.served_stones import serving

OWN = {"type": "eq", "key": "tenant", "value": "acme"}
STONES, STORE = "/v1/collections/stones", "/v1/vector_stores/stones"
SEARCH = f"{STONES}/search"
FIGURES = ("/stones", "/stones/health", "/stones/map")
ACME = "nobody, acme"


@pytest.fixture(scope="module")
def tenant(served_root, tmp_path_factory):
    """A client whose key sees acme's documents: those of odd numbers."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    with starter() as start:
        yield start(ServeSettings(root=served_root, keys_file=keys), key={"restriction": OWN})


@pytest.fixture(scope="module", params=["key", "principal"])
def reader(request, tenant, served_root, tmp_path_factory):
    """A client that sees acme's documents by its key, or as a reader for whom its key asks."""
    if request.param == "key":
        yield tenant
        return
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    settings = ServeSettings(root=served_root, keys_file=keys, readers_column="tenant")
    with starter() as start:
        client = start(settings, key={"scopes": ("search", "principal")})
        client.headers["X-Cairn-Principal"] = ACME
        yield client


def is_own(doc_id):
    return int(doc_id.rpartition("/")[2]) % 2 == 1


keys = st.sampled_from(
    ["tenant", "year", "doc_id", "title", "source_file", "cluster_id", "num_tokens"]
) | st.text(max_size=8)
values = (
    st.sampled_from(["acme", "zenith", 2004, 0, -1, 1e9, True, "stones/granite/0", "' OR 1=1 --"])
    | st.text(max_size=8)
    | st.integers()
)
lists = st.lists(values, min_size=1, max_size=4)


def leaf(kinds, key, **value):
    """Return comparisons of these kinds."""
    return st.fixed_dictionaries({"type": st.sampled_from(kinds), "key": key, **value})


leaves = st.one_of(
    leaf(["is_null", "is_not_null"], keys),
    leaf(["eq", "ne", "gt", "gte", "lt", "lte", "contains"], keys, value=values),
    leaf(["in", "nin"], keys, value=lists),
    st.dictionaries(keys, values | st.none() | lists, min_size=1, max_size=3),
)
tenants, years = st.just("tenant"), st.just("year")
likely = st.one_of(
    st.sampled_from(["acme", "zenith", ["acme", "zenith"], None]).map(lambda value: {"tenant": value}),
    leaf(["contains"], tenants, value=st.just("e")),
    leaf(["is_null", "is_not_null"], years),
    leaf(["eq", "ne"], tenants, value=st.sampled_from(["acme", "zenith"])),
    leaf(["gte", "lt"], years, value=st.integers(1999, 2020)),
)
trees = st.lists(likely, min_size=1, max_size=3)
filters = st.recursive(
    likely | leaves,
    lambda children: st.builds(
        lambda t, f: {"type": t, "filters": f},
        st.sampled_from(["and", "or"]),
        st.lists(children, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    filters=st.none() | filters,
    hybrid=st.booleans(),
    granularity=st.sampled_from(["document", "chunk", "both"]),
    query=st.sampled_from(["zenith granite", "tenant = zenith", "basalt"]),
    chosen=st.sampled_from(
        [{}, {"group_by": "year"}, {"group_by": "tenant", "group_size": 20}, {"mmr": 0.3}]
    ),
)
def test_no_search_finds_another_tenants_document(tenant, filters, hybrid, granularity, query, chosen):
    options = {"hybrid": hybrid, "granularity": granularity, "passages": 1, **chosen}
    body = {"query": query, "top_k": 200, "filters": filters, **options}
    response = tenant.post(SEARCH, json=body)
    assert response.status_code in (200, 422), response.text
    found = [hit["doc_id"] for hit in response.json().get("hits", [])]
    assert all(map(is_own, found))
    if filters is None:
        assert len(found) == 10
    body = {"query": [query, "zenith"], "filters": filters, "max_num_results": 50}
    stored = tenant.post("/v1/vector_stores/stones/search", json=body)
    assert stored.status_code in (200, 422), stored.text
    assert all(is_own(result["file_id"]) for result in stored.json().get("data", []))


def test_reader_sees_its_own_documents_alone_over_every_address(reader, client):
    def post(path, status=200, **body):
        response = reader.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    own = {row["id"] for row in stone_rows() if is_own(row["id"])}
    assert {hit["doc_id"] for hit in post(SEARCH, query="granite", top_k=200)["hits"]} == own
    assert post(SEARCH, query="granite", filters={"tenant": "zenith"})["hits"] == []
    cursor, paged = "*", []
    while cursor:
        answer = post(SEARCH, query="granite", top_k=3, cursor=cursor)
        paged += [hit["doc_id"] for hit in answer["hits"]]
        cursor = answer["next_cursor"]
    assert sorted(paged) == sorted(own)
    listed = post(f"{STONES}/documents/list", limit=1_000)
    assert {each["doc_id"] for each in listed["documents"]} == own
    assert post(f"{STONES}/count")["documents"] == listed["total"] == 10
    (tenants,) = post(f"{STONES}/facets", columns=["tenant"])["columns"]
    assert tenants["values"] == [{"value": "acme", "documents": 10}]
    for row in stone_rows():
        document, lineage, file = (
            reader.get(f"{path}/{row['id']}")
            for path in (f"{STONES}/documents", f"{STONES}/lineage", f"{STORE}/files")
        )
        found = {reply.status_code for reply in (document, lineage, file)}
        assert found == ({200} if is_own(row["id"]) else {404})
        assert lineage.json().get("context_documents") is None
        assert is_own(row["id"]) or document.json()["type"].endswith(":unknown-document")
    stored = post(f"{STORE}/search", query="slate", max_num_results=50)["data"]
    assert stored
    assert {each["file_id"] for each in stored} <= own
    files = reader.get(f"{STORE}/files", params={"limit": 100}).json()["data"]
    assert {each["id"] for each in files} == own
    assert reader.get(STORE).json()["file_counts"]["total"] == 10
    assert reader.get(f"{STORE}/files", params={"after": "stones/granite/0"}).status_code == 422
    points = drawn(reader, "map")["points"]
    assert {*points["doc_id"]} == own
    placed = drawn(reader, "map/places", doc_id=["stones/granite/0", "stones/basalt/1"])["points"]
    assert placed["doc_id"] == ["stones/basalt/1"]
    mine, whole = (each.get(f"{STONES}/health").json() for each in (reader, client))
    assert (mine["documents"], mine["drift"], reader.get(STONES).json()["documents"]) == (10, None, 10)
    assert 0 < mine["chunks"] < whole["chunks"]
    assert 0 < mine["tokens"] < whole["tokens"]
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    asked = {"query": "stone", "top_k": 50, "collection": "stones"}
    told = post("/mcp", **message, params={"name": "search", "arguments": asked})["result"]
    assert {each["doc_id"] for each in told["structuredContent"]["documents"]} <= own
    asked = {"doc_id": "stones/granite/0", "collection": "stones"}
    assert post("/mcp", **message, params={"name": "get_document", "arguments": asked})["result"]["isError"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    restriction=likely
    | st.builds(lambda kind, trees: {"type": kind, "filters": trees}, st.sampled_from(["and", "or"]), trees)
)
def test_figures_are_of_what_any_restriction_lets_through(tenant, restriction):
    token = f"cairn_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"
    KeyFile(tenant.app.state.server.settings.keys_path).create("any", restriction=restriction, token=token)
    expected = {row["id"] for row in stone_rows() if matches(restriction, row)}

    def asked(path):
        return tenant.get(f"/v1/collections{path}", headers={"Authorization": f"Bearer {token}"}).json()

    described, health = asked("/stones"), asked("/stones/health")
    assert (described["documents"], described["chunks"], described["context_documents"]) == (
        len(expected),
        None,
        None,
    )
    assert (health["documents"], health["context_documents"], health["drift"]) == (len(expected), None, None)
    assert {(each["documents"], each["chunks"]) for each in asked("")["collections"]} == {(None, None)}


@pytest.mark.parametrize("bounds", [{"restriction": OWN}, {"collections": ("stones",)}])
def test_figures_of_the_whole_server_are_not_for_a_key_that_is_bound(served_root, serve, tmp_path, bounds):
    """Such keys are not made any more, but there may be some."""
    keys = KeyFile(tmp_path / "keys.json")
    _, whole = keys.create("whole", scopes=("admin",))
    _, bound = keys.create("bound", **bounds)
    raw = json.loads(keys.path.read_text())
    raw["keys"][1]["scopes"] = ["search", "admin"]
    keys.path.write_text(json.dumps(raw))
    client = serve(ServeSettings(root=served_root, keys_file=keys.path))
    replies = [
        client.get("/metrics", headers={"Authorization": f"Bearer {token}"}) for token in (whole, bound)
    ]
    assert [reply.status_code for reply in replies] == [200, 403]
    assert replies[1].json()["type"].endswith(":scope-missing")


@pytest.mark.parametrize(
    "restriction",
    [
        {"type": "eq", "key": "owner", "value": "acme"},
        {"type": "eq", "key": "year", "value": "acme"},
        {"type": "is", "key": "tenant", "value": "acme"},
        {"type": "or", "filters": []},
        {"anything": "else"},
    ],
)
def test_restriction_that_does_not_fit_answers_nothing(served_root, serve, tmp_path, restriction):
    settings = ServeSettings(root=served_root, keys_file=tmp_path / "keys.json")
    client = serve(settings, key={"restriction": restriction})
    replies = [
        client.post(SEARCH, json={"query": "slate"}),
        client.post(f"{STORE}/search", json={"query": "slate"}),
        *(client.get(f"{STONES}{path}") for path in ("", "/documents/stones/granite/0", "/map", "/health")),
        client.get(f"{STONES}/map/places?doc_id=a"),
    ]
    assert {problem(reply) for reply in replies} == {(403, "restriction-unusable")}


def test_click_on_a_document_that_the_key_does_not_see_is_refused_and_not_logged(served_root, tmp_path):
    settings = ServeSettings(
        root=served_root, keys_file=tmp_path / "keys.json", feedback_log=tmp_path / "log"
    )
    with starter() as start:
        client = start(settings, key={"restriction": OWN})
        seen = client.post(SEARCH, json={"query": "granite"}).json()["hits"][0]["doc_id"]
        clicks = [
            client.post("/v1/collections/stones/clicks", json={"query": "q", "doc_id": doc_id})
            for doc_id in ("stones/granite/0", "stones/none/1", seen)
        ]
    assert [reply.status_code for reply in clicks] == [404, 404, 200]
    assert clicks[0].json()["type"] == clicks[1].json()["type"]
    rows = [row for path in (tmp_path / "log").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert [row["doc_ids"] for row in rows if row["kind"] == "click"] == [[seen]]


FRENCH = "Le granite est une pierre très dure que l'on trouve dans les montagnes et que l'on taille pour "


def _answers(root, **settings):
    """Return what acme is told over HTTP, MCP and in Python, as it is sent."""
    token = KeyFile(root / "keys.json").create("portal", scopes=("search", "principal"))[1]
    headers = {"Authorization": f"Bearer {token}", "X-Cairn-Principal": "acme"}
    tool = {"name": "search", "arguments": {"query": "granite slate", "collection": "stones"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": tool}
    asked: list[tuple[str, dict[str, Any]]] = [
        (SEARCH, {"query": "granite slate of version 0 flintement", "top_k": 50}),
        (SEARCH, {"query": "granite", "top_k": 3, "chunk_tokens": 32, "max_characters": 400}),
        (SEARCH, {"query": "flint", "filters": {"type": "gte", "key": "year", "value": 2008}}),
        (SEARCH, {"query": "quartz chalk", "top_k": 50, "min_probability": 0.0}),
        (f"{STONES}/facets", {"columns": ["tenant", "year"]}),
        (f"{STONES}/count", {}),
        (f"{STORE}/search", {"query": "gneiss or slate"}),
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


PORTAL = ("search", "principal")
OF_NOBODY = Connection(base_url="http://127.0.0.1", principals=()).settings()["headers"]["X-Cairn-Principal"]


@pytest.mark.parametrize(
    ("column", "scopes", "principals", "told"),
    [
        ("tenant", PORTAL, "j%C3%B6rg", None),
        ("tenant", PORTAL, None, "principal-missing"),
        ("tenant", PORTAL, " , ", "principal-missing"),
        ("tenant", PORTAL, "a," * 300, "principal-missing"),
        ("tenant", PORTAL, "a" * 10_000, "restriction-unusable"),
        ("tenant", ("search",), ACME, "principal-missing"),
        ("tenant", None, OF_NOBODY, "principal-missing"),
        (None, PORTAL, ACME, "principal-missing"),
        ("readers", PORTAL, ACME, "restriction-unusable"),
    ],
)
def test_request_that_may_not_say_for_whom_it_asks_is_refused_and_one_of_a_stranger_finds_nothing(
    own_root, serve, column, scopes, principals, told
):
    settings = ServeSettings(root=own_root, readers_column=column)
    client = serve(settings, key=None if scopes is None else {"scopes": scopes})
    headers = {} if principals is None else {"X-Cairn-Principal": principals}
    response = client.post(SEARCH, json={"query": "granite"}, headers=headers)
    if told is None:
        assert response.json()["hits"] == []
    else:
        assert problem(response) == (403, told)
