"""The list: three hits on a laptop's screen, passages as they were written, words explained."""

from __future__ import annotations

import pytest

from tests.serve.page.conftest import answer_of, ask, give

pytestmark = pytest.mark.xdist_group("page")

LONG = (
    "the end of a sentence before. Stones are set\none upon another.\n\n    first = stone\n\n"
    "They mark the way, and they outlast those who set them. " * 3
)


def named(text, *words, start=0):
    """Return highlights of words of a text that begins at a character, each answering itself and "stone"."""
    places = sorted((start + text.index(word), word) for word in words)
    return [
        {"start_char": place, "end_char": place + len(word), "weight": 0.5, "query_words": [word, "stone"]}
        for place, word in places
    ]


def hit(number, text=LONG, start=70, **fields):
    passage = {
        "start_char": start, "end_char": start + len(text), "score": 0.5, "scores": {}, "text": text,
        "highlights": [], "title_highlights": [],
    }  # fmt: skip
    parts = {"document": 0.5, "chunk": 0.4, "bm25": 12.5, "passage_bm25": 9.0, "late": 0.7}
    named = {"doc_id": f"stone/{number}", "title": f"Stone {number}", "score": 0.9, "scores": parts}
    metadata = {f"column {each}": "value" for each in range(6)}
    return {**named, "metadata": metadata, "passages": [passage] * 3, **fields}


@pytest.fixture
def answer(visit):
    """Return what shows hits as the answer to a query in a new tab."""

    def run(*hits, query="stones on the way", warnings=(), **options):
        tab = visit(**options)
        give(tab, "**/search", answer_of(*hits, query=query, warnings=[*warnings]))
        ask(tab, query, hits[0]["title"])
        return tab

    return run


@pytest.mark.slow
def test_three_hits_fit_on_a_laptop(answer):
    tab = answer(*(hit(number) for number in range(5)), viewport={"width": 1366, "height": 768})
    third = tab.locator(".hit").nth(2).bounding_box()
    assert third["y"] + third["height"] <= 768
    assert tab.locator(".hit-foot").first.bounding_box()["height"] < 30


def test_score_and_further_passages_are_folded_until_asked_and_words_explained_by_keys_too(answer):
    tab = answer(hit(0))
    assert not tab.locator(".parts").is_visible()
    assert tab.locator(".passage:visible").count() == 1
    tab.click(".total")
    assert tab.locator(".part:visible").count() == 5
    assert tab.locator(".chip.unfold").inner_text() == "2 more"
    tab.click(".chip.unfold")
    assert tab.locator(".passage:visible").count() == 3
    assert tab.locator("[aria-expanded=true]").count() == 2
    word = tab.locator(".part .term", has_text="BM25").first
    word.focus()
    tab.keyboard.press("Enter")
    meaning = tab.locator(".meaning:popover-open")
    assert "rare words counting more" in meaning.inner_text()
    below, above = meaning.bounding_box(), word.bounding_box()
    assert abs(below["x"] - above["x"]) < 2
    assert 0 < below["y"] - above["y"] < 40
    tab.keyboard.press("Escape")
    meaning.wait_for(state="detached")
    assert tab.locator(".hit").count() == 1
    tab.click(".total")
    assert not tab.locator(".parts").is_visible()


def test_passage_keeps_its_lines_and_begins_with_a_sentence(answer):
    cases = [
        (LONG, 70, "Stones are set\none upon another.\n    first = stone\nThey mark"),
        ("the end of it. Then", 0, "the end"),
        ("Then a sentence. Then", 9, "Then a"),
        ("🪨 of it. Ünder the stone. More of that.", 9, "🪨"),
        ('"with" of it. Under the stone. More of that.', 9, "Under"),
        ("this is\none long sentence that goes on to the end", 9, "… this is\none"),
        (
            "at St. Leonhard on 3. Mai, art. 5 of it. Under the stone, where two cats and a mouse sat.",
            9,
            "Under",
        ),
        ("call();\n\nDef of another and more of that.", 9, "Def"),
    ]
    tab = answer(*(hit(number, text, start) for number, (text, start, _) in enumerate(cases)))
    shown = tab.locator(".passages:not(.more) q").all_text_contents()
    assert [text[: len(begin)] for text, (_, _, begin) in zip(shown, cases, strict=True)] == [
        begin for _, _, begin in cases
    ]
    assert tab.locator("q").first.evaluate("q => getComputedStyle(q).whiteSpace").startswith("pre-wrap")


