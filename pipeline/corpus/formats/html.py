"""HTML: a file is a document, as Markdown, so that headings, lists and tables stay.

markdownify converts the page, or an only ``main`` that has the page's heading or most of its text, without
navigation, scripts, forms that hold no text of their own, and the header and footer of the page, told by
elements and ARIA roles. A picture is its alternative text. The title is that of the page, else its first
heading, else the name of the file. Bytes are UTF-8 where they can be, else what the page declares, else what
they look like.
"""

from __future__ import annotations

import re
from copy import copy
from functools import cache
from html.entities import html5
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, cast

from cairn.pipeline.corpus.formats.encodings import text_of
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.formats.text import TextDocument, TextFormat
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bs4 import BeautifulSoup, Tag
    from markdownify import MarkdownConverter

_LEFT_OUT: Final = ("title", "script", "style", "template", "noscript", "nav", "iframe", "svg", "rt", "rp")
_LEFT_OUT_ROLES: Final = ("navigation", "banner", "contentinfo", "complementary", "search")
_LEFT_OUT_CLASSES: Final = ("navheader", "navfooter", "nav-panel", "navbar")
"""How DocBook, Texinfo and Bootstrap name navigation."""
_CONTENT: Final = ("main", "article", "section", "blockquote")
"""A header, footer or aside inside one of these is its own and not the page's."""
_HEADINGS: Final = ("h1", "h2", "h3")
_OF_TEXT: Final = (*_HEADINGS, "h4", "p", "main", "article", "table", "ul", "ol", "pre")
"""What a form has that encloses a page, as those of ASP.NET do."""
_CONTROLS: Final = ("select", "option", "textarea", "button", "label", "input")
"""A form's parts, whose texts stand apart on the page."""
_BLOCKS: Final = (
    *("aside", "header", "footer", "form", "fieldset", "legend", "details", "summary", "address"),
    *("figure", "center", "hgroup", "dialog", "search", "menu", "optgroup", "dir"),
)
"""Elements that stand in lines of their own, as a ``div`` does, which markdownify does not know."""
MAX_DEPTH: Final = 500
"""How many elements may enclose one another: markdownify takes fewer, and the search for headings in each of
them takes time quadratic in their number."""
_CELLS: Final = ("td", "th")
MAX_COLUMNS: Final = 1_000
"""How many columns or rows a cell may span, as in browsers and markdownify."""
MAX_SPANNED: Final = 20_000
"""How many cells of a page are written again in the rows that they span."""
MAX_REPEATED: Final = 100
"""How many characters such a cell may have."""
_ENDS: Final = {
    "li": ("li",),
    **dict.fromkeys(("dt", "dd"), ("dt", "dd")),
    **dict.fromkeys(_CELLS, _CELLS),
    "tr": ("tr", *_CELLS),
    **dict.fromkeys(("tbody", "tfoot"), ("thead", "tbody", "tfoot", "tr", *_CELLS)),
    **dict.fromkeys(
        ("p", "ul", "ol", "dl", "table", "pre", "div", *_HEADINGS, "h4", *_CONTENT, *_BLOCKS), ("p",)
    ),
    "option": ("option",),
    "body": ("title",),
}
"""Which elements end where one begins, if their end tags are left out."""
_WHOLE: Final = ("html", "head", "body")
"""Tags that move nothing: browsers show what stands before, between and behind them, too."""
_TEX: Final = re.compile("tex")
_OF_THE_PAGE: Final = re.compile("^#")
_OF_DATA: Final = re.compile(r"^\s*data:", re.IGNORECASE)
_LINK_SIGNS: Final = " \t\r\n\N{PILCROW SIGN}↑↩🔗\u200b\ufe0e\ufe0f\uf0c1"
"""What generators show as a link to a heading, or from a note back to its text."""
_OWN_LINK_SIGNS: Final = f"#\N{SECTION SIGN}{_LINK_SIGNS}"
"""What they show, too, in a heading or what else it is the address of; elsewhere, `§` is a text."""
_SHOWN_FORMULAS: Final = ("span", "img", "nobr", "mjx-math")
"""What KaTeX, Wikipedia and MathJax show of a formula beside it."""
_SIGNS: Final = {
    "mfrac": "/", "msup": "^", "msub": "_", "munder": "_", "msubsup": "_^", "munderover": "_^",
    "msqrt": "", "mroot": "", "mtr": ", ", "mtable": "; ",
}  # fmt: skip
"""What stands between the parts of a formula of MathML."""
_ONE: Final = re.compile(r"[\d.,]+|[^\W\d_]+|[^\w\s]|\([^()]*\)|")
"""A part of a formula that needs no brackets."""
RAISED: Final = re.compile(r"[-+\N{MINUS SIGN}]?\d")
"""What would be another number if it stood on the line, as the 6 of 10⁶."""
_RULE: Final = re.compile(r"(?:^|(?<=\}))\s*(?:span)?\.([\w-]+)\s*\{([^{}]*)")
"""A rule of a page's style for one class, and no more than that."""
_ENTITY: Final = re.compile(r"<[^<>]*>|&([A-Za-z][A-Za-z0-9]{0,40};?)")
"""A tag, or a name of an entity outside of one."""
_DRAWN: Final = re.compile(
    r"(?i)(?<![\w-])(?:(vertical-align\s*:\s*super)|text-decoration(?:-line)?\s*:[^;]{0,99}line-through)"
)
"""What raises a text, or strikes it out."""
_BASE: Final = re.compile(r"[^\W_]|[)\]]")
"""What a number is raised over."""
BAR: Final = re.compile(r"(?<!\\)\|")
"""What would end a cell if it stood in its text."""
_TASKS: Final = ("inline-task-list", "checkbox-on", "checkbox-off")
"""Classes of the tasks of Confluence and Notion, which tell by a class whether one is done."""
_LINE_NUMBERS: Final = re.compile(r"[\d\s]+")
_OF_LINE_NUMBERS: Final = ("linenos", "lineno", "linenumber", "line-number", "ln", "lnt")
"""Classes of the numbers that Sphinx, Rouge, Prism, Hugo and others write into code."""
_BLANK_LINES: Final = re.compile(r"(^```.*?^```)|\n{3,}", re.DOTALL | re.MULTILINE)
"""Blank lines, but for those in code."""
_LONG_SPACE: Final = re.compile(r"(?<![ \t\r\n])([ \t\r\n]{200})[ \t\r\n]+")
"""markdownify takes time quadratic in the length of white space, so longer runs are cut."""


