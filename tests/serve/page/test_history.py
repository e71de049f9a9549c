"""Documents have addresses: Back leaves one, Forward opens it again, and a reload keeps it open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

pytestmark = pytest.mark.xdist_group("page")

STEPS = "#document .steps [role=status]"


def opened(tab: Any) -> str | None:
    """Return the document that the address names."""
    return parse_qs(urlsplit(tab.url).fragment).get("doc", [None])[0]


def test_back_and_forward_go_through_documents_and_the_list(
    visit: Callable[..., Any], ask: Callable[..., None]
) -> None:
    tab = visit()
    ask(tab, "basalt", "Basalt")
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
def test_reload_keeps_the_document_and_its_passage(
    visit: Callable[..., Any], ask: Callable[..., None]
) -> None:
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


def test_address_of_a_document_opens_it_without_a_question(visit: Callable[..., Any]) -> None:
    tab = visit(f"#{urlencode({'collection': 'stones', 'doc': 'plain/granite'})}")
    tab.locator("#document h2", has_text="Granite").wait_for()
    assert tab.locator(".hit").count() == 0


@pytest.mark.slow
def test_address_of_no_document_is_said(visit: Callable[..., Any], address: str) -> None:
    tab = visit("")
    tab.route(
        "**/documents/**",
        lambda route: route.fulfill(
            status=299,
            json={"title": "There is no such document", "detail": "“gone” is not here", "status": 404},
        ),
    )
    tab.goto(f"{address}/?again#{urlencode({'collection': 'stones', 'doc': 'gone'})}")
    tab.locator("#notice:not([hidden])").wait_for()
    assert opened(tab) is None


@pytest.mark.slow
def test_reload_keeps_the_tab(visit: Callable[..., Any]) -> None:
    tab = visit()
    tab.locator("#holds", has_text="generation 1").wait_for()
    tab.click("#tab-health")
    tab.locator("#health .tile").first.wait_for()
    tab.reload()
    tab.locator("#health .tile").first.wait_for()
