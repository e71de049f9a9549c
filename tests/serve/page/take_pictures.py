"""Take the pictures of the page for docs/images, from the collection that `make demo` makes.

cairn serve python-docs &
python tests/serve/page/take_pictures.py http://127.0.0.1:8400
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

QUESTION = "how do I run a function in another thread and get its result"
PICTURES = Path(__file__).resolve().parents[3] / "docs" / "images"
LIT = "#map canvas[data-hits='20']"
WIDE, PHONE = {"width": 1320, "height": 840}, {"width": 390, "height": 780}


def save(tab, name):
    tab.wait_for_timeout(400)
    tab.screenshot(path=PICTURES / f"{name}.jpg", type="jpeg", quality=80)


def main(address):
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )

        def visit(**options):
            tab = browser.new_context(**options).new_page()
            tab.set_default_timeout(120_000)
            tab.goto(f"{address}/#collection=python-docs")
            tab.fill("#query", QUESTION)
            tab.locator(".hit").first.wait_for()
            return tab

        light = visit(viewport=WIDE, color_scheme="light")
        light.locator(LIT).wait_for()
        save(light, "light")
        light.locator(".hit .open").nth(1).click()
        light.locator("mark.active").first.wait_for()
        save(light, "document")
        light.set_viewport_size({"width": 1320, "height": 528})
        light.click("#tab-health")
        light.locator("#health .gauges").wait_for()
        save(light, "health")
        dark = visit(viewport=WIDE, color_scheme="dark")
        dark.locator(LIT).wait_for()
        dark.locator("#map canvas").focus()
        dark.keyboard.press("n")
        save(dark, "dark")
        phone = visit(viewport=PHONE, color_scheme="light", is_mobile=True, has_touch=True)
        save(phone, "phone")
        phone = visit(viewport=PHONE, color_scheme="dark", is_mobile=True, has_touch=True)
        phone.tap("#tab-map")
        phone.locator(LIT).wait_for()
        save(phone, "phone-map")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
