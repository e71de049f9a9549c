"""The list: three hits on a laptop's screen, passages as they were written, words explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.index.words import STOP_WORDS

pytestmark = pytest.mark.xdist_group("page")

LONG = (
    "the end of a sentence before. Stones are set\none upon another.\n\n    first = stone\n\n"
    "They mark the way, and they outlast those who set them. " * 3
)


def hit(number: int, text: str = LONG, start: int = 70, **fields: Any) -> dict[str, Any]:
    passage = {"start_char": start, "end_char": start + len(text), "score": 0.5, "scores": {}, "text": text}
    parts = {"document": 0.5, "chunk": 0.4, "bm25": 12.5, "passage_bm25": 9.0, "late": 0.7}
    named = {"doc_id": f"stone/{number}", "title": f"Stone {number}", "score": 0.9, "scores": parts}
    metadata = {f"column {each}": "value" for each in range(6)}
    return {**named, "metadata": metadata, "passages": [{**passage, "highlights": []}] * 3, **fields}


@pytest.fixture
def answer(visit: Callable[..., Any], ask: Callable[..., None]) -> Callable[..., Any]:
    """Return what shows hits as the answer to a query in a new tab."""

    def run(*hits: dict[str, Any], query: str = "stones on the way", **options: Any) -> Any:
        tab = visit(**options)
        reply = {"query": query, "generation": 1, "hits": list(hits), "next_cursor": None}
        tab.route("**/search", lambda route: route.fulfill(json=reply))
        ask(tab, query, hits[0]["title"])
        return tab

    return run


def test_three_hits_fit_on_a_laptop(answer: Callable[..., Any]) -> None:
    tab = answer(*(hit(number) for number in range(5)), viewport={"width": 1366, "height": 768})
    third = tab.locator(".hit").nth(2).bounding_box()
    assert third["y"] + third["height"] <= 768


def test_score_and_further_passages_are_folded_until_asked(answer: Callable[..., Any]) -> None:
    tab = answer(hit(0))
    assert not tab.locator(".parts").is_visible()
    assert tab.locator(".passage:visible").count() == 1
    tab.click(".total")
    assert tab.locator(".part:visible").count() == 5
    assert tab.locator(".chip.unfold").inner_text() == "2 more"
    tab.click(".chip.unfold")
    assert tab.locator(".passage:visible").count() == 3
    assert tab.locator("[aria-expanded=true]").count() == 2
    tab.click(".total")
    assert not tab.locator(".parts").is_visible()


def test_passage_keeps_its_lines_and_begins_with_a_sentence(answer: Callable[..., Any]) -> None:
    tab = answer(hit(0))
    shown = tab.locator("q").first
    assert shown.text_content().startswith(
        "… Stones are set\none upon another.\n    first = stone\nThey mark"
    )
    assert shown.evaluate("q => getComputedStyle(q).whiteSpace").startswith("pre-wrap")


@pytest.mark.parametrize(
    ("text", "start", "begin"),
    [
        ("the end of it. Then", 0, "the end"),
        ("Then a sentence. Then", 9, "Then a"),
        ("🪨 of it. Ünder the stone. More of that.", 9, "🪨"),
        ('"with" of it. Under the stone. More of that.', 9, "… Under"),
        ("this is\none long sentence that goes on to the end", 9, "this is\none"),
        ("call();\n\nDef of another and more of that.", 9, "… Def"),
    ],
)
def test_beginnings_of_passages(answer: Callable[..., Any], text: str, start: int, begin: str) -> None:
    tab = answer(hit(0, text, start))
    assert tab.locator("q").first.text_content().startswith(begin)


def test_words_that_were_found_are_marked_and_named(answer: Callable[..., Any]) -> None:
    words = [(" way", ["way", "the"]), ("Stones", ["stone"]), ("the", ["on"])]
    starts = {word: LONG.index(word) + len(word) - len(word.strip()) for word, _ in words}
    highlights = [
        {"start_char": 70 + starts[word], "end_char": 70 + starts[word] + len(word.strip()), "weight": 0.5,
         "query_words": asked}
        for word, asked in words
    ]  # fmt: skip
    highlights.sort(key=lambda each: each["start_char"])
    passage = {**hit(0)["passages"][0], "highlights": highlights}
    tab = answer(hit(0, passages=[passage]))
    assert tab.locator(".hit b.word").all_inner_texts() == ["Stones", "way"]
    assert tab.inner_text(".hit .found") == "found by Stones (stone), way"


def test_words_of_the_query_are_marked_where_the_server_names_none(answer: Callable[..., Any]) -> None:
    tab = answer(hit(0, passages=[hit(0)["passages"][0]]))
    assert set(tab.locator(".hit b.word").all_inner_texts()) == {"Stones", "way"}


def test_page_leaves_out_the_words_that_the_search_leaves_out(visit: Callable[..., Any]) -> None:
    found = visit().evaluate("import('/page/words.js').then((m) => [...m.STOP_WORDS])")
    assert set(found) == STOP_WORDS


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (2012, "int64", "2012"),
        (1234567, "int64", "1,234,567"),
        (0.123456789, "double", "0.123457"),
        ("2026-01-31", "date32[day]", "Jan 31, 2026"),
        ("2026-01-31T15:00:00+00:00", "timestamp[us, tz=UTC]", "Jan 31, 2026, 3:00 PM"),
        ("2026-01-31", "string", "2026-01-31"),
        ("soon", "timestamp[us]", "soon"),
    ],
)
def test_values_are_written_for_a_person(
    visit: Callable[..., Any], value: object, kind: str, shown: str
) -> None:
    tab = visit(timezone_id="UTC")
    script = "(asked) => import('/page/formats.js').then((m) => m.valueOf(...asked))"
    assert tab.evaluate(script, [value, kind]).replace("\u202f", " ") == shown


def test_words_are_explained_where_they_stand_by_keys_too(answer: Callable[..., Any]) -> None:
    tab = answer(hit(0))
    tab.click(".total")
    tab.locator(".part .term", has_text="BM25").first.focus()
    tab.keyboard.press("Enter")
    meaning = tab.locator(".meaning:popover-open")
    assert "rare words counting more" in meaning.inner_text()
    box = meaning.bounding_box()
    word = tab.locator(".part .term", has_text="BM25").first.bounding_box()
    assert abs(box["x"] - word["x"]) < 2
    assert 0 < box["y"] - word["y"] < 40
    tab.keyboard.press("Escape")
    meaning.wait_for(state="detached")
    assert tab.locator(".hit").count() == 1


def test_page_does_not_jump_while_it_loads(visit: Callable[..., Any]) -> None:
    """Cumulative Layout Shift: below 0.1 is good."""
    tab = visit("#collection=stones&q=basalt")
    tab.locator("#map canvas[data-hits='20']").wait_for()
    shift = tab.evaluate(
        """() => new Promise((done) => {
          let sum = 0;
          const add = (list) => { for (const each of list.getEntries()) sum += each.value; };
          new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
          setTimeout(() => done(sum), 200);
        })"""
    )
    assert shift < 0.1
