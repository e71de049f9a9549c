"""Documents of pages: their texts, where pages begin, and what a damaged one costs."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import fsspec
import pyarrow as pa
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus import file_identity
from cairn.pipeline.corpus.formats import documents, paged
from cairn.pipeline.corpus.formats.documents import ExcelFormat, _Walk
from cairn.pipeline.corpus.formats.format import PAGE_BREAK
from cairn.pipeline.corpus.quarantine import examples, rejected_rows
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.errors import SourceError, install_command
from cairn.pipeline.search.hits import page_of
from cairn.pipeline.types import Highlight
from docx import Document
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from openpyxl import Workbook
from pptx import Presentation
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

from tests.corpus.checked_rows import CONFIG, checked, read
from tests.corpus.published import Published

PIXEL = b"q 99 0 0 99 0 0 cm BI /W 1 /H 1 /BPC 8 /CS /G ID x EI Q"
BOMB = b"/F0 Do"
FORMS = 9
OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)
XML_ENCRYPTION = "http://www.w3.org/2001/04/xmlenc#"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


@pytest.fixture
def own_children() -> Iterator[None]:
    """Have children started under the test's settings, and none of them outlive it."""
    paged.end_children()
    yield
    paged.end_children()


def page(*lines: str) -> bytes:
    shown = b" ".join(b"(%s) Tj 0 -20 Td" % line.encode("cp1252") for line in lines)
    return b"BT /H 12 Tf 72 700 Td %s ET" % shown


FONT = (
    b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica"
    b"/Encoding<</BaseEncoding/WinAnsiEncoding/Differences[1/uni2010]>>%s>>"
)


def pdf(
    path: Path, *pages: bytes | None, title: str = "", trailer: bytes = b"", font: bytes = FONT % b""
) -> Path:
    """Write a PDF of pages with these contents; None is a page that is not there."""
    kids = b" ".join(b"%d 0 R" % (10 + number) for number in range(len(pages)))
    objects = {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
        3: font,
        4: b"<</Title(%s)>>" % title.encode(),
    }
    for number, content in enumerate(pages):
        if content is not None:
            objects[10 + number] = (
                b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents %d 0 R"
                b"/Resources<</Font<</H 3 0 R>>/XObject<</F0 3000 0 R>>>>>>" % (5_000 + number)
            )
            objects[5_000 + number] = _stream(b"", content)
    for depth in range(FORMS):  # each draws the next one ten times
        resources = b"/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</F %d 0 R>>>>" % (3_001 + depth)
        objects[3_000 + depth] = _stream(resources, b"/F Do " * 10)
    objects[3_000 + FORMS] = _stream(b"/Subtype/Form/BBox[0 0 9 9]", b"0 0 9 9 re f")
    written, places = b"%PDF-1.7\n", list[bytes]()
    for number, body in sorted(objects.items()):
        places.append(b"%d 1\n%010d 00000 n \n" % (number, len(written)))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    end = b"trailer<</Size 9999/Root 1 0 R/Info 4 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (trailer, len(written))
    path.write_bytes(written + b"xref\n0 1\n0000000000 65535 f \n" + b"".join(places) + end)
    return path


def _stream(entries: bytes, content: bytes) -> bytes:
    return b"<<%s/Length %d>>stream\n%s\nendstream" % (entries, len(content), content)


def packed(path: Path, parts: Mapping[str, str | bytes]) -> Path:
    """Write an archive of these parts."""
    with zipfile.ZipFile(path, "w") as made:
        for name, content in parts.items():
            made.writestr(name, content)
    return path


def word_of(path: Path, body: str, **parts: tuple[str, str, str | bytes]) -> Path:
    """Write a document of Word with the parts that its body refers to: the kind, name and content of each."""
    links = "".join(
        f'<r Id="{key}" Type="{RELATIONS}/{kind}" Target="{name}"/>' for key, (kind, name, _) in parts.items()
    )
    contents = {f"word/{name}": content for _, name, content in parts.values()}
    document = {"word/document.xml": f"<document>{body}</document>"}
    return packed(path, {**document, "word/_rels/document.xml.rels": f"<c>{links}</c>", **contents})


def open_text(path: Path, content: str, **parts: str) -> Path:
    """Write a text of OpenDocument."""
    names = 'xmlns:t="t" xmlns:d="drawing:1.0" xmlns:v="svg" xmlns:x="x" xmlns:m="math"'
    shown = {"content": content, **parts}
    return packed(path, {f"{name}.xml": f"<c {names}>{part}</c>" for name, part in shown.items()})


def word(path: Path) -> Path:
    made = Document()
    made.core_properties.title = "Handbook"
    made.add_heading("Leave", 1)
    made.add_paragraph("Ask early.")
    made.add_paragraph("by mail", style="List Bullet")
    inner = "<w:sdtContent><w:p><w:r><w:t>Controlled</w:t></w:r></w:p></w:sdtContent>"
    control = f"<w:sdt {nsdecls('w')}>{inner}</w:sdt>"
    made.element.body.insert(3, parse_xml(control))
    anchored = (
        "<w:r><w:pict><w:txbxContent><w:p><w:r><w:t>Boxed</w:t></w:r></w:p></w:txbxContent></w:pict></w:r>"
    )
    made.paragraphs[0]._p.append(parse_xml(anchored.replace("<w:r>", f"<w:r {nsdecls('w')}>", 1)))
    deleted = f"<w:del {nsdecls('w')}><w:r><w:t>gone</w:t></w:r></w:del>"
    made.paragraphs[1]._p.append(parse_xml(deleted))
    sign = '<w:r><w:t>Or</w:t><w:ptab/><w:sym w:font="Wingdings" w:char="F0E0"/></w:r>'
    alpha = '<w:r><w:sym w:font="Symbol" w:char="F061"/><w:sym w:font="Own" w:char="E001"/></w:r>'
    made.element.body.insert(4, parse_xml(f"<w:p {nsdecls('w')}>{sign}{alpha}</w:p>"))
    table = made.add_table(2, 2)
    for place, cell in enumerate(cell for row in table.rows for cell in row.cells):
        cell.text = f"cell {place}"
    second = made.add_paragraph("Second page.")
    made.add_picture(io.BytesIO(_gif()))
    (shown,) = made.element.body.iterfind(".//{*}docPr")
    shown.set("descr", "A palm\n on a beach")
    second.runs[0]._r.insert(0, parse_xml(f"<w:lastRenderedPageBreak {nsdecls('w')}/>"))
    made.add_paragraph("Plain", "Subtitle")  # whose style tells the level of a list, and no list
    for address, text in (("https://a.example/b", "the plan"), ("https://c.example", "https://c.example")):
        key = made.part.relate_to(address, f"{RELATIONS}/hyperlink", is_external=True)
        link = f'<w:hyperlink {nsdecls("w", "r")} r:id="{key}"><w:r><w:t>{text}</w:t></w:r></w:hyperlink>'
        made.add_paragraph()._p.append(parse_xml(link))
    made.save(str(path))
    return path


def slides(path: Path) -> Path:
    made = Presentation()
    for title, body in (("Plans", "Grow"), ("Risks", "Rain")):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = body
    sales = CategoryChartData()
    sales.categories = ["East", "West"]
    sales.add_series("Sales", (19.2, 21))
    made.slides[0].shapes.add_chart(XL_CHART_TYPE.PIE, Inches(1), Inches(1), Inches(1), Inches(1), sales)
    made.slides[0].shapes.title._element.nvSpPr.cNvPr.set("descr", "Title")
    made.slides[1].notes_slide.notes_text_frame.text = "Say it slowly."
    picture = made.slides.add_slide(made.slide_layouts[6])
    picture.shapes.add_picture(io.BytesIO(_gif()), Inches(1), Inches(1))
    told = made.slides.add_slide(made.slide_layouts[6]).shapes.add_picture(io.BytesIO(_gif()), 0, 0)
    told._element.nvPicPr.cNvPr.set("descr", "Microsoft Word with a map")
    made.save(str(path))
    return path


