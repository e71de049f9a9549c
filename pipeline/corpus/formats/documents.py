"""Readers of PDF, Office, e-books, mail, notebooks and source code: a class a kind, with all its facts.

PDFium reads PDF, calamine the sheets of Excel and OpenDocument, striprtf RTF. The other kinds are XML in an
archive, or what Python itself reads. One walk over the elements reads Word, PowerPoint and OpenDocument. It
takes every text that is shown, those of content controls, text boxes, notes and formulas, too, which
libraries that model a document pass over. Headings and list items are written as in Markdown, tables a row a
line.

Left out are headers and footers of pages, comments, deleted text of tracked changes, texts in pictures, the
numbers of numbered headings, formulas of RTF, and attachments of mail, which are named.
"""

from __future__ import annotations

import base64
import codecs
import email
import email.policy
import io
import json
import posixpath
import quopri
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from email.errors import CloseBoundaryNotFoundDefect, InvalidBase64LengthDefect
from email.message import EmailMessage
from functools import cache, partial
from itertools import chain, groupby, pairwise, product, zip_longest
from math import hypot
from pathlib import Path, PurePosixPath
from string import ascii_uppercase
from typing import Any, Final, NamedTuple, cast
from unicodedata import category, combining, normalize
from urllib.parse import unquote
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element
from zipfile import BadZipFile, ZipFile, is_zipfile

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import batch_of, role_names
from cairn.pipeline.corpus.formats.encodings import decoded, text_of
from cairn.pipeline.corpus.formats.file_kind import OLD_OFFICE, PDF, RTF, TEXT, ZIP
from cairn.pipeline.corpus.formats.format import (
    ENCODING,
    Footer,
    Format,
    SourceFile,
    Undecoded,
    batched,
    damage_of,
    is_utf8,
)
from cairn.pipeline.corpus.formats.html import BAR, RAISED, converted, joined_formula, root_of
from cairn.pipeline.corpus.formats.paged import (
    Opened,
    Page,
    PagedFormat,
    PageWithoutText,
    UnreadableError,
    cleaned,
)
from cairn.pipeline.corpus.formats.right_to_left import RIGHT_TO_LEFT, text_in_reading_order
from cairn.pipeline.corpus.formats.text import DOCUMENT_SCHEMA, TextDocument, TextFormat, without_pictures
from typing_extensions import override

MAX_REPEATED: Final = 100
"""How often a cell or row of OpenDocument is written again."""
MAX_UNPACKED_BYTES: Final = 512 << 20
"""How large the texts in an archive may be; pictures and films do not count, as they are not read."""
_TEXTS: Final = (".xml", ".rels", ".html", ".htm", ".xhtml", ".mht", ".mhtml", ".opf", ".bin", ".vml")
_MADE_UP_TITLE: Final = re.compile(
    r"microsoft (word|powerpoint)\b.*|powerpoint presentation|unknown title|\(?(untitled|anonymous)\)?|"
    r"\S+\.[a-z]{2,5}",
    re.IGNORECASE,
)
"""What programs write where no title was given: their own name, or that of a file."""
_PICTURE_FILE: Final = re.compile(r"\S+\.(png|jpe?g|gif|bmp|tiff?|webp|svg|emf|wmf)", re.IGNORECASE)
_WITHOUT_TEXT: Final = "it shows pictures or drawings and holds no text; recognise it, as with `ocrmypdf`"


_BROKEN: Final = "\ufffe"
_PRINTED_HYPHEN: Final = re.compile("(?<=\\w)\N{HYPHEN}\r?\n(?=\\w)")
"""What WeasyPrint, Prince and Chrome break words with, which PDFium does not mark."""
_WORDS: Final = re.compile(r"\S+")
_OF_TEX: Final = {
    0x0B: "ff", 0x0C: "fi", 0x0E: "ffi", 0x0F: "ffl", 0x10: "“", 0x11: "”", 0x12: "„", 0x13: "«", 0x14: "»",
    0x15: "–", 0x16: "—", 0x1B: "ff", 0x1C: "fi", 0x1D: "fl", 0x1E: "ffi", 0x1F: "ffl",
}  # fmt: skip
"""What fonts of TeX have where others have controls, as those made of dots that tell no characters."""
_BULLET: Final = re.compile("^[\x80-\x84\x86-\x9f](?=[ \r\n])", re.MULTILINE)
"""A control where a line begins, as the bullets of TeX are."""
_ACCENTS: Final = dict(
    zip(
        "`´ˆ˜¯˘˙¨˚˝ˇ¸˛",
        "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327\u0328",
        strict=True,
    )
)
"""Accents that stand by themselves, by what makes a letter of a letter and them."""
_INDIC_BLANK: Final = re.compile("(?<=[\u0900-\u0dff]{2}) (?=\\S)")
_PLACED: Final = re.compile(f"[{''.join(_ACCENTS)}{RIGHT_TO_LEFT}]|{_INDIC_BLANK.pattern}")
"""What is read by the places of letters."""


class PdfFormat(PagedFormat):
    """Reads PDF in the order of its content; a word that goes on in the next line is one."""

    suffixes = (".pdf",)
    kinds = (PDF,)
    unit = "page"
    package = "pypdfium2"
    has_headings = False

    @override
    def open(self, path: str) -> Opened:
        import pypdfium2 as pdfium

        try:
            document = pdfium.PdfDocument(path)
        except pdfium.PdfiumError as error:
            if error.err_code == pdfium.raw.FPDF_ERR_PASSWORD:
                raise UnreadableError(
                    "it is encrypted; remove its password, as with `qpdf --decrypt`"
                ) from error
            raise
        if document.get_formtype():
            document.init_forms()
        title = _given_title(document.get_metadata_value("Title"))
        pages = (partial(_pdf_page, document, index) for index in range(len(document)))
        return Opened(title, pages)


def _given_title(text: str) -> str:
    """Return a title without blanks around it, empty where a program made it up."""
    text = text.strip()
    return "" if _MADE_UP_TITLE.fullmatch(text) else text


def _pdf_page(document: Any, index: int) -> str:
    from pypdfium2 import raw

    page = document[index]
    if document.formenv is not None and raw.FPDFPage_Flatten(page, 0) == raw.FLATTEN_SUCCESS:
        page.close()  # what was filled in is content of the page once it is loaded again
        page = document[index]
    shown = page.get_textpage()
    text = cast("str", shown.get_text_range())
    if _PLACED.search(text):
        letters = [chr(raw.FPDFText_GetUnicode(shown, place)) for place in range(shown.count_chars())]
        _accent(shown, letters)
        _drop_false_blanks(shown, letters)
        text = text_in_reading_order(shown, letters)
    text = _BULLET.sub("•", text.translate(_OF_TEX))
    text = _WORDS.sub(_joined, _PRINTED_HYPHEN.sub(_BROKEN, text))
    is_scan = not text.strip() and raw.FPDFPage_CountObjects(page) > 0
    shown.close()
    page.close()
    if is_scan:
        raise PageWithoutText(_WITHOUT_TEXT)
    return text


def _accent(page: Any, letters: list[str]) -> None:
    """Make one letter of a letter and the accent that a page has over or below it.

    Where they stand tells an accent from an apostrophe, or a mark of code, that looks the same.
    """
    text = "".join(letters)
    for place in [place for place, each in enumerate(letters) if each in _ACCENTS]:
        accent, near = _ACCENTS[text[place]], (place + 1, place - 1)
        if not (text[place - 1 : place] + text[place + 1 : place + 2]).strip():  # PDFium took it for a word
            near = range(len(text))
        box = page.get_charbox(place)
        for letter in near:
            base = text[letter : letter + 1].replace("ı", "i").replace("ȷ", "j")
            whole = normalize("NFC", base + accent)
            if len(whole) == len(base) and _touches(
                box, page.get_charbox(letter), is_below=combining(accent) < _ABOVE
            ):
                letters[letter], letters[place] = whole, ""
                break


def _drop_false_blanks(page: Any, letters: list[str]) -> None:
    """Leave out blanks that PDFium sees within words of India, as Chrome writes them.

    It tells all letters of a syllable with its first glyph, over which PDFium spreads them, and with none the
    glyph of the vowel behind it.
    """
    from pypdfium2 import raw

    for found in _INDIC_BLANK.finditer("".join(each or "\0" for each in letters)):
        place = found.start()
        if category(letters[place - 1]) != "Mc" or raw.FPDFText_IsGenerated(page, place) != 1:
            continue
        first, vowel, behind = (
            page.get_charbox(each, loose=True) for each in (place - 2, place - 1, place + 1)
        )
        is_spread = abs((vowel[2] - vowel[0]) - (first[2] - first[0])) < _TOUCHING
        matrix = raw.FS_MATRIX()
        raw.FPDFText_GetMatrix(page, place - 1, matrix)
        size = raw.FPDFText_GetFontSize(page, place - 1) * hypot(matrix.c, matrix.d)
        if is_spread and behind[0] - vowel[2] < _VOWEL * size:
            letters[place] = ""