class HtmlFormat(TextFormat):
    """Reads HTML files."""

    suffixes = (".html", ".htm", ".xhtml")
    unit = None

    @override
    def document(self, file: SourceFile, raw: bytes) -> TextDocument:
        try:
            return converted(raw)
        except RecursionError as error:
            raise ValueError("its elements are nested too deeply") from error


def converted(raw: bytes | str, *, is_page: bool = True) -> TextDocument:
    """Return title and Markdown of a page, or of a chapter or mail, whose notes are its own."""
    from bs4.dammit import EncodingDetector
    from bs4.element import Declaration, ProcessingInstruction
    from bs4.exceptions import ParserRejectedMarkup

    try:
        declared = "" if isinstance(raw, str) else EncodingDetector.find_declared_encoding(raw, is_html=True)
        markup, encoding = (raw, "") if isinstance(raw, str) else text_of(raw, declared or "")
        page = _page_class()(_ENTITY.sub(_as_browsers, markup), "html.parser")
    except (ParserRejectedMarkup, AssertionError) as error:  # on declarations such as <![foo[bar]]>
        raise ValueError("its markup cannot be parsed") from error
    for told in page.find_all(
        string=lambda text: isinstance(text, Declaration | ProcessingInstruction)
    ):  # for browsers
        told.extract()
    for frame in page.find_all("iframe", srcdoc=True):
        shown = _page_class()(str(frame["srcdoc"]), "html.parser")
        for title in shown.find_all("title"):
            title.decompose()
        frame.replace_with(shown)
    for element in page.find_all("math"):
        _say_once(element)
    for figure in page.find_all("figure"):
        caption, picture = figure.find("figcaption", recursive=False), figure.find("img")
        if caption and picture and _words(picture.get("alt")) == _words(caption.get_text()):
            picture["alt"] = ""
    for element in page.find_all(class_=[*_TASKS]):
        if element.name != "ul":
            element.replace_with("[x]" if "checkbox-on" in element["class"] else "[ ]")
            continue
        for item in element.find_all("li", recursive=False):
            item.insert(0, "[x] " if "checked" in (item.get("class") or ()) else "[ ] ")
    for element in page.find_all(["img", "area", "input"]):
        if element.get("type") == "checkbox" and element.find_parent("li"):
            mark = "[x]" if element.has_attr("checked") else "[ ]"
            element.replace_with(mark if str(element.next_sibling)[:1].isspace() else f"{mark} ")
        elif (alt := _words(element.get("alt"))) or element.name == "img":
            element.replace_with(f" {alt} " if alt else "")
    for element in page.find_all("a", href=_OF_DATA):
        element.unwrap()
    for element in page.find_all("a", href=_OF_THE_PAGE):
        shown = element.get_text().strip(_LINK_SIGNS)
        if not shown or (not shown.strip(_OWN_LINK_SIGNS) and _is_within_its_aim(element)):
            element.decompose()
    rules = chain.from_iterable(_RULE.findall(each.get_text()) for each in page.find_all("style"))
    drawn = {name: found for name, rule in rules if (found := _DRAWN.search(rule))}
    for element in page.find_all("span"):  # Google Docs says by classes what is raised and struck out
        of_classes = (drawn[each] for each in element.get("class") or () if each in drawn)
        if found := next(of_classes, None) or _DRAWN.search(str(element.get("style") or "")):
            element.name = "sup" if found[1] else "s"
    for element in page.find_all("sup"):
        before = element.previous_sibling
        if RAISED.match(element.get_text()) and before is not None and _BASE.search(before.get_text()[-1:]):
            element.insert(0, "^")  # before it, its place among its siblings would be counted each time
    title = _title(page)
    left_out = (page.find_all([*_LEFT_OUT]), page.find_all(role=[*_LEFT_OUT_ROLES]))
    for element in chain(*left_out, page.find_all(class_=[*_LEFT_OUT_CLASSES])):
        if element.name == "template" and element.get("shadowrootmode") == "open":
            element.name = "div"
        else:
            element.decompose()
    for element in page.find_all("form"):
        if not element.find([*_OF_TEXT]):
            element.decompose()
    has_content = page.find(["main", "article"]) is not None
    for element in page.find_all(["header", "footer", "aside"] if is_page else []):
        is_own = (
            element.find([*_HEADINGS])
            if element.name != "aside"
            else not (has_content or _is_of_links(element))
        )
        holders = [
            each
            for each in element.find_parents([*_CONTENT])
            if each.name != "section" or not _holds_main(each)
        ]
        if not (is_own or holders):
            element.decompose()
    for code in page.find_all("pre"):
        for element in code.find_all("br"):
            element.replace_with("\n")
        for element in code.find_all("a"):  # no Markdown is read within code
            element.unwrap()
        for element in code.find_all(class_=[*_OF_LINE_NUMBERS]):
            if _LINE_NUMBERS.fullmatch(element.get_text()):
                element.decompose()
    for element in page.find_all([*_CONTROLS]):
        element.insert_before(" ")
        element.insert_after(" ")
    for element in page.find_all([*_BLOCKS]):
        element.name = "div"
    for element in page.find_all("ol"):
        items = element.find_all("li", recursive=False)
        step = -1 if element.has_attr("reversed") else 1
        number = _number(element.get("start"), len(items) if step < 0 else 1)
        for item in items:
            number = _number(item.get("value"), number)
            item["value"] = str(number)
            number += step
    for table in page.find_all("table"):
        if table.find("pre"):
            _as_blocks(table)
    for text in page.find_all(string=BAR):
        if (within := text.find_parent([*_CELLS, "pre"])) is not None and within.name != "pre":
            text.replace_with(BAR.sub(r"\|", text))
    _fill_spanned(page)
    for table in page.find_all("table"):  # each group of rows would begin with a header
        first = table.find("tbody", recursive=False) or table.find("tfoot", recursive=False)
        if first is None:
            continue
        for row in first.find_previous_siblings("tr"):
            first.insert(0, row)
        others = table.find_all(["tr", "tbody", "tfoot"], recursive=False)
        for group in sorted(others, key=lambda each: each.name == "tfoot"):  # it may stand before the rows
            if group is not first:
                first.extend([group] if group.name == "tr" else group.find_all("tr", recursive=False))
    for text in page.find_all(string=_LONG_SPACE):
        text.replace_with(type(text)(_LONG_SPACE.sub(r"\1", text)))
    lines = (line if line.strip() else "" for line in _converter().convert_soup(_content(page)).split("\n"))
    return TextDocument(
        title, _BLANK_LINES.sub(lambda found: found[1] or "\n\n", "\n".join(lines)).strip(), encoding=encoding
    )