def _gif() -> bytes:
    start = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff,\x00\x00\x00\x00"
    return start + b"\x01\x00\x01\x00\x00\x02\x02D\x01\x00;"


def sheets(path: Path) -> Path:
    made = Workbook()
    made.active.title = "People"
    for row in (["name", "age"], ["Ann", 41], [None, None], ["Bo", 3.5], ["Id", 4006381333931001]):
        made.active.append(row)
    made.active.append(["S", "#N/A"])
    made.active.cell(6, 2).data_type = "e"
    made.create_sheet("Towns").append(["Oslo"])
    made.properties.title = "Census"
    made.save(path)
    return path


def open_document(path: Path) -> Path:
    frame = "<d:frame><d:text-box><t:p>Boxed</t:p></d:text-box><v:desc>A leaf</v:desc></d:frame>"
    content = (
        '<t:h t:outline-level="2">Trees</t:h>'
        '<t:p>An <t:span>old</t:span><t:s t:c="2"/>oak<t:note>'
        "<t:note-citation>1</t:note-citation><t:note-body><t:p>in May</t:p></t:note-body></t:note>.</t:p>"
        "<t:list><t:list-item><t:p>ash</t:p></t:list-item><t:list-item><t:p>-5 °C</t:p><t:list><t:list-item>"
        "<t:p>frost</t:p></t:list-item></t:list></t:list-item></t:list><t:p><t:soft-page-break/>Last.</t:p>"
        f"<t:p>See{frame}there</t:p>"
    )
    return open_text(path, content, meta="<d:title>Wood</d:title>")


def presentation(path: Path) -> Path:
    def slide(*frames: tuple[str, str], more: str = "") -> str:
        shown = (
            f'<d:frame x:class="{role}"><d:text-box><t:p>{text}</t:p></d:text-box></d:frame>'
            for role, text in frames
        )
        return f"<d:page>{''.join(shown)}{more}</d:page>"

    notes = "<x:notes><d:frame><d:text-box><t:p>Say it slowly.</t:p></d:text-box></d:frame></x:notes>"
    first = slide(("title", "Plans"), ("outline", "Grow"), ("page-number", "1"), more=notes)
    last = slide(more="<d:frame><d:image/><v:title>A leaf</v:title></d:frame>" + slide(("", "Last"))[8:-9])
    return open_text(path, f"{first}{slide()}{last}")


def book(path: Path, algorithm: str = "http://www.idpf.org/2008/embedding") -> Path:
    package = (
        '<package xmlns:d="urn:d"><metadata><d:title>Tales</d:title></metadata>'
        '<manifest><item id="a" href="a%20b.xhtml"/><item id="b" href="b.xhtml#one"/></manifest>'
        '<spine><itemref idref="b"/><itemref idref="a"/></spine></package>'
    )
    method = f'<x:EncryptionMethod xmlns:x="{XML_ENCRYPTION}" Algorithm="{algorithm}"/>'
    parts = {
        "META-INF/encryption.xml": f"<encryption><EncryptedData>{method}</EncryptedData></encryption>",
        "META-INF/container.xml": '<c><rootfile full-path="in%20a/book.opf"/></c>',
        "in a/book.opf": package,
        "in a/b.xhtml": "<html><body><h1>One</h1><p>Once.</p><aside>Note</aside></body></html>",
        "in a/a b.xhtml": "<html><body><h1>Two</h1><p>Twice.</p></body></html>",
    }
    return packed(path, parts)


def mail(path: Path) -> Path:
    made = EmailMessage()
    made["From"], made["Subject"] = "ann@example.org", "Lunch"
    made.set_content("At noon.\n")
    made.add_alternative("<p>At <b>noon</b>.</p>", subtype="html")
    made.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="menu.pdf")
    path.write_bytes(made.as_bytes())
    return path


def notebook(path: Path) -> Path:
    printed = {"output_type": "stream", "text": ["2\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Sums\n", "of two"]},
        {"cell_type": "code", "source": "print(1 + 1)", "outputs": [printed]},
        {"cell_type": "code", "source": "1/0", "outputs": [{"ename": "ZeroDivisionError", "evalue": "by 0"}]},
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {"kernelspec": {"language": "python"}}}))
    return path


def rich(path: Path) -> Path:
    path.write_bytes(
        rb"{\rtf1\ansi{\fonttbl\f0 Arial;}{\info{\title Caf\'e9s}}\f0 Caf\'e9 \b open\b0"
        rb"{\footnote late}\par Daily.}"
    )
    return path


def code(path: Path) -> Path:
    path.write_text("def f():\n    return 1\n")
    return path


def counted(path: Path) -> Path:
    return pdf(path, page("One", "two"), b"", page("Three"), title="Count")


TABLE = "| cell 0 | cell 1 |\n| cell 2 | cell 3 |"
HEAD = "From: ann@example.org\nSubject: Lunch\nAttachments: menu.pdf"
WORD_PAGE = f"# Leave\nBoxed\nAsk early.\n- by mail\nControlled\nOr\t→\u03b1\ue001\n{TABLE}"
LINKS = ["[the plan](https://a.example/b)", "<https://c.example>"]
SALES = "# Plans\n- Grow\n\nSales: East 19.2, West 21"
PEOPLE = "| name | age |\n| Ann | 41 |\n| Bo | 3.5 |\n| Id | 4006381333931001 |\n| S | #N/A |"
TREES = "## Trees\nAn old  oak (in May).\n- ash\n- -5 °C\n- frost"
CELL_OF = "```python\n%s\n```\n\n```\n%s\n```"
DIVIDED = "ZeroDivisionError: by 0"
FILES: Sequence[tuple[str, Callable[[Path], Path], str, list[str]]] = [
    ("a.pdf", counted, "Count", ["One\ntwo", "", "Three"]),
    ("a.docx", word, "Handbook", [WORD_PAGE, "Second page.\nA palm on a beach\nPlain\n" + "\n".join(LINKS)]),
    (
        "a.pptx",
        slides,
        "Plans",
        [SALES, "# Risks\n- Rain\n\nSay it slowly.", "", "Microsoft Word with a map"],
    ),
    ("a.xlsx", sheets, "Census", [f"# People\n\n{PEOPLE}", "# Towns\n\n| Oslo |"]),
    ("a.odt", open_document, "Wood", [TREES, "Last.\nSee\nBoxed\n A leaf there"]),
    ("a.odp", presentation, "Plans", ["# Plans\n\nGrow\n\nSay it slowly.", "", "A leaf\n\nLast"]),
    ("a.epub", book, "Tales", ["# One\n\nOnce.\n\nNote", "# Two\n\nTwice."]),
    ("a.eml", mail, "Lunch", [f"{HEAD}\n\nAt noon."]),
    (
        "a.ipynb",
        notebook,
        "Sums",
        ["# Sums\nof two", CELL_OF % ("print(1 + 1)", "2"), CELL_OF % ("1/0", DIVIDED)],
    ),
    ("a.rtf", rich, "Cafés", ["Café open late\nDaily."]),
    ("a.py", code, "a.py", ["def f():\n    return 1"]),
]


@pytest.mark.parametrize(("name", "make", "title", "pages"), FILES, ids=[each[0] for each in FILES])
def test_a_document_has_the_text_of_each_of_its_pages(
    tmp_path: Path, name: str, make: Callable[[Path], Path], title: str, pages: list[str]
) -> None:
    [row], _ = read(make(tmp_path / name))
    assert (row["doc_id"], row["title"]) == (name, title)
    assert row["text"].rstrip("\n") == PAGE_BREAK.join(pages).rstrip("\n")


PAGES = PAGE_BREAK.join(["first ", "second", "", "last"])
HEADED = "# One {#one}\n\n# Two ##\n\n```\n# no heading\n```\nfound\n# Three"