_VOWEL: Final = 0.4
"""How much of the size of letters a vowel takes behind one at most; with a blank it is more."""
_TOUCHING: Final = 0.05
"""How many points two widths differ at most that are halves of one."""
_ABOVE: Final = 230
"""What Unicode calls the place of an accent above a letter; those of accents below are less."""


def _touches(accent: tuple[float, ...], letter: tuple[float, ...], is_below: bool) -> bool:
    """Whether an accent stands close above or below a letter; both are left, bottom, right and top."""
    middle, height = (accent[0] + accent[2]) / 2, letter[3] - letter[1]
    gap = letter[1] - accent[3] if is_below else accent[1] - letter[3]
    return letter[0] < middle < letter[2] and -height / 4 < gap < height / 2


def _joined(word: re.Match[str]) -> str:
    """Return a word whose hyphens at the end of a line PDFium marked, and took out."""
    whole, *parts = word[0].split(_BROKEN)
    for part in parts:
        is_own = "-" in whole[1:] or (whole and part[:2].istitle())
        whole += f"-{part}" if is_own else part
    return whole


class _Archive(ZipFile):
    """A file that is an archive of XML; one that unpacks to more than memory holds is refused."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.unpacked = sum(
            each.file_size for each in self.infolist() if each.filename.lower().endswith(_TEXTS)
        )
        if self.unpacked > MAX_UNPACKED_BYTES:
            raise UnreadableError(
                f"its texts unpack to {self.unpacked >> 20:,} MiB, more than {MAX_UNPACKED_BYTES >> 20:,} MiB"
            )

    def xml(self, name: str) -> Element:
        """Return the root of a part."""
        return ET.fromstring(self.read(name))  # noqa: S314 (expat limits what entities expand to)

    def found(self, name: str | None) -> Element:
        """Return the root of a part, an empty one where there is no such part."""
        return self.xml(name) if name and name in self.namelist() else Element("none")

    def named(self, address: str) -> str:
        """Return the part that an address names, which may be quoted, and of a place in it."""
        plain, names = address.partition("#")[0], self.namelist()
        return next((each for each in (address, plain, unquote(plain)) if each in names), address)

    def related(self, name: str = "") -> dict[str, tuple[str, str]]:
        """Return kind and name of the parts that one refers to, by the ids that it has for them."""
        return {
            each.get("Id", ""): (
                each.get("Type", "").rpartition("/")[2],
                posixpath.normpath(
                    posixpath.join("/", posixpath.dirname(name), each.get("Target", ""))
                ).lstrip("/"),
            )
            for each in self._relations(name)
            if each.get("TargetMode") != "External"
        }

    def links(self, name: str) -> dict[str, str]:
        """Return the addresses that a part refers to, by the ids that it has for them."""
        external = (each for each in self._relations(name) if each.get("TargetMode") == "External")
        return {each.get("Id", ""): each.get("Target", "") for each in external}

    def _relations(self, name: str) -> Iterable[Element]:
        folder, base = posixpath.split(name)
        return self.found(posixpath.join(folder, "_rels", f"{base}.rels"))

    def part(self, kind: str, of: str = "") -> str | None:
        """Return the name of the part of a kind that another refers to."""
        return next((name for found, name in self.related(of).values() if found == kind), None)

    def title(self, name: str | None) -> str:
        """Return the title in a part of properties."""
        found = self.found(name).find(".//{*}title")
        return "" if found is None else _given_title("".join(found.itertext()))


_OF_ROOTS: Final = {"document": ".docx", "presentation": ".pptx", "workbook": ".xlsx"}


def _require_root(main: Element, name: str) -> None:
    """Refuse a file of Office of another kind than its name says."""
    other = _OF_ROOTS.get(_name(main), "")
    if other and _name(main) != name:
        raise UnreadableError(f"it is {other}, and not {_OF_ROOTS[name]}: name it so")


_MARK: Final = "mark"
"""The attribute, of no namespace, for the number of an item of a list with what stands behind it."""
_NOT_SHOWN: Final = frozenset(
    "pPr rPr sectPr sdtPr del moveFrom Fallback rt tracked-changes annotation ruby-text note-citation".split()  # noqa: SIM905
)
"""Settings, deleted text, a second form of a drawing, and how a word is read aloud."""
_MARKS: Final = {
    "tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "line-break": "\n", "noBreakHyphen": "-",
    "lastRenderedPageBreak": "\f", "soft-page-break": "\f",
}  # fmt: skip
_GAP: Final = "\x1f"
"""A blank between texts, which is none at the beginning of a line; XML has no such character."""
_SPACE: Final = f" \t\n{_GAP}"
_HEADING: Final = re.compile(r"(?:title|heading (\d))", re.IGNORECASE)
"""The names of Word's own styles, in every language."""
_BLANKS: Final = re.compile("[ \t\r\n]+")
_SIGNS: Final = {"f": "/", "sSup": "^", "sSub": "_", "sSubSup": "_^", "limLow": "_", "limUpp": "^"}
"""What stands between the parts of a formula of Office."""
_SLIDE_END: Final = "\f\n"
"""What stands behind a slide of OpenDocument: no page that Word or a program for texts noted."""
_NOT_OF_A_SLIDE: Final = frozenset(
    ("sldNum", "dt", "ftr", "hdr", "sldImg", "page-number", "date-time", "footer", "header")
)
"""Roles of shapes in PowerPoint, then of frames in OpenDocument."""


_RAISED_NUMBER: Final = re.compile(rf"\x02(?={RAISED.pattern})")
_RAISED_CUT: Final = re.compile("(?<=[-+\\d\N{MINUS SIGN}])\3\2(?=\\d)")
_RAISED_MARK: Final = re.compile("[\2\3]")
_STRUCK: Final = re.compile(r"\x05(\s*)([^\x05\x06]*?)(\s*)\x06")
_OFF: Final = ("0", "false", "off", "none")


