"""Where in its file a passage stands: the one place that maps offsets of characters to pages.

Pages stand in the text itself: between two of them is a line with a form feed, as `pdftotext` writes it. So
they go wherever the text goes, and no number can disagree with it. A page that is empty, or could not be
read, has its place, and numbers are those of the file. What a page is called is told by the file's format: of
source code and plain text, it is a line. Documents without pages have headings or lines instead.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Final

from cairn.pipeline.corpus.formats import FORMAT_OF
from cairn.pipeline.corpus.formats.format import HEADING_ID, PAGE_BREAK
from cairn.pipeline.types import Highlight

_MARK: Final = PAGE_BREAK.strip("\n")
_SHOWN_CHARACTERS: Final = 100
_HEADING_OR_FENCE: Final = re.compile(
    r"^ {0,3}(?:(?P<fence>`{3,}|~{3,})|#{1,6}[ \t]+(?P<heading>\S.*))", re.MULTILINE
)


def page_of(
    text: str, start: int, end: int, source_file: str, highlights: Iterable[Highlight] = ()
) -> str | None:
    """Return the page on which the characters from ``start`` to ``end`` of a document's text stand.

    Of several pages, sheets or sections it is the one that has more than half of the weight of the words
    that are highlighted in them, where one has.

    It is written as people write it: `page 3`, `slides 3-4`, `lines 12-20`, `sheet Prices`. Where a document
    has no pages, or none that are known, it is the heading above them, `section Install`, else their lines in
    the text. White space around the characters is not theirs. None for rows of tables, of which each is a
    document.
    """
    unit = _unit_of(text, source_file)
    if unit is None:
        return None
    whole = _place(text, start, end, unit)
    if unit == "line" or not (whole.startswith("sections ") or _MARK in text[start:end].strip()):
        return whole
    weight_of = defaultdict[str, float](float)
    for each in highlights:
        weight_of[_place(text, each.start_char, each.end_char, unit)] += each.weight
    best = max(weight_of, key=weight_of.__getitem__, default=whole)
    return best if 2 * weight_of[best] > sum(weight_of.values()) else whole


def _place(text: str, start: int, end: int, unit: str) -> str:
    passage = text[start:end]
    start += len(passage) - len(passage.lstrip())
    if unit == "sheet" and (name := _heading(text, text.rfind(_MARK, 0, start) + 1, start + 1)):
        return f"sheet {name}"
    if unit == "section":
        names = [_heading(text, 0, start + 1), _heading(text, 0, end)]
        first, last = names if names[0] else names[::-1]
        if first:
            return f"section {first}" if last in (first, None) else f"sections {first} - {last}"
        unit = "line"
    mark = "\n" if unit == "line" else _MARK
    first = 1 + text.count(mark, 0, start)
    last = first + passage.strip().count(mark)
    return f"{unit}s {first}-{last}" if last > first else f"{unit} {first}"


def pages_in(text: str, source_file: str) -> str | None:
    """Return how many pages a document has, such as `48 pages`, None where it has none."""
    unit = _unit_of(text, source_file)
    if unit in (None, "section"):
        return None
    number = 1 + text.count("\n" if unit == "line" else _MARK)
    return f"{number:,} {unit}{'s' if number > 1 else ''}"


def _unit_of(text: str, source_file: str) -> str | None:
    """Return what the pages of a document are called, `section` for one of a file without, None for a row."""
    found = FORMAT_OF.get(PurePosixPath(source_file.lower()).suffix)
    if found is not None and found.unit is not None:
        return found.unit
    if _MARK in text:
        return "page"
    return "section" if found is not None and found.is_document else None


def _heading(text: str, begin: int, end: int) -> str | None:
    """Return the last heading that begins within these characters."""
    starts, names = _headings(text)
    last = bisect_left(starts, end) - 1
    return names[last] if last >= 0 and starts[last] >= begin else None


@lru_cache(maxsize=16)
def _headings(text: str) -> tuple[list[int], list[str]]:
    """Return where headings begin, and what they say; a `#` between fences is none.

    It is kept for the passages and highlights of one text, of which each asks.
    """
    starts, names = list[int](), list[str]()
    fence = None
    for found in _HEADING_OR_FENCE.finditer(text) if "#" in text else ():
        if found["fence"] is not None:
            if fence is None or found["fence"].startswith(fence):
                fence = None if fence else found["fence"]
        elif not fence:
            heading = HEADING_ID.sub("", found["heading"])
            name = " ".join(heading.rstrip("# \t").split() or heading.split())
            starts.append(found.start())
            names.append(name if len(name) <= _SHOWN_CHARACTERS else f"{name[: _SHOWN_CHARACTERS - 1]}…")
    return starts, names
