"""Asking: answers while one types, switches, filters, keys of the server, and what goes wrong."""

from __future__ import annotations

from functools import partial

import httpx2
import pytest
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import ByLength
from tests.serve.page.conftest import ask, give, titles

pytestmark = pytest.mark.xdist_group("page")


def test_words_of_the_clusters_are_offered_and_results_appear_while_one_types_with_their_scores(visit):
    tab = visit()
    offer = tab.locator("#suggestions button").first
    words = offer.inner_text()
    offer.click()
    tab.locator(".hit").first.wait_for()
    assert tab.input_value("#query") == words
    assert tab.locator("#welcome").is_hidden()
    tab.fill("#query", "")
    tab.locator(".hit").first.wait_for(state="detached")
    tab.locator("#query").press_sequentially("pumi")
    tab.locator(".hit").first.wait_for()
    with tab.expect_response(lambda response: "basalt" in (response.request.post_data or "")) as response:
        ask(tab, "basalt", "Basalt")
    assert titles(tab)[0] == "Basalt"
    scores = response.value.json()["hits"][0]["scores"]
    shown = tab.eval_on_selector_all(
        ".hit:first-child .part", "all => all.map((p) => [p.dataset.part, p.querySelector('dd').textContent])"
    )
    assert {part for part, _ in shown} == set(scores) >= {"document", "chunk", "bm25"}
    assert all(float(value) == pytest.approx(scores[part], abs=0.06) for part, value in shown)
    assert tab.inner_text("#status").startswith("20 documents in ")


@pytest.mark.slow
def test_granularity_and_bm25_are_what_is_asked_and_an_address_by_hand_is_followed(tab):
    for label, expected in (("Documents", "document"), ("Passages", "chunk"), ("Both", "both")):
        with tab.expect_request("**/search") as request:
            tab.locator("#granularity").get_by_text(label, exact=True).click()
        assert request.value.post_data_json["granularity"] == expected
    with tab.expect_request("**/search") as request:
        tab.locator(".toggle", has_text="BM25").click()
    assert request.value.post_data_json["hybrid"] is False
    tab.evaluate("location.hash = '#collection=stones&q=pumice&granularity=chunk'")
    tab.locator("#hits[data-query=pumice]").wait_for(state="attached")
    assert tab.locator("[name=granularity][value=chunk]").is_checked()


def test_filters_are_rows_that_make_the_apis_tree_and_those_that_nothing_matches_can_be_left_out(tab):
    tab.click("#add-filter")
    assert tab.locator(".filter [name=column]").input_value() == "tenant"
    assert tab.locator(".filter option[value=acme]").count() == 1  # what the hits have is offered
    tab.locator(".filter [name=value]").fill("nobody")
    tab.get_by_text("No document matches the filters.").wait_for()
    tab.get_by_text("Search without filters").click()
    tab.locator(".hit h2", has_text="Basalt").first.wait_for()
    assert tab.locator(".filter").count() == 0
    tab.click("#add-filter")
    row = tab.locator(".filter").first
    row.locator("[name=column]").select_option("year")
    row.locator("[name=comparison]").select_option("gte")
    row.locator("[name=value]").fill("20x")
    assert row.locator("[name=value]").get_attribute("aria-invalid") == "true"
    assert row.locator(".complaint").inner_text() == "year takes a whole number: left out until it fits."
    with tab.expect_request(lambda request: "2012" in (request.post_data or "")) as request:
        row.locator("[name=value]").fill("2012")
    assert request.value.post_data_json["filters"] == {"type": "gte", "key": "year", "value": 2012}
    tab.locator(".hit h2", has_text="Basalt").wait_for(state="detached")
    with tab.expect_request(lambda request: '"and"' in (request.post_data or "")) as request:
        tab.locator(".hit .chip", has_text="tenant").first.click()
    assert request.value.post_data_json["filters"]["filters"][1] == {
        "type": "eq",
        "key": "tenant",
        "value": "acme",
    }
    with tab.expect_request(lambda request: '"or"' in (request.post_data or "")):
        tab.locator(".join select").select_option("or")
    tab.reload()
    tab.locator(".filter").nth(1).wait_for()