class _Walk(NamedTuple):
    """Tells what an element shows; names of elements are those without their namespace.

    ``prefixes`` are those of Word's styles of headings and lists, ``notes`` its notes. Pages end at breaks
    that the author made where they are not ``is_laid_out``. Texts stand between elements where they are
    ``is_mixed``, as in OpenDocument, else in elements of their own. ``objects`` are formulas, charts and
    inserted files, by what refers to them, ``raised`` the styles of OpenDocument that stand above the line,
    ``struck`` those with a line through their text. ``links`` are addresses, by Word's ids for them.
    """

    prefixes: Mapping[str, str] = {}
    notes: Mapping[tuple[str, str], Element] = {}
    is_laid_out: bool = True
    is_mixed: bool = False
    objects: Mapping[str, str] = {}
    raised: Collection[str] = ()
    struck: Collection[str] = ()
    links: Mapping[str, str] = {}

    def text(self, element: Element, inside: bool = False) -> str:
        kind = _name(element)
        if kind in _NOT_SHOWN:
            return ""
        if kind == "docPr" and (described := _described(element)):
            return f"{_GAP}{described}{_GAP}"
        # Of Word, it says what docPr has said.
        if kind == "cNvPr" and "presentationml" in element.tag and (described := _described(element)):
            return f"{described}\n"
        if kind == "br" and not self.is_laid_out and _attribute(element, "type") == "page":
            return "\f"
        if kind in _MARKS:
            return _MARKS[kind]
        if kind == "t":
            return element.text or ""
        if kind == "sym":
            return _symbol(_attribute(element, "font"), int(_attribute(element, "char") or "0", 16))
        if kind == "s":
            return " " * min(int(_attribute(element, "c") or 1), 1_000)
        if kind == "ddList":
            shown = int(_value(element, "{*}result", _value(element, "{*}default", "0")))
            return next((_attribute(each, "val") for each in element.findall("{*}listEntry")[shown:]), "")
        if kind in ("footnoteReference", "endnoteReference"):
            note = self.notes.get((kind.removesuffix("Reference"), _attribute(element, "id")))
            return "" if note is None else f" ({_line(self.text(note))})"
        if kind == "object" and (part := self.objects.get(_object_name(element))):
            return f"{_GAP}{part}{_GAP}"
        if kind == "textpath":  # WordArt
            return f"{_GAP}{_attribute(element, 'string')}{_GAP}"
        if kind == "altChunk":
            return self.objects.get(_attribute(element, "id"), "")
        if kind in ("chart", "relIds") and (
            part := self.objects.get(_attribute(element, "dm") or _attribute(element, "id"))
        ):
            return f"\n{part}\n"
        if "math}" in element.tag and kind in _SIGNS:
            parts = [self.text(child) for child in element if not _name(child).endswith("Pr")]
            return joined_formula(parts, _SIGNS[kind])
        if element.tag.endswith(("math}nary", "math}sPre", "math}rad")):
            names = ("sub", "sup", "deg", "e")
            found = (element.find(f"{{*}}{name}") for name in names)
            sub, sup, degree, inner = ("" if each is None else self.text(each) for each in found)
            if kind == "rad":
                return root_of(inner, degree)
            limits = joined_formula([_signs(element)[0], sub, sup], "_^")
            return f"{limits} {inner}" if sub or sup else f"{limits}{inner}"
        if "math}" in element.tag and (between := _between(kind, element)):
            parts = [self.text(child) for child in element if _name(child) in ("e", "mr")]
            return self._closed(kind, element, between.join(parts))
        if kind in ("title", "desc") and "svg" in element.tag and not inside:  # of a picture on a slide
            described = _line("".join(element.itertext()))
            return f"{described}\n" if described else ""
        is_paragraph = self.is_mixed and kind in ("p", "h")
        inside = inside or is_paragraph
        parts = [_BLANKS.sub(" ", element.text or "")] if inside else []
        parts = [part.lstrip() for part in parts] if is_paragraph else parts
        for child in element:
            parts += [self.text(child, inside), _BLANKS.sub(" ", child.tail or "") if inside else ""]
        return self._closed(kind, element, "".join(parts))

    def _closed(self, kind: str, element: Element, inner: str) -> str:
        breaks = "\f" * inner.count("\f")
        if kind in ("p", "h"):
            inner = _STRUCK.sub(_with_line_through, inner.replace("\6\5", ""))
            start = "\f" if inner.lstrip(_SPACE).startswith("\f") else ""
            inner = inner.replace("\f", "", 1) if start else inner
            inner = _RAISED_MARK.sub("", _RAISED_NUMBER.sub("^", _RAISED_CUT.sub("", inner)))
            prefix = self._prefix(element)
            inner = inner.rstrip(_SPACE).lstrip(_SPACE if prefix else f"\n{_GAP}")  # of code, blanks stay
            return start + (prefix if inner else "") + inner.replace(_GAP, " ") + "\n"
        if kind in ("r", "span") and inner:
            # Its paragraph joins neighbours: Word cuts a text into several runs.
            click = element.find("{*}rPr/{*}hlinkClick")  # of PowerPoint
            inner = inner if click is None else _linked(inner, self.links.get(_attribute(click, "id"), ""))
            inner = f"\2{inner}\3" if self._is_raised(element) else inner
            return f"\5{inner}\6" if self._is_struck(element) else inner
        if kind in ("hyperlink", "a"):
            return _linked(
                inner, self.links.get(_attribute(element, "id"), "") or _attribute(element, "href")
            )
        if kind == "list-item":
            return f"{element.get(_MARK, '- ')}{inner}" if _has_own_text(element) else inner
        if kind in ("tc", "table-cell", "covered-table-cell"):
            return f" {_cell_text(inner)} |" * _repeated(element, "columns") + breaks
        if kind in ("tr", "table-row"):
            row = _cut_row(inner.replace("\f", ""))
            breaks = max(re.findall("\f+", inner), key=len, default="")  # each cell notes where a page ends
            return breaks + (f"|{row} |\n" * _repeated(element, "rows") if row else "")
        if kind in ("txbxContent", "text-box"):  # stands in the paragraph that it is anchored to
            return f"\n{inner}"
        if kind in ("title", "desc") and "svg" in element.tag:
            return f" {_line(inner)} "
        if kind == "note-body":
            return f" ({_line(inner)})"
        if element.tag.endswith("math}acc"):
            return inner + _signs(element)[0]
        if element.tag.endswith("math}d"):
            begin, end = _signs(element)
            return f"{begin}{inner}{end}"
        if kind == "page" and "drawing" in element.tag:
            return inner.replace("\f", "") + _SLIDE_END
        if kind == "frame" and (role := _attribute(element, "class")):
            title = f"# {_line(inner)}\n" if role == "title" and inner.strip() else inner
            return "" if role in _NOT_OF_A_SLIDE else title
        if kind == "sp":
            role = _place(element).get("type", "")
            body = element.find("{*}txBody") if role in ("title", "ctrTitle") else None
            if body is not None and (title := _line(self.text(body))):
                return f"# {title}\n"
            return "" if role in _NOT_OF_A_SLIDE else inner
        return inner

    def _is_raised(self, run: Element) -> bool:
        own, place = run.find("{*}rPr"), run.find("{*}rPr/{*}vertAlign")
        is_told = place is not None and _attribute(place, "val") == "superscript"
        is_higher = own is not None and own.get("baseline", "-").strip("0%").isdecimal()  # of PowerPoint
        return is_told or is_higher or _attribute(run, "style-name") in self.raised

    def _is_struck(self, run: Element) -> bool:
        own = run.find("{*}rPr")
        is_told = any(_value(own, f"{{*}}{name}", "0") not in _OFF for name in ("strike", "dstrike"))
        is_of_slide = own is not None and own.get("strike", "noStrike") != "noStrike"
        return is_told or is_of_slide or _attribute(run, "style-name") in self.struck

    def _prefix(self, element: Element) -> str:
        if _name(element) == "h":
            return "#" * min(int(_attribute(element, "outline-level") or 1), 6) + " "
        style = element.find("{*}pPr/{*}pStyle")
        prefix = "" if style is None else self.prefixes.get(_attribute(style, "val"), "")
        if prefix.startswith("#"):
            return prefix
        return element.get(_MARK, prefix or ("- " if element.find("{*}pPr/{*}numPr") is not None else ""))


def _linked(inner: str, address: str) -> str:
    """Return a text with its address, but for one in the file, as the lines of a table of contents have."""
    text = inner.strip()
    if not text or not address or address.startswith("#") or "\n" in inner:
        return inner
    return inner.replace(text, f"<{address}>" if text == address else f"[{text}]({address})")


def _with_line_through(struck: re.Match[str]) -> str:
    before, text, behind = struck.groups()
    return f"{before}~~{text}~~{behind}" if text else f"{before}{behind}"


_SYMBOLS: Final[Mapping[str, Mapping[int, str]]] = {
    "symbol": {
        0x22: "∀", 0x24: "∃", 0x27: "∋", 0x40: "≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", 0x5C: "∴", 0x5E: "⊥",
        0x61: "αβχδεφγηιϕκλμνοπθρστυϖωξψζ", 0xA0: "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…",
        0xC0: "ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊",
    },
    "wingdings": {
        0x4A: "☺", 0x4C: "☹", 0x6C: "●", 0x6E: "■□", 0x76: "❖", 0x9F: "•", 0xA7: "▪□", 0xD8: "➢",
        0xDF: "←→↑↓↖↗↙↘", 0xE8: "➔", 0xF0: "⇨", 0xFB: "✗✓☒☑",
    },
}  # fmt: skip
"""What Word's fonts of symbols show for characters in common use, from a first one on."""


def _symbol(font: str, code: int) -> str:
    """Return a character of a font; one of symbols has its own from U+F000 on, which stay where unknown."""
    for first, shown in _SYMBOLS.get(font.lower(), {}).items():
        if 0 <= (code & 0xFF) - first < len(shown):
            return shown[(code & 0xFF) - first]
    return chr(code)


_USUAL_SIGNS: Final = {
    "nary": {"chr": "∫", "endChr": ""},
    "sPre": {"chr": "", "endChr": ""},
    "acc": {"chr": "\u0302", "endChr": ""},
    "d": {"begChr": "(", "endChr": ")"},
}


def _between(kind: str, formula: Element) -> str:
    """Return what stands between the cells of a matrix or its rows, lines, or parts in brackets."""
    told = formula.find("*/{*}sepChr") if kind == "d" else None
    usual = {"mr": ", ", "m": "; ", "eqArr": "; ", "d": "|"}.get(kind, "")
    return usual if told is None else _attribute(told, "val")


def _signs(formula: Element) -> tuple[str, str]:
    """Return the sign of a sum or accent, or brackets; Word has its own where a formula tells none."""
    usual = _USUAL_SIGNS[_name(formula)]
    told = ((formula.find(f"*/{{*}}{name}"), sign) for name, sign in usual.items())
    begin, end = (sign if each is None else _attribute(each, "val") for each, sign in told)
    return begin, end


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _attribute(element: Element, name: str) -> str:
    """Return an attribute in whatever namespace it stands, empty where there is none."""
    return next((value for key, value in element.items() if key.rpartition("}")[2] == name), "")


def _described(picture: Element) -> str:
    """Return a picture's alternative text; the name of its file is none."""
    text = _line(picture.get("descr", ""))
    return "" if _PICTURE_FILE.fullmatch(text) else text


def _line(text: str) -> str:
    return " ".join(text.split())