@pytest.mark.parametrize(
    ("source", "text", "passage", "place"),
    [
        ("a.pdf", PAGES, "\nsecond\n\f", "page 2"),  # white space around a passage is not its own
        ("A.PPTX", PAGES, "first \n\f", "slide 1"),
        ("a.xlsx", PAGES, "second\n\f\n\n\f\nlast", "sheets 2-4"),
        ("a.epub", PAGES, "\nlast", "chapter 4"),
        ("a.docx", PAGES, "\nlast", "page 4"),
        ("memory", PAGES, "first \n\f\nsecond\n\f", "pages 1-2"),
        ("a.py", PAGES, "\nsecond\n\f", "line 3"),
        ("a.md", HEADED, "found", "section Two"),
        ("a.docx", HEADED, "found", "section Two"),
        ("a.xlsx", HEADED, "found", "sheet Two"),
        ("a.txt", HEADED, "found", "line 8"),
        ("a.pdf", HEADED, "found", "page 1"),
        ("a.csv", HEADED, "found", None),
        ("a.html", "no heading", "heading", "line 1"),
        ("a.md", HEADED, HEADED, "sections One - Three"),
        ("a.md", f"before\n{HEADED}", "before\n# One", "section One"),
    ],
)
def test_a_passage_is_on_the_pages_of_its_first_and_last_character_or_below_its_heading(
    source: str, text: str, passage: str, place: str | None
) -> None:
    start = text.index(passage)
    assert page_of(text, start, start + len(passage), source) == place


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (("an exam-", "ple"), "an example"),
        (("an exam\1", "ple \1"), "an example \N{HYPHEN}"),
        (("EXAM-", "PLES"), "EXAMPLES"),
        (("state-of-the-", "art"), "state-of-the-art"),
        (("U-", "Boot"), "U-Boot"),
        (("-Nach-", "teile"), "-Nachteile"),
        (("\x10e\x1ecient\x11",), "“efficient”"),
    ],
)
def test_words_of_pdf_are_whole_and_keep_hyphens_of_their_own(
    tmp_path: Path, lines: Sequence[str], word: str
) -> None:
    [row], _ = read(pdf(tmp_path / "a.pdf", page(*lines)))
    assert row["text"] == word


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (b"Sch) 0 (\250) 450 (on", "Schön"),  # as pdfTeX moves back to what stands below
        (b"Cap met)] TJ 2.5 2 Td [(\264", "Ćap met"),
        (b"Cap met)] TJ 2.5 -40 Td [(\264", "Cap met\n\xb4"),
        (b"Caf) 0 (e) 450 (\264) -100 ( au lait", "Café au lait"),
        (b"Fran) 0 (\270) 450 (cois", "François"),
        (b"d\264accord, it\264s, `a` and x`y", "d\xb4accord, it\xb4s, `a` and x`y"),
        (b"\210 Alpha", "• Alpha"),
    ],
)
def test_an_accent_of_pdf_belongs_to_the_letter_that_it_stands_over(
    tmp_path: Path, shown: bytes, text: str
) -> None:
    font = (FONT % b"").replace(b"/uni2010", b"/uni2010 136/uni0088")
    content = b"BT /H 12 Tf 72 700 Td [(%s)] TJ ET" % shown
    [row], _ = read(pdf(tmp_path / "a.pdf", content, font=font))
    assert row["text"].rstrip() == text


HEBREW = "אבגדהוזחט"
HEBREW_FONT = (FONT % (b"/FirstChar 0/LastChar 255/Widths[%s]" % (b"500 " * 256))).replace(
    b"]>>", b" 192%s]>>" % "".join(f"/uni{ord(letter):04X}" for letter in HEBREW).encode(), 1
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (
            ".Windows 11 (ab) חז ]הו[ 15/03/2024 גד (1,200) אב",
            "בא (1,200) דג 15/03/2024 [וה] זח Windows 11 (ab).",
        ),
        ("17% זח 3-4 דג (בא\n[הג] דב", "אב) גד 3-4 חז 17%\nבד [גה]"),
        ("one two אב three", "one two בא three"),
        ("one two דג בא, three", "one two אב גד, three"),
        ("1,200\nab אב\nהג (ab)\nדה", "1,200\nבא ab\n(ab) גה\nהד"),
    ],
)
def test_a_line_of_pdf_from_right_to_left_is_read_in_its_order(tmp_path: Path, shown: str, text: str) -> None:
    letters = str.maketrans(dict(zip(HEBREW, map(chr, range(192, 201)), strict=True)))
    lines = page(*shown.translate(letters).replace("(", "\\(").replace(")", "\\)").split("\n"))
    [row], _ = read(pdf(tmp_path / "a.pdf", lines, font=HEBREW_FONT))
    assert row["text"] == text


@pytest.mark.parametrize(
    ("name", "gap", "text"),
    [
        ("0930093E", 250, "राम"),
        ("0930093E", 800, "रा म"),
        ("0928", 250, "न म"),  # what is one letter has no vowel behind it
        ("0928 093E", 250, "ना म"),  # a glyph of its own
    ],
)
def test_a_blank_that_pdfium_sees_for_a_vowel_of_india_is_left_out(
    tmp_path: Path, name: str, gap: int, text: str
) -> None:
    first, *own = name.split()
    told = f"<c0> <{first}> <c1> <092E> <69> <{own[0] if own else '0020'}>"
    characters = (
        b"1 begincodespacerange <00> <ff> endcodespacerange 3 beginbfchar %s endbfchar" % told.encode()
    )
    widths = b"/FirstChar 0/LastChar 255/Widths[%s]" % (b"500 " * 256)
    content = b"BT /H 12 Tf 72 700 Td [(\xc0%s) -%d (\xc1)] TJ ET" % (b"i" * len(own), gap)
    font = FONT % (b"/ToUnicode 5001 0 R" + widths)  # which the second page has as its content
    [row], _ = read(pdf(tmp_path / "a.pdf", content, characters, font=font))
    assert row["text"].split("\n")[0] == text


def found(text: str, **weights: float) -> list[Highlight]:
    """Return highlights of words of a text with their weights."""
    starts = {word: text.index(word) for word in weights}
    return [
        Highlight(start_char=start, end_char=start + len(word), weight=weights[word], query_words=())
        for word, start in starts.items()
    ]


@pytest.mark.parametrize(
    ("weights", "place"),
    [
        ({}, "pages 1-3"),
        ({"second": 1.0}, "page 2"),
        ({"first": 0.4, "second": 1.0}, "page 2"),
        ({"first": 1.0, "last": 0.8, "end": 0.4}, "page 3"),
        ({"first": 1.0, "second": 1.0}, "pages 1-3"),
        ({"first": 1.0, "second": 0.9, "last": 0.8}, "pages 1-3"),
    ],
)
def test_a_passage_of_several_pages_is_on_the_one_with_most_of_what_was_found(
    weights: dict[str, float], place: str
) -> None:
    text = PAGE_BREAK.join(["first", "second", "last end"])
    assert page_of(text, 0, len(text), "a.pdf", found(text, **weights)) == place
    sections = "# 1\nfirst\n# 2\nsecond\n# 3\nlast end"
    place = place.replace("page", "section").replace("1-3", "1 - 3")
    assert page_of(sections, 0, len(sections), "a.md", found(sections, **weights)) == place
    assert page_of(text, 0, len(text), "a.py", found(text, **weights)) == "lines 1-5"
    sheets = text.replace(" end", "\n# Stock\nend")
    assert page_of(sheets, 0, len(sheets), "a.xlsx", found(sheets, end=1.0)) == "sheet Stock"


def test_the_heading_of_a_passage_is_found_in_linear_time() -> None:
    text = f"# x{' ' * 200_000}y\n\nfound"
    begin = time.process_time()
    assert page_of(text, len(text) - 5, len(text), "a.md") == "section x y"
    assert time.process_time() - begin < 15  # quadratic time: 60


