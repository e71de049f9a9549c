"""Every error becomes a problem with its own status, without words of the request or paths."""

from __future__ import annotations

import pytest
from cairn.pipeline import errors
from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.errors import CairnError
from cairn.pipeline.serve.problems import (
    opening_problem,
    schema_problem,
    search_problem,
    unknown_names,
)
from cairn.pipeline.serve.schemas import Request, SearchRequest, field_names
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


def test_of_a_field_of_several_types_the_error_of_the_type_that_was_sent_is_told() -> None:
    """HTTP cannot send it: JSON has no such number."""
    filters = {"type": "eq", "key": "year", "value": float("nan")}
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate({"query": "a", "filters": filters})
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    problem = schema_problem(found, field_names(Request))
    assert problem.errors == (
        FieldProblem(pointer="#/filters/value", detail="Input should be a finite number"),
    )


@pytest.mark.parametrize(
    "name", ["", "x" * 33, "1x", "a b", "a-b", "a/b", "<b>", "line\n", "é", "cairn_0123456789ab_" + "A" * 43]
)
def test_no_other_name_is_repeated(name: str) -> None:
    (told,) = unknown_names("query", [name], "it takes a")
    assert told.pointer == "query"
    assert not name or name not in told.detail
