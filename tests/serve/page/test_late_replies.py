"""Replies that come late, in another order or never, while the user types, chooses or opens something."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

Hold = Callable[[Any, str], Any]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("page")]

ONLY_ACME = {"type": "eq", "key": "tenant", "value": "acme"}
DESCRIPTION = "**/v1/collections/stones"
FOCUSED_HIT = "document.activeElement.closest('.hit')?.dataset.id"


@pytest.fixture
def arrive(visit):
    """Return what calls ``prepare(tab)`` and then sends the tab to an address with a state."""

    def run(prepare, **state):
        tab = visit("")
        prepare(tab)
        tab.goto(f"{tab.url.split('#')[0]}?again#{urlencode(state)}", wait_until="commit")
        return tab

    return run


def refuse(tab, pattern):
    """Let requests fail, with a status that leaves a browser's console silent."""
    tab.route(pattern, lambda route: route.fulfill(status=299, body="not JSON"))


def body_of(request):
    return request.value.post_data_json


def is_search(request):
    return request.url.endswith("/search")


@pytest.mark.parametrize("pattern", ["**/v1/collections", DESCRIPTION])
def test_address_outlives_a_failure_typing_and_another_try(arrive, pattern):
    tab = arrive(
        lambda tab: refuse(tab, pattern),
        collection="stones",
        q="old",
        bm25="off",
        filters=json.dumps(ONLY_ACME),
    )
    tab.locator("#notice p", has_text="The server answered 299.").wait_for()
    tab.fill("#query", "granite")
    assert tab.locator("#notice").is_visible()
    tab.unroute(pattern)
    with tab.expect_request(is_search) as request:
        tab.get_by_text("Try again").click()
    assert "/stones/" in request.value.url
    assert (body_of(request)["query"], body_of(request)["hybrid"], body_of(request)["filters"]) == (
        "granite",
        False,
        ONLY_ACME,
    )
    tab.locator("#notice").wait_for(state="hidden")


@pytest.mark.parametrize(
    ("pattern", "shown"), [(DESCRIPTION, "#suggestions button"), ("**/map", "#map canvas[data-points='35']")]
)
def test_another_try_shows_what_failed_although_nothing_is_asked(arrive, pattern, shown):
    tab = arrive(lambda tab: refuse(tab, pattern), collection="stones")
    tab.locator("#notice:not([hidden])").wait_for()
    tab.unroute(pattern)
    tab.get_by_text("Try again").click()
    tab.locator("#holds", has_text="generation 1").wait_for()
    tab.locator(shown).first.wait_for()
    tab.locator("#notice").wait_for(state="hidden")


def test_nothing_is_asked_before_the_columns_of_the_filters_are_known(arrive, hold):
    held: list[Any] = []
    searches: list[dict[str, Any]] = []
    tab = arrive(
        lambda tab: held.append(hold(tab, DESCRIPTION)), collection="stones", filters=json.dumps(ONLY_ACME)
    )
    tab.on("request", lambda request: searches.append(request.post_data_json) if is_search(request) else None)
    description = held[0].first()
    tab.fill("#query", "granite")
    tab.keyboard.press("Enter")
    description.continue_()
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert [search["filters"] for search in searches] == [ONLY_ACME]


def test_collection_that_is_left_before_it_is_described_is_called_off(arrive, hold):
    held: list[Any] = []
    tab = arrive(lambda tab: held.append(hold(tab, DESCRIPTION)), collection="stones", q="basalt")
    description = held[0].first()
    tab.select_option("#collection", "pebbles")
    tab.locator("#holds", has_text="2 documents").wait_for()
    tab.locator("#hits[data-query=basalt]").wait_for(state="attached")
    assert description.request.failure == "net::ERR_ABORTED"
    assert tab.title() == "pebbles · Cairn"


def test_hits_of_a_collection_go_with_it_and_the_next_question_waits_for_the_other(visit, ask, hold):
    tab = visit()
    ask(tab, "basalt", "Basalt")
    held = hold(tab, "**/v1/collections/pebbles")
    searches: list[str] = []
    tab.on("request", lambda request: searches.append(request.url) if is_search(request) else None)
    tab.select_option("#collection", "pebbles")
    description = held.first()
    assert tab.locator(".hit, #suggestions button").count() == 0
    tab.fill("#query", "granite")
    tab.keyboard.press("Enter")
    description.continue_()
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert [url.split("/collections/")[1] for url in searches] == ["pebbles/search"]


