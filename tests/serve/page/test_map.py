"""The map: every document, hits lit, by pointer and by keyboard, in colours that tell regions apart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.serve.page.conftest import EVIL, ROWS, ask, titles

pytestmark = pytest.mark.xdist_group("page")


def painted(tab):
    """Return some places on the map's canvas, in CSS pixels, where something coloured is."""
    return tab.evaluate(
        """() => {
          const canvas = document.querySelector("#map canvas");
          const { width, height } = canvas;
          const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
          const found = [];
          for (let at = 0; at < data.length && found.length < 20; at += 4) {
            const colours = [data[at], data[at + 1], data[at + 2]];
            if (data[at + 3] < 200 || Math.max(...colours) - Math.min(...colours) < 60) continue;
            const [x, y] = [(at / 4) % width, Math.floor(at / 4 / width)];
            found.push([x / devicePixelRatio, y / devicePixelRatio]);
          }
          return found;
        }"""
    )


def test_map_shows_every_document_lights_the_hits_and_a_point_has_its_title_and_opens(visit):
    tab = visit()
    tab.locator(f"#map canvas[data-points='{len(ROWS)}'][data-hits='0']").wait_for()
    assert f"{len(ROWS)} documents" in tab.inner_text(".map-caption")
    with tab.expect_response("**/search") as response:
        ask(tab, "obsidian cuts", EVIL)
    tab.locator(f"#map canvas[data-hits='{len(response.value.json()['hits'])}']").wait_for()
    x, y = painted(tab)[0]
    canvas = tab.locator("#map canvas")
    canvas.hover(position={"x": x + 1, "y": y + 1})
    title = tab.locator(".map-label strong").inner_text()
    assert title in {row["title"] for row in ROWS}
    assert tab.locator("#map img, #map script").count() == 0
    canvas.click(position={"x": x + 1, "y": y + 1})
    tab.locator("#document .text").wait_for()
    assert tab.inner_text("#document h2") == title
    tab.keyboard.press("Escape")
    canvas.wait_for()
    tab.fill("#query", "")
    tab.locator("#map canvas[data-hits='0']").wait_for()


@pytest.mark.slow
def test_every_document_of_the_map_is_reached_by_arrow_keys(visit):
    tab = visit()
    tab.locator(f"#map canvas[data-points='{len(ROWS)}']").wait_for()
    reached = tab.evaluate(
        """async () => {
          const { neighbour } = await import("/page/map_keys.js");
          const { points } = await (await fetch("/v1/collections/stones/map")).json();
          const all = points.doc_id.map((id, i) => ({ id, x: points.x[i], y: points.y[i] }));
          const seen = new Set([all[0]]);
          for (const point of seen) {
            for (const way of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
              const next = neighbour(all, point, (p) => [300 * p.x, -300 * p.y], way);
              if (next) seen.add(next);
            }
          }
          return seen.size;
        }"""
    )
    assert reached == len(ROWS)


@pytest.mark.slow
def test_map_is_gone_about_by_keys_alone(tab):
    tab.locator("#map canvas[data-hits='20']").wait_for()
    tab.locator("#tab-map").focus()
    for _ in range(3):  # the word "clusters", the button of the legend, the map
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.tagName") == "CANVAS"
    said = tab.locator("#map [aria-live]")
    first, second = titles(tab)[:2]
    assert said.inner_text().startswith(f"{first}, cluster ")
    assert said.inner_text().endswith("number 1 of the answer")
    assert tab.locator(".map-label strong").inner_text() == first
    assert tab.locator(".map-keys").is_visible()
    tab.keyboard.press("n")
    assert said.inner_text().startswith(second)
    tab.keyboard.press("p")
    tab.keyboard.press("+")
    tab.get_by_text("Show all").wait_for()
    assert any(
        said.inner_text() not in {press(tab, key, said), ""}
        for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown")
    )
    here = tab.locator(".map-label strong").inner_text()
    tab.keyboard.press("Enter")
    tab.locator("#document .text").wait_for()
    assert tab.inner_text("#document h2") == here
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.tagName") == "CANVAS"
    assert tab.locator(".map-label strong").inner_text() == here


def press(tab, key, said):
    tab.keyboard.press(key)
    return said.inner_text()


