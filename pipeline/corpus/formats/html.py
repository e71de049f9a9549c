"""HTML: a file is a document, as Markdown, so that headings, lists and tables stay.

markdownify converts what ``main``, an only ``article`` or else ``body`` holds, without navigation, scripts,
forms, and the header and footer of the page, told by elements and ARIA roles. The title is that of the page,
else its first heading, else the name of the file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.formats.text import Document, DocumentFormat
from typing_extensions import override

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

_LEFT_OUT: Final = ("script", "style", "template", "noscript", "nav", "aside", "form", "iframe", "svg")
_LEFT_OUT_ROLES: Final = ("navigation", "banner", "contentinfo", "complementary", "search")
_CONTENT: Final = ("main", "article", "section", "blockquote")
"""A header or footer inside one of these is its own and not the page's."""
_HEADINGS: Final = ("h1", "h2", "h3")
_BLANK_LINES: Final = re.compile(r"\n{3,}")
_LONG_SPACE: Final = re.compile(r"(?<![ \t\r\n])([ \t\r\n]{200})[ \t\r\n]+")
"""markdownify takes time quadratic in the length of white space, so longer runs are cut."""


class HtmlFormat(DocumentFormat):
    """Reads HTML files."""

    suffixes = (".html", ".htm")

    @override
    def document(self, file: SourceFile, raw: bytes) -> Document:
        try:
            return _converted(raw)
        except RecursionError as error:
            raise ValueError("its elements are nested too deeply") from error


def _converted(raw: bytes) -> Document:
    """Return title and Markdown of a page."""
    from bs4 import BeautifulSoup
    from bs4.exceptions import ParserRejectedMarkup
    from markdownify import MarkdownConverter

    try:
        page = BeautifulSoup(raw, "html.parser")
    except (ParserRejectedMarkup, AssertionError) as error:  # on declarations such as <![foo[bar]]>
        raise ValueError("its markup cannot be parsed") from error
    title = _title(page)
    for element in [*page.find_all([*_LEFT_OUT]), *page.find_all(role=[*_LEFT_OUT_ROLES])]:
        element.decompose()
    for element in page.find_all(["header", "footer"]):
        if not (element.find_parent([*_CONTENT]) or element.find([*_HEADINGS])):
            element.decompose()
    for text in page.find_all(string=_LONG_SPACE):
        text.replace_with(type(text)(_LONG_SPACE.sub(r"\1", text)))
    articles = page.find_all("article")
    content = page.find("main") or (articles[0] if len(articles) == 1 else page.body or page)
    converter = MarkdownConverter(heading_style="ATX", bullets="-", strip=["img"])
    lines = (line if line.strip() else "" for line in converter.convert_soup(content).split("\n"))
    return Document(title, _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip())


def _title(page: BeautifulSoup) -> str:
    named = page.title or page.find(["h1", "h2"])
    return " ".join(named.get_text().split()) if named else ""
