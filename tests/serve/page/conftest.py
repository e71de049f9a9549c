"""The page in headless Chromium: servers over a small collection, tabs whose console must stay silent.

Tests that use it are skipped where there is no Chromium (Debian's package, or CAIRN_CHROMIUM).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings

from tests.served_stones import serving

CHROMIUM = (
    os.environ.get("CAIRN_CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
PATIENCE_MILLISECONDS = 120_000.0
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--in-process-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
EVIL = '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script>'
"""An id, a title and a part of a text that would be markup."""
ROWS = [
    {"id": "plain/granite", "title": "Granite", "text": "granite is an old stone on the "
"way. " * 12, "tenant": "acme", "year": 2001},
    {"id": "plain/basalt", "title": "Basalt", "text": "basalt is a dark stone by the river "
"path. " * 40, "tenant": "zenith", "year": 2002},
    {"id": "astral/🪨", "title": "Letters 🏔🪨",
     "text": "🏔😀🪨 😀 mark the way é " * 14 + "pumice on the river 🏔 " * 9, "tenant": "acme", "year": 2003},
    {"id": EVIL, "title": EVIL, "text": f"obsidian {EVIL} cuts the mat. " * 6, "tenant": EVIL, "year": 2004},
    {"id": "astral/rtl", "title": "אבני דרך", "text": "אבן ישנה על הדרך, ליד "
"הנהר. " * 12, "tenant": "acme", "year": 2005},
    *({"id": f"filler/{n}", "title": f"Filler {n}", "text": f"chert number {n} walks the old "
"path " * (1 + n % 5), "tenant": "acme",
       "year": 2010 + n} for n in range(30)),
]  # fmt: skip
"""The collection ``stones``: astral characters, markup, and a script from right to left."""


def answer_of(*hits, **changed):
    """Return an answer as the API gives it."""
    return {"query": "x", "generation": 1, "hits": [*hits], "warnings": [], "next_cursor": None, **changed}


def give(tab, pattern, reply):
    """Let requests of a tab that match a pattern be answered with this."""
    tab.route(pattern, lambda route: route.fulfill(json=reply))


def ask(tab, query, found):
    """Type a query and wait for its answer, with a document of this title among the hits."""
    tab.fill("#query", query)
    tab.locator(f"#hits[data-query={json.dumps(query, ensure_ascii=False)}]").wait_for(state="attached")
    tab.locator(".hit h2", has_text=found).first.wait_for()


def titles(tab):
    """Return the titles of the hits, best first."""
    return tab.locator(".hit h2").all_text_contents()


class Held:
    """The requests of a tab that match a pattern, held back until they are let go."""

    def __init__(self, tab, pattern):
        self._tab, self._routes = tab, list[Any]()
        tab.route(pattern, lambda route: self._routes.append(route))

    def first(self):
        """Wait for a request and give its route."""
        ends = time.monotonic() + PATIENCE_MILLISECONDS / 1000
        while not self._routes:
            assert time.monotonic() < ends, "it was never asked"
            self._tab.wait_for_timeout(10)
        return self._routes.pop(0)


@pytest.fixture(scope="session")
def page_root(tmp_path_factory, ingest):
    root = tmp_path_factory.mktemp("page") / "root"
    ingest(root, "stones", ROWS)
    ingest(root, "pebbles", ROWS[:2])
    return root


@pytest.fixture(scope="session")
def start():
    """Return a starter of servers that gives their address."""
    with ExitStack() as stack:

        def run(settings, reranker=None):
            app = create_app(settings, reranker=reranker)
            return stack.enter_context(serving(replace(settings, port=0), app))

        yield run


@pytest.fixture(scope="session")
def address(page_root, start):
    return start(ServeSettings(root=page_root, deadline_seconds=300.0))


@pytest.fixture(scope="package")
def browser():
    """Chromium; this folder's alone, because its driver keeps an event loop running on this thread."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MILLISECONDS
        )
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def new_context(browser, address):
    """Return a maker of browser contexts, with options of their own."""

    def run(**options):
        context = browser.new_context(
            **{"viewport": {"width": 1400, "height": 900}, "base_url": address, **options}
        )
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        return context

    return run


@pytest.fixture(scope="package")
def shared_context(new_context):
    """The context of all tabs that need none of their own: its cache holds scripts and fonts."""
    return new_context()


@pytest.fixture
def new_tab(shared_context):
    """Return a maker of tabs that leave nothing behind; what their consoles say is not heard."""
    opened: list[Any] = []

    def run():
        opened.append(shared_context.new_page())
        return opened[-1]

    yield run
    for tab in opened:
        if tab.url.startswith("http"):
            tab.evaluate("localStorage.clear()")
        tab.close()
    shared_context.clear_cookies()


@pytest.fixture
def visit(new_context, new_tab, address):
    """Return ``visit(hash)``: a tab on the page with a collection chosen.

    At the end its console must have been silent. ``media`` is what the system prefers; further options need a
    context of their own, which loads everything again.
    """
    complaints: list[str] = []
    opened: list[Any] = []

    def run(fragment="#collection=stones", *, at=None, viewport=None, media=None, **options):
        if options:
            opened.append(new_context(**options))
            tab = opened[-1].new_page()
        else:
            tab = new_tab()
        if viewport:
            tab.set_viewport_size(viewport)
        if media:
            tab.emulate_media(**media)
        tab.on(
            "console",
            lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) => console.error('policy', "
            "e.violatedDirective))"
        )
        tab.goto(f"{at or address}/{fragment}")
        return tab

    yield run
    for each in opened:
        each.close()
    assert complaints == []


@pytest.fixture
def tab(visit):
    """A tab on the page that has asked for basalt."""
    opened = visit()
    ask(opened, "basalt", "Basalt")
    return opened