def _repeated(element: Element, what: str) -> int:
    """Return how often OpenDocument shows a cell or row that it has once."""
    return min(int(_attribute(element, f"number-{what}-repeated") or 1), MAX_REPEATED)


def _cell_text(text: str) -> str:
    return BAR.sub("\4", _line(text))


def _cut_row(row: str) -> str:
    """Return a row without the empty cells at its end, with a backslash before each bar that ends no cell."""
    return row.rstrip(" |").replace("\4", r"\|")


class WordFormat(PagedFormat):
    """Reads Word; pages are those that Word last laid out, or end at the author's breaks where it did not."""

    suffixes = (".docx", ".docm", ".dotx")
    kinds = (ZIP,)

    @override
    def open(self, path: str) -> Opened:
        archive = _Archive(path)
        main = archive.part("officeDocument") or "word/document.xml"
        notes = {
            (kind, _attribute(note, "id")): note
            for kind in ("footnote", "endnote")
            if (name := archive.part(f"{kind}s", main))
            for note in archive.xml(name)
        }
        styles_name, numbers = archive.part("styles", main), archive.found(archive.part("numbering", main))
        styles = archive.xml(styles_name) if styles_name else Element("none")
        document = archive.xml(main)
        _require_root(document, "document")
        _number_paragraphs(document, numbers, styles)
        is_laid_out = document.find(".//{*}lastRenderedPageBreak") is not None
        inserted = {key: name for key, (kind, name) in archive.related(main).items() if kind == "aFChunk"}
        texts = {
            key: text for key, name in inserted.items() if (text := _inserted(archive, name)) is not None
        }
        drawn = {key: name for key, (kind, name) in archive.related(main).items() if kind in _DRAWN}
        texts |= {key: _drawn(archive.xml(name)) for key, name in drawn.items()}
        walk = _Walk(_prefixes(styles), notes, is_laid_out, objects=texts, links=archive.links(main))
        title = archive.title(archive.part("core-properties"))
        pages: list[Page] = [*walk.text(document).split("\f")]
        shown = (_attribute(each, "id") for each in document.iterfind(".//{*}altChunk"))
        if unread := [inserted.get(key, key) for key in shown if key not in texts]:
            pages.append(ValueError(f"files that are inserted are not read: {', '.join(unread)[:200]}"))
        return Opened(title, pages)


def _inserted(archive: _Archive, name: str) -> str | None:
    """Return the text of a file that a document of Word shows at a place, None where it cannot be read."""
    is_html = name.lower().endswith((".html", ".htm", ".xhtml"))
    if not is_html and not name.lower().endswith((".mht", ".mhtml")):
        return None
    try:
        raw = archive.read(name)
        if is_html:
            return f"{converted(raw, is_page=False).text}\n"
        bodies = _bodies(email.message_from_bytes(raw, policy=email.policy.default))
    except (LookupError, ValueError, RecursionError, BadZipFile):
        return None
    return "".join(f"{body.text}\n" for body in bodies)


def _prefixes(styles: Element) -> dict[str, str]:
    """Return what stands before a paragraph of each style, also by the style that it is based on."""
    prefixes = dict[str, str]()
    for style in styles.iterfind("{*}style"):
        names = {_name(child): _attribute(child, "val") for child in style}
        prefix = prefixes.get(names.get("basedOn", ""), "")
        if found := _HEADING.fullmatch(names.get("name", "")):
            prefix = "#" * min(int(found[1] or 1), 6) + " "
        elif not prefix and _value(style, "{*}pPr/{*}numPr/{*}numId", "0") != "0":
            prefix = "- "  # a level alone, as of Word's subtitles, is of no list
        prefixes[_attribute(style, "styleId")] = prefix
    return prefixes


def _count(counts: dict[int, int], level: int, start: int) -> str:
    """Return the mark of the next item of a list on a level; lists within it begin again."""
    for deeper in [each for each in counts if each > level]:
        del counts[deeper]
    counts[level] = counts.get(level, start - 1) + 1
    return f"{counts[level]}. "


def _value(element: Element | None, path: str, default: str = "") -> str:
    found = None if element is None else element.find(path)
    return default if found is None else _attribute(found, "val")


def _number_paragraphs(document: Element, numbering: Element, styles: Element) -> None:
    """Mark the paragraphs of Word's numbered lists; lists of one definition go on where none says a start."""
    definitions = {_attribute(each, "abstractNumId"): each for each in numbering.iterfind("{*}abstractNum")}
    lists = {_attribute(each, "numId"): each for each in numbering.iterfind("{*}num")}
    of_styles = dict[str, tuple[str, str]]()  # the list and level of each
    for style in styles.iterfind("{*}style"):
        place = "{*}pPr/{*}numPr/{*}"
        number, level = of_styles.get(_value(style, "{*}basedOn"), ("", ""))
        of_styles[_attribute(style, "styleId")] = (
            _value(style, f"{place}numId", number),
            _value(style, f"{place}ilvl", level),
        )
    counts, begun = dict[str, dict[int, int]](), set[tuple[str, int]]()
    for paragraph in _shown_paragraphs(document):
        own = paragraph.find("{*}pPr")
        style = _value(own, "{*}pStyle")
        number, told = of_styles.get(style, ("", ""))
        number, told = _value(own, "{*}numPr/{*}numId", number), _value(own, "{*}numPr/{*}ilvl", told)
        definition = definitions.get(name := _value(lists.get(number), "{*}abstractNumId"))
        if number and (linked := _value(definition, "{*}numStyleLink")):
            name = _value(lists.get(of_styles.get(linked, ("", ""))[0]), "{*}abstractNumId")
            definition = definitions.get(name)
        if number == "0":
            paragraph.set(_MARK, "")
        if definition is None:
            continue
        levels = {_attribute(each, "ilvl"): each for each in definition.iterfind("{*}lvl")}
        of_style = (key for key, each in levels.items() if style and _value(each, "{*}pStyle") == style)
        level = told or next(of_style, "0")
        changed = {_attribute(each, "ilvl"): each for each in lists[number].iterfind("{*}lvlOverride")}.get(
            level
        )
        own_level = None if changed is None else changed.find("{*}lvl")
        shown = levels.get(level) if own_level is None else own_level
        counted, start = counts.setdefault(name, {}), _value(shown, "{*}start", "1")
        restart = _value(changed, "{*}startOverride")
        if restart and (number, int(level)) not in begun:
            counted.pop(int(level), None)
        begun.add((number, int(level)))
        mark = _count(counted, int(level), int(restart or start or 1))
        is_numbered = _value(shown, "{*}numFmt", "decimal") not in ("bullet", "none")
        paragraph.set(_MARK, mark if is_numbered else "- ")


def _shown_paragraphs(element: Element) -> Iterator[Element]:
    """Yield the paragraphs of Word whose ends no tracked change deleted."""
    for child in element:
        if _name(child) in _NOT_SHOWN:
            continue
        is_gone = any(
            child.find(f"{{*}}pPr/{{*}}rPr/{{*}}{kind}") is not None for kind in ("del", "moveFrom")
        )
        if _name(child) == "p" and not is_gone:
            yield child
        yield from _shown_paragraphs(child)


class PowerPointFormat(PagedFormat):
    """Reads PowerPoint: texts of shapes in their order, then those of diagrams, charts and notes."""

    suffixes = (".pptx", ".pptm", ".ppsx")
    kinds = (ZIP,)
    unit = "slide"

    @override
    def open(self, path: str) -> Opened:
        archive = _Archive(path)
        main = archive.part("officeDocument") or "ppt/presentation.xml"
        parts = archive.related(main)
        shown = archive.xml(main)
        _require_root(shown, "presentation")
        slides = shown.findall("{*}sldIdLst/{*}sldId")
        ids = [next(value for key, value in each.items() if key.endswith("}id")) for each in slides]
        title = archive.title(archive.part("core-properties"))
        styles = cache(partial(_list_styles, archive))  # slides share a layout
        return Opened(title, (partial(_slide, archive, styles, parts.get(each, ("", ""))[1]) for each in ids))


class _ListStyles(NamedTuple):
    """What tells of a slide's lists beside it: its layout, by the places of shapes, and their master."""

    of_layout: Mapping[str, Element | None]
    usual: Element | None


def _list_styles(archive: _Archive, layout: str) -> _ListStyles:
    shapes = archive.found(layout).iterfind(".//{*}sp")
    of_layout = {_place(each).get("idx", "0"): each.find("{*}txBody/{*}lstStyle") for each in shapes}
    master = archive.found(archive.part("slideMaster", layout))
    return _ListStyles(of_layout, master.find("{*}txStyles/{*}bodyStyle"))


