"""Reading: passages marked in texts of any script or markup, and stretches of long ones."""

from __future__ import annotations

import httpx2
import pytest

from tests.serve.page.conftest import EVIL, ROWS, answer_of, ask, give

pytestmark = pytest.mark.xdist_group("page")


@pytest.mark.parametrize(
    ("query", "doc_id", "title"),
    [("pumice river", "astral/🪨", "Letters 🏔🪨"), ("basalt river", "plain/basalt", "Basalt")],
)
def test_marked_passages_stand_at_the_spans_the_api_gives(visit, address, query, doc_id, title):
    tab = visit()
    with tab.expect_response("**/search") as response:
        ask(tab, query, title)
    hit = next(hit for hit in response.value.json()["hits"] if hit["doc_id"] == doc_id)
    tab.locator(".hit .open", has_text=title).first.click()
    tab.locator("mark.active").first.wait_for()
    marks = tab.eval_on_selector_all("mark", "all => all.map((m) => ({ ...m.dataset, text: m.textContent }))")
    text = next(row["text"] for row in ROWS if row["id"] == doc_id)
    assert tab.text_content("#document .text") == text
    for rank, passage in enumerate(hit["passages"]):
        own = [mark for mark in marks if str(rank) in mark["passages"].split()]
        assert (int(own[0]["start"]), int(own[-1]["end"])) == (passage["start_char"], passage["end_char"])
        assert (
            "".join(mark["text"] for mark in own)
            == passage["text"]
            == text[passage["start_char"] : passage["end_char"]]
        )
    covered = {
        position
        for passage in hit["passages"]
        for position in range(passage["start_char"], passage["end_char"])
    }
    assert {position for mark in marks for position in range(int(mark["start"]), int(mark["end"]))} == covered


def test_text_that_looks_like_markup_stays_text(visit):
    tab = visit()
    ask(tab, "obsidian cuts", EVIL)
    tab.locator(".hit .open", has_text="onerror").first.click()
    tab.locator("mark.active").first.wait_for()
    assert tab.inner_text("#document h2") == EVIL
    assert EVIL in tab.text_content("#document .text")
    assert tab.locator("main img, main script").count() == 0
    assert tab.title() == f"{EVIL} · stones · Cairn"


@pytest.mark.slow
def test_segments_cover_a_text_once_and_say_which_passages_they_are_of(visit):
    tab = visit()
    whole = "a😀bé𐍈c🪨d" * 9
    spans = [(3, 11), (8, 20), (8, 20), (30, 31), (50, 72), (60, 400)]
    passages = [{"start_char": start, "end_char": end} for start, end in spans]
    for first, last in ((0, 72), (10, 60), (21, 29), (5, 5)):
        script = "([t, f, l, p]) => import('/page/reader.js').then((m) => m.segmentsOf(t, f, l, p))"
        segments = tab.evaluate(script, [whole[first:last], first, last, passages])
        assert "".join(each["text"] for each in segments) == whole[first:last]
        for each in segments:
            start, end = each["start"], each["end"]
            assert each["text"] == whole[start:end]
            assert each["passages"] == [
                rank for rank, span in enumerate(spans) if span[0] <= start and end <= span[1]
            ]
            assert all(not (start < cut < end) for span in spans for cut in span)


@pytest.mark.slow
def test_long_document_is_read_where_its_passage_stands(visit):
    tab = visit()
    text = "".join(f"{number:09d}\n" for number in range(50_000))
    spans = [(450_000, 450_040), (90, 120)]
    common = {"score": 0.5, "scores": {}, "highlights": [], "title_highlights": []}
    passages = [{"start_char": a, "end_char": b, "text": text[a:b], **common} for a, b in spans]
    named = {"doc_id": "long", "title": "Long", "metadata": {}}
    hit = {**named, "score": 1.0, "scores": {}, "passages": passages}

    def stretch(route):
        params = httpx2.URL(route.request.url).params
        start = int(params["start_char"])
        piece = text[start : start + int(params["max_characters"])]
        span = {"start_char": start, "end_char": start + len(piece), "text": piece}
        route.fulfill(json={**named, "num_tokens": 1, "num_characters": len(text), **span})

    give(tab, "**/search", answer_of(hit))
    tab.route("**/documents/**", stretch)
    ask(tab, "anything", "Long")
    tab.locator(".hit .open").click()
    tab.locator("mark.active", has_text=text[450_000:450_009]).wait_for()
    assert tab.locator("mark.active").text_content() == text[450_000:450_040]
    assert tab.inner_text(".stretch").startswith("Characters 430,000 to 500,000 of 500,000")
    tab.keyboard.press("n")
    tab.locator("mark.active", has_text=text[90:99]).wait_for()
    tab.get_by_text("Later").click()
    tab.locator(".stretch", has_text="Characters 200,000 to 400,000").wait_for()


@pytest.mark.slow
def test_text_runs_in_the_direction_of_its_script(visit):
    tab = visit()
    ask(tab, "נהר", "אבני דרך")
    hit = tab.locator(".hit", has_text="אבני דרך").first
    assert [
        hit.locator(part).first.evaluate("e => getComputedStyle(e).direction") for part in (".open", "q")
    ] == ["rtl", "rtl"]
    hit.locator(".open").click()
    text = tab.locator("#document .text")
    text.wait_for()
    first = tab.evaluate(
        """() => {
          const range = document.createRange();
          range.setStart(document.querySelector("#document .text mark").firstChild, 0);
          range.setEnd(range.startContainer, 1);
          return range.getBoundingClientRect().left;
        }"""
    )
    box = text.bounding_box()
    assert first > box["x"] + box["width"] / 2