def test_marked_are_the_words_that_the_answer_names_and_no_others_and_a_passage_shows_its_page(answer):
    passage = hit(0)["passages"][0] | {"highlights": named(LONG, "Stones", "way", "the", start=70)}
    passage["highlights"][0]["weight"] = 0.4
    title = {"title_highlights": named("Stone 0", "Stone"), "page": "sheet Prices"}
    tab = answer(hit(0, passages=[passage | title, passage]), hit(1), query="Stones")
    first, second = tab.locator(".hit").all()
    assert first.locator(".passages:not(.more) b").all_inner_texts() == ["the", "Stones", "way"]
    assert first.locator("h2 b").all_inner_texts() == ["Stone"]
    found = first.locator(".found").all_text_contents()
    assert found == [
        "found by Stones (stone), way (stone), Stone (title), the (stone)",
        "found by Stones (stone), way (stone), the (stone)",
    ]
    assert second.locator("b").count() == 0
    assert tab.locator(".place").all_text_contents() == ["sheet Prices"]


ALL_MARKED_ARE_SEEN = """() => [...document.querySelectorAll("q")].every((q) => {
  const box = q.getBoundingClientRect();
  const words = [...q.querySelectorAll("b")].map((b) => b.getBoundingClientRect());
  return words.length === 6 && words.every((b) => b.bottom <= box.bottom + 1 && b.right <= box.right);
})"""


@pytest.mark.slow
def test_marked_words_are_seen_however_narrow_the_page_is(answer):
    words = [f"flint{number}" for number in range(6)]
    text = "".join(f"It was said of {word} {'that it lasts ' * 20}. " for word in words)
    passage = hit(0, text)["passages"][0] | {"highlights": named(text, *words, start=70)}
    tab = answer(hit(0, passages=[passage] * 2))
    tab.click(".chip.unfold")
    assert tab.locator("q:visible").count() == 2
    for width in (1366, 390, 1100):
        tab.set_viewport_size({"width": width, "height": 768})
        tab.wait_for_function(ALL_MARKED_ARE_SEEN)


def test_warnings_of_an_answer_are_shown_until_the_next(answer):
    tab = answer(hit(0), warnings=["no word carries <weight>"])
    assert tab.locator(".warnings li").all_text_contents() == ["no word carries <weight>"]
    tab.unroute("**/search")
    ask(tab, "basalt", "Basalt")
    assert tab.locator(".warnings li").count() == 0


def test_values_are_written_for_a_person(visit):
    cases = [
        (2012, "int64", "2012"),
        (1234567, "int64", "1,234,567"),
        (0.123456789, "double", "0.123457"),
        ("2026-01-31", "date32[day]", "Jan 31, 2026"),
        ("2026-01-31T15:00:00+00:00", "timestamp[us, tz=UTC]", "Jan 31, 2026, 3:00 PM"),
        ("2026-01-31", "string", "2026-01-31"),
        ("soon", "timestamp[us]", "soon"),
    ]
    script = "(cases) => import('/page/formats.js').then((m) => cases.map((each) => m.valueOf(...each)))"
    shown = visit(timezone_id="UTC").evaluate(script, [(value, kind) for value, kind, _ in cases])
    assert [text.replace("\u202f", " ") for text in shown] == [written for _, _, written in cases]


@pytest.mark.slow
def test_page_does_not_jump_while_it_loads(visit):
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