def _slide(archive: _Archive, styles: Callable[[str], _ListStyles], name: str) -> str:
    slide, others = archive.xml(name), (*_DRAWN, "notesSlide")
    _mark_bullets(slide, styles(archive.part("slideLayout", name) or ""))
    parts = [part for kind, part in archive.related(name).values() if kind in others]
    texts = [
        _drawn(slide, archive.links(name)),
        *(_drawn(archive.xml(part), archive.links(part)) for part in parts),
    ]
    if not any(texts) and slide.find(".//{*}pic") is not None:
        raise PageWithoutText(_WITHOUT_TEXT)
    return "\n\n".join(filter(None, texts))


_BULLETS: Final = ("buNone", "buChar", "buBlip", "buAutoNum")


def _mark_bullets(slide: Element, beside: _ListStyles) -> None:
    """Mark the items of lists of a slide; it, its shape, its layout and the master may tell which are."""
    for shape in slide.iterfind(".//{*}sp"):
        place, styles = _place(shape), [shape.find("{*}txBody/{*}lstStyle")]
        if _name(place) == "ph" and place.get("type", "obj") in ("obj", "body"):
            styles += [beside.of_layout.get(place.get("idx", "0")), beside.usual]
        counts = dict[int, int]()
        for paragraph in shape.iterfind("{*}txBody/{*}p"):
            own = paragraph.find("{*}pPr")
            level = 0 if own is None else int(own.get("lvl", "0"))
            told = (None if each is None else each.find(f"{{*}}lvl{level + 1}pPr") for each in styles)
            bullets = (
                bullet
                for each in (own, *told)
                if each is not None
                for bullet in each
                if _name(bullet) in _BULLETS
            )
            bullet = next(bullets, None)
            if bullet is None or not "".join(paragraph.itertext()).strip():
                continue
            if _name(bullet) == "buAutoNum":
                paragraph.set(_MARK, _count(counts, level, int(bullet.get("startAt", "1"))))
            else:
                counts = {each: count for each, count in counts.items() if each < level}
                paragraph.set(_MARK, "" if _name(bullet) == "buNone" else "- ")


def _place(shape: Element) -> Element:
    """Return what tells which shape of the layout one fills, if it does."""
    place = shape.find("{*}nvSpPr/{*}nvPr/{*}ph")
    return Element("none") if place is None else place


MAX_COPIED_BYTES: Final = 64 << 20
"""How large the texts of a workbook may be that is copied for its errors such as #N/A."""
_ENCRYPTED: Final = "EncryptedPackage".encode("utf-16-le")
"""What a workbook has that is kept with a password."""
MAX_CELLS: Final = 1 << 23
"""How many cells a sheet may span before its empty rows and columns are left out."""
_SHEET: Final = re.compile(r"xl/worksheets/[^/]*\.xml|content\.xml")
_DIMENSION: Final = re.compile(rb'<(?:\w+:)?dimension ref="[A-Z]+\d+:([A-Z]+)(\d+)"')
_CELL: Final = re.compile(rb'(<(?:\w+:)?c\s(?:[^<>]*\s)?r=")([A-Z]{1,3})(\d+)')
_ERROR: Final = re.compile(rb'(<(?:\w+:)?c\s[^<>]*\bt=)"e"')
_FORMULA_END: Final = re.compile(rb"f>(?:<(?:\w+:)?v(?:\s*/>|></(?:\w+:)?v>))?</(?:\w+:)?c>")
_FORMULA: Final = re.compile(
    rb"<((?:\w+:)?)c(\s[^<>]*)?><\1f(?:\s[^<>]*)?>([^<]+)</\1f>(?:<\1v(?:\s*/>|></\1v>))?</\1c>"
)
"""A cell whose value its program did not store, as libraries do that write workbooks."""
_CELL_TYPE: Final = re.compile(rb'\st="(\w+)"')
_OLD_FORMULA: Final = re.compile(rb"\x06\0(..).{6}(.{8}).{6}(..)", re.DOTALL)
"""A cell of BIFF with a formula: the length of the record, the value, and the length of the formula."""
_DURATION: Final = re.compile(rb'office:value-type="time" office:time-value="PT(\d+)H(\d+)M(\d+)[^"]*"')
_MANY_DIGITS: Final = re.compile(rb'[>"]-?\d{16}')
_LONG_NUMBER: Final = re.compile(
    rb'(<(?:\w+:)?c(?:\s+(?!t=)[\w:]+="[^"]*")*)(?:\st="n")?((?:\s[^<>]*)?><(?:\w+:)?v>-?\d{16,}<)'
    rb'|office:value-type="float" office:value="(-?\d{16,})"'
)
"""A whole number whose digits are stored one by one, of which a float would keep the first."""
_UNTYPED: Final = re.compile(rb"<table:table-cell(?![^<>]*value-type)(?=[^<>]*[^/<>]>|>)")
"""A cell of OpenDocument that does not say of which type it is; programs show its text."""
_COLUMNS: Final = ["".join(each) for size in (1, 2, 3) for each in product(ascii_uppercase, repeat=size)]


_DRAWN: Final = ("diagramData", "chart")


def _drawn(part: Element, links: Mapping[str, str] | None = None) -> str:
    return f"{_Walk(links=links or {}).text(part)}{_series(part)}".strip()


def _series(chart: Element) -> str:
    """Return what a chart shows, a line a series: its name, and its values with their names."""
    lines: list[str] = []
    for series in chart.iterfind(".//{*}ser"):
        name, names, values = (
            [each.text or "" for each in series.iterfind(f"{{*}}{kind}//{{*}}v")]
            for kind in ("tx", "cat", "val")
        )
        shown = (" ".join(filter(None, pair)) for pair in zip_longest(names, values))
        lines.append(f"{' '.join(name)}: {', '.join(shown)}\n")
    return "".join(lines)


class ExcelFormat(PagedFormat):
    """Reads sheets of Excel and OpenDocument, with what formulas gave when the file was saved."""

    suffixes = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")
    kinds = (ZIP, OLD_OFFICE)
    unit = "sheet"
    package = "python_calamine"

    @override
    def open(self, path: str) -> Opened:
        import python_calamine

        file, title = cast("Any", path), ""
        if is_zipfile(path):
            archive = _Archive(path)
            title = archive.title(archive.part("core-properties") or "meta.xml")
            names = filter(_SHEET.fullmatch, archive.namelist())
            with_errors = archive.unpacked <= MAX_COPIED_BYTES
            sheets = {
                name: shown
                for name in names
                if (shown := _for_calamine(sheet := archive.read(name), with_errors)) != sheet
            }
            if sheets:
                file = io.BytesIO()
                with ZipFile(file, "w") as copy:
                    for name in archive.namelist():
                        if name.endswith((*_TEXTS, "mimetype")):
                            copy.writestr(name, sheets.get(name) or archive.read(name))
                file.seek(0)
        try:
            book = python_calamine.load_workbook(file)
        except python_calamine.CalamineError:  # it takes the name of a path for its kind
            raw = Path(path).read_bytes()
            if _ENCRYPTED in raw:
                raise UnreadableError("it is encrypted; save it without a password") from None
            book = python_calamine.load_workbook(io.BytesIO(raw))
        pages: list[Page] = [partial(_sheet, book, each.name) for each in book.sheets_metadata]
        if file is path and (num_formulas := _unstored(Path(path).read_bytes())):
            lost = f"the values of all its formulas, {num_formulas:,}, are empty, so they may never have been"
            pages.append(ValueError(f"{lost} computed; open it in a program for sheets and save it"))
        return Opened(title, pages)


def _unstored(raw: bytes) -> int:
    """Count the formulas of a `.xls` whose values are all empty, as of a program that stores none.

    Some empty ones among others are what their formulas came to.
    """
    values = [value for size, value, own in _OLD_FORMULA.findall(raw) if _int(own) == _int(size) - 22]
    are_empty = all(value[:1] == b"\3" and value[6:] == b"\xff\xff" for value in values)
    return len(values) if are_empty else 0


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _for_calamine(sheet: bytes, with_errors: bool) -> bytes:
    """Return a sheet with texts of cells that calamine would leave out, and few empty cells.

    Such are errors such as #N/A, formulas without a value, and cells of OpenDocument without a type. calamine
    makes a cell of all between the first and the last, so empty rows and columns go where there are many.
    """
    if with_errors:
        sheet = _ERROR.sub(rb'\1"str"', sheet) if b't="e"' in sheet else sheet
        sheet = _FORMULA.sub(_as_text, sheet) if _FORMULA_END.search(sheet) else sheet
        sheet = _LONG_NUMBER.sub(_as_digits, sheet) if _MANY_DIGITS.search(sheet) else sheet
        sheet = _UNTYPED.sub(rb'<table:table-cell office:value-type="string"', sheet)
        sheet = _DURATION.sub(rb'office:value-type="string" office:string-value="\1:\2:\3"', sheet)
    places = {letters: place for place, letters in enumerate(_COLUMNS)}
    told = _DIMENSION.search(sheet, 0, 1 << 12)
    if told and (places.get(told[1].decode(), MAX_CELLS) + 1) * int(told[2]) <= MAX_CELLS:
        return sheet
    used = {(found[2].decode(), int(found[3])) for found in _CELL.finditer(sheet)}
    rows, columns = (
        sorted({row for _, row in used}),
        sorted({column for column, _ in used}, key=places.__getitem__),
    )
    if not used or rows[-1] * (places[columns[-1]] + 1) <= MAX_CELLS:
        return sheet
    row_of = {row: place for place, row in enumerate(rows, 1)}
    column_of = dict(zip(columns, _COLUMNS, strict=False))
    return _CELL.sub(
        lambda found: found[1] + f"{column_of[found[2].decode()]}{row_of[int(found[3])]}".encode(), sheet
    )


