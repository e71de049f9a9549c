"""Replies that come late, in another order or never, while the user types, chooses or opens something."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.serve.page.conftest import ROWS, Held, answer_of, ask, give

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("page")]

ONLY_ACME = {"type": "eq", "key": "tenant", "value": "acme"}
DESCRIPTION = "**/v1/collections/stones"
FOCUSED_HIT = "document.activeElement.closest('.hit')?.dataset.id"


@pytest.fixture
def arrive(visit):
    """Return what sends a tab to an address with a state.

    The requests that match a pattern are given with it, held, or fail, with a status that leaves a console
    silent.
    """

    def run(pattern, *, fails=False, **state):
        tab = visit("")
        held = None if fails else Held(tab, pattern)
        if fails:
            tab.route(pattern, lambda route: route.fulfill(status=299, body="not JSON"))
        tab.goto(f"{tab.url.split('#')[0]}?again#{urlencode(state)}", wait_until="commit")
        return tab, held

    return run


def searches_of(tab):
    """Return the searches that a tab sends from now on."""
    found: list[Any] = []
    tab.on("request", lambda request: found.append(request) if is_search(request) else None)
    return found


def is_search(request):
    return request.url.endswith("/search")


@pytest.mark.parametrize("pattern", ["**/v1/collections", DESCRIPTION])
def test_address_outlives_a_failure_typing_and_another_try(arrive, pattern):
    filters = json.dumps(ONLY_ACME)
    tab, _ = arrive(pattern, fails=True, collection="stones", q="old", bm25="off", filters=filters)
    tab.locator("#notice p", has_text="The server answered 299.").wait_for()
    tab.fill("#query", "granite")
    assert tab.locator("#notice").is_visible()
    assert "q=granite" in tab.url
    assert urlencode({"filters": filters}) in tab.url
    tab.unroute_all()
    with tab.expect_request(is_search) as request:
        tab.get_by_text("Try again").click()
    assert "/stones/" in request.value.url
    sent = request.value.post_data_json
    assert (sent["query"], sent["hybrid"], sent["filters"]) == ("granite", False, ONLY_ACME)
    tab.locator("#notice").wait_for(state="hidden")


@pytest.mark.parametrize(
    ("pattern", "shown"), [(DESCRIPTION, "#suggestions button"), ("**/map", "#map canvas[data-points='35']")]
)
def test_another_try_shows_what_failed_although_nothing_is_asked(arrive, pattern, shown):
    tab, _ = arrive(pattern, fails=True, collection="stones")
    tab.locator("#notice:not([hidden])").wait_for()
    tab.unroute_all()
    tab.get_by_text("Try again").click()
    tab.locator("#holds", has_text="generation 1").wait_for()
    tab.locator(shown).first.wait_for()
    tab.locator("#notice").wait_for(state="hidden")


def test_nothing_is_asked_before_the_columns_are_known_nor_any_more_of_a_collection_that_is_left(
    arrive,
):
    tab, held = arrive(DESCRIPTION, collection="stones", filters=json.dumps(ONLY_ACME))
    description, searches = held.first(), searches_of(tab)
    tab.fill("#query", "granite")
    tab.keyboard.press("Enter")
    tab.select_option("#collection", "pebbles")
    tab.locator("#holds", has_text="2 documents").wait_for()
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert description.request.failure == "net::ERR_ABORTED"
    assert tab.title() == "pebbles · Cairn"
    tab.select_option("#collection", "stones")
    description = held.first()
    tab.fill("#query", "pumice")
    tab.keyboard.press("Enter")
    description.continue_()
    tab.locator("#hits[data-query=pumice]").wait_for(state="attached")
    asked = [(search.url.split("/collections/")[1], search.post_data_json["filters"]) for search in searches]
    assert asked == [("pebbles/search", ONLY_ACME), ("stones/search", ONLY_ACME)]


def test_question_or_collection_that_is_left_goes_with_its_hits_and_answers_and_the_next_one_waits(tab):
    late, held = Held(tab, "**/stones/search"), Held(tab, "**/v1/collections/pebbles")
    answers: list[Any] = []
    for query in ("granite", "pumice"):
        tab.fill("#query", query)
        answers.append(late.first())
    searches = searches_of(tab)
    tab.select_option("#collection", "pebbles")
    description = held.first()
    assert tab.locator(".hit, #suggestions button").count() == 0
    assert [answer.request.failure for answer in answers] == ["net::ERR_ABORTED"] * 2
    tab.fill("#query", "granite")
    tab.keyboard.press("Enter")
    description.continue_()
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert [search.url.split("/collections/")[1] for search in searches] == ["pebbles/search"]
    assert tab.locator(".hit").count() == 2


@pytest.mark.parametrize("view", ["map", "health"])
def test_view_that_is_chosen_before_the_collections_came_stays(arrive, view):
    tab, held = arrive("**/v1/collections", collection="stones")
    found = held.first()
    tab.click(f"#tab-{view}")
    found.continue_()
    tab.locator({"map": "#map canvas[data-points]", "health": "#health .tile"}[view]).first.wait_for()
    assert tab.locator(f"#tab-{view}[aria-selected=true]").count() == 1


def test_filters_are_of_the_columns_that_the_newest_description_has(tab, address):
    tab.locator(".hit .chip", has_text="tenant").first.click()
    tab.locator(".filter").wait_for()
    tab.locator("#hits:not([aria-busy])").wait_for()
    for name, changed in (("stones", {"generation": 2}), ("pebbles", {})):
        reply = tab.request.get(f"{address}/v1/collections/{name}").json()
        columns = [column for column in reply["filter_columns"] if column["name"] != "tenant"]
        later = {**reply, **changed, "filter_columns": [*columns, {"name": f"of {name}", "type": "bool"}]}
        give(tab, f"**/v1/collections/{name}", later)
    give(tab, "**/stones/search", answer_of(generation=2))
    with tab.expect_request(lambda request: is_search(request) and request.post_data_json["filters"] is None):
        tab.fill("#query", "granite")
    assert tab.locator(".filter").count() == 0
    assert "filters" not in tab.evaluate("location.hash")
    tab.click("#add-filter")
    tab.select_option("#collection", "pebbles")
    tab.locator("#holds", has_text="2 documents").wait_for()
    offered = tab.locator(".filter option[value^='of ']").all()
    assert [option.get_attribute("value") for option in offered] == ["of pebbles"]


def test_progress_of_a_map_that_is_drawn_is_a_bar(visit, arrive):
    visit().locator(f"#map canvas[data-points='{len(ROWS)}']").wait_for()  # the server has drawn it
    tab, held = arrive("**/stones/map", collection="stones")
    for share in (0.0, 0.4):
        drawing = {"generation": 1, "status": "drawing", "documents": len(ROWS), "progress": share}
        held.first().fulfill(json=drawing)
        tab.wait_for_function("share => document.querySelector('#map progress').value === share", arg=share)
        assert tab.locator("#map progress").is_visible()
        assert tab.inner_text("#map-drawing") == f"Drawing a map of {len(ROWS)} documents…"
    held.first().continue_()
    tab.locator("#map progress").wait_for(state="hidden")
    tab.locator(f"#map canvas[data-points='{len(ROWS)}']").wait_for()


def test_pointer_finds_nothing_on_the_map_of_a_collection_that_was_left(visit):
    tab = visit()
    canvas = tab.locator(f"#map canvas[data-points='{len(ROWS)}']")
    canvas.wait_for()
    canvas.focus()
    tab.keyboard.press("ArrowRight")
    place = tab.locator(".map-label").evaluate(
        "label => ({ x: parseFloat(label.style.left), y: parseFloat(label.style.top) })"
    )
    tab.locator("#query").focus()
    canvas.hover(position=place)
    assert tab.locator(".map-label").is_visible()
    held = Held(tab, "**/pebbles/map")
    tab.select_option("#collection", "pebbles")
    held.first()
    tab.mouse.move(0, 0)
    tab.locator("#map canvas").hover(position=place)
    assert tab.locator(".map-label").is_hidden()


def test_of_two_addresses_the_later_holds_whatever_comes_first_and_is_typed(visit):
    tab = visit("#collection=stones")
    tab.locator("#holds", has_text="generation 1").wait_for()
    held = Held(tab, DESCRIPTION)
    address = urlencode({"collection": "stones", "q": "old", "filters": json.dumps(ONLY_ACME)})
    tab.evaluate("address => { location.hash = address }", address)
    earlier = held.first()
    tab.evaluate(
        """() => {
          location.hash = "#collection=pebbles&q=granite";
          document.querySelector("#query").dispatchEvent(new Event("input"));  // before hashchange
        }"""
    )
    tab.locator("#hits[data-query=granite]").wait_for(state="attached")
    assert earlier.request.failure == "net::ERR_ABORTED"
    assert tab.locator(".filter").count() == 0
    assert tab.title() == "pebbles · Cairn"


def test_what_is_typed_before_the_page_runs_is_kept(arrive):
    tab, held = arrive("**/page/page.js", collection="stones", q="old", bm25="off")
    program = held.first()
    tab.fill("#query", "granite")
    with tab.expect_request(is_search) as request:
        program.continue_()
    sent = request.value.post_data_json
    assert (sent["query"], sent["hybrid"]) == ("granite", False)


def test_keys_wait_for_the_document_that_is_opened_which_takes_no_focus_from_who_went_on(tab):
    held = Held(tab, "**/documents/**")
    for place, key in enumerate("n/"):
        tab.locator(".hit .open").nth(place).click()
        text = held.first()
        tab.keyboard.press(key)
        text.continue_()
        tab.locator("#document .steps", has_text="passage 1 of").wait_for()
    assert tab.evaluate("document.activeElement.id") == "query"


def test_document_whose_text_is_broken_off_for_another_leaves_that_alone(tab):
    """What is called off while its body is on the way has a status that says all is well."""
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
    held = Held(tab, "**/documents/**")
    second = tab.locator(".hit .open").nth(1)
    title = second.text_content()
    second.click()
    text = held.first()
    tab.evaluate("breakOff()")
    text.continue_()
    tab.locator("mark.active").first.wait_for()
    assert tab.inner_text("#document h2") == title
    assert tab.locator("#notice").is_hidden()


def test_answer_that_comes_while_one_moves_among_the_hits_keeps_the_place(tab):
    held = Held(tab, "**/search")
    tab.fill("#query", "basalt stone")
    answer = held.first()
    tab.keyboard.press("ArrowDown")
    place = tab.evaluate(FOCUSED_HIT)
    assert place == "plain/basalt"
    answer.continue_()
    tab.locator("#hits[data-query='basalt stone']").wait_for(state="attached")
    assert tab.evaluate(FOCUSED_HIT) == place


def test_second_refusal_leaves_the_key_that_is_being_typed(new_tab, address):

    def refusal(title):
        return {"status": 401, "json": {"type": "urn:x", "title": title, "status": 401}}

    tab = new_tab()
    tab.goto(f"{address}/#collection=stones")
    ask(tab, "basalt", "Basalt")
    tab.evaluate("sessionStorage.setItem('cairn-key', 'cairn_old')")
    search, health = Held(tab, "**/search"), Held(tab, "**/health")
    tab.click("#tab-health")
    tab.fill("#query", "granite")
    search.first().fulfill(**refusal("The API key has expired"))
    tab.locator("#key-complaint", has_text="has expired").wait_for()
    tab.fill("#key-value", "cairn_half")
    health.first().fulfill(**refusal("The API key is unknown"))
    tab.locator("#key-complaint", has_text="is unknown").wait_for()
    assert tab.input_value("#key-value") == "cairn_half"