def _as_browsers(found: re.Match[str]) -> str:
    """Return an entity as browsers read it, which take an unknown one, or `&lang=en`, for a text."""
    name = found[1]
    if name is None:
        return re.sub("&(?=[A-Za-z][A-Za-z0-9]*=)", "&amp;", found[0])
    if name.endswith(";") and name in html5:
        return found[0]
    own = next((name[:end] for end in range(len(name), 1, -1) if name[:end] in html5), None)
    return f"&amp;{name}" if own is None else f"&{own};{name[len(own) :]}"


def _holds_main(section: Tag) -> bool:
    """Whether a section is one of the page's layout, as in the theme of Read the Docs."""
    return section.find(["main", "article"]) is not None or section.find(role="main") is not None


def _words(text: object) -> str:
    return " ".join(str(text or "").split())


def _is_of_links(element: Tag) -> bool:
    of_links = sum(len(link.get_text(strip=True)) for link in element.find_all("a"))
    return 2 * of_links >= len(element.get_text(strip=True))


def _is_within_its_aim(link: Tag) -> bool:
    within = link.find_parent([*_HEADINGS, "h4", "h5", "h6"]) or link.find_parent(id=str(link["href"])[1:])
    return within is not None


def _say_once(formula: Tag) -> None:
    """Leave a formula as TeX, which stands in it, and not what shows it beside an element that is its own."""
    holder = formula.parent
    if holder is not None and len(holder.contents) == 1:
        for shown in cast("list[Any]", [holder.previous_sibling, holder.next_sibling]):
            if getattr(shown, "name", None) in _SHOWN_FORMULAS and shown.get("aria-hidden") == "true":
                shown.clear()
                shown["alt"] = ""
    tex = formula.find("annotation", encoding=_TEX)
    told = [tex.get_text().strip() if tex is not None else "", str(formula.get("alttext", "")).strip()]
    for element in filter(None, (formula, holder)):  # a blank may stand between it and its picture
        for beside in cast(
            "list[Any]", [*islice(element.previous_siblings, 2), *islice(element.next_siblings, 2)]
        ):
            if getattr(beside, "name", None) == "img" and str(beside.get("alt")).strip() in told:
                beside["alt"] = ""
    if tex is not None:
        formula.string = tex.get_text()
    for other in formula.find_all(["annotation", "annotation-xml"]):  # which browsers do not show
        other.decompose()
    for part in reversed(formula.find_all([*_SIGNS])):
        texts = [each.get_text().strip() for each in part.find_all(recursive=False)]
        sign = _SIGNS[part.name]
        if part.name == "msqrt":
            part.string = root_of("".join(texts) or part.get_text().strip(), "")
        elif part.name in ("mtr", "mtable"):
            part.string = sign.join(texts)
        elif part.name == "mroot" and len(texts) == 2:
            part.string = root_of(*texts)
        elif len(texts) == 1 + len(sign):
            part.string = joined_formula(texts, sign)
        behind = part.next_sibling
        if behind is not None and part.get_text()[-1:].isalnum() and behind.get_text()[:1].isalnum():
            part.append(" ")