def _as_digits(cell: re.Match[bytes]) -> bytes:
    shown = b'office:value-type="string" office:string-value="%b"'
    return shown % cell[3] if cell[3] else b'%b t="str"%b' % cell.groups()[:2]


def _as_text(cell: re.Match[bytes]) -> bytes:
    """Return a cell that shows its formula; one whose formula gave a text without letters stays."""
    prefix, attributes, formula = cell[1], cell[2] or b"", cell[3]
    told = _CELL_TYPE.search(attributes)
    if told and told[1] == b"str":
        return cell[0]
    attributes = _CELL_TYPE.sub(b"", attributes)
    return b'<%bc%b t="str"><%bv>=%b</%bv></%bc>' % (prefix, attributes, prefix, formula, prefix, prefix)


def _sheet(book: Any, name: str) -> str:
    rows = ([_cell(value) for value in row] for row in book.get_sheet_by_name(name).iter_rows())
    lines = "\n".join(f"| {line} |" for row in rows if (line := _cut_row(" | ".join(row))))
    return f"# {name}\n\n{lines}" if lines else ""


MAX_WHOLE: Final = 1e21
"""Larger numbers are written with an exponent."""


def _cell(value: object) -> str:
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) < MAX_WHOLE  # and has zeros behind what a float keeps
        return f"{Decimal(str(value)):.0f}" if is_whole else f"{value:.15g}"
    if isinstance(value, timedelta):
        minutes, seconds = divmod(round(value.total_seconds()), 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
    if isinstance(value, datetime | date):
        return value.isoformat().removesuffix("T00:00:00")
    return _cell_text(str(value))


_HIGHER: Final = re.compile("super|[1-9]")


class OpenDocumentFormat(PagedFormat):
    """Reads texts of OpenDocument; pages are those of the last layout, and one where none is noted."""

    suffixes = (".odt", ".ott")
    kinds = (ZIP,)

    @override
    def open(self, path: str) -> Opened:
        archive = _Archive(path)
        manifest = "META-INF/manifest.xml"
        if manifest in archive.namelist() and b"encryption-data" in archive.read(manifest):
            raise UnreadableError("it is encrypted; save it without a password")
        content = archive.xml("content.xml")
        _number_items(content, archive.found("styles.xml"))
        names = {_object_name(each) for each in content.iterfind(".//{*}object")}
        objects, damaged = dict[str, str](), list[str]()
        for name in sorted(names):
            if f"{name}/content.xml" in archive.namelist():
                try:
                    objects[name] = _object(archive.xml(f"{name}/content.xml"))
                except ET.ParseError:
                    damaged.append(name)
        for frame in content.iterfind(".//{*}frame"):
            is_read = any(objects.get(_object_name(each)) for each in frame)
            for told in [*frame.findall("{*}title"), *frame.findall("{*}desc")] if is_read else ():
                if len("".join(told.itertext()).split()) < 2:  # of programs, such as `formula`
                    frame.remove(told)
        shown = {
            _attribute(style, "name"): own
            for style in content.iterfind(".//{*}style")
            if (own := style.find("{*}text-properties")) is not None
        }
        raised = {name for name, own in shown.items() if _HIGHER.match(_attribute(own, "text-position"))}
        lines = {name: _attribute(own, "text-line-through-style") for name, own in shown.items()}
        struck = {name for name, line in lines.items() if line and line not in _OFF}
        walk = _Walk(is_mixed=True, objects=objects, raised=raised, struck=struck)
        pages: list[Page] = [*walk.text(content).removesuffix(_SLIDE_END).split("\f")]
        if damaged:
            shown = ", ".join(damaged)[:200]
            pages.append(ValueError(f"formulas or charts cannot be parsed, so they are missing: {shown}"))
        return Opened(archive.title("meta.xml"), pages)


def _has_own_text(item: Element) -> bool:
    """Whether an item of a list holds more than a list."""
    return any(_name(child) not in ("list", "soft-page-break") for child in item)


def _number_items(content: Element, styles: Element) -> None:
    """Mark the items of numbered lists of OpenDocument."""
    named = chain.from_iterable(each.iterfind(".//{*}list-style") for each in (styles, content))
    starts = {
        (_attribute(style, "name"), int(_attribute(level, "level") or 1)): int(
            _attribute(level, "start-value") or 1
        )
        for style in named
        for level in style.iterfind("{*}list-level-style-number")
        if _attribute(level, "num-format")
    }
    of_style, of_id = dict[str, dict[int, int]](), dict[str, dict[int, int]]()

    def number(element: Element, style: str, level: int, counts: dict[int, int]) -> None:
        for child in element:
            if _name(child) in _NOT_SHOWN:
                continue
            if _name(child) == "list":
                name = _attribute(child, "style-name") or style
                inner = counts
                if level == 0:
                    other, goes_on = _attribute(child, "continue-list"), None
                    if other or _attribute(child, "continue-numbering") == "true":
                        goes_on = of_id.get(other) if other else of_style.get(name)
                    inner = {} if goes_on is None else goes_on
                    of_style[name] = of_id[_attribute(child, "id")] = inner
                number(child, name, level + 1, inner)
                continue
            if _name(child) == "list-item" and _has_own_text(child):
                if told := _attribute(child, "start-value"):
                    counts[level] = int(told) - 1
                mark = _count(counts, level, starts.get((style, level), 1))
                is_heading = child.find("{*}h") is not None  # whose numbers are left out
                child.set(_MARK, "" if is_heading else mark if (style, level) in starts else "- ")
            number(child, style, level, counts)

    number(content, "", 0, {})


class OpenPresentationFormat(OpenDocumentFormat):
    """Reads presentations of OpenDocument: texts of each slide in their order, then its notes."""

    suffixes = (".odp", ".otp")
    unit = "slide"


def _object_name(element: Element) -> str:
    return _attribute(element, "href").strip("./")


def _object(part: Element) -> str:
    """Return the text of a formula or chart."""
    if _name(part) != "math":
        return _line(_Walk(is_mixed=True).text(part))
    for each in part.iter():
        each.tag = _name(each)
    return _line(str(converted(ET.tostring(part, "unicode"), is_page=False).text))


_ENCRYPTION: Final = "META-INF/encryption.xml"
_OF_FONTS: Final = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
"""How fonts are made useless outside of a book whose text anyone may read."""


class EpubFormat(PagedFormat):
    """Reads e-books, each chapter as a page of HTML."""

    suffixes = (".epub",)
    kinds = (ZIP,)
    unit = "chapter"

    @override
    def open(self, path: str) -> Opened:
        archive = _Archive(path)
        if _ENCRYPTION in archive.namelist():
            parts = archive.xml(_ENCRYPTION).iterfind(".//{*}EncryptedData")
            methods = [each.find("{*}EncryptionMethod") for each in parts]
            if any(each is None or each.get("Algorithm") not in _OF_FONTS for each in methods):
                raise UnreadableError("it is protected against copying")
        root = archive.xml("META-INF/container.xml").find(".//{*}rootfile")
        name = archive.named("content.opf" if root is None else root.get("full-path", ""))
        book = archive.xml(name)
        files = {each.get("id"): each.get("href", "") for each in book.iterfind("{*}manifest/{*}item")}
        chapters = [files.get(each.get("idref"), "") for each in book.iterfind("{*}spine/{*}itemref")]
        folder = posixpath.dirname(name)
        paths = (archive.named(posixpath.normpath(posixpath.join(folder, each))) for each in chapters)
        return Opened(archive.title(name), (partial(_chapter, archive, each) for each in paths))


def _chapter(archive: _Archive, name: str) -> str:
    return str(converted(archive.read(name), is_page=False).text)


_RTF_TITLE: Final = re.compile(r"\{\\title( [^{}]*)\}")
_RTF_NOTE: Final = re.compile(r"\{\s*(\\\*)?\\footnote\b")
"""What striprtf leaves out with all that is in it."""
_RTF_DELETED: Final = re.compile(r"(?<!\\)(\{(?:\\(?!deleted|rtf)[a-z]+-?\d*\s*)*+)(?=\\deleted(?![a-z0]))")
"""The start of a group that a tracked change deleted, behind which a sign makes programs pass it over."""
_RTF_CELL_END: Final = re.compile(r"\\par\b(?=[\s}]*\\cell\b)")
"""The end of a last paragraph in a cell, which would be one of its line."""
_RTF_ENCODING: Final = re.compile(r"\\ansicpg(\d+)")
_RTF_MACHINES: Final = {"\\mac": "mac_roman", "\\pca": "cp850", "\\pc": "cp437"}
_RTF_PAIRS: Final = ("932", "936", "949", "950")
"""Encodings of two bytes a letter, of which the second may stand as the sign that it is in ASCII."""
_RTF_PAIR: Final = r"(\\'[%s][0-9a-f])(?:\\'[0-9a-f]{2}|([@-\[\]-z|~]))"
_RTF_RAISED: Final = re.compile(r"\\super(?:\\[a-z]+-?\d*)*\s+(?=[-+]?\d)")
_RTF_ESCAPED: Final = re.compile(r"\\[\\{}]")


class RtfFormat(PagedFormat):
    """Reads RTF, which tells no pages."""

    suffixes = (".rtf",)
    kinds = (RTF,)
    package = "striprtf"
    has_headings = False

    @override
    def open(self, path: str) -> Opened:
        from striprtf.striprtf import rtf_to_text

        raw = Path(path).read_bytes()
        if not raw.startswith(b"{\\rtf"):
            raise UnreadableError("it does not begin as RTF does")
        text = _RTF_CELL_END.sub("", decoded(raw, "cp1252"))
        text = _RTF_DELETED.sub(r"\1\\*", _RTF_NOTE.sub("{", text))
        *_, title = None, *_RTF_TITLE.finditer(text)  # of two, the second is in Unicode
        encoding = _RTF_ENCODING.search(text)
        if encoding and encoding[1] in _RTF_PAIRS:
            # From a0 to df, Shift_JIS has letters of one byte.
            pairs = re.compile(_RTF_PAIR % ("89ef" if encoding[1] == "932" else "89a-f"), re.IGNORECASE)
            text = pairs.sub(lambda pair: f"{pair[1]}\\'{ord(pair[2]):02x}" if pair[2] else pair[0], text)
        of_machine = next((name for word, name in _RTF_MACHINES.items() if word in text[:64]), "cp1252")
        head = f"{{\\rtf1{encoding[0] if encoding else ''}"
        shown = rtf_to_text(f"{head}{title[1]}}}", of_machine, "replace") if title else ""
        text = _RTF_RAISED.sub(r"\g<0>^", text)
        pages: list[Page] = [partial(rtf_to_text, text, of_machine, "replace")]
        plain = _RTF_ESCAPED.sub("", text)
        if plain.count("{") > plain.count("}") and "\\bin" not in plain:
            pages.append(_cut("its last group"))
        return Opened(_given_title(shown), pages)


def _cut(what: str) -> ValueError:
    return ValueError(f"the file ends before {what} does, so the rest is missing")


_FIELDS: Final = ("From", "To", "Cc", "Date", "Subject")


class MailFormat(PagedFormat):
    """Reads e-mail: who wrote when to whom, the text, and the names of attachments."""

    suffixes = (".eml",)
    kinds = (TEXT,)
    has_headings = False

    @override
    def open(self, path: str) -> Opened:
        return _mail(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).lstrip())[1]


