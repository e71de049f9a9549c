"""Where headings, blocks, list items and rows begin, for landmarks of structure granularity.

    text ─▶ lines ─▶ places with ranks ─▶ the tokens that open them, ranked above sentences ─▶ (landmarks)

    heading    # Install · == Install == · Install, with a line of ======= below (or above and below)
    block      a paragraph, a list, a table, a fenced block of code
    introduced a block below a heading, or below a line that ends with a colon
    item       an item of a list · part: its inner items and blocks, and lines of code below an empty line
    line       a row of a table, a line of code

The ranks are those of :mod:`cairn.pipeline.model.landmarks`. A text without any of these has sentences only.
Source code has none inside its lines: a text without fences, a third of which stands in lines that end with a
sign of code.

Source: CommonMark 0.31 for blocks, GitHub's tables, reStructuredText's underlined and a wiki's headings.
Differs: what a line means depends on the lines next to it alone, not on nested containers; code that is only
indented is paragraphs; the items of one list may have several markers; HTML in a text is prose.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from cairn.pipeline.encode.sentences import rank_starts, sentence_starts
from cairn.pipeline.encode.tokenization import TokenizedTexts
from cairn.pipeline.model.landmarks import (
    BLOCK_START,
    HEADING_START,
    INTRODUCED_START,
    ITEM_START,
    LINE_START,
    PART_START,
    SENTENCE_START,
)
from jaxtyping import Int64, UInt8

MAX_HEADING_CHARACTERS: Final = 120

FENCES: Final = ("```", "~~~")
"""What a line begins with that opens or closes a block of code."""

_UNDERLINE: Final = re.compile(r"([=\-~^*#+])\1{2,}")
_MARKER: Final = re.compile(r"(?:(?P<bullet>[-*+•])|(?P<number>\d{1,9})[.)])[ \t]+(?=\S)")
_MIN_CODE_LINES: Final = 8
_CODE_ENDS: Final = tuple("{}()[];:,=<>\\&+/")
_DELIMITERS: Final = frozenset("|:- \t")
_NESTED_INDENT: Final = 2
"""Columns from the marker of an item on which an inner one begins at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """S places of one text, ascending, each with its rank; and the spans inside which no sentence begins.

    Spans are headings, rows of tables, lines of code, and markers of items, as in "1. Install".
    """

    start_char_S: Int64[np.ndarray, " S"]
    rank_S: UInt8[np.ndarray, " S"]
    unbroken: Sequence[tuple[int, int]]


def rank_structure(tokens: TokenizedTexts, texts: Sequence[str]) -> None:
    """Raise the ranks of the places before tokens that open sentences or structure, in place."""
    for index, text in enumerate(texts):
        found = structure_of(text)
        rank_starts(tokens, index, _outside(found.unbroken, sentence_starts(text)), SENTENCE_START)
        rank_starts(tokens, index, found.start_char_S, found.rank_S)


def structure_of(text: str) -> Structure:
    """Return where the structure of a text lies; a text of one paragraph has its own start alone."""
    lines = text.splitlines(keepends=True)
    reader = _Reader(lines)
    marks = np.array(list(reader.marks()), np.int64).reshape(-1, 2)
    unbroken = reader.unbroken
    if _is_source_code(lines):
        starts = [0, *accumulate(map(len, lines))]
        unbroken = [(start + 1, end) for start, end in pairwise(starts)]
    return Structure(start_char_S=marks[:, 0], rank_S=marks[:, 1].astype(np.uint8), unbroken=unbroken)


def _is_source_code(lines: Sequence[str]) -> bool:
    filled = [stripped for line in lines if (stripped := line.strip())]
    if len(filled) < _MIN_CODE_LINES or any(map(_is_fence, filled)):
        return False
    return 3 * sum(len(line) for line in filled if line.endswith(_CODE_ENDS)) > sum(map(len, filled))


def heading_at(lines: Sequence[str], place: int) -> tuple[str, int]:
    """Return the heading that begins on a line and how many lines it takes; an empty one where none does.

    Its time is linear in the length of the lines, whatever they hold.
    """
    line = lines[place].rstrip()
    if marked := _marked_heading(line):
        return marked[:MAX_HEADING_CHARACTERS], 1
    # An overline belongs to the heading below it.
    skipped = int(_is_underline(line) and place + 2 < len(lines) and _is_underline(lines[place + 2]))
    words, below = lines[place + skipped].strip(), lines[place + skipped + 1 :][:1]
    is_line_of_words = len(words) <= MAX_HEADING_CHARACTERS and any(map(str.isalnum, words))
    is_after_a_gap = place == 0 or not lines[place - 1].strip()
    is_underlined = below and _is_underline(below[0]) and len(below[0].strip()) >= len(words) - 2
    return (words, 2 + skipped) if is_line_of_words and is_after_a_gap and is_underlined else ("", 1)


def _is_underline(line: str) -> bool:
    return _UNDERLINE.fullmatch(line.rstrip()) is not None