@pytest.mark.slow
def test_legend_names_clusters_makes_one_stand_out_and_covers_nothing_of_the_map(visit):
    tab = visit()
    tab.click("#legend-toggle")
    found = tab.request.get("/v1/collections/stones/map").json()["clusters"]
    shown = tab.eval_on_selector_all(
        ".legend button",
        "all => all.map((b) => [b.querySelector('bdi').textContent, b.querySelector('.size').textContent])",
    )
    expected = sorted(found, key=lambda each: -each["documents"])
    assert shown == [
        [", ".join(each["name"].split()) or f"cluster {each['cluster']}", str(each["documents"])]
        for each in expected
    ]
    button = tab.locator(".legend button").first
    for is_pressed in ("true", "false"):
        button.click()
        assert button.get_attribute("aria-pressed") == is_pressed
    fills = tab.eval_on_selector_all(".legend circle", "all => all.map((c) => c.getAttribute('fill'))")
    assert len(set(fills)) == len(found)
    for viewport in ({"width": 1366, "height": 768}, {"width": 390, "height": 780}):
        tab.set_viewport_size(viewport)
        tab.click("#tab-map")
        canvas, legend = (tab.locator(f"#map {part}").bounding_box() for part in ("canvas", ".legend"))
        is_beside = canvas["x"] + canvas["width"] <= legend["x"]
        assert is_beside or canvas["y"] + canvas["height"] <= legend["y"]
        assert tab.locator("#legend-toggle").get_attribute("aria-expanded") == "true"


SEES = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear RGB as dichromats see it (Machado, Oliveira & Fernandes 2009, severity 1)."""


def in_space(tab, colours, space):
    """Return colours as the browser gives them in a colour space, written as CSS derives it from one."""
    script = """(colours) => colours.map((colour) => {
      const probe = document.body.appendChild(document.createElement("i"));
      probe.style.color = colour;
      return getComputedStyle(probe).color.split(/[ ()]+/).slice(-4, -1).map(Number);
    })"""
    return np.array(tab.evaluate(script, [space.format(colour) for colour in colours]))


@pytest.mark.slow
def test_colours_of_63_clusters_stand_out_from_the_ground_and_from_those_beside_them(visit):
    """WCAG 2.2, 1.4.11: 3 to 1 against the ground.

    No colour twice, and between those that follow one another four times what an eye just notices (0.02 in
    Ottosson's Oklab), for those, too, who see no red, no green or no blue.
    """
    tab = visit()
    for scheme, number in (("light", 63), ("dark", 63), ("light", 61), ("dark", 62)):
        tab.emulate_media(color_scheme=scheme)
        script = "(asked) => import('/page/map_colours.js').then((m) => m.coloursOfClusters(...asked))"
        colours = tab.evaluate(script, [number, scheme])
        assert len(set(colours)) == number
        ground = tab.eval_on_selector("#map", "e => getComputedStyle(e).backgroundColor")
        *luminances, behind = in_space(tab, [*colours, ground], "color(from {} xyz-d65 x y z)")[:, 1]
        lighter, darker = np.maximum(luminances, behind), np.minimum(luminances, behind)
        assert ((lighter + 0.05) / (darker + 0.05)).min() >= 3.0, scheme
        linear = in_space(tab, colours, "color(from {} srgb-linear r g b)")
        for eye, sees in SEES.items():
            seen = ["color(srgb-linear {} {} {})".format(*each) for each in np.clip(linear @ sees.T, 0, 1)]
            lab = in_space(tab, seen, "oklab(from {} l a b)")
            apart = np.linalg.norm(lab - np.roll(lab, 1, axis=0), axis=1)
            assert apart.min() >= 0.08, (scheme, eye)


@pytest.mark.slow
def test_regions_of_the_map_have_hues_of_their_own(visit):
    """Clusters in one direction from the middle have like hues, those in opposite directions unlike ones."""
    tab = visit()
    hues = tab.evaluate(
        """async () => {
          const { coloursOfClusters, orderClusters } = await import("/page/map_colours.js");
          const at = (cluster) => (2 * Math.PI * ((cluster * 10) % 63)) / 63;
          const places = Array.from({ length: 63 }, (_, cluster) => {
            const far = 1 + (cluster % 3);
            return { cluster, x: far * Math.cos(at(cluster)), y: far * Math.sin(at(cluster)) };
          });
          const order = orderClusters(places);
          const colours = coloursOfClusters(63, "light");
          const hue = (cluster) => d3.hcl(colours[order.get(cluster)]).h;
          const around = places.map(({ cluster }) => [(cluster * 10) % 63, hue(cluster)]);
          return around.sort((a, b) => a[0] - b[0]).map(([, hue]) => hue);
        }"""
    )

    def apart(one, other):
        return abs((one - other + 180) % 360 - 180)

    assert max(apart(hues[n], hues[(n + 1) % 63]) for n in range(63)) < 40
    assert min(apart(hues[n], hues[(n + 31) % 63]) for n in range(63)) > 100