def test_a_document_in_a_store_is_read_from_a_copy(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/shelf/a.pdf", counted(tmp_path / "a.pdf").read_bytes())
    [row], _ = read("memory://shelf")
    assert (row["doc_id"], row["title"]) == ("a.pdf", "Count")


def test_a_sheet_with_a_far_cell_keeps_both_and_takes_no_memory_for_what_is_between(tmp_path: Path) -> None:
    made = Workbook()
    sheet = made.worksheets[0]
    sheet["A1"], sheet["B1"], sheet["XFD1048576"] = "a|b|", 1, "far"
    made.save(tmp_path / "a.xlsx")
    [row], rejected = read(tmp_path)
    assert row["text"] == "# Sheet\n\n| a\\|b\\| | 1 |\n|  |  | far |"
    assert rejected == []


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.eml", b"Subject: a\nContent-Type: multipart/mixed; boundary=B\n\n--B\n\nkept"),
        ("a.rtf", rb"{\rtf1 kept {\b \{ "),
        ("a.eml", b"Subject: a\nContent-Transfer-Encoding: base64\n\na2VwdCB0ZXh0I"),
    ],
)
def test_a_text_that_ends_before_its_parts_do_is_kept_and_told_to_be_cut(
    tmp_path: Path, name: str, raw: bytes
) -> None:
    (tmp_path / name).write_bytes(raw)
    [row], [rejected] = read(tmp_path)
    assert row["text"].endswith(("kept", "kept { ", "kept text")), "no further page"
    assert (rejected["reason"], "the rest is missing" in rejected["detail"]) == ("damaged_page", True)


def _mail(head: str, body: str) -> tuple[str, bytes]:
    return "a.eml", f"Subject: a\nContent-Type: {head}\n\n{body}\n".encode("latin-1")


def _cell(data: object) -> tuple[str, bytes]:
    outputs = [{"output_type": "display_data", "data": data}]
    cell = {"cell_type": "code", "source": "f()", "outputs": outputs}
    return "a.ipynb", json.dumps({"cells": [cell]}).encode()


def _rtf(text: bytes) -> tuple[str, bytes]:
    return "a.rtf", rb"{\rtf1%s}" % text


PARTS = "multipart/mixed; boundary=B"
OTHERS = (
    "--B\nContent-Type: text/html\n\n<p>At <b>noon</b>.\n--B\nContent-Disposition: inline\n\nTo all.\n--B--"
)
EMPTY = "--B\nContent-Type: text/plain\n\n\n--B\nContent-Type: text/html\n\n<p>At noon</p>\n--B--"
INNER = "--B\n\nSee.\n--B\nContent-Type: message/rfc822\n\nSubject: Budget\n\nFour thousand.\n--B--"
STATUS = "Reporting-MTA: dns; mx.example\n\nFinal-Recipient: rfc822; bo@example.org\nStatus: 5.1.1"
REPORT = f"--B\n\nSorry.\n--B\nContent-Type: message/delivery-status\n\n{STATUS}\n\n--B--"
STUB = "--B\n\nSee the HTML.\n--B\nContent-Type: text/html\n\n<p>Prices rise\n--B--"
SAME = "--B\n\nPrices rise.\n--B\nContent-Type: text/html\n\n<p><a href=x>Prices</a> rise.\n--B--"
STRUCK = "<r><rPr><strike/></rPr><t>10 </t></r>"
CELL = "<tc><p><t>a</t><lastRenderedPageBreak/><t>b</t></p></tc>"
BARE = "<pandas.io.formats.style.Styler at 0x7f>"
OUTPUT = "```\nf()\n```\n\n```\n%s\n```"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (_mail(PARTS, OTHERS), "Subject: a\n\nAt **noon**.\n\nTo all."),
        (_mail("multipart/alternative; boundary=B", EMPTY), "Subject: a\n\nAt noon"),
        (_mail("multipart/mixed", "At noon"), "Subject: a\n\nAt noon"),
        (_mail("multipart/alternative; boundary=B", STUB), "Subject: a\n\nSee the HTML.\n\nPrices rise"),
        (_mail("multipart/alternative; boundary=B", SAME), "Subject: a\n\nPrices rise."),
        (("a.eml", b"\xef\xbb\xbf\n\nSubject: a\n\nb"), "Subject: a\n\nb"),
        (
            (
                "a.eml",
                (
                    b"From: =?utf-8?B?Wm/D?= =?utf-8?q?=AB_B?= <z@x>\n"
                    b"Cc: =?utf-8?Q?A b?=\nSubject: =?gb2312?b?6UY=?=\n\nb"
                ),
            ),
            "From: Zoë B <z@x>\nCc: A b\nSubject: 镕\n\nb",
        ),
        (_mail(PARTS, INNER), "Subject: a\nAttachments: Budget\n\nSee.\n\nFour thousand."),
        (_mail("multipart/report; boundary=B", REPORT), f"Subject: a\n\nSorry.\n\n{STATUS}"),
        (
            _mail("text/plain; charset=iso-8859-1", "\x84noön\x93 \x80 \x81"),
            "Subject: a\n\n„noön“ € \x81",
        ),
        (
            _mail("text/plain; format=flowed", "At noon \nor one\n> no \n>thanks\n>> so\n  in\n-- \nAnn"),
            "Subject: a\n\nAt noon or one\n> no thanks\n>> so\n in\n-- \nAnn",
        ),
        (_mail("text/plain; format=flowed; delsp=yes", "after \nnoon"), "Subject: a\n\nafternoon"),
        (_mail("text/calendar; name=a.ics", "x"), "Subject: a\n\nx"),
        (_rtf(rb"\ansi\ansicpg932 \'93\'fa\'96\'7b \'83\'5c\'83t\'83o"), "日本 ソフバ"),
        (_rtf(rb"\ansi\ansicpg932 \'b0\'83t"), "ｰフ"),
        (_rtf(rb"\ansi\ansicpg936 \'e9F\'bb\'f9\'b5t\'cb\'b5\'d6\'ec"), "镕基祎说朱"),
        (
            _rtf(rb"\ansi\ansicpg950 \'a4@\'ad\'d3\'b3\'5c\'a6h\'a5\'5c\'bd\'d2\'aa\'ba\'a5@\'ac\'c9"),
            "一個許多功課的世界",
        ),
        (_rtf(rb" a{\pict\bin4 {{{{}b"), "ab"),
        (_rtf(b"\\trowd{\\pard\\intbl a\\par}\n\\cell{\\pard b\\par c\\par}\\cell\\row d"), "a|b\nc|\nd"),
        (_rtf(b" 10{\\loch\\super\\fs20\n6} 1{\\super st}"), "10^6 1st"),
        (
            _rtf(rb" for {\deleted\revauthdel1 90}{\revised\revauth1 80} a year{\deleted0 !}"),
            "for 80 a year!",
        ),
        (_rtf(rb" a{\rtlch\fcs1 \af0 \deleted\revauthdel1 b{\b c}d}{\b e}"), "ae"),
        (_rtf(rb"\mac Gr\'9a\'a7e"), "Größe"),
        (_rtf(rb"\pca Gr\'94\'e1e"), "Größe"),
        (_cell({"text/latex": ["$x$"]}), OUTPUT % "$x$"),
        (_cell({"text/html": ["<p>a <b>b</b>"]}), OUTPUT % "a **b**"),
        (_cell({"application/json": {"é": 1}}), OUTPUT % '{"é": 1}'),
        (_cell({"text/plain": ["\x1b[31mred\x1b[0m"], "text/html": "<p>x"}), OUTPUT % "red"),
        (_cell({"text/plain": BARE, "text/markdown": ["**a**"]}), OUTPUT % "**a**"),
        (_cell({"text/plain": BARE, "text/html": "<style>p {}</style><p>a <b>b"}), OUTPUT % "a **b**"),
        (_cell({"text/plain": BARE, "text/html": "<script>f()</script>"}), OUTPUT % BARE),
        (_cell({"text/plain": BARE, "text/latex": "$x$"}), OUTPUT % "$x$"),
        (_cell({"text/plain": "\x1b]8;;http://a\x07link\x1b]8;;\x07"}), OUTPUT % "link"),
    ],
)
def test_a_file_is_read_as_its_program_shows_it(tmp_path: Path, file: tuple[str, bytes], text: str) -> None:
    (tmp_path / file[0]).write_bytes(file[1])
    [row], rejected = read(tmp_path)
    assert (row["text"].strip(), rejected) == (text, [])