def _mail(raw: bytes) -> tuple[EmailMessage, Opened]:
    message = email.message_from_bytes(raw, policy=email.policy.default)
    if not message.keys():
        raise UnreadableError("it has no header of a mail")
    bodies = _bodies(message)
    kinds = ("multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime")
    if not bodies and any(part.get_content_type() in kinds for part in message.walk()):
        raise UnreadableError("it is encrypted, or signed as a whole; save it decrypted")
    pages: list[Page] = ["\n\n".join([_head(message, bodies), *(body.text.strip() for body in bodies)])]
    faults = (each for part in message.walk() for each in part.defects)
    if any(isinstance(each, CloseBoundaryNotFoundDefect | InvalidBase64LengthDefect) for each in faults):
        pages.append(_cut("its last part"))
    heads = (_header(part, name)[1] for part in message.walk() for name in _FIELDS)
    encodings = dict.fromkeys(filter(None, [*heads, *(body.encoding for body in bodies)]))
    return message, Opened(_header(message, "Subject")[0], pages, ", ".join(encodings))


_FIRST_LINE: Final = re.compile(rb"From \S+ .*\d\d:\d\d")
"""What stands before each mail of a box, whose first field is in the next line."""
_FIELD_LINE: Final = re.compile(rb"[!-9;-~]+[ \t]*:")
_QUOTED_LINE: Final = re.compile(rb"^>(>*From )", re.MULTILINE)
MAX_MAIL_BYTES: Final = 256 << 20
"""How large a mail of a box may be, with its attachments."""


class MailboxFormat(Format):
    """Reads boxes of e-mail (mbox): each mail is a document, whose id is that of its message."""

    suffixes = (".mbox",)
    kinds = (TEXT,)
    is_compressible = True

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns of a document, and count the mails."""
        return Footer(schema=DOCUMENT_SCHEMA, num_rows=sum(1 for _ in _mails_of(file)))

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield a row a mail; one that was cut is told of."""

        def rows() -> Iterator[tuple[Mapping[str, str] | str, int] | Undecoded]:
            for number, raw in enumerate(_mails_of(file), 1):
                if len(raw) > MAX_MAIL_BYTES:
                    yield f"mail {number} must have at most {MAX_MAIL_BYTES >> 20} MiB, got more", 0
                    continue
                try:
                    message, opened = _mail(_QUOTED_LINE.sub(rb"\1", raw))
                except (ValueError, LookupError, RecursionError) as error:
                    yield f"mail {number} cannot be read: {damage_of(error)}", 0
                    continue
                text, *lost = opened.pages
                doc_id = _header(message, "Message-ID")[0].strip("<>") or f"{file.doc_id(config)}#{number}"
                row = {
                    "id": doc_id,
                    "title": opened.title,
                    "text": str(text),
                    ENCODING.decode(): opened.encoding,
                }
                yield {name: cleaned(value) for name, value in row.items()}, len(raw)
                yield from (Undecoded(num_rows=0, detail=f"mail {number}: {each}") for each in lost)

        def batch(some: Sequence[Mapping[str, str] | str]) -> pa.RecordBatch:
            guesses = (row[ENCODING.decode()] for row in some if not isinstance(row, str))
            told = next(filter(None, guesses), "")
            made = batch_of(some, types, role_names(config))
            return made.replace_schema_metadata({ENCODING: told} if told else None)

        yield from batched(file, rows(), batch, config)


def _mails_of(file: SourceFile) -> Iterator[bytes]:
    """Yield each mail of a box, of one that is too large only so much as to tell."""
    lines, num_bytes = list[bytes](), 0
    with file.open_stream() as stream, io.BufferedReader(cast("io.RawIOBase", stream)) as box:
        for line, following in pairwise(chain(iter(partial(box.readline, 1 << 20), b""), [b""])):
            is_first = _FIRST_LINE.match(line) is not None
            if is_first and (not num_bytes or _FIELD_LINE.match(following)):
                if lines:
                    yield b"".join(lines)
                lines, num_bytes = [], 1
            elif num_bytes:
                if num_bytes <= MAX_MAIL_BYTES + 1:
                    lines.append(line)
                num_bytes += len(line)
            elif line.strip():
                raise ValueError("it does not begin with a line `From …`, as a box of mail does")
    if not num_bytes:
        raise ValueError("it holds no mail")
    yield b"".join(lines)


_WORD: Final = re.compile(r"=\?([^?*\s]+)(?:\*[^?\s]*)?\?([BbQq])\?([^?]*)\?=")
"""An encoded word of a header: its encoding, how it is written, and what is written."""
_ADDRESSES: Final = re.compile(r"\]\([^()\s]*\)|https?://\S+")


class _Body(NamedTuple):
    """A text of a mail that is shown, and its encoding as :func:`text_of` tells it."""

    part: EmailMessage
    text: str
    encoding: str = ""


def _head(message: EmailMessage, bodies: Sequence[_Body]) -> str:
    shown = [body.part for body in bodies]
    names = [
        part.get_filename() or part.get_content_type()
        for part in message.walk()
        if not (part.is_multipart() or part in shown)
        and (part.is_attachment() or part.get_content_type() not in ("text/plain", "text/html"))
    ]
    names += filter(None, (_header(part, "Subject")[0] for part in message.walk() if part is not message))
    fields = ((name, _header(message, name)[0]) for name in _FIELDS)
    head = [f"{name}: {value}" for name, value in fields if value]
    return "\n".join([*head, *([f"Attachments: {', '.join(names)}"] if names else [])])


