"""What a refused request is told, in words of the schema, without what was sent, and what none may name."""

from __future__ import annotations

import pytest
from cairn.pipeline import errors
from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.errors import CairnError
from cairn.pipeline.serve.problems import opening_problem, schema_problem, search_problem, unknown_names
from cairn.pipeline.serve.schemas import Request, SearchRequest, field_names
from pydantic import ValidationError

from tests.serve.conftest import problem

PLACE = "/srv/secret/place"
CANARY = "zq-canary-zq"
SENTENCE = f"top_k must be a number, got '{CANARY}'; see {PLACE}"


def kinds_of_errors():
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CairnError)]


@pytest.mark.parametrize("kind", kinds_of_errors())
def test_no_error_passes_on_a_place_or_a_value(kind):
    for told in (search_problem(kind(SENTENCE)).detail, opening_problem(kind(SENTENCE)).detail):
        assert told
        assert PLACE not in told
        assert CANARY not in told


def test_of_a_field_of_several_types_the_error_of_the_type_that_was_sent_is_told():
    """HTTP cannot send it: JSON has no such number."""
    filters = {"type": "eq", "key": "year", "value": float("nan")}
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate({"query": "a", "filters": filters})
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    told = schema_problem(found, field_names(Request))
    assert told.errors == (FieldProblem(pointer="#/filters/value", detail="Input should be a finite number"),)


@pytest.mark.parametrize(
    "name", ["", "x" * 33, "1x", "a b", "a-b", "a/b", "<b>", "line\n", "é", "cairn_0123456789ab_" + "A" * 43]
)
def test_no_other_name_is_repeated(name):
    (told,) = unknown_names("query", [name], "it takes a")
    assert told.pointer == "query"
    assert not name or name not in told.detail


SEARCH = "/v1/collections/stones/search"
FILLED = {
    **dict.fromkeys(("name", "vector_store_id"), "stones"),
    **dict.fromkeys(("doc_id", "file_id"), "stones/granite/0"),
    "number": "1",
}
BODIES = {"post": {"query": "slate"}, "patch": {"metadata": {}}}


def refused(response):
    assert problem(response) == (422, "invalid-request")
    assert CANARY not in response.text
    return {error["pointer"]: error["detail"] for error in response.json()["errors"]}


def test_every_address_refuses_a_parameter_it_does_not_declare_and_names_those_it_does(client):
    paths = {
        path: found
        for path, found in client.get("/openapi.json").json()["paths"].items()
        if path.startswith("/v1")
    }
    assert len(paths) > 5
    for path, operations in paths.items():
        for method, operation in operations.items():
            if "files" in operation["tags"]:  # what they name is looked for first
                continue
            declared = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
            told = refused(
                client.request(
                    method,
                    path.format(**FILLED),
                    params={"star_char": 1, "no such": 2},
                    json=BODIES.get(method),
                )
            )
            assert list(told) == ["query/star_char", "query"]
            assert all(f"takes {', '.join(declared) or 'none'}" in detail for detail in told.values())
            asks = method == "post" and not declared
            assert all(("body" in detail) == asks for detail in told.values())


def test_parameters_of_addresses_without_documents_are_nobodys_business(client):
    assert [
        client.get(f"{path}?probe=1").status_code for path in ("/healthz", "/readyz", "/metrics", "/")
    ] == [200] * 4


UNKNOWN = "there is no such name; this object takes "
OF_A_SEARCH = "query, top_k, granularity"
TOO_LONG = "Text should have at most 8192 bytes in UTF-8"


@pytest.mark.parametrize(
    ("body", "pointer", "detail"),
    [
        ({"topk": 3}, "#/topk", UNKNOWN + OF_A_SEARCH),
        ({"weights": {"bm52": 1.0}}, "#/weights/bm52", f"{UNKNOWN}document, chunk, bm25"),
        (
            {"filters": {"type": "eq", "key": "year", "val": 1}},
            "#/filters/val",
            f"{UNKNOWN}type, key, value",
        ),
        (
            {"filters": {"type": "and", "filters": [{"type": "in", "key": "a", "vals": [1]}]}},
            "#/filters/filters/0/vals",
            f"{UNKNOWN}type, key, value",
        ),
        (
            {"filters": {"type": "or", "filters": [], "filter": []}},
            "#/filters/filter",
            f"{UNKNOWN}type, filters",
        ),
        (
            {"top k": 3},
            "#",
            f"a name here, which is not an identifier, is not known; this object takes {OF_A_SEARCH}",
        ),
        ([], "#", "Input should be an object"),
        ({"query": None}, "#/query", "Input should be a valid string or a valid list"),
        ({"query": [None]}, "#/query/0", "Input should be a valid string"),
        ({"query": ""}, "#/query", "String should have at least 1 character"),
        ({"query": " \t\n"}, "#/query", "Text should hold more than white space"),
        *(({"query": query}, "#/query", TOO_LONG) for query in ("x" * 8_193, "é" * 4_097)),
        *(
            ({field: f"file:///{CANARY}"}, f"#/{field}", UNKNOWN)
            for field in ("root", "url", "path", "model")
        ),
        (
            {"filters": {"type": "in", "key": "year", "value": [1, None]}},
            "#/filters/value/1",
            "Input should be a valid string or a valid boolean or a valid integer or a valid number",
        ),
        ({"weights": 1}, "#/weights", "Input should be an object"),
        ({"filters": {"key": "year"}}, "#/filters", "Input should have a field `type`"),
        (
            {"filters": {"type": "is", "key": "year"}},
            "#/filters",
            "Input should have a type that is one of 'eq', 'ne', 'gt'",
        ),
    ],
)
def test_what_is_wrong_is_named_and_said_in_words_of_json(client, body, pointer, detail):
    sent = {"query": "slate", **body} if isinstance(body, dict) else body
    (told,) = refused(client.post(SEARCH, json=sent)).items()
    assert told[0] == pointer
    assert told[1].startswith(detail)


def test_every_unknown_field_of_an_object_is_named_up_to_a_bound(client):
    many = {f"x{number}": 1 for number in range(50)}
    told = refused(client.post("/v1/embeddings", json={"model": "stones", "input": "slate", **many}))
    assert list(told) == [f"#/x{number}" for number in range(10)]
    fields = "model, input, input_type, encoding_format, dimensions, user"
    assert {*told.values()} == {f"{UNKNOWN}{fields}"}


def test_parameter_that_comes_twice_is_refused_where_one_is_taken(client):
    told = refused(client.get("/v1/collections/stones/documents/stones/granite/0?start_char=1&start_char=2"))
    assert told == {"query/start_char": "there must be one of it"}
    ids = "doc_id=stones/granite/0&doc_id=stones/basalt/1"
    assert client.get(f"/v1/collections/stones/map/places?{ids}").status_code == 200


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
def test_filters_are_a_bounded_grammar_and_no_value_is_repeated(client, wrong):
    """Other bounds and types are the description's, which ``test_fuzz.py`` holds every address to."""
    response = client.post(SEARCH, json={"query": CANARY, **wrong})
    assert problem(response)[1] in ("invalid-request", "invalid-filter", "invalid-cursor")
    assert CANARY not in response.text


def test_longest_query_is_answered_and_no_field_of_the_schema_is_an_address(client):
    assert client.post(SEARCH, json={"query": "é" * 4_096, "top_k": 1}).status_code == 200
    described = str(client.get("/openapi.json").json()["components"]["schemas"])
    assert "'format': 'uri'" not in described


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
