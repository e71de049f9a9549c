"""A key's own filter: no filter, cursor, id or query gets a document past it."""

from __future__ import annotations

import json
import operator
import secrets
from typing import Any

import pyarrow.parquet as pq
import pytest
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import starter, stone_rows

OWN = {"type": "eq", "key": "tenant", "value": "acme"}
SEARCH = "/v1/collections/stones/search"


@pytest.fixture(scope="module")
def tenant(served_root, tmp_path_factory):
    """A client whose key sees acme's documents: those of odd numbers."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    with starter() as start:
        yield start(ServeSettings(root=served_root, keys_file=keys), key={"restriction": OWN})


LOOKED_AT = ("/documents/stones/granite/0", "/map", "/map/places?doc_id=a", "/health")


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
nulls = st.builds(lambda t, k: {"type": t, "key": k}, st.sampled_from(["is_null", "is_not_null"]), keys)
columns = st.dictionaries(
    keys, values | st.none() | st.lists(values, min_size=1, max_size=3), min_size=1, max_size=3
)
leaves = st.one_of(
    nulls,
    columns,
    st.builds(
        lambda t, k, v: {"type": t, "key": k, "value": v},
        st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte", "contains"]),
        keys,
        values,
    ),
    st.builds(
        lambda t, k, v: {"type": t, "key": k, "value": v},
        st.sampled_from(["in", "nin"]),
        keys,
        st.lists(values, min_size=1, max_size=4),
    ),
)
likely = st.one_of(
    st.sampled_from(["acme", "zenith", ["acme", "zenith"], None]).map(lambda value: {"tenant": value}),
    st.just({"type": "contains", "key": "tenant", "value": "e"}),
    st.sampled_from(["is_null", "is_not_null"]).map(lambda t: {"type": t, "key": "year"}),
    st.sampled_from(["eq", "ne"]).flatmap(
        lambda t: st.sampled_from(["acme", "zenith"]).map(lambda v: {"type": t, "key": "tenant", "value": v})
    ),
    st.sampled_from(["gte", "lt"]).flatmap(
        lambda t: st.integers(1999, 2020).map(lambda v: {"type": t, "key": "year", "value": v})
    ),
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
    body = {
        "query": query,
        "top_k": 200,
        "hybrid": hybrid,
        "granularity": granularity,
        "filters": filters,
        "passages": 1,
        **chosen,
    }
    response = tenant.post(SEARCH, json=body)
    assert response.status_code in (200, 422), response.text
    found = [hit["doc_id"] for hit in response.json().get("hits", [])]
    assert all(map(is_own, found))
    if filters is None:
        assert len(found) == 10


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(filters=st.none() | likely)
def test_no_openai_search_finds_another_tenants_document(tenant, filters):
    response = tenant.post(
        "/v1/vector_stores/stones/search",
        json={"query": ["granite", "zenith"], "filters": filters, "max_num_results": 50},
    )
    assert response.status_code == 200
    assert all(is_own(result["file_id"]) for result in response.json()["data"])


def test_pages_stay_within_the_restriction_and_documents_of_others_are_not_found_by_id(tenant):
    cursor, found = "*", []
    while cursor:
        answer = tenant.post(SEARCH, json={"query": "granite", "top_k": 3, "cursor": cursor}).json()
        found += [hit["doc_id"] for hit in answer["hits"]]
        cursor = answer["next_cursor"]
    assert len(set(found)) == 10
    assert all(map(is_own, found))
    for row in stone_rows():
        response = tenant.get(f"/v1/collections/stones/documents/{row['id']}")
        assert response.status_code == (200 if is_own(row["id"]) else 404)
        lineage = tenant.get(f"/v1/collections/stones/lineage/{row['id']}").json()
        assert lineage.get("context_documents") is None
        if not is_own(row["id"]):
            assert response.json()["type"].endswith(":unknown-document")


def matches(row, tree):
    if tree.get("type") in ("and", "or"):
        return (all if tree["type"] == "and" else any)(matches(row, each) for each in tree["filters"])
    if "key" not in tree:
        value = tree["tenant"]
        return row["tenant"] in (value if isinstance(value, list) else [value])
    value = row[tree["key"]]
    if tree["type"] in ("is_null", "is_not_null"):
        return (value is None) == (tree["type"] == "is_null")
    if tree["type"] == "contains":
        return tree["value"] in value
    return value is not None and getattr(operator, {"gte": "ge"}.get(tree["type"], tree["type"]))(
        value, tree["value"]
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    restriction=likely
    | st.builds(lambda kind, trees: {"type": kind, "filters": trees}, st.sampled_from(["and", "or"]), trees)
)
def test_figures_are_of_what_any_restriction_lets_through(tenant, restriction):
    token = f"cairn_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"
    KeyFile(tenant.app.state.server.settings.keys_path).create("any", restriction=restriction, token=token)
    expected = {row["id"] for row in stone_rows() if matches(row, restriction)}

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


def test_nothing_that_is_counted_depends_on_documents_the_key_does_not_see(tmp_path, serve, ingest):
    own = [row for row in stone_rows() if row["tenant"] == "acme"]
    others = [
        {
            "id": f"other/{n}",
            "title": "Zinc",
            "text": "zinc and lead " * (n + 1),
            "tenant": "zenith",
            "year": 1990,
        }
        for n in range(25)
    ]
    seen: list[Any] = []
    for name, rows in (("few", [*own, others[0]]), ("many", [*others, *own])):
        ingest(tmp_path / name, "stones", rows)
        client = serve(ServeSettings(root=tmp_path / name), key={"restriction": OWN})
        replies = [
            client.get(f"/v1/collections{path}").json()
            for path in ("", "/stones", "/stones/health", "/stones/map")
        ]
        # When it was published, and the numbers of the clusters, which are the collection's.
        hidden = ("created_at", "points", "clusters", "status", "progress")
        seen.append([{key: value for key, value in reply.items() if key not in hidden} for reply in replies])
    assert seen[0] == seen[1]
    assert seen[0][2]["documents"] == 10


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
        client.post("/v1/vector_stores/stones/search", json={"query": "slate"}),
        *(client.get(f"/v1/collections/stones{path}") for path in ("", *LOOKED_AT)),
    ]
    assert {(reply.status_code, reply.json()["type"].rpartition(":")[2]) for reply in replies} == {
        (403, "restriction-unusable")
    }


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
