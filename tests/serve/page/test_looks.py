"""The look of the page: keyboard use, both colour schemes, contrast, a phone, the health panel."""

from __future__ import annotations

import pytest
from cairn.pipeline.collection import open_collection

from tests.serve.page.conftest import EVIL, ask, titles

pytestmark = pytest.mark.xdist_group("page")


def test_keys_alone_find_open_read_and_go_back(visit):
    tab = visit()
    tab.locator("#collection option").first.wait_for(state="attached")
    tab.locator("#theme").focus()
    tab.keyboard.press("/")
    tab.keyboard.type("basalt")
    tab.locator(".hit h2", has_text="Basalt").first.wait_for()
    tab.keyboard.press("ArrowDown")
    first = tab.evaluate("document.activeElement.textContent")
    assert first == titles(tab)[0]
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.textContent") == titles(tab)[1]
    assert tab.evaluate("document.activeElement.matches(':focus-visible')")
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("Enter")
    tab.locator("mark.active").first.wait_for()
    place = tab.inner_text("#document .steps [role=status]")
    tab.keyboard.press("n")
    assert tab.inner_text("#document .steps [role=status]") != place
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.textContent") == first
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.id") == "query"


@pytest.mark.slow
def test_colours_follow_the_system_until_one_chooses(visit):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(media={"color_scheme": scheme}) for scheme in ("light", "dark"))
    assert light.evaluate(ground) != dark.evaluate(ground)
    chosen = dark.evaluate(ground)
    light.click("#theme")
    light.click("#theme")
    assert light.evaluate(ground) == chosen
    light.reload()
    assert light.evaluate(ground) == chosen


CONTRASTS = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const luminance = ([...parts]) => {
    const linear = (part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = parts.slice(0, 3).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(".unseen, noscript, option")) continue;
    const line = [];
    for (let at = element; at; at = at.parentElement) line.unshift(at);
    context.clearRect(0, 0, 1, 1);
    const paint = (colour) => {
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
      return luminance(context.getImageData(0, 0, 1, 1).data);
    };
    let ground = 0;
    for (const each of line) ground = paint(getComputedStyle(each).backgroundColor);
    const ink = paint(getComputedStyle(element).color);
    const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    found.push([contrast, walker.currentNode.data.trim().slice(0, 40)]);
  }
  return found;
}"""


@pytest.mark.slow
def test_all_text_can_be_read_against_its_ground(visit):
    """WCAG 2.2, 1.4.3: 4.5 to 1, whatever is shown, in both colour schemes."""
    tab = visit(media={"reduced_motion": "reduce"})
    seen: list[tuple[str, float, str]] = []

    def look():
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            seen.extend((scheme, contrast, text) for contrast, text in tab.evaluate(CONTRASTS))

    tab.locator("#suggestions button").first.wait_for()
    look()
    ask(tab, "basalt", "Basalt")
    tab.click("#add-filter")
    tab.locator(".filter [name=column]").select_option("year")
    tab.locator(".filter [name=value]").fill("20x")
    tab.click("#legend-toggle")
    tab.locator(".legend button").first.click()
    tab.locator("#hits:not([aria-busy])").wait_for()
    look()
    tab.click("#tab-health")
    tab.locator("#health .tile").first.wait_for()
    look()
    tab.locator(".hit .open").first.click()
    tab.locator("mark.active").first.wait_for()
    look()
    tab.click("#key")
    look()
    assert len(seen) > 600
    assert [(scheme, text, round(contrast, 2)) for scheme, contrast, text in seen if contrast < 4.5] == []


@pytest.mark.slow
def test_tab_key_passes_everything_and_shows_where_it_is(tab):
    tab.locator("#map canvas[data-hits='20']").wait_for()
    passed: list[str] = []
    while len(passed) < 300 and (not passed or passed[-1] != "BODY"):
        tab.keyboard.press("Tab")
        name, is_shown = tab.evaluate(
            """() => {
              const here = document.activeElement;
              const isOutlined = (each) => each && getComputedStyle(each).outlineStyle !== "none";
              const outlined = [here, here.nextElementSibling].some(isOutlined);
              const label = here.id || here.getAttribute("aria-label") || here.className;
              const name = label || here.textContent.trim() || here.tagName;
              return [here === document.body ? "BODY" : name, here === document.body || outlined];
            }"""
        )
        assert is_shown, name
        passed.append(name)
    assert passed[-1] == "BODY"
    controls = {"hybrid", "add-filter", "open", "passage", "chip", "total unfold", "tab-map", "legend-toggle"}
    assert controls <= set(passed)
    assert any(name.startswith("Map of the collection") for name in passed)


@pytest.mark.slow
def test_phone_has_one_view_at_a_time_and_nothing_is_wider(visit):
    tab = visit(viewport={"width": 320, "height": 800}, has_touch=True, is_mobile=True)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for width in (320, 390):
        tab.set_viewport_size({"width": width, "height": 800})
        ask(tab, "obsidian cuts", EVIL)
        tab.click("#add-filter")
        assert tab.evaluate(overflow) == 0
        tab.locator(".hit .open").first.click()
        tab.locator("mark.active").first.wait_for()
        assert tab.evaluate(overflow) == 0
        tab.get_by_label("Close the document").click()
        tab.locator(".hit").first.wait_for()
    tab.set_viewport_size({"width": 360, "height": 740})
    tab.goto("/?again#collection=stones")
    ask(tab, "basalt", "Basalt")
    for name, inside in (("map", "canvas[data-hits='20']"), ("health", ".tile"), ("find", ".hit")):
        tab.click(f"#tab-{name}")
        tab.locator(f"#{name} {inside}").first.wait_for()
        assert tab.evaluate(overflow) == 0
        assert [
            each for each in ("find", "map", "document", "health") if tab.locator(f"#{each}").is_visible()
        ] == [name]


def test_health_and_map_show_the_figures_of_the_api_and_of_status(visit, page_root):
    tab = visit()
    tab.locator("#holds", has_text="generation 1").wait_for()  # keys are heard once the page runs
    sizes = open_collection("stones", root=page_root).status()["cluster_sizes"]
    filled = sum(size > 0 for size in sizes)
    tab.locator(".map-caption", has_text=f"in {filled} clusters").wait_for()
    tab.locator("#tab-map[aria-selected=true]").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.locator("#health .tile").first.wait_for()
    found = tab.request.get("/v1/collections/stones/health").json()
    names, values = (tab.locator(f"#health {part}").all_text_contents() for part in ("dt .term", "dd"))
    tiles = dict(zip(names, values, strict=True))
    figures = ("documents", "chunks", "clusters", "generation")
    assert {name: tiles[name] for name in figures} == {name: f"{found[name]:,}" for name in figures}
    assert tiles["clusters"] == str(filled)
    assert "in step" in tab.inner_text("#health .verdict")
