"""HTML: a file is a document, as Markdown, so that headings, lists and tables stay.

markdownify converts what ``main``, an only ``article`` or else ``body`` holds, without navigation, scripts,
forms, and the header and footer of the page, told by elements and ARIA roles. The title is that of the page,
else its first heading, else the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import Undecoded
from cairn.pipeline.corpus.formats.text import DOCUMENT_SCHEMA, one_document, read_document
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile
from cairn.pipeline.errors import extra_missing

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


class HtmlFormat:
    """Reads HTML files; needs the extra ``html``."""

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:  # noqa: ARG002
        """Return the columns of every document; the file is not opened."""
        _require_converter()
        return Footer(schema=DOCUMENT_SCHEMA, num_rows=1)

    def decode(
        self,
        file: SourceFile,
        num_rows: int,  # noqa: ARG002 - a file is one row
        types: Mapping[str, pa.DataType],
        config: CorpusConfig,
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the one document."""
        raw = read_document(file, config)
        if len(raw) > config.max_document_bytes:
            yield one_document(file, file.relative, raw, types)  # refused as it is
            return
        try:
            title, text = _converted(raw)
        except RecursionError:
            yield Undecoded(num_rows=1, detail="its elements are nested too deeply")
            return
        yield one_document(file, title or PurePosixPath(file.relative).stem, text, types)


def _converted(raw: bytes) -> tuple[str, str]:
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
    return title, _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _title(page: BeautifulSoup) -> str:
    named = page.title or page.find(["h1", "h2"])
    return " ".join(named.get_text().split()) if named else ""


def _require_converter() -> None:
    try:
        import_module("markdownify")
    except ModuleNotFoundError as error:
        raise extra_missing(
            error, what="reading HTML", module="markdownify", package="markdownify", extra="html"
        ) from None
