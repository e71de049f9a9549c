"""What a caller of the search API must not be able to do.

Each answer here is looked through for places on this machine and for what was sent.
"""

from __future__ import annotations

import pytest

from tests.serve.conftest import problem

SEARCH = "/v1/collections/stones/search"
CANARY = "zq-canary-zq"


@pytest.fixture
def refused(client):
    """Return ``refused(body)``: post it, and give the problem's name; the answer gives nothing away."""

    def post(body):
        response = client.post(SEARCH, json=body)
        assert 400 <= response.status_code < 500, response.text
        assert CANARY not in response.text
        return problem(response)[1]

    return post


def comparison(value=1, key="year", kind="eq"):
    return {"type": kind, "key": key, "value": value}


def nested(depth):
    return comparison() if depth == 1 else {"type": "and", "filters": [nested(depth - 1)]}


FILTERS = [
    "year > 2000 OR 1=1",
    comparison(key=f"{CANARY}) OR (1=1"),
    comparison(key="length(repeat(text,1000000))"),
    comparison(key="text"),
    comparison(key="vector"),
    comparison(kind="like"),
    comparison(value={"sql": "1=1"}),
    comparison(value=CANARY),
    {"type": CANARY},
    nested(9),
    {"type": "or", "filters": [comparison() for _ in range(257)]},
    {"type": "and", "filters": [{"type": "or", "filters": [comparison()] * 32}] * 8},
    {"type": "in", "key": "year", "value": list(range(1_001))},
    {"type": "and", "filters": []},
]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"filters": filters} for filters in FILTERS),
        *({"granularity": CANARY}, {CANARY: 1}, {"weights": {CANARY: 1.0}}, {"cursor": CANARY}),
    ],
)
def test_filters_are_a_bounded_grammar_and_no_value_is_repeated(refused, wrong):
    """Other bounds and types are the description's, which ``test_fuzz.py`` holds every address to."""
    assert refused({"query": CANARY, **wrong}) in ("invalid-request", "invalid-filter", "invalid-cursor")


@pytest.mark.parametrize("query", ["x" * 8_193, "é" * 4_097, "", " \t\n"])
def test_query_has_at_most_eight_kilobytes(refused, client, query):
    assert refused({"query": query}) == "invalid-request"
    assert client.post(SEARCH, json={"query": "é" * 4_096, "top_k": 1}).status_code == 200
    if query.strip():
        (field,) = client.post(SEARCH, json={"query": query}).json()["errors"]
        assert field["detail"] == "Text should have at most 8192 bytes in UTF-8"


NAMES = [
    *("..", "%2E%2E", "..%2Froot", "Stones", "-rf", ".hidden", "a" * 64, "stones%00", "s3:%2F%2Fbucket"),
    "%2Fetc%2Fpasswd",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_outside_the_root(client, name):
    for response in (
        *(client.get(f"/v1/collections/{name}{path}") for path in ("", "/documents/x")),
        client.post(f"/v1/collections/{name}/search", json={"query": "slate"}),
        client.post("/v1/embeddings", json={"model": name, "input": "slate"}),
    ):
        is_search = response.request.method == "POST" and response.url.path.endswith("/search")
        assert problem(response)[0] in (404, 422, *([405] if is_search else [])), response.url


def test_no_request_names_a_place(refused, client):
    for field in ("root", "url", "uri", "path", "model", "file"):
        assert refused({"query": "slate", field: "file:///etc/passwd"}) == "invalid-request"
    described = str(client.get("/openapi.json").json()["components"]["schemas"])
    assert "'format': 'uri'" not in described