def joined_formula(texts: Sequence[str], signs: str) -> str:
    """Return parts of a formula with a sign before each but the first, in brackets where they need them."""
    first, *others = (text if _ONE.fullmatch(text) else f"({text})" for text in map(str.strip, texts))
    return first + "".join(f"{sign}{text}" for sign, text in zip(signs, others, strict=True) if text)


def root_of(text: str, degree: str) -> str:
    """Return a root of a part of a formula, as a power where it is no square root."""
    return joined_formula([text, f"1/{degree}"], "^") if degree.strip() else f"sqrt({text})"


def _as_blocks(table: Tag) -> None:
    """Make blocks of a table that only lays out code, beside the numbers of its lines, which are left out."""
    rows = [row.find_all([*_CELLS], recursive=False) for row in table.find_all("tr")]
    if sum(len(cells) > 1 for cells in rows) > 1:
        return
    for cell in chain(*(cells for cells in rows if len(cells) > 1)):
        if _LINE_NUMBERS.fullmatch(cell.get_text()):
            cell.decompose()
    for element in [table, *table.find_all(["thead", "tbody", "tfoot", "tr", *_CELLS])]:
        element.name = "div"


def _fill_spanned(page: BeautifulSoup) -> None:
    """Write cells that span rows in each of them, so that a row says all by itself; long ones as empty."""
    left = MAX_SPANNED
    for group in page.find_all(["table", "thead", "tbody", "tfoot"]):
        above: dict[int, tuple[Tag, int]] = {}  # by column, a cell and how many more rows it spans
        for row in group.find_all("tr", recursive=False):
            cells = row.find_all([*_CELLS], recursive=False)
            if len(cells) > MAX_COLUMNS or not (above or any(cell.has_attr("rowspan") for cell in cells)):
                continue
            below: dict[int, tuple[Tag, int]] = {}
            column = 0
            for cell in [*cells, None]:
                while left and (column in above or (cell is None and any(each > column for each in above))):
                    spanning, rows = above.pop(column, (page.new_tag("td"), 0))
                    if rows > 1:
                        below[column] = spanning, rows - 1
                    again = copy(spanning)
                    _ = row.append(again) if cell is None else cell.insert_before(again)
                    column += _span(spanning, "colspan")
                    left -= 1
                if cell is None:
                    break
                if (rows := _span(cell, "rowspan")) > 1:
                    is_short = (
                        len([*islice(cell.descendants, 30)]) < 30 and len(cell.get_text()) <= MAX_REPEATED
                    )
                    repeated = (
                        copy(cell) if is_short else page.new_tag("td", colspan=str(_span(cell, "colspan")))
                    )
                    below[column] = repeated, rows - 1
                column += _span(cell, "colspan")
            above = below