def test_answer_for_a_collection_that_was_left_is_called_off(visit, ask, hold):
    tab = visit()
    ask(tab, "basalt", "Basalt")
    held = hold(tab, "**/stones/search")
    tab.fill("#query", "granite")
    answer = held.first()
    tab.select_option("#collection", "pebbles")
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert answer.request.failure == "net::ERR_ABORTED"
    assert tab.locator(".hit").count() == 2


@pytest.mark.parametrize("view", ["map", "health"])
def test_view_that_is_chosen_before_the_collections_came_stays(arrive, hold, view):
    held: list[Any] = []
    tab = arrive(lambda tab: held.append(hold(tab, "**/v1/collections")), collection="stones")
    found = held[0].first()
    tab.click(f"#tab-{view}")
    found.continue_()
    tab.locator({"map": "#map canvas[data-points]", "health": "#health .tile"}[view]).first.wait_for()
    assert tab.locator(f"#tab-{view}[aria-selected=true]").count() == 1


def test_description_without_a_column_takes_its_filter_away_and_asks_again(visit, ask, address):
    tab = visit()
    ask(tab, "basalt", "Basalt")
    tab.locator(".hit .chip", has_text="tenant").first.click()
    tab.locator(".filter").wait_for()
    tab.locator("#hits:not([aria-busy])").wait_for()
    reply = tab.request.get(f"{address}/v1/collections/stones").json()
    later = {
        **reply,
        "generation": 2,
        "filter_columns": [column for column in reply["filter_columns"] if column["name"] != "tenant"],
    }
    tab.route(DESCRIPTION, lambda route: route.fulfill(json=later))
    tab.route(
        "**/search",
        lambda route: route.fulfill(
            json={"query": "x", "generation": 2, "hits": [], "warnings": [], "next_cursor": None}
        ),
    )
    with tab.expect_request(lambda request: is_search(request) and request.post_data_json["filters"] is None):
        tab.fill("#query", "granite")
    assert tab.locator(".filter").count() == 0
    assert "filters" not in tab.evaluate("location.hash")


def test_filter_that_is_added_after_another_collection_was_chosen_has_its_columns(visit, ask, address):
    tab = visit()
    ask(tab, "basalt", "Basalt")
    tab.click("#add-filter")
    reply = tab.request.get(f"{address}/v1/collections/pebbles").json()
    other = {**reply, "filter_columns": [*reply["filter_columns"], {"name": "polished", "type": "bool"}]}
    tab.route("**/v1/collections/pebbles", lambda route: route.fulfill(json=other))
    tab.select_option("#collection", "pebbles")
    tab.locator("#holds", has_text="2 documents").wait_for()
    assert tab.locator(".filter").count() == 1
    assert tab.locator(".filter option[value=polished]").count() == 1


def test_pointer_finds_nothing_on_the_map_of_a_collection_that_was_left(visit, hold, rows):
    tab = visit()
    canvas = tab.locator(f"#map canvas[data-points='{len(rows)}']")
    canvas.wait_for()
    canvas.focus()
    tab.keyboard.press("ArrowRight")
    place = tab.locator(".map-label").evaluate(
        "label => ({ x: parseFloat(label.style.left), y: parseFloat(label.style.top) })"
    )
    tab.locator("#query").focus()
    canvas.hover(position=place)
    assert tab.locator(".map-label").is_visible()
    held = hold(tab, "**/pebbles/map")
    tab.select_option("#collection", "pebbles")
    held.first()
    tab.mouse.move(0, 0)
    tab.locator("#map canvas").hover(position=place)
    assert tab.locator(".map-label").is_hidden()


def test_address_that_is_changed_while_one_types_wins(visit, ask):
    tab = visit()
    ask(tab, "basalt", "Basalt")
    tab.evaluate(
        """() => {
          location.hash = "#collection=pebbles&q=granite";
          document.querySelector("#query").dispatchEvent(new Event("input"));  // before hashchange
        }"""
    )
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert tab.title() == "pebbles · Cairn"


def test_of_two_addresses_the_later_holds_whatever_comes_first(visit, hold):
    tab = visit("#collection=stones")
    tab.locator("#holds", has_text="generation 1").wait_for()
    held = hold(tab, DESCRIPTION)
    tab.evaluate(
        "location.hash = "
        f"'#{urlencode({'collection': 'stones', 'q': 'old', 'filters': json.dumps(ONLY_ACME)})}'"
    )
    earlier = held.first()
    tab.evaluate("location.hash = '#collection=stones&q=granite'")
    held.first().continue_()
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert earlier.request.failure == "net::ERR_ABORTED"
    assert tab.locator(".filter").count() == 0