def _marked_heading(line: str) -> str:
    """Return the words between Markdown's or a wiki's signs, empty where the line has none."""
    level = len(line) - len(line.lstrip("#"))
    if 1 <= level <= 6 and line[level : level + 1].isspace():
        words = line[level:].strip()
        return words.rstrip("#").rstrip() or words
    opening, closing = len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("="))
    return line.strip("=").strip() if 2 <= opening <= 6 and 2 <= closing <= 6 else ""


class _Reader:
    """Lines of one text, read from the first to the last.

    ``_is_opening``: the next line cannot continue a paragraph. ``_is_introduced``: a heading, or a line that
    ends with a colon, stands before it.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.unbroken: list[tuple[int, int]] = []
        self._lines = [line.rstrip() for line in lines]
        self._starts = [0, *accumulate(map(len, lines))]
        self._in_list = self._is_introduced = False
        self._is_opening = True
        self._list_indent = 0

    def marks(self) -> Iterator[tuple[int, int]]:
        """Yield start and rank of every place, ascending."""
        place = 0
        while place < len(self._lines):
            if not self._lines[place]:
                self._is_opening = True
                place += 1
                continue
            num_lines = yield from self._read(place)
            place += num_lines

    def _read(self, place: int) -> Generator[tuple[int, int], None, int]:
        """Read what begins on a line that is not blank, and return how many lines it takes."""
        line = self._lines[place]
        content = line.lstrip()
        indent = len(line[: len(line) - len(content)].expandtabs(4))
        is_inner = self._in_list and indent > self._list_indent
        if _is_fence(content):
            return (yield from self._read_code(place, is_inner))
        heading, num_lines = heading_at(self._lines, place)
        if heading:
            yield self._starts[place], self._rank(HEADING_START)
            if len(heading) < MAX_HEADING_CHARACTERS:
                self.unbroken.append((self._starts[place], self._starts[place + num_lines]))
            self._in_list, self._is_opening, self._is_introduced = False, True, True
            return num_lines
        if self._is_table(place):
            return (yield from self._read_table(place, is_inner))
        marker = _MARKER.match(content)
        if marker and (self._in_list or self._is_opening or marker["number"] in (None, "1")):
            yield self._starts[place], self._item_rank(indent)
            content_start = self._starts[place] + len(line) - len(content) + marker.end()
            self.unbroken.append((self._starts[place], content_start + 1))
            self._is_opening = False
        elif self._is_opening:
            yield self._starts[place], self._block_rank(is_inner)
            self._is_opening = False
        if content.startswith("|"):
            self._keep_line_whole(place)
        self._is_introduced = line.endswith(":")
        return 1

    def _read_code(self, place: int, is_inner: bool) -> Generator[tuple[int, int], None, int]:
        yield self._starts[place], self._block_rank(is_inner)
        opening = self._lines[place].lstrip()
        fence = opening[: len(opening) - len(opening.lstrip(opening[0]))]
        is_after_gap = False
        end = place + 1
        while end < len(self._lines):
            line = self._lines[end].lstrip()
            if line.startswith(fence) and not line.strip(fence[0]):
                end += 1
                break
            if line and end > place + 1:
                yield self._starts[end], PART_START if is_after_gap and not is_inner else LINE_START
            self._keep_line_whole(end)
            is_after_gap = not line
            end += 1
        self._is_opening, self._is_introduced = True, False
        return end - place

    def _keep_line_whole(self, place: int) -> None:
        self.unbroken.append((self._starts[place] + 1, self._starts[place + 1]))

    def _is_table(self, place: int) -> bool:
        below = "".join(self._lines[place + 1 : place + 2])
        return "|" in self._lines[place] and "|" in below and "-" in below and _DELIMITERS.issuperset(below)

    def _read_table(self, place: int, is_inner: bool) -> Generator[tuple[int, int], None, int]:
        """The first row stays with the heads of the columns."""
        yield self._starts[place], self._block_rank(is_inner)
        self._keep_line_whole(place)
        end = place + 2
        while end < len(self._lines) and "|" in self._lines[end]:
            if end > place + 2:
                yield self._starts[end], LINE_START
            self._keep_line_whole(end)
            end += 1
        self._is_opening, self._is_introduced = True, False
        return end - place

    def _item_rank(self, indent: int) -> int:
        if self._in_list and indent >= self._list_indent + _NESTED_INDENT:
            return PART_START
        is_first, self._list_indent = not self._in_list, indent
        rank = self._block_rank(False) if is_first else ITEM_START
        self._in_list = True
        return rank

    def _block_rank(self, is_inner: bool) -> int:
        """Return the rank of what begins here; what is not inside an item ends the list."""
        self._in_list = is_inner
        return PART_START if is_inner else self._rank(BLOCK_START)

    def _rank(self, rank: int) -> int:
        return INTRODUCED_START if self._is_introduced else rank


def _is_fence(content: str) -> bool:
    return content.startswith(FENCES) and "`" not in content.lstrip("`")


def _outside(spans: Sequence[tuple[int, int]], places: Sequence[int]) -> Int64[np.ndarray, " n"]:
    """Return the places that lie inside no span; spans are ascending and apart."""
    edges = [edge for span in spans for edge in span]
    return np.array([place for place in places if bisect_right(edges, place) % 2 == 0], np.int64)
