"""Addresses written by hand.

What the page cannot show is said, and never answered as if less had been asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("page")]

ACME = {"type": "eq", "key": "tenant", "value": "acme"}
LATE = {"type": "gt", "key": "year", "value": 2002}


def address(**state: str) -> str:
    return f"#{urlencode(state)}"


def go_to(tab: Any, number: int, **state: str) -> None:
    """Load the page at an address, or change the address by hand where it is loaded."""
    if number:
        tab.evaluate("hash => { location.hash = hash }", address(**state))
    else:
        tab.goto(f"/?again{address(**state)}")


def test_unknown_granularity_is_both(visit: Callable[..., Any]) -> None:
    tab = visit(address(collection="stones", q="basalt", granularity="zzz"))
    tab.locator(".hit h2", has_text="Basalt").first.wait_for()
    assert tab.locator("[name=granularity]:checked").get_attribute("value") == "both"


def test_collection_that_is_not_there_is_said_and_another_one_can_be_chosen(
    visit: Callable[..., Any],
) -> None:
    tab = visit(address(collection="nope", q="basalt"))
    tab.locator("#notice p", has_text="The collection “nope” is not here: choose another one.").wait_for()
    assert tab.locator(".hit").count() == 0
    assert "collection=nope" in tab.url
    tab.select_option("#collection", "stones")
    tab.locator(".hit h2", has_text="Basalt").first.wait_for()
    tab.locator("#notice").wait_for(state="hidden")


def test_filters_that_cannot_be_shown_are_said_and_nothing_is_asked_without_them(
    visit: Callable[..., Any],
) -> None:
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


def test_filters_that_mean_what_the_rows_mean_are_asked(visit: Callable[..., Any]) -> None:
    cases = [
        ({"value": "acme", "key": "tenant", "type": "eq"}, ACME),
        ({"type": "and", "filters": [ACME]}, ACME),
        ({"filters": [ACME, LATE], "type": "or"}, {"type": "or", "filters": [ACME, LATE]}),
        (
            {"type": "in", "key": "year", "value": [2001, 2003]},
            {"type": "in", "key": "year", "value": [2001, 2003]},
        ),
    ]
    tab = visit("")
    for number, (tree, meant) in enumerate(cases):
        with tab.expect_request(lambda request: request.url.endswith("/search")) as request:
            go_to(tab, number, collection="stones", q="basalt", filters=json.dumps(tree))
        assert request.value.post_data_json["filters"] == meant
