"""Every error becomes a problem with its own status, without words of the request or paths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cairn.pipeline import errors
from cairn.pipeline.errors import CairnError
from cairn.pipeline.serve.problems import (
    DEADLINE,
    KEY_MISSING,
    OVERLOADED,
    UNKNOWN_COLLECTION,
    ProblemError,
    opening_problem,
    problem_response,
    schema_problem,
    search_problem,
    unknown_names,
)
from cairn.pipeline.serve.schemas import InvalidField, Membership, SearchRequest, field_names
from pydantic import ValidationError

PLACE = "/srv/secret/place"
SENTENCE = f"top_k must be a number, got 'canary'; see {PLACE}"


def kinds_of_errors() -> list[type[CairnError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CairnError)]


IN_A_SEARCH = {
    "CollectionNotFoundError": ("unknown-collection", 404),
    "FilterError": ("invalid-filter", 422),
    "RestrictionError": ("restriction-unusable", 403),
    "FingerprintMismatchError": ("encoder-mismatch", 503),
    "UsageError": ("invalid-request", 422),
    "ConfigError": ("invalid-request", 422),
    "IntegrityError": ("collection-damaged", 503),
    "DamageError": ("collection-damaged", 503),
    "StorageError": ("storage-failed", 503),
    "TryAgainError": ("deadline", 504),
}
AT_OPENING = {
    **{
        name: IN_A_SEARCH[name]
        for name in (
            "CollectionNotFoundError",
            "FingerprintMismatchError",
            "IntegrityError",
            "DamageError",
            "StorageError",
        )
    },
    "ConfigError": ("encoder-unavailable", 503),
    "ModelError": ("encoder-unavailable", 503),
}


@pytest.mark.parametrize(("name", "expected"), IN_A_SEARCH.items())
def test_error_of_a_search_has_its_problem(name: str, expected: tuple[str, int]) -> None:
    problem = search_problem(getattr(errors, name)(SENTENCE))
    assert (problem.kind.name, problem.kind.status) == expected


@pytest.mark.parametrize(("name", "expected"), AT_OPENING.items())
def test_error_of_opening_has_its_problem(name: str, expected: tuple[str, int]) -> None:
    problem = opening_problem(getattr(errors, name)(SENTENCE))
    assert (problem.kind.name, problem.kind.status) == expected


@pytest.mark.parametrize("kind", kinds_of_errors())
def test_no_error_passes_on_a_place_or_a_value(kind: type[CairnError]) -> None:
    for told in (search_problem(kind(SENTENCE)).detail, opening_problem(kind(SENTENCE)).detail):
        assert told
        assert PLACE not in told
        assert "canary" not in told


def test_problem_is_json_of_its_own_type_with_its_headers() -> None:
    response = problem_response(ProblemError(OVERLOADED, "too much"))
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "1"
    assert json.loads(bytes(response.body)) == {
        "type": "urn:problem-type:cairn:overloaded",
        "title": OVERLOADED.title,
        "status": 503,
        "detail": "too much",
    }
    assert (
        problem_response(ProblemError(KEY_MISSING, "none")).headers["www-authenticate"]
        == 'Bearer realm="cairn"'
    )
    assert "retry-after" not in problem_response(ProblemError(UNKNOWN_COLLECTION, "none")).headers
    assert (
        problem_response(ProblemError(DEADLINE, "none", headers={"Retry-After": "9"})).headers["retry-after"]
        == "9"
    )


def test_schema_problem_names_known_places_and_nothing_else() -> None:
    found = [
        {
            "type": "int_type",
            "loc": ("body", "top_k"),
            "msg": "Input should be a valid integer",
            "input": "canary",
        },
        {
            "type": "unknown_field",
            "loc": ("body", "filters"),
            "msg": "",
            "ctx": {"names": ["a canary"], "fields": ["key"]},
            "input": {},
        },
        {
            "type": "union_tag_invalid",
            "loc": ("body", "filters"),
            "msg": "Input tag 'canary' found",
            "ctx": {"expected_tags": "'a'"},
            "input": {},
        },
        {
            "type": "string_pattern_mismatch",
            "loc": ("path", "name"),
            "msg": "String should match",
            "input": "canary",
        },
    ]
    problem = schema_problem(found, frozenset({"top_k", "filters", "name"}))
    assert [error.pointer for error in problem.errors] == ["#/top_k", "#/filters", "path/name"]
    assert problem.detail == "3 part(s) of the request must be changed"
    assert "canary" not in str([error.detail for error in problem.errors])


def test_schema_problem_tells_of_the_type_that_was_sent_only() -> None:
    found = [
        {
            "type": "string_too_long",
            "loc": ("body", "query", "constrained-str"),
            "msg": "String should have at most 8192 characters",
        },
        {"type": "list_type", "loc": ("body", "query", "list[str]"), "msg": "Input should be a valid list"},
    ]
    problem = schema_problem(found, frozenset({"query"}))
    assert [(error.pointer, error.detail) for error in problem.errors] == [
        ("#/query", "String should have at most 8192 characters")
    ]
    both = [
        {"type": f"{kind}_type", "loc": ("body", "query", kind), "msg": f"Input should be a valid {kind}"}
        for kind in ("string", "list")
    ]
    problem = schema_problem([*both, *both], frozenset({"query"}))
    assert problem.errors == (
        InvalidField(pointer="#/query", detail="Input should be a valid string or a valid list"),
    )
    assert problem.detail == "1 part(s) of the request must be changed"


@pytest.mark.parametrize(
    ("sent", "pointer", "detail"),
    [
        ({"query": None}, "#/query", "Input should be a valid string or a valid list"),
        ({"query": [None]}, "#/query/0", "Input should be a valid string"),
        ({"query": " \n"}, "#/query", "Text should hold more than white space"),
        (
            {"query": "a", "filters": {"type": "in", "key": "year", "value": [1, None]}},
            "#/filters/value/1",
            "Input should be a valid string or a valid boolean or a valid integer or a valid number",
        ),
        (
            {"query": "a", "filters": {"type": "eq", "key": "year", "value": float("nan")}},
            "#/filters/value",
            "Input should be a finite number",
        ),
    ],
)
def test_one_mistake_is_one_part(sent: dict[str, Any], pointer: str, detail: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate(sent)
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    problem = schema_problem(found, field_names(SearchRequest, Membership))
    assert problem.errors == (InvalidField(pointer=pointer, detail=detail),)
    assert problem.detail == "1 part(s) of the request must be changed"


@pytest.mark.parametrize("name", ["topk", "Top_K2", "_"])
def test_unknown_name_that_is_a_short_identifier_is_told(name: str) -> None:
    assert unknown_names("#/weights", [name], "it takes a") == [
        InvalidField(pointer=f"#/weights/{name}", detail="there is no such name; it takes a")
    ]


@pytest.mark.parametrize(
    "name", ["", "x" * 33, "1x", "a b", "a-b", "a/b", "<b>", "line\n", "é", "cairn_0123456789ab_" + "A" * 43]
)
def test_no_other_name_is_repeated(name: str) -> None:
    (told,) = unknown_names("query", [name], "it takes a")
    assert told.pointer == "query"
    assert not name or name not in told.detail