def _number(told: object, otherwise: int) -> int:
    return int(str(told)) if str(told).isdecimal() and len(str(told)) < 10 else otherwise


def _span(cell: Tag, name: str) -> int:
    """Return how many columns or rows a cell spans; 0 rows are all that follow in its part of the table."""
    num = min(_number(cell.get(name), 1), MAX_COLUMNS)
    return num or (MAX_COLUMNS if name == "rowspan" else 1)


def _content(page: BeautifulSoup) -> Tag:
    """Return the page, or the only ``main`` where it has the page's heading, or else most of its text."""
    for hidden in page.find_all("main", hidden=True):
        hidden.decompose()
    mains = [each for each in page.find_all("main") if each.get_text(strip=True)]
    for each in mains:
        each.name = "div"  # which stands in lines of its own
    if len(mains) != 1 or (page.find("h1") and not mains[0].find("h1")):
        return page
    is_most = 2 * len(mains[0].get_text(strip=True)) >= len(page.get_text(strip=True))
    return mains[0] if is_most or mains[0].find("h1") else page


@cache
def _page_class() -> type[BeautifulSoup]:
    from bs4 import BeautifulSoup

    class Page(BeautifulSoup):
        """Ends elements whose end tags HTML lets out; `html.parser` would put each into the one before."""

        def handle_starttag(self, name: str, *arguments: Any, **named: Any) -> Tag | None:
            if len(self.tagStack) > MAX_DEPTH:
                raise RecursionError
            while self.currentTag is not None and self.currentTag.name in _ENDS.get(name, ()):
                self.handle_endtag(self.currentTag.name)
            if name in _WHOLE:
                return None
            return super().handle_starttag(name, *arguments, **named)

    return Page


@cache
def _converter() -> MarkdownConverter:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    class Converter(MarkdownConverter):
        """Takes an item's number from its ``value``: markdownify counts the items before each, all again."""

        def convert_li(self, el: Tag, text: str, parent_tags: set[str]) -> str:
            if el.parent is not None and el.parent.name == "ol":
                ordered["start"] = el["value"]
                el = item
            return cast("Any", super()).convert_li(el, text, parent_tags)

        def convert_hN(self, n: int, el: Tag, text: str, parent_tags: set[str]) -> str:  # noqa: N802
            if "_inline" in parent_tags:  # in a cell, where markdownify glues it to its neighbours
                return f" {text.strip()} "
            return cast("Any", super()).convert_hN(n, el, text, parent_tags)

    ordered = cast("Tag", BeautifulSoup("<ol><li></li></ol>", "html.parser").ol)
    item = cast("Tag", ordered.li)
    return Converter(heading_style="ATX", bullets="-", escape_asterisks=False, escape_underscores=False)


def _title(page: BeautifulSoup) -> str:
    titles = (each for each in page.find_all("title") if not each.find_parent("svg"))
    named = next(titles, None) or page.find(["h1", "h2"])
    for element in named.find_all("br") if named else ():
        element.replace_with(" ")
    return _words(named and named.get_text())
