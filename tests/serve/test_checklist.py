"""The security checklist of the search API: what each point means to a caller, and where it is tested.

Points 7, 8, 10 and 16 are about what is stored, Parquet and dependencies. Each answer here is looked
through for places on this machine and for what was sent (point 13).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.serve.settings import TABLE_TIMEOUT_SECONDS, ServeSettings
from starlette.testclient import TestClient

TESTS = Path(__file__).parents[1]
SEARCH = "/v1/collections/stones/search"
CANARY = "zq-canary-zq"

POINTS = {
    "1 no SQL from callers": [
        "search/test_filters.py::test_injection_like_string_is_a_plain_value",
        "search/test_filters.py::test_violation_is_one_sentence",
        "serve/test_checklist.py::test_point_1_filters_are_a_bounded_grammar",
    ],
    "2 bounded answers and queries": [
        "test_search_options.py::test_search_options_out_of_bounds_are_refused",
        "serve/test_search_routes.py::test_answer_that_would_be_too_large_is_refused",
        "serve/test_envelope.py::test_request_past_its_deadline_is_given_up_and_the_next_one_answered",
        "serve/test_checklist.py::test_point_2_what_a_request_may_ask_for_is_bounded",
        "serve/test_checklist.py::test_point_2_a_query_of_the_tables_has_two_seconds",
    ],
    "3 bounded bodies and concurrency": [
        "serve/test_guard.py::test_body_over_one_mebibyte_is_refused",
        "serve/test_guard.py::test_body_that_does_not_arrive_is_given_up",
        "serve/test_connections.py::test_connection_that_asks_nothing_is_closed",
        "serve/test_connections.py::test_connection_of_who_does_not_read_is_closed",
        "serve/test_connections.py::test_too_many_connections_keep_no_health_check_out",
        "serve/test_envelope.py::test_requests_beyond_the_bound_are_told_to_try_again_and_health_answers",
        "serve/test_batching.py::test_full_queue_refuses_and_serves_again_when_it_is_empty",
        "serve/test_checklist.py::test_point_3_query_has_at_most_eight_kilobytes",
    ],
    "4 strict JSON, no echo, no server error": [
        "serve/test_guard.py::test_body_that_is_no_json_is_refused",
        "serve/test_fuzz.py::test_no_case_ends_in_a_server_error_or_beside_the_description",
        "serve/test_restriction.py::test_no_refusal_repeats_what_was_sent",
        "serve/test_checklist.py::test_point_4_types_are_strict_and_values_are_not_repeated",
    ],
    "5 keys, scopes, loopback": [
        "serve/test_keys.py::test_key_is_stored_as_its_hash_for_its_owner_alone",
        "serve/test_keys.py::test_tokens_are_compared_in_constant_time_whether_or_not_the_id_is_known",
        "serve/test_guard.py::test_key_opens_the_routes_of_its_scope_and_no_others",
        "serve/test_guard.py::test_every_route_needs_a_scope_or_is_open_on_purpose",
        "serve/test_guard.py::test_key_for_one_collection_learns_nothing_of_another",
        "serve/test_restriction.py::test_no_search_finds_another_tenants_document",
        "serve/test_server.py::test_address_beyond_this_machine_needs_a_key",
    ],
    "6 names and links": [
        "index/test_layout.py::test_layout_of_a_bad_name_is_refused",
        "serve/test_collections.py::test_linked_collection_is_not_followed",
        "serve/test_checklist.py::test_point_6_no_name_leads_outside_the_root",
    ],
    "11 places come from the configuration only": [
        "serve/test_guard.py::test_rebound_name_is_refused",
        "serve/test_checklist.py::test_point_11_no_request_names_a_place",
    ],
    "12 no secrets or texts in logs": [
        "serve/test_envelope.py::test_log_has_routes_and_no_text_id_or_key",
        "serve/test_batching.py::test_failure_does_not_log_the_text",
    ],
    "13 no paths in errors": [
        "serve/test_problems.py::test_no_error_passes_on_a_place_or_a_value",
        "serve/test_envelope.py::test_unforeseen_error_is_a_problem_without_its_message",
        "serve/test_guard.py::test_keys_that_cannot_be_read_let_nobody_in_and_say_no_path",
    ],
    "14 the page": [
        "serve/test_page_routes.py::test_every_file_comes_with_the_policy_that_lets_nothing_else_run",
        "serve/test_page_routes.py::test_page_names_no_other_place_and_holds_no_script_of_its_own",
        "serve/page/test_reading.py::test_text_that_looks_like_markup_stays_text",
        "serve/test_envelope.py::test_every_response_carries_the_security_headers",
    ],
    "15 containers": [
        "test_compose.py::test_container_is_unprivileged_bounded_and_watched",
        "test_manifests.py::test_pod_is_unprivileged_and_read_only",
    ],
    "9 Ray": [
        "test_compose.py::test_every_ray_process_has_the_token",
        "test_compose.py::test_only_the_search_api_is_published_and_to_this_machine_alone",
        "jobs/test_schedule_configs.py::test_ray_job_has_the_fields_of_its_kind_and_a_token_on_every_process",
    ],
}


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_tested_where_it_says(point: str) -> None:
    for place in POINTS[point]:
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), place


@pytest.fixture
def refused(client: TestClient, served_root: Path) -> Callable[..., str]:
    """Return ``refused(body, path)``: post it, and give the problem's name.

    The answer is no server error and gives nothing away.
    """

    def post(body: dict[str, Any], path: str = SEARCH) -> str:
        response = client.post(path, json=body)
        assert 400 <= response.status_code < 500, response.text
        assert response.headers["content-type"] == "application/problem+json"
        for secret in (str(served_root), f"{Path.home()}/", "site-packages", CANARY):
            assert secret not in response.text
        return response.json()["type"].rpartition(":")[2]

    return post


def comparison(value: Any = 1, key: str = "year", kind: str = "eq") -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


def nested(depth: int) -> dict[str, Any]:
    return comparison() if depth == 1 else {"type": "and", "filters": [nested(depth - 1)]}


@pytest.mark.parametrize(
    "filters",
    [
        "year > 2000 OR 1=1",
        comparison(key=f"{CANARY}) OR (1=1"),
        comparison(key="length(repeat(text,1000000))"),
        comparison(key="text"),
        comparison(key="vector"),
        comparison(kind="like"),
        comparison(value={"sql": "1=1"}),
        nested(9),
        {"type": "or", "filters": [comparison() for _ in range(257)]},
        {
            "type": "and",
            "filters": [{"type": "or", "filters": [comparison() for _ in range(32)]} for _ in range(8)],
        },
        {"type": "in", "key": "year", "value": list(range(1_001))},
        {"type": "and", "filters": []},
    ],
)
def test_point_1_filters_are_a_bounded_grammar(refused: Callable[..., str], filters: Any) -> None:
    assert refused({"query": "slate", "filters": filters}) in ("invalid-request", "invalid-filter")


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 0},
        {"top_k": 201},
        {"top_k": 10**30},
        {"passages": 51},
        {"chunk_tokens": 1 << 21},
        {"max_characters": 1_000_001},
        {"weights": {"bm25": 1e7}},
        {"query": ["slate"] * 33},
        {"offset": 10_001},
        {"nprobe": 1_000_000},
        {"max_candidates": 1_000_000},
    ],
)
def test_point_2_what_a_request_may_ask_for_is_bounded(
    refused: Callable[..., str], wrong: dict[str, Any]
) -> None:
    assert refused({"query": "slate", **wrong}) == "invalid-request"


def test_point_2_a_query_of_the_tables_has_two_seconds() -> None:
    assert TABLE_TIMEOUT_SECONDS == 2.0


@pytest.mark.parametrize("query", ["x" * 8_193, "é" * 4_097, "", " \t\n"])
def test_point_3_query_has_at_most_eight_kilobytes(
    refused: Callable[..., str], client: TestClient, query: str
) -> None:
    assert refused({"query": query}) == "invalid-request"
    assert client.post(SEARCH, json={"query": "é" * 4_096, "top_k": 1}).status_code == 200
    if query.strip():
        (field,) = client.post(SEARCH, json={"query": query}).json()["errors"]
        assert field["detail"] == "Text should have at most 8192 bytes in UTF-8"


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": "3"},
        {"top_k": 3.0},
        {"top_k": True},
        {"hybrid": "yes"},
        {"query": 7},
        {"query": None},
        {"granularity": CANARY},
        {CANARY: 1},
        {"filters": comparison(value=CANARY)},
        {"filters": {"type": CANARY}},
        {"weights": {CANARY: 1.0}},
        {"cursor": CANARY},
    ],
)
def test_point_4_types_are_strict_and_values_are_not_repeated(
    refused: Callable[..., str], wrong: dict[str, Any]
) -> None:
    assert refused({"query": CANARY, **wrong}) in ("invalid-request", "invalid-filter", "invalid-cursor")


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2E%2E",
        "..%2Froot",
        "Stones",
        "-rf",
        ".hidden",
        "a" * 64,
        "stones%00",
        "s3:%2F%2Fbucket",
        "%2Fetc%2Fpasswd",
    ],
)
def test_point_6_no_name_leads_outside_the_root(client: TestClient, served_root: Path, name: str) -> None:
    for path in (f"/v1/collections/{name}", f"/v1/collections/{name}/documents/x"):
        response = client.get(path)
        assert response.status_code in (404, 422), (path, response.text)
        assert str(served_root) not in response.text
    assert client.post(f"/v1/collections/{name}/search", json={"query": "slate"}).status_code in (
        404,
        405,
        422,
    )
    assert client.post("/v1/embeddings", json={"model": name, "input": "slate"}).status_code in (404, 422)


def test_point_11_no_request_names_a_place(refused: Callable[..., str], client: TestClient) -> None:
    for field in ("root", "url", "uri", "path", "model", "file"):
        assert refused({"query": "slate", field: "file:///etc/passwd"}) == "invalid-request"
    described = str(client.get("/openapi.json").json()["components"]["schemas"])
    assert "'format': 'uri'" not in described


def test_settings_are_all_there_is_to_configure_places(tmp_path: Path) -> None:
    assert ServeSettings(root=tmp_path).keys_path.parent == tmp_path