def _header(part: EmailMessage, name: str) -> tuple[str, str]:
    """Return a header and its encoding, as :func:`text_of` does.

    Letters that are neither ASCII nor marked are of the encoding of the text; `email` would leave them out.
    Neighbouring words of one encoding are decoded together: programs cut them within a letter.
    """
    found = next((value for key, value in part.raw_items() if key.lower() == name.lower()), "")
    raw = str(found).encode("utf-8", "surrogateescape")
    is_plain = raw.isascii() and b"\x1b" not in raw
    charsets = filter(None, (each.get_content_charset() for each in part.walk()))
    text, encoding = text_of(raw, "" if is_plain else next(charsets, ""))
    encodings = [encoding]

    def words(found: re.Match[str]) -> str:
        texts = list[str]()
        for charset, group in groupby(_WORD.findall(found[0]), key=lambda word: word[0].lower()):
            raw = b"".join(
                _of_base64(payload.encode()) if kind in "Bb" else quopri.decodestring(payload, header=True)
                for _, kind, payload in group
            )
            text, encoding = text_of(raw, charset)
            texts.append(text)
            encodings.append(encoding)
        return "".join(texts)

    text = re.sub(rf"{_WORD.pattern}(?:\s+{_WORD.pattern})*", words, text)
    return " ".join(text.split()), next(filter(None, encodings), "")


def _bodies(part: EmailMessage) -> list[_Body]:
    """Return the texts of a part that are shown, of alternatives the plain one, else the first.

    HTML is shown as well where the plain text only says that there is one.
    """
    mails = ("rfc822", "global", "partial", "external-body")
    if part.get_content_maintype() == "message" and part.get_content_subtype() not in mails:
        # Fields that a program wrote, as of a mail that could not be delivered.
        blocks = cast("list[EmailMessage]", part.get_payload())
        fields = ("\n".join(f"{name}: {_header(each, name)[0]}" for name in each) for each in blocks)
        return [_Body(part, "\n\n".join(fields))]
    if not part.is_multipart():
        # Of several parts without a boundary between them, all is one text.
        is_shown = part.get_content_maintype() in ("text", "multipart") and not part.is_attachment()
        body = _decoded(part) if is_shown else None
        return [body] if body and body.text.strip() else []
    found = [bodies for each in part.iter_parts() if (bodies := _bodies(cast(EmailMessage, each)))]
    if part.get_content_type() == "multipart/alternative":
        found.sort(key=lambda bodies: bodies[0].part.get_content_subtype() != "plain")
        found[1:] = [each for each in found[1:] if _is_another_text(each, found[0])][:1]
    return [*chain.from_iterable(found)]


def _is_another_text(html: Sequence[_Body], shown: Sequence[_Body]) -> bool:
    """Whether most words of HTML are not in another form of it."""
    own, others = (
        {word for body in bodies for word in re.findall(r"\w+", _ADDRESSES.sub(" ", body.text.lower()))}
        for bodies in (html, shown)
    )
    return html[0].part.get_content_subtype() == "html" and 2 * len(own & others) < len(own)


def _decoded(part: EmailMessage) -> _Body:
    raw = cast(bytes, part.get_payload(decode=True))
    if any(isinstance(each, InvalidBase64LengthDefect) for each in part.defects):  # and it is not decoded
        raw = _of_base64(raw)
    text, encoding = text_of(raw, part.get_content_charset() or "")
    if part.get_content_subtype() == "html":
        text = str(converted(text, is_page=False).text)
    elif part.get_param("format") == "flowed":
        text = _unflowed(text, "" if part.get_param("delsp") == "yes" else " ")
    return _Body(part, text, encoding)


def _of_base64(raw: bytes) -> bytes:
    """Decode what may have been cut anywhere."""
    letters = re.sub(rb"[^A-Za-z0-9+/]", b"", raw)
    return base64.b64decode(letters[: len(letters) - (len(letters) % 4 == 1)] + b"==")


def _unflowed(text: str, between: str) -> str:
    """Return lines that end with a blank together with those of as many quote marks that they go on in."""
    lines, before = list[str](), None
    for line in text.splitlines():
        own = line.lstrip(">")
        marks, own = line[: len(line) - len(own)], own.removeprefix(" ")
        if before == marks and own not in ("", "-- "):
            lines[-1] = f"{lines[-1][:-1]}{between}{own}"
        else:
            lines.append(f"{marks} {own}" if marks else own)
        before = marks if own.endswith(" ") and own != "-- " else None
    return "\n".join(lines)


_COLOURS: Final = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
"""What colours a text on a terminal, or makes a link of it there."""
_BARE_OBJECT: Final = re.compile(r"<[\w.]+(?: [^<>]*)?>")
"""An object that says no more of itself as a text than of which class it is."""


class NotebookFormat(PagedFormat):
    """Reads notebooks of Jupyter: text, code, and what code printed."""

    suffixes = (".ipynb",)
    kinds = (TEXT,)
    unit = "cell"

    @override
    def open(self, path: str) -> Opened:
        book = json.loads(Path(path).read_bytes())
        if not (isinstance(book, dict) and {"cells", "worksheets"} & book.keys()):
            raise UnreadableError("it has no cells, as a notebook has")
        cells = (
            book["cells"]
            if "cells" in book
            else [each for sheet in book["worksheets"] for each in sheet["cells"]]
        )
        language = book.get("metadata", {}).get("kernelspec", {}).get("language", "")
        return Opened("", _notebook_cells(cells, language))


def _notebook_cells(cells: Sequence[Mapping[str, Any]], language: str) -> Iterator[Page]:
    damaged = list[str]()

    def text(number: int, cell: Mapping[str, Any]) -> str:
        text = _notebook_cell(cell, language)
        if "\0" in text or not is_utf8(text):
            damaged.append(str(number))
        return text

    for number, cell in enumerate(cells, 1):
        yield partial(text, number, cell)
    if damaged:
        marks = "NUL characters, which are left out, or halves of characters, which became U+FFFD"
        yield ValueError(f"{marks}, stand in cell {', '.join(damaged)}")


def _notebook_cell(cell: Mapping[str, Any], language: str) -> str:
    source = "".join(cell.get("source", cell.get("input", "")))
    if cell["cell_type"] == "heading":
        source = f"{'#' * int(cell.get('level', 1))} {source}"
    if cell["cell_type"] != "code":
        return without_pictures(source)
    outputs = ["".join(_shown(each)) for each in cell.get("outputs", [])]
    printed = _COLOURS.sub("", "".join(each.rstrip() + "\n" for each in outputs if each))
    fences = [f"```{language}\n{source.rstrip()}\n```", f"```\n{printed}```" if printed else ""]
    return "\n\n".join(filter(None, fences))


def _shown(output: Mapping[str, Any]) -> str | Sequence[str]:
    if "ename" in output:
        return f"{output['ename']}: {output.get('evalue', '')}"
    data = output.get("data") or {}
    plain = "".join(output.get("text") or data.get("text/plain") or "")
    if plain and not _BARE_OBJECT.fullmatch(plain.strip()):
        return plain
    if shown := data.get("text/markdown"):
        return shown
    if shown := str(converted("".join(data.get("text/html", "")), is_page=False).text):
        return shown
    if "application/json" in data:
        return json.dumps(data["application/json"], ensure_ascii=False)
    others = (kind for kind in data if kind.startswith("text/") and kind not in ("text/plain", "text/html"))
    return next((data[kind] for kind in others), plain)


_CODING: Final = re.compile(rb"(?:[^\n]*\n)?[ \t]*(?:#|//|%|--|/\*)[^\n]*?coding[:=][ \t]*([-\w.]+)")
"""What a comment in one of the first two lines says that code is written in, for Python and editors."""


class CodeFormat(TextFormat):
    """Reads source code as it is; its title is the name of the file.

    JavaScript is not among it: folders of HTML pages hold much that programs made.
    """

    suffixes = (
        *(".py", ".pyi", ".ts", ".tsx", ".jsx", ".mjs", ".java", ".kt", ".kts", ".scala", ".groovy", ".cs"),
        *(".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".go", ".rs", ".zig", ".swift", ".m", ".rb"),
        *(".php", ".pl", ".pm", ".lua", ".r", ".jl", ".dart", ".ex", ".exs", ".erl", ".hs", ".ml", ".clj"),
        *(".fs", ".vb", ".sh", ".bash", ".ps1", ".sql", ".proto", ".tf"),
    )

    @override
    def document(self, file: SourceFile, raw: bytes) -> TextDocument:
        told = _CODING.match(raw)
        text, encoding = text_of(raw, told[1].decode() if told else "")
        return TextDocument(PurePosixPath(file.path).name, text, encoding=encoding)
