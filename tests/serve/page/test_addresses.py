"""Addresses: written by hand, of documents, gone back to and forward again."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from tests.serve.page.conftest import answer_of, ask, give

pytestmark = pytest.mark.xdist_group("page")

ACME = {"type": "eq", "key": "tenant", "value": "acme"}
LATE = {"type": "gt", "key": "year", "value": 2002}


def address(**state):
    return f"#{urlencode(state)}"


def go_to(tab, number, **state):
    """Load the page at an address, or change the address by hand where it is loaded."""
    if number:
        tab.evaluate("hash => { location.hash = hash }", address(**state))
    else:
        tab.goto(f"/?again{address(**state)}")


@pytest.mark.slow
def test_collection_that_is_not_there_is_said_another_one_chosen_and_unknown_granularity_is_both(visit):
    tab = visit(address(collection="nope", q="basalt", granularity="zzz"))
    tab.locator("#notice p", has_text="The collection “nope” is not here: choose another one.").wait_for()
    assert tab.locator(".hit").count() == 0
    assert "collection=nope" in tab.url
    tab.select_option("#collection", "stones")
    tab.locator(".hit h2", has_text="Basalt").first.wait_for()
    tab.locator("#notice").wait_for(state="hidden")
    assert tab.locator("[name=granularity]:checked").get_attribute("value") == "both"


@pytest.mark.slow
def test_filters_that_cannot_be_shown_are_said_and_nothing_is_asked_without_them(visit):
    cases = [
        json.dumps({"type": "and", "filters": [{"type": "or", "filters": [ACME, LATE]}, LATE]}),
        json.dumps({"type": "eq", "key": "weight", "value": 1}),
        json.dumps({"type": "eq", "key": "tenant", "value": None}),
        json.dumps({"type": "zz", "key": "tenant", "value": "acme"}),
        "no JSON",
        "5",
    ]
    asked: list[Any] = []
    tab = visit("")
    tab.on("request", lambda request: asked.append(request) if request.url.endswith("/search") else None)
    for number, filters in enumerate(cases):
        asked.clear()
        go_to(tab, number, collection="stones", q="basalt", filters=filters)
        tab.locator("#notice p", has_text="The filters of this address cannot be shown here.").wait_for()
        assert (filters, asked, tab.locator(".filter").count()) == (filters, [], 0)
        tab.get_by_text("Try again", exact=True).click()
        tab.locator(".hit h2", has_text="Basalt").first.wait_for()
        assert (filters, [request.post_data_json["filters"] for request in asked]) == (filters, [None])


@pytest.mark.slow
def test_filters_that_mean_what_the_rows_mean_are_asked_joined_as_they_say_whatever_was_before(visit):
    some = {"type": "in", "key": "year", "value": [2001, 2003]}
    rough = {"type": "eq", "key": "polished", "value": False}
    cases = [
        ({"value": "acme", "key": "tenant", "type": "eq"}, ACME),
        ({"type": "and", "filters": [ACME]}, ACME),
        ({"filters": [ACME, LATE], "type": "or"}, {"type": "or", "filters": [ACME, LATE]}),
        (some, some),
        *[({"type": join, "filters": [rough, LATE]},) * 2 for join in ("and", "or", "and")],
    ]
    tab = visit("")
    reply = tab.request.get("/v1/collections/stones").json()
    described = {**reply, "filter_columns": [*reply["filter_columns"], {"name": "polished", "type": "bool"}]}
    give(tab, "**/collections/stones", described)
    give(tab, "**/search", answer_of())
    for number, (tree, meant) in enumerate(cases):
        with tab.expect_request(lambda request: request.url.endswith("/search")) as request:
            go_to(tab, number, collection="stones", q="basalt", filters=json.dumps(tree))
        assert request.value.post_data_json["filters"] == meant


STEPS = "#document .steps [role=status]"


def opened(tab):
    """Return the document that the address names."""
    return parse_qs(urlsplit(tab.url).fragment).get("doc", [None])[0]


def test_back_and_forward_go_through_documents_and_the_list(tab):
    ids = tab.eval_on_selector_all(".hit", "all => all.map((hit) => hit.dataset.id)")
    shown = tab.locator("#document .id")
    for place in (0, 1):
        tab.locator(".hit .open").nth(place).click()
        tab.locator(f".hit.opened[data-id='{ids[place]}']").wait_for()
        shown.get_by_text(ids[place], exact=True).wait_for()
        assert opened(tab) == ids[place]
    second = tab.inner_text("#document h2")
    tab.go_back()
    tab.locator(f".hit.opened[data-id='{ids[0]}']").wait_for()
    shown.get_by_text(ids[0], exact=True).wait_for()
    tab.locator("#document mark.active").first.wait_for()
    tab.go_back()
    tab.locator("#map canvas").wait_for()
    assert opened(tab) is None
    assert tab.locator(".hit.opened").count() == 0
    assert tab.locator(".hit").count() == len(ids)
    for _ in range(2):
        tab.go_forward()
    tab.locator("#document h2", has_text=second).wait_for()
    assert tab.title() == f"{second} · stones · Cairn"


@pytest.mark.slow
def test_reload_keeps_the_document_and_its_passage_and_the_tab(visit):
    tab = visit()
    ask(tab, "basalt river", "Basalt")
    tab.locator(".hit .open", has_text="Basalt").first.click()
    tab.locator("mark.active").first.wait_for()
    tab.keyboard.press("n")
    place = tab.inner_text(STEPS)
    assert place.startswith("passage 2 of ")
    tab.reload()
    tab.locator(STEPS, has_text=place).wait_for()
    assert tab.inner_text("#document h2") == "Basalt"
    tab.keyboard.press("Escape")
    tab.locator("#map canvas").wait_for()
    tab.reload()
    tab.locator(".hit").first.wait_for()
    assert tab.locator("#document").is_hidden()
    tab.click("#tab-health")
    tab.locator("#health .tile").first.wait_for()
    tab.reload()
    tab.locator("#health .tile").first.wait_for()


def test_address_of_a_document_opens_it_without_a_question_and_of_none_is_said(visit):
    tab = visit(address(collection="stones", doc="plain/granite"))
    tab.locator("#document h2", has_text="Granite").wait_for()
    assert tab.locator(".hit").count() == 0
    gone = {"title": "There is no such document", "detail": "“gone” is not here", "status": 404}
    tab.route("**/documents/**", lambda route: route.fulfill(status=299, json=gone))
    go_to(tab, 0, collection="stones", doc="gone")
    tab.locator("#notice:not([hidden])").wait_for()
    assert opened(tab) is None