def raised(text: str) -> str:
    return f'<r><rPr><vertAlign val="superscript"/></rPr><t>{text}</t></r>'


def formula(kind: str, own: str = "", **parts: str) -> str:
    inner = "".join(f"<m:{name}><m:r><m:t>{text}</m:t></m:r></m:{name}>" for name, text in parts.items())
    return f'<m:{kind} xmlns:m="math">{own}{inner}</m:{kind}>'


SUM = '<m:naryPr><m:chr m:val="∑"/></m:naryPr>'
OPEN = '<m:dPr><m:begChr m:val="["/></m:dPr>'
TILDE = '<m:accPr><m:chr m:val="\u0303"/></m:accPr>'
ROW = "<m:mr><m:e><m:t>x</m:t></m:e><m:e/></m:mr>"


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        # Cells that all go over a page are one page further.
        (f"<d><tr>{CELL * 2}</tr><p><t>c</t></p></d>", "\f| a b | a b |\nc\n"),
        # A bar in a cell ends none.
        ("<d><tr><tc><p><t>x</t></p></tc><tc><p><t>a|b|</t></p></tc><tc/></tr></d>", "| x | a\\|b\\| |\n"),
        # Word cuts a number into several runs.
        (f"<p><t>10</t>{raised('-')}{raised('1')}{raised('2')}<t> m</t>{raised('st')}</p>", "10^-12 mst\n"),
        ('<p><t>10</t><r><rPr baseline="30000"/><t>6</t></r></p>', "10^6\n"),
        (f"<p><t>Price </t>{STRUCK * 2}<r><t>20</t></r></p>", "Price ~~10 10~~ 20\n"),
        ("<p><r><rPr><dstrike/></rPr><t>a</t></r></p>", "~~a~~\n"),
        ('<p><r><rPr strike="sngStrike"/><t>a</t></r></p>', "~~a~~\n"),
        ("<d><p><t>    b = 1</t></p><p><tab/><t>c</t></p></d>", "    b = 1\n\tc\n"),
        (
            '<p><t>a </t><ddList><result val="1"/><listEntry val="x"/><listEntry val="y"/></ddList></p>',
            "a y\n",
        ),
        (
            (
                '<table-row number-rows-repeated="2"><table-cell number-columns-repeated="2"><t>a</t>'
                '</table-cell><table-cell number-columns-repeated="9999999"/></table-row>'
            ),
            "| a | a |\n| a | a |\n",
        ),
        # The name of its file describes no picture.
        ('<p><t>a</t><docPr descr="x.png"/><t>b</t><docPr descr="Node.js"/></p>', "ab Node.js\n"),
        (formula("nary", e="x"), "∫x"),
        (formula("nary", SUM, e="x"), "∑x"),
        (formula("nary", sub="i", sup="n", e="a"), "∫_i^n a"),
        (formula("d", e="x"), "(x)"),
        (formula("d", OPEN, e="x"), "[x)"),
        (formula("d", "<m:e><m:t>x</m:t></m:e>", e="x"), "(x|x)"),
        (formula("d", f"<m:e><m:m>{ROW * 2}</m:m></m:e>"), "(x, ; x, )"),
        (formula("rad", e="x"), "sqrt(x)"),
        (formula("rad", deg="3", e="a+b"), "(a+b)^(1/3)"),
        (formula("acc", e="x"), "x\u0302"),
        (formula("acc", TILDE, e="x"), "x\u0303"),
        (formula("f", num="a+b", den="2c"), "(a+b)/(2c)"),
        (formula("sSup", e="(a+b)", sup="n+1"), "(a+b)^(n+1)"),
        (formula("sSubSup", e="x", sub="1", sup="2"), "x_1^2"),
        (formula("sPre", sub="1", sup="2", e="x"), "_1^2 x"),
        (formula("limLow", e="lim", lim="n→0"), "lim_(n→0)"),
    ],
)
def test_elements_show_their_texts(markup: str, shown: str) -> None:
    assert _Walk().text(ET.fromstring(markup)) == shown


@pytest.mark.parametrize(
    ("charset", "encoding", "subject", "read_as"),
    [
        ("windows-1251", "cp1251", "Счёт", None),
        ("iso-8859-8-i", "iso8859_8", "שלום", None),
        ("x-sjis", "cp932", "日本①", None),
        ("windows-874", "cp874", "สวัสดี", None),
        ("", "utf-8", "Öl für die Tür", None),
        ("", "cp1252", "Öl für die Tür", "cp1252"),
        ("", "iso2022_jp", "日本語の文章です。", "iso2022_jp"),
        ("iso-2022-jp", "iso2022_jp", "日本語の文章です。", None),
        ("x-unknown", "cp1252", "Größe", "cp1252"),
        ("utf-8", "utf-8", "Süd\udce9", "utf-8 with U+FFFD for damaged characters"),
    ],
)
def test_a_mail_is_read_in_the_encoding_that_it_is_in_and_told_of_where_that_is_a_guess(
    tmp_path: Path, charset: str, encoding: str, subject: str, read_as: str | None
) -> None:
    head = f"Subject: {subject}\n" + (f"Content-Type: text/plain; charset={charset}\n" if charset else "")
    raw = f"{head}\nUnd: {subject}".encode(encoding, "surrogateescape")
    (tmp_path / "a.eml").write_bytes(raw)
    found = checked(tmp_path)
    shown = subject.replace("\udce9", "\ufffd")
    assert [(row["title"], row["text"]) for row in found.rows] == [
        (shown, f"Subject: {shown}\n\nUnd: {shown}")
    ]
    assert found.encodings == [read_as]


def test_a_header_of_an_undeclared_encoding_is_told_of(tmp_path: Path) -> None:
    text = "From: Jörg <j@x.org>\n\nAt noon."
    (tmp_path / "a.eml").write_bytes(text.encode("cp1252"))
    found = checked(tmp_path)
    assert (found.rows[0]["text"], found.encodings) == (text, ["cp1252"])


@pytest.mark.usefixtures("own_children")
def test_a_reader_that_was_ended_while_it_waited_is_started_again(tmp_path: Path) -> None:
    read(pdf(tmp_path / "a.pdf", page("One")))
    [waiting] = paged._idle
    waiting._process.kill()
    waiting._process.wait()
    [row], rejected = read(tmp_path / "a.pdf")
    assert (row["text"], rejected) == ("One", [])
    assert waiting._process.stdout.closed


def test_errors_stay_in_a_workbook_that_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(sheets(tmp_path / "a.xlsx"))

    def has_error() -> bool:
        return "#N/A" in next(iter(ExcelFormat().open(path).pages))()

    assert has_error()
    monkeypatch.setattr(documents, "MAX_COPIED_BYTES", 1_000)
    assert not has_error()


@pytest.mark.parametrize(
    ("written", "title"),
    [
        (rb" \'cf\'eb\'e0\'ed ", "План"),
        (b" Microsoft Word - a.doc", "a"),
        (b" ", "a"),
        (rb" \'3f\'3f}{\*\ud{\title \u1492\'3f\u1501\'3f}", "הם"),
    ],
)
def test_a_title_of_rtf_is_read_in_its_encoding(tmp_path: Path, written: bytes, title: str) -> None:
    (tmp_path / "a.rtf").write_bytes(rb"{\rtf1\ansi\ansicpg1251{\info{\title%s}}text}" % written)
    [row], _ = read(tmp_path)
    assert row["title"] == title