def test_what_is_typed_before_the_page_runs_is_kept(arrive, hold):
    held: list[Any] = []
    tab = arrive(
        lambda tab: held.append(hold(tab, "**/page/page.js")), collection="stones", q="old", bm25="off"
    )
    program = held[0].first()
    tab.fill("#query", "granite")
    with tab.expect_request(is_search) as request:
        program.continue_()
    assert (body_of(request)["query"], body_of(request)["hybrid"]) == ("granite", False)


def press_before_the_text_comes(tab, key, ask, hold):
    """Open the best document and press a key while its text is on its way."""
    ask(tab, "basalt", "Basalt")
    held = hold(tab, "**/documents/**")
    tab.locator(".hit .open").first.click()
    text = held.first()
    tab.keyboard.press(key)
    text.continue_()


def test_keys_wait_for_the_document_that_is_opened(visit, ask, hold):
    tab = visit()
    press_before_the_text_comes(tab, "n", ask, hold)
    tab.locator("#document .steps", has_text="passage 1 of").wait_for()


def test_document_takes_no_focus_from_who_went_on_meanwhile(visit, ask, hold):
    tab = visit()
    press_before_the_text_comes(tab, "/", ask, hold)
    tab.locator("mark.active").first.wait_for()
    assert tab.evaluate("document.activeElement.id") == "query"


def test_document_whose_text_is_broken_off_for_another_leaves_that_alone(visit, ask, hold):
    """What is called off while its body is on the way has a status that says all is well."""
    tab = visit()
    ask(tab, "basalt", "Basalt")
    tab.evaluate(
        """() => {
          const json = Response.prototype.json;
          Response.prototype.json = function () {
            if (globalThis.breakOff || !this.url.includes("/documents/")) return json.call(this);
            document.body.dataset.reading = "true";
            const aborted = new DOMException("", "AbortError");
            return new Promise((_, reject) => (globalThis.breakOff = () => reject(aborted)));
          };
        }"""
    )
    tab.locator(".hit .open").nth(0).click()
    tab.locator("body[data-reading]").wait_for()
    held = hold(tab, "**/documents/**")
    second = tab.locator(".hit .open").nth(1)
    title = second.text_content()
    second.click()
    text = held.first()
    tab.evaluate("breakOff()")
    text.continue_()
    tab.locator("mark.active").first.wait_for()
    assert tab.inner_text("#document h2") == title
    assert tab.locator("#notice").is_hidden()


def test_answer_that_comes_while_one_moves_among_the_hits_keeps_the_place(visit, ask, hold):
    tab = visit()
    ask(tab, "basalt", "Basalt")
    held = hold(tab, "**/search")
    tab.fill("#query", "basalt stone")
    answer = held.first()
    tab.keyboard.press("ArrowDown")
    place = tab.evaluate(FOCUSED_HIT)
    assert place == "plain/basalt"
    answer.continue_()
    tab.locator("#hits[data-query='basalt stone']").wait_for(state="attached")
    assert tab.evaluate(FOCUSED_HIT) == place


def test_status_of_an_answer_comes_back_when_another_request_was_waited_for(new_tab, address, ask):
    left = ["once"]

    def overloaded(route):
        if not left:
            return route.continue_()
        left.pop()
        return route.fulfill(
            status=503,
            headers={"Retry-After": "0.01"},
            json={"type": "urn:x", "title": "Much to do", "status": 503},
        )

    tab = new_tab()
    tab.goto(f"{address}/#collection=stones")
    ask(tab, "basalt", "Basalt")
    said = tab.inner_text("#status")
    tab.route("**/health", overloaded)
    tab.click("#tab-health")
    tab.locator("#health .tile").first.wait_for()
    assert not left
    assert tab.inner_text("#status") == said


def test_second_refusal_leaves_the_key_that_is_being_typed(new_tab, address, ask, hold):

    def refusal(title):
        return {"status": 401, "json": {"type": "urn:x", "title": title, "status": 401}}

    tab = new_tab()
    tab.goto(f"{address}/#collection=stones")
    ask(tab, "basalt", "Basalt")
    tab.evaluate("sessionStorage.setItem('cairn-key', 'cairn_old')")
    search, health = hold(tab, "**/search"), hold(tab, "**/health")
    tab.click("#tab-health")
    tab.fill("#query", "granite")
    search.first().fulfill(**refusal("The API key has expired"))
    tab.locator("#key-complaint", has_text="has expired").wait_for()
    tab.fill("#key-value", "cairn_half")
    health.first().fulfill(**refusal("The API key is unknown"))
    tab.locator("#key-complaint", has_text="is unknown").wait_for()
    assert tab.input_value("#key-value") == "cairn_half"
