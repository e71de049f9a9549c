"""Measure what of saved HTML pages is kept, by Cairn and by other extractors that are installed.

    python tests/benchmarks/bench_html.py FOLDER

``FOLDER`` has packages of Debian, unpacked by ``dpkg-deb -x PACKAGE FOLDER/PACKAGE``: those of ``PAGES``. Six
pages of each are drawn. What their generator marks as content is kept or not, and what is beside it is
navigation. A word counts as often as it stands there.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from bs4 import BeautifulSoup
from cairn.pipeline.corpus.formats.html import converted
from markdownify import markdownify

PAGES = {
    "python-click-doc/**/*.html": ("div.body", ""),
    "mkdocs-doc/**/html/**/*.html": ("div[role=main]", ""),
    "libcommons-io-java-doc/**/api/org/**/*.html": ("main", ""),
    "libjsoncpp-doc/**/*.html": ("div.contents", ""),
    "docbook-xsl-doc-html/**/doc/**/*.html": ("body", "div.navheader, div.navfooter"),
    "git-doc/**/*.html": ("body", "#footer, #toc"),
    "libsoup-3.0-doc/**/*.html": ("section.content", ".toc"),
    "libglib2.0-doc/**/glib/*.html": ("body", "table.navigation, div.footer"),
    "m4-doc/**/*.html": ("body", "div.header, div.nav-panel"),
    "ikiwiki/**/html/**/*.html": ("#pagebody", ""),
    "rust-doc/**/html/alloc/**/struct.*.html": ("#main-content", ""),
    "rust-doc/**/html/book/ch*.html": ("main", ""),
}
"""Pages of Sphinx, MkDocs, Javadoc, Doxygen, DocBook, AsciiDoc, gi-docgen, gtk-doc, Texinfo, ikiwiki, rustdoc
and mdBook: what is their content, and what of it is none."""
NOT_SHOWN = ["script", "style", "template", "noscript", "head", "svg"]


def others() -> dict[str, Callable[[str], str | None]]:
    """Return the extractors that are installed."""
    made: dict[str, Callable[[Any], Callable[[str], str | None]]] = {
        "trafilatura": lambda own: (
            lambda page: own.extract(page, output_format="markdown", favor_recall=True)
        ),
        "readability": lambda own: (
            lambda page: markdownify(own.Document(page).summary(), heading_style="ATX")
        ),
        "inscriptis": lambda own: own.get_text,
        "html2text": lambda own: own.HTML2Text(bodywidth=0).handle,
    }
    found: dict[str, Callable[[str], str | None]] = {
        "markdownify": lambda page: markdownify(page, heading_style="ATX")
    }
    for name, make in made.items():
        try:
            found[name] = make(import_module(name))
        except ImportError:
            print(f"{name} is not installed")
    return found


def shown(page: str) -> BeautifulSoup:
    soup = BeautifulSoup(page, "html.parser")
    for element in soup(NOT_SHOWN):
        element.decompose()
    return soup


def words(text: str) -> Counter[str]:
    without_addresses = re.sub(r"\]\([^)\s]*(?:\s\"[^\"]*\")?\)", "]", text).replace("\\_", "_")
    return Counter(re.findall(r"\w+", without_addresses.lower()))


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip("\n").split("\n")).strip()


def measure(
    page: str, content: Any, extract: Callable[[str], str | None], found: dict[str, list[float]]
) -> None:
    text = extract(page) or ""
    own, kept = words(content.get_text(" ")), words(text)
    beside = words(shown(page).get_text(" ")) - own
    found["text kept"].append((kept & own).total() / own.total())
    if beside.total() >= 20:
        found["navigation left"].append(((kept - own) & beside).total() / beside.total())
    for block in content.find_all("pre"):
        if "\n" in block.get_text().strip():
            found["code whole"].append(lines(block.get_text()) in lines(text))
    headings = [words(line) for line in text.split("\n") if re.match(r"[-*+\d.\s|]*#", line)]
    for heading in content.find_all(["h1", "h2", "h3", "h4"]):
        found["headings"].append(any(words(heading.get_text()) <= line for line in headings))


def main() -> None:
    folder, drawn = Path(sys.argv[1]), random.Random(7)
    extractors = {"Cairn": lambda page: str(converted(page).text), **others()}
    found = {name: defaultdict[str, list[float]](list) for name in extractors}
    num_pages = 0
    for pattern, (selector, without) in PAGES.items():
        paths = sorted(filter(Path.is_file, folder.glob(pattern)))
        drawn.shuffle(paths)
        some = 0
        for path in paths:
            page = path.read_text("utf-8", "replace")
            content = shown(page).select_one(selector)
            if content is None or not 3_000 < len(page) < 200_000:
                continue
            for element in content.select(without) if without else []:
                element.extract()
            if len(content.get_text()) < 600 or some == 6:
                continue
            some += 1
            for name, extract in extractors.items():
                measure(page, content, extract, found[name])
        num_pages += some
    print(f"{num_pages} pages")
    for name, figures in found.items():
        print(name, *(f"{what} {fmean(each):.3f}" for what, each in figures.items()), sep="  ")


if __name__ == "__main__":
    main()