def test_cells_without_a_stored_value_or_type_keep_what_they_say(tmp_path: Path) -> None:
    made = Workbook()
    made.worksheets[0].append(
        [timedelta(hours=42, seconds=5), 2, "=B1*3", 1234567890123456789, "09007199254740993"]
    )
    made.save(tmp_path / "a.xlsx")
    for name in ("b.xls", "c.ods", "d.xlsb"):  # read as what it is
        (tmp_path / name).write_bytes((tmp_path / "a.xlsx").read_bytes())
    duration = 'office:value-type="time" office:time-value="PT42H00M05S"'
    number = 'office:value-type="float" office:value="9007199254740993"'
    cells = "<table:table-cell><text:p>no type</text:p></table:table-cell>" + "".join(
        f"<table:table-cell {each}/>" for each in (duration, number)
    )
    names = "".join(
        f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for name in ("office", "table", "text")
    )
    table = f'<table:table table:name="S"><table:table-row>{cells}</table:table-row></table:table>'
    sheet = f"<office:body><office:spreadsheet>{table}</office:spreadsheet></office:body>"
    parts = {
        "mimetype": "application/vnd.oasis.opendocument.spreadsheet",
        "META-INF/manifest.xml": "<manifest/>",
        "content.xml": f"<office:document-content{names}>{sheet}</office:document-content>",
    }
    packed(tmp_path / "e.ods", parts)
    rows, rejected = read(tmp_path)
    assert [row["text"].splitlines()[-1] for row in rows] == [
        *["| 42:00:05 | 2 | =B1*3 | 1234567890123457000 | 09007199254740993 |"] * 4,
        "| no type | 42:00:05 | 9007199254740993 |",
    ]
    assert rejected == []


@pytest.mark.parametrize("attributes", ["", ' t="n"', ' t="n" s="1"', ' s="1"'])
def test_a_whole_number_of_a_sheet_keeps_the_digits_that_are_stored(tmp_path: Path, attributes: str) -> None:
    made = Workbook()
    made.worksheets[0].append([1, 2.5])
    made.save(tmp_path / "b.xlsx")
    with (
        zipfile.ZipFile(tmp_path / "b.xlsx") as old,
        zipfile.ZipFile(tmp_path / "a.xlsx", "w") as new,
    ):
        for name in old.namelist():
            cell = f'<c r="A1"{attributes}><v>-9007199254740993</v>'.encode()
            new.writestr(name, old.read(name).replace(b'<c r="A1" t="n"><v>1</v>', cell))
    (tmp_path / "b.xlsx").unlink()
    [row], _ = read(tmp_path)
    assert row["text"].endswith("| -9007199254740993 | 2.5 |")


def test_time_grows_with_the_length_of_a_cell() -> None:
    def seconds(num_attributes: int) -> float:
        begin = time.process_time()
        shown = documents._for_calamine(b"<c%b><c><f>1</f></c>" % (b' t="x"' * num_attributes), True)
        assert shown.endswith(b'<c t="str"><v>=1</v></c>')
        return time.process_time() - begin

    assert seconds(40_000) < 10


def test_formulas_of_xls_are_told_of_where_none_has_a_value() -> None:
    def cell(value: bytes) -> bytes:
        return b"\x06\0" + struct.pack("<H6x8s6xH", 25, value, 3) + b"\x1e\1\0"

    empty, number = cell(b"\3" + bytes(5) + b"\xff\xff"), cell(struct.pack("<d", 6))
    assert [documents._unstored(raw) for raw in (empty * 2, empty + number, b"no formula")] == [2, 0, 0]


STYLED = (
    '<x:style x:name="T"><x:text-properties x:%s/></x:style>'
    '<t:p>10<t:span t:style-name="T">6</t:span> m</t:p>'
)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            ('<t:p>if a:</t:p><t:p>\n  <t:s t:c="4"/>b\n   = 1</t:p><t:p><t:tab/>c</t:p><t:h> <t:s/>D</t:h>'),
            "if a:\n    b = 1\n\tc\n# D",
        ),
        (STYLED % 'text-position="super 58%"', "10^6 m"),
        (STYLED % 'text-line-through-style="solid"', "10~~6~~ m"),
        (STYLED % 'text-line-through-style="none"', "106 m"),
        ('<t:p>by <t:a x:href="https://a.example">plan</t:a></t:p>', "by [plan](https://a.example)"),
        ('<t:p>see <t:a x:href="#b">1</t:a></t:p>', "see 1"),
    ],
)
def test_a_text_of_opendocument_is_read_as_it_is_shown(tmp_path: Path, content: str, text: str) -> None:
    [row], _ = read(open_text(tmp_path / "a.odt", content))
    assert row["text"] == text


def test_numbered_lists_of_word_have_their_numbers(tmp_path: Path) -> None:
    made = Document()
    numbering = made.part.numbering_part.element
    level = '<w:lvl w:ilvl="%d"><w:start w:val="%d"/><w:numFmt w:val="%s"/></w:lvl>'
    levels = "".join(level % each for each in ((0, 1, "decimal"), (1, 3, "lowerLetter"), (2, 1, "bullet")))
    own = f'<w:abstractNum {nsdecls("w")} w:abstractNumId="90">{levels}</w:abstractNum>'
    numbering.insert(0, parse_xml(own))
    anew = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="%d"/></w:lvlOverride>'
    for number, start in ((90, ""), (91, anew % 1), (92, "")):
        told = f'<w:num {nsdecls("w")} w:numId="{number}"><w:abstractNumId w:val="90"/>{start}</w:num>'
        numbering.append(parse_xml(told))
    for text, style, *place in (
        ("a", "List Number"),
        ("b", "List Number 2"),
        ("c", None),
        ("d", "List Number"),
        ("none", "List Number", 0, 0),
        *((text, None, 90, level) for text, level in zip("efghij", (0, 1, 1, 2, 0, 1), strict=True)),
        ("k", None, 91, 0),
        ("l", None, 91, 0),
        ("m", None, 92, 0),
        ("Head", "Heading 1", 92, 0),
        ("n", None, 92, 0),
    ):
        paragraph = made.add_paragraph(text, style)
        if place:
            number, level = place
            told = f'<w:numId w:val="{number}"/><w:ilvl w:val="{level}"/>'
            told = f"<w:numPr {nsdecls('w')}>{told}</w:numPr>"
            paragraph._p.get_or_add_pPr().append(parse_xml(told))
    made.save(str(tmp_path / "a.docx"))
    [row], _ = read(tmp_path)
    lists = "1. a|1. b|c|2. d|none|1. e|3. f|4. g|- h|2. i|3. j|1. k|2. l|3. m|# Head|5. n"
    assert row["text"].split("\n") == lists.split("|")


DRAWING = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'


def test_lists_of_powerpoint_are_marked_as_their_layout_and_they_tell(tmp_path: Path) -> None:
    made = Presentation()
    slide = made.slides.add_slide(made.slide_layouts[4])  # whose names of its two columns have no bullets
    slide.shapes.title.text = "Goals"
    for place, text in (
        (1, "This year"),
        (2, "Grow\nSave\n\nby 20%\nPlain\nthird\nfourth\nMore\nthird"),
        (3, "Next"),
    ):
        slide.placeholders[place].text = text
    box = slide.shapes.add_textbox(0, 0, 0, 0).text_frame
    box.text = "Box"
    link = box.paragraphs[0].add_run()
    link.text, link.hyperlink.address = " plan", "https://example.org"
    _, _, _, by, plain, *counted, _, last = slide.placeholders[2].text_frame.paragraphs
    by.level = 1
    for paragraph, bullet in (
        (plain, "buNone"),
        *((each, 'buAutoNum startAt="3"') for each in (*counted, last)),
    ):
        paragraph._p.get_or_add_pPr().append(parse_xml(f"<a:{bullet} {DRAWING}/>"))
    made.save(str(tmp_path / "a.pptx"))
    assert read(tmp_path)[0][0]["text"] == (
        "# Goals\nThis year\n- Grow\n- Save\n\n- by 20%\nPlain\n3. third\n4. fourth\n- More\n3. third\n"
        "Next\n\nBox [plan](https://example.org)"
    )