def test_problem_is_told_in_its_own_words_and_takes_the_place_of_older_hits(tab):
    tab.route(
        "**/search",
        lambda route: route.fulfill(status=299, content_type="application/problem+json", body="not JSON"),
    )
    tab.fill("#query", "granite")
    tab.locator("#notice:not([hidden])").wait_for()
    assert tab.inner_text("#notice p") == "The server answered 299."
    assert tab.locator(".hit").count() == 0
    tab.unroute("**/search")
    tab.get_by_text("Try again").click()
    tab.locator(".hit h2", has_text="Granite").first.wait_for()
    tab.locator("#notice").wait_for(state="hidden")


@pytest.mark.slow
def test_answer_of_another_generation_renews_what_is_shown(tab):
    tab.locator("#map canvas[data-hits='20']").wait_for()
    stones = "/v1/collections/stones"
    found = {
        "**/search": tab.request.post(f"{stones}/search", data={"query": "granite", "top_k": 20}),
        "**/collections/stones/map": tab.request.get(f"{stones}/map"),
        "**/collections/stones": tab.request.get(stones),
    }
    for path, reply in found.items():
        give(tab, path, {**reply.json(), "generation": 2})
    ask(tab, "granite", "Granite")
    tab.locator("#holds", has_text="generation 2").wait_for()
    tab.locator("#map canvas[data-generation='2']").wait_for()


def test_server_with_keys_is_asked_with_the_key_that_is_entered(new_tab, page_root, start, tmp_path):
    keys = tmp_path / "keys.json"
    _, token = KeyFile(keys).create("reader", restriction={"type": "eq", "key": "tenant", "value": "zenith"})
    guarded = start(ServeSettings(root=page_root, keys_file=keys, deadline_seconds=300.0))
    assert httpx2.get(f"{guarded}/v1/collections", timeout=None).status_code == 401
    tab = new_tab()
    tab.goto(guarded)
    tab.fill("#key-value", "cairn_wrong")
    tab.get_by_text("Use this key").click()
    tab.locator("#key-complaint", has_text="API key").wait_for()
    tab.fill("#key-value", token)
    tab.keyboard.press("Enter")
    tab.select_option("#collection", "stones")
    ask(tab, "stone", "Basalt")
    assert titles(tab) == ["Basalt"]
    assert token not in str(tab.context.cookies()) + tab.evaluate(
        "JSON.stringify(localStorage) + location.href"
    )


@pytest.mark.slow
def test_what_asks_to_wait_is_asked_again_and_leaves_the_status_of_the_answer(new_tab, address):
    tab, left = new_tab(), {"**/v1/collections/stones": 2, "**/health": 1}

    def wait(pattern, route):
        if not left[pattern]:
            return route.continue_()
        left[pattern] -= 1
        problem = {"type": "urn:x", "title": "Much to do", "detail": "soon", "status": 503}
        return route.fulfill(status=503, headers={"Retry-After": "0.05"}, json=problem)

    for each in left:
        tab.route(each, partial(wait, each))
    tab.goto(f"{address}/#collection=stones&q=basalt")
    tab.locator(".hit h2", has_text="Basalt").first.wait_for()
    assert tab.locator("#notice").is_hidden()
    said = tab.inner_text("#status")
    tab.click("#tab-health")
    tab.locator("#health .tile").first.wait_for()
    assert not any(left.values())
    assert tab.inner_text("#status") == said


@pytest.mark.slow
def test_rerank_is_offered_where_the_server_can_and_off_until_asked(visit, page_root, start):
    without = visit()
    ask(without, "basalt", "Basalt")
    assert (
        without.locator("#rerank").is_checked()
        is without.locator(".toggle", has_text="Rerank").is_visible()
        is False
    )
    tab = visit(at=start(ServeSettings(root=page_root, deadline_seconds=300.0), ByLength()))
    with tab.expect_request("**/search") as request:
        ask(tab, "basalt", "Basalt")
    assert "rerank" not in request.value.post_data_json
    for step in (tab.locator(".toggle", has_text="Rerank").click, tab.reload):
        with tab.expect_request("**/search") as request:
            step()
        assert request.value.post_data_json["rerank"] is True
        tab.locator(".hit .part[data-part=rerank]").first.wait_for(state="attached")