def test_numbered_lists_of_opendocument_have_their_numbers(tmp_path: Path) -> None:
    level = '<t:list-level-style-number t:level="%d" x:num-format="%s" t:start-value="%d"/>'
    levels = "".join(level % each for each in ((1, "1", 1), (2, "a", 3), (3, "", 1)))
    numbered = f'<t:list-style x:name="N">{levels}</t:list-style>'

    def items(*texts: str, more: str = "", inner: str = "") -> str:
        shown = [f"<t:list-item><t:p>{text}</t:p></t:list-item>" for text in texts]
        return f"<t:list {more}>{''.join(shown)}{inner}</t:list>"

    nested = items("c", "d", inner=f"<t:list-item>{items('e')}</t:list-item>")
    own = f'<t:list-item t:start-value="7"><t:p>f</t:p>{nested}</t:list-item>'
    body = [
        items("a", "b", more='t:style-name="N" x:id="i"', inner=own),
        "<t:p>between</t:p>",
        items("g", more='t:style-name="N" t:continue-numbering="true"'),
        items("h", more='t:style-name="N"'),
        items(
            "i", more='t:style-name="N" t:continue-list="i"', inner=f"<t:list-item>{items('j')}</t:list-item>"
        ),
        items("k", more='t:style-name="Other"'),
        "<t:list><t:list-item><t:h>Head</t:h></t:list-item></t:list>",
    ]
    [row], _ = read(open_text(tmp_path / "a.odt", "".join(body), styles=numbered))
    lists = "1. a|2. b|7. f|3. c|4. d|- e|between|8. g|1. h|9. i|3. j|- k|# Head"
    assert row["text"].split("\n") == lists.split("|")


def test_charts_of_word_are_read_where_they_stand(tmp_path: Path) -> None:
    body = '<p><t>Before</t></p><p><r><chart id="c"/></r><r><t>Behind</t></r></p>'
    chart = "<c><ser><tx><v>Plums</v></tx><cat><v>East</v></cat><val><v>7</v></val></ser></c>"
    [row], _ = read(word_of(tmp_path / "a.docx", body, c=("chart", "charts/a.xml", chart)))
    assert row["text"].split("\n") == ["Before", "Plums: East 7", "Behind"]


MHTML = b"Content-Type: multipart/related; boundary=B\n\n--B\nContent-Type: text/html\n\n<p>Inserted\n--B--"


@pytest.mark.parametrize(
    ("name", "raw", "shown", "told"),
    [
        ("a.html", b"<p>Inserted", "Before\nInserted\nBehind", []),
        ("a.mht", MHTML, "Before\nInserted\nBehind", []),
        ("a.rtf", rb"{\rtf1 x}", "Before\nBehind", ["files that are inserted are not read: word/a.rtf"]),
        ("a.htm", b"<b>" * 2_000, "Before\nBehind", ["files that are inserted are not read: word/a.htm"]),
        (None, b"", "Before\nBehind", ["files that are inserted are not read: rId9"]),  # and missing
    ],
)
def test_a_file_that_word_shows_within_a_document_is_read_or_told_of(
    tmp_path: Path, name: str | None, raw: bytes, shown: str, told: Sequence[str]
) -> None:
    body = '<p><t>Before</t></p><altChunk id="rId9"/><p><t>Behind</t></p>'
    parts = {"rId9": ("aFChunk", name, raw)} if name else {}
    [row], rejected = read(word_of(tmp_path / "a.docx", body, **parts))
    assert (row["text"], [each["detail"] for each in rejected]) == (shown, told)


@pytest.mark.parametrize("kind", ["markdown", "code"])
def test_characters_that_no_text_has_are_told_of_in_a_notebook(tmp_path: Path, kind: str) -> None:
    cells = [{"cell_type": kind, "source": text} for text in ("fine", "a\0b", "c\ud800d")]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    [row], [rejected] = read(tmp_path)
    assert "ab" in row["text"]
    assert rejected["detail"].endswith("which became U+FFFD, stand in cell 2, 3")


def test_formulas_of_opendocument_are_read_from_their_own_files(tmp_path: Path) -> None:
    power = "<m:msup><m:mn>10</m:mn><m:mn>6</m:mn></m:msup>"
    formula = f"<m:math xmlns:m='math'><m:mrow><m:mi>a</m:mi><m:mo>+</m:mo>{power}</m:mrow>%s</m:math>"
    objects = "".join(
        f'<d:frame><d:object x:href="./Object {number}"/><v:title>Formel</v:title><v:desc>{told}</v:desc>'
        "</d:frame>"
        for number, told in ((1, "formula"), (2, "of energy"))
    )
    open_text(tmp_path / "a.odt", f"<t:p>so {objects}end</t:p>")
    files = {
        "Object 1/content.xml": formula % "",
        "Object 2/content.xml": formula % "<m:annotation>a over b</m:annotation>",
        "Object 3/content.xml": "is shown nowhere",
    }
    for name, content, shown in (
        ("whole.odt", formula % "", ["so", "a+10^6", "a+10^6", "of", "energy", "end"]),
        ("cut.odt", "", ["so", "Formel", "formula", "a+10^6", "of", "energy", "end"]),
    ):
        shutil.copy(tmp_path / "a.odt", tmp_path / name)
        with zipfile.ZipFile(tmp_path / name, "a") as archive:
            for part, own in {**files, "Object 1/content.xml": content}.items():
                archive.writestr(part, own)
        [row], rejected = read(tmp_path / name)
        assert row["text"].split() == shown
        told = "formulas or charts cannot be parsed, so they are missing: Object 1"
        assert [each["detail"].endswith(told) for each in rejected] == [True] * (not content)


def test_pages_of_word_end_at_breaks_of_the_author_where_no_layout_is_noted(tmp_path: Path) -> None:
    end = '<r><br type="page"/></r>'
    [row], _ = read(word_of(tmp_path / "a.docx", f"<p><t>One</t>{end}</p><p><t>Two</t></p><p>{end}</p>"))
    assert row["text"].split(PAGE_BREAK) == ["One", "Two", ""]


def test_a_page_that_is_damaged_or_a_picture_costs_that_page_and_a_blank_one_nothing(tmp_path: Path) -> None:
    [row], rejected = read(pdf(tmp_path / "a.pdf", PIXEL, page("Two"), None, b"", page("Five"), PIXEL))
    assert row["text"] == "\f\nTwo\n\f\n\n\f\n\n\f\nFive\n\f\n"
    assert [(each["doc_id"], each["reason"], each["detail"][:7]) for each in rejected] == [
        ("a.pdf", "page_without_text", "page 1:"),
        ("a.pdf", "damaged_page", "page 3:"),
        ("a.pdf", "page_without_text", "page 6:"),
    ]


@pytest.mark.usefixtures("own_children")
@pytest.mark.parametrize(
    ("seconds", "mebibytes", "detail"),
    [
        (3, 1 << 20, "reading it takes longer than 3 s"),
        (60, 64, "its reader failed; it is damaged, or needs more than 64 MiB of memory"),
    ],
)
def test_a_page_that_takes_all_time_or_memory_costs_that_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, mebibytes: int, detail: str
) -> None:
    monkeypatch.setattr(paged, "PAGE_SECONDS", seconds)
    monkeypatch.setattr(paged, "MEMORY_BYTES", mebibytes << 20)
    [row], [rejected] = read(pdf(tmp_path / "a.pdf", page("One"), BOMB, page("Three")))
    assert row["text"] == PAGE_BREAK.join(["One", "", "Three"])
    assert rejected["detail"] == f"page 2: {detail}"


@pytest.mark.usefixtures("own_children")
def test_pages_that_each_end_their_reader_are_given_up_after_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(paged, "MAX_ENDED", 2)
    [row], rejected = read(pdf(tmp_path / "a.pdf", page("One"), *[BOMB] * 3, page("Five")))
    assert row["text"] == PAGE_BREAK.join(["One", "", "", ""])
    assert [each["detail"][:6] for each in rejected] == ["page 2", "page 3", "page 4"]


def test_a_file_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE_SECONDS", 1)
    os.mkfifo(tmp_path / "a.rtf")
    found = paged._read_in_child(".rtf", str(tmp_path / "a.rtf"), 1_000, "page")
    assert found.refused == "damaged_document it cannot be opened: reading it takes longer than 1 s"


def test_a_file_with_more_text_than_a_document_may_have_is_refused(tmp_path: Path) -> None:
    path = pdf(tmp_path / "a.pdf", *[page("x" * 50)] * 20)
    rows, [rejected] = read(path, config=CorpusConfig(max_document_bytes=200))
    assert (rows, rejected["reason"]) == ([], "oversized_text")


def _encrypted_pdf(path: Path) -> Path:
    key = b"<%s>" % (b"0" * 64)
    locked = b"/ID[%s%s]/Encrypt<</Filter/Standard/V 1/R 2/O%s/U%s/P -4>>" % (key, key, key, key)
    return pdf(path, page("One"), trailer=locked)


def _zip_bomb(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("word/document.xml", "<d/>")
        made.filelist[0].file_size = 513 << 20
    return path


def _entity_bomb(path: Path) -> Path:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<!DOCTYPE d [<!ENTITY e0 "ha">{entities}]><d><t>&e11;</t></d>'
    return packed(path, {"word/document.xml": bomb})


def test_a_box_of_mails_has_a_document_a_mail_and_tells_of_one_that_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_MAIL_BYTES", 999)
    head = "Message-ID: <1@x>\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?="
    first = f"From a Thu Jan  1 10:00:00 2026\n{head}\n\nAt noon.\n>From here.\n"
    parts = "Content-Type: multipart/mixed; boundary=B\n\n--B\n\nkept\n"
    cut = f"From b Thu Jan  1 10:00:00 2026\nSubject: b\n{parts}"
    large = f"From c Jan 10:00\nSubject: c\n\n{'long ' * 200}"
    unquoted = "From text, no time\n\nFrom Monday, 10:00,\nit opens.\n"
    (tmp_path / "a.mbox").write_text(f"\n{first}\n{unquoted}{cut}\n{large}\nFrom d Jan 10:00\nSubject: d\n")
    (tmp_path / "b.mbox.gz").write_bytes(gzip.compress(first.replace("1@x", "2@x").encode()))
    (tmp_path / "c.mbox").write_text("hello\n")
    found = checked(tmp_path)
    body = "Subject: Grüße\n\nAt noon.\nFrom here."

    assert [(row["doc_id"], row["title"], row["text"]) for row in found.rows] == [
        ("1@x", "Grüße", f"{body}\n\nFrom text, no time\n\nFrom Monday, 10:00,\nit opens."),
        ("a.mbox#2", "b", "Subject: b\n\nkept"),
        ("a.mbox#4", "d", "Subject: d"),
        ("2@x", "Grüße", body),
    ]
    assert found.doubts == [
        f"{tmp_path}/a.mbox: mail 2: the file ends before its last part does, so the rest is missing"
    ]
    assert sorted((row["reason"], row["detail"]) for row in found.rejected) == [
        ("damaged_file", "it does not begin with a line `From …`, as a box of mail does"),
        ("damaged_rows", "mail 3 must have at most 0 MiB, got more"),
    ]


PROTECTED_MAIL = b"Content-Type: multipart/encrypted; boundary=B\n\n--B\nContent-Type: application/x\n\n--B--"
PROTECTED_BOOK = f"{XML_ENCRYPTION}aes128-cbc"


@pytest.mark.parametrize(
    ("name", "content", "detail"),
    [
        ("a.pdf", _encrypted_pdf, "it is encrypted; remove its password"),
        ("a.eml", b"Content-Type: application/pkcs7-mime\n\nx", "it is encrypted, or signed as a"),
        ("b.eml", PROTECTED_MAIL, "it is encrypted, or signed as a whole; save it decrypted"),
        (
            "a.docx",
            OLD_OFFICE,
            "it is of an Office before 2007, or encrypted, and not .docx: save it as .docx",
        ),
        ("a.docx", _zip_bomb, "its texts unpack to 513 MiB"),
        ("b.docx", _entity_bomb, "limit on input amplification"),
        ("a.pptx", b"PK\x03\x04", "File is not a zip file"),
        ("a.pdf", b"%PDF-1.7\n\xff", "Failed to load document"),
        ("a.rtf", b"nothing", "it does not begin as RTF does"),
        ("a.xls", OLD_OFFICE, "it cannot be read as .xls: "),
        ("c.xlsx", OLD_OFFICE + "EncryptedPackage".encode("utf-16-le"), "it is encrypted; save it"),
        ("d.xlsx", b"id,text\n1,x\n", "it is a text, and not .xlsx: name it .txt, .csv or what"),
        ("e.docx", sheets, "it is .xlsx, and not .docx: name it so"),
        ("f.pdf", b"<!DOCTYPE html><p>Not found", "it is HTML or XML, and not .pdf: name it .html"),
        ("g.txt", pdf, "it is PDF, and not .txt: name it .pdf"),
        ("h.md", word, "it is a zip archive, and not .md: unpack it, or name it what it is"),
        ("i.html", b"{\\rtf1 x}", "it is RTF, and not .html: name it .rtf"),
        ("a.ipynb", b"{}", "it has no cells, as a notebook has"),
        ("b.xls", b"\xef\xbb\xbf <html><table><tr><td>a", "it is HTML or XML, and not .xls: name it .html"),
        ("a.epub", partial(book, algorithm=PROTECTED_BOOK), "it is protected against copying"),
        ("a.eml", b"text", "it has no header of a mail"),
        ("a.docx", b"", "the file is empty"),
    ],
)
def test_a_file_that_cannot_be_opened_is_one_quarantined_row_that_says_why(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], Path], detail: str
) -> None:
    _ = (tmp_path / name).write_bytes(content) if isinstance(content, bytes) else content(tmp_path / name)
    code(tmp_path / "b.py")
    rows, [rejected] = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["b.py"]
    assert (rejected["doc_id"], rejected["reason"]) == (name, "damaged_document")
    assert detail in rejected["detail"]


def test_refused_pages_count_alike_in_a_run_that_reads_their_file_and_in_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 0.0)
    (tmp_path / "in").mkdir()
    pdf(tmp_path / "in" / "a.pdf", page("One"), None, PIXEL)
    published = Published(tmp_path / "work")
    first = published.ingest(tmp_path / "in", sync=True)
    assert (first["rows"], first["new"], first["quarantined"], first["is_complete"]) == (3, 1, 2, True)
    second = published.ingest(tmp_path / "in", sync=True)
    assert published.passed_over == ["a.pdf"]
    assert (second["rows"], second["unchanged"], second["quarantined"]) == (3, 1, 2)
    assert second["refused"] == first["refused"]


def test_without_its_package_a_file_is_left_out_of_a_folder_and_refused_by_name_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "find_spec", lambda _: None)
    named = pdf(tmp_path / "a.pdf", page("One"))
    code(tmp_path / "b.py")
    [warning] = scan_sources([str(tmp_path)], CONFIG).warnings
    assert ".pdf" in warning
    assert install_command("documents") in warning
    with pytest.raises(SourceError, match=r"a\.pdf cannot be read.*documents"):
        scan_sources([str(named)], CONFIG)


def test_control_characters_and_halves_of_characters_do_not_reach_the_text() -> None:
    dirty: Any = "a\0b\x1b[1m\r\nc\fd\ud83d\ude00e\ud83d"
    assert paged.cleaned(dirty) == "ab[1m\nc\nd\U0001f600e\ufffd"


def test_the_first_quarantined_row_of_each_reason_is_told_by_file_and_row_or_page() -> None:
    places = [("s/a.pdf", 1, "a.pdf"), ("s/b.csv", 4, "7"), ("s/b.csv", 5, None), ("s/c.csv", None, None)]
    details = ["page 2: it is a picture", "the text is empty", "the id is null", "it is gone"]
    files, rows, ids = zip(*places, strict=True)
    told = examples(
        rejected_rows(pa.array(files), rows, pa.array([*"abcd"]), pa.array(details), pa.array(ids))
    )
    assert told == {
        "a": "s/a.pdf: page 2: it is a picture",
        "b": "s/b.csv, row 4: the text is empty",
        "c": "s/b.csv, row 5: the id is null",
        "d": "s/c.csv: it is gone",
    }
