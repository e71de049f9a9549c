"""Lines of Hebrew, Arabic and the like in PDF: their order as it is read, made from where characters stand.

PDFium orders such a line by guesses of its own, which move brackets, numbers and words. A line most of whose
words are of such a script is ordered again: from right to left, but for numbers and words of other scripts,
which the bidirectional algorithm of Unicode (UAX 9) shows from left to right. This is its reverse, without
embeddings. What looks the same on paper is not told apart, as `3.9-beta` and `beta-3.9` behind Hebrew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_double
from functools import partial
from math import hypot
from typing import Any, Final, NamedTuple
from unicodedata import bidirectional, combining

RIGHT_TO_LEFT: Final = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc"
_WORD: Final = re.compile(rf"\S*[{RIGHT_TO_LEFT}]\S*")
_OTHER_WORD: Final = re.compile(
    rf"(?<!\S)[^\s{RIGHT_TO_LEFT}]*[^\W\d{RIGHT_TO_LEFT}][^\s{RIGHT_TO_LEFT}]*(?!\S)"
)
_RUN: Final = re.compile(rf"[{RIGHT_TO_LEFT}]+(?: [{RIGHT_TO_LEFT}]+)*")
_DIGITS: Final = "[0-9\u0660-\u0669\u06f0-\u06f9]+"
_NUMBER: Final = re.compile(rf"[#$€₪%°]*{_DIGITS}(?:[.,:/+-]{_DIGITS})*[#$€₪%°]*")
_NUMBER_OF_ARABIC: Final = re.compile(rf"{_DIGITS}(?:[.,:/]{_DIGITS})*")
"""In Arabic, the parts of `3-4` stand from right to left, as words do."""
_PAIRS: Final = ("()", "[]", "{}", "<>", "«»")
_PAIR: Final = re.compile(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}|«[^«»]*»")
_MIRRORED: Final[Mapping[int, int]] = str.maketrans("()[]{}<>«»", ")(][}{><»«")
_GAP: Final = 0.2
"""How much of the size of the letters lies at least between two words."""
_LEAST_WIDTH: Final = 0.1
"""How much of it a character takes at least, on the average."""
_SAME_LINE: Final = 0.3
"""How much of it vowel signs may stand above or below their line."""
_TOUCHING: Final = 0.05
"""How many points lie at most between a letter and its sign where a program tells one place for both."""
_HYPHEN: Final = {2: 0xFFFE}
"""How PDFium marks a hyphen at the end of a line among characters, and in a text."""


class _Character(NamedTuple):
    right: float
    left: float
    text: str


class _Line(NamedTuple):
    """A line of PDFium, with its characters, all of them and those that are no blanks of PDFium."""

    text: str
    base: float
    size: float
    characters: list[_Character]
    placed: list[_Character]


def text_in_reading_order(page: Any, letters: Sequence[str]) -> str:
    """Return the text of a page of PDFium with its lines as they are read; ``letters`` are its characters."""
    text = "".join(letters).translate(_HYPHEN)
    if not _WORD.search(text):
        return text
    is_page_such = _surplus(text) > 0
    lines = list[_Line]()
    for line in _lines(page, letters):
        # As many words of others are read as the page is.
        if _surplus(line.text) + is_page_such <= 0 or not _is_level(line):
            lines.append(line._replace(characters=[], text=_with_runs_in_order(line)))
        elif lines and lines[-1].characters and abs(line.base - lines[-1].base) < _SAME_LINE * line.size:
            lines[-1].characters.extend(line.characters)
        else:
            lines.append(line)
    shown = [_as_shown(line.characters, line.size) for line in lines]
    # Brackets are told by their shapes in some files, in others by what they mean.
    read = ([_as_read(each, mirrored) for each in shown] for mirrored in (_MIRRORED, {}))
    likely = max(read, key=lambda each: len(_PAIR.findall("\n".join(each))))
    return "\n".join(_paired(each) or line.text for each, line in zip(likely, lines, strict=True))


def _with_runs_in_order(line: _Line) -> str:
    """Return the text of a line of other scripts with what it has from right to left as it is read."""

    def in_order(run: re.Match[str]) -> str:
        placed = [each for each in line.placed[run.start() : run.end()] if each.text.strip()]
        rights = [each.right for each in placed]
        return (
            run[0] if sorted(rights, reverse=True) == rights else _as_read(_as_shown(placed, line.size), {})
        )

    return _RUN.sub(in_order, line.text)


def _is_level(line: _Line) -> bool:
    """Whether a line runs across the page, and is not turned."""
    width = max((each.right for each in line.characters), default=0.0) - min(
        (each.left for each in line.characters), default=0.0
    )
    return width > _LEAST_WIDTH * line.size * len(line.characters)


def _surplus(text: str) -> int:
    """Return how many words from right to left there are more than others; where there is none, very few."""
    num_words = len(_WORD.findall(text))
    return num_words - len(_OTHER_WORD.findall(text)) if num_words else -len(text)


def _lines(page: Any, letters: Sequence[str]) -> Iterator[_Line]:
    from pypdfium2 import raw

    text, base, size, characters, placed = "", 0.0, 0.0, list[_Character](), list[_Character]()
    for index, letter in enumerate(letters):
        shown = letter.translate(_HYPHEN)
        if shown == "\n":
            yield _Line(text, base, size, characters, placed)
            text, size, characters, placed = "", 0.0, [], []
        elif shown not in ("", "\r"):
            box, x, y, matrix = raw.FS_RECTF(), c_double(), c_double(), raw.FS_MATRIX()
            raw.FPDFText_GetMatrix(page, index, byref(matrix))
            raw.FPDFText_GetLooseCharBox(page, index, byref(box))
            raw.FPDFText_GetCharOrigin(page, index, byref(x), byref(y))
            base, size = (base, size) if text else (y.value, 0.0)
            size = max(size, raw.FPDFText_GetFontSize(page, index) * hypot(matrix.c, matrix.d))
            text += shown
            placed.append(_Character(box.right, box.left, shown))
            if shown.strip() or box.right - box.left > _GAP:  # and is no blank that PDFium adds
                characters.append(placed[-1])
    yield _Line(text, base, size, characters, placed)


def _as_shown(characters: Sequence[_Character], size: float) -> str:
    """Return the characters of a line from left to right; a vowel sign stands before its letter."""
    letters = [each for each in characters if not combining(each.text)]
    lefts = {id(each): each.left for each in letters}
    placed = list[tuple[float, bool, int, str, int]]()
    for index, each in enumerate(characters):
        letter = each
        if combining(each.text) and letters:
            letter = min(letters, key=partial(_distance, each))
            lefts[id(letter)] = min(lefts[id(letter)], each.left)
        placed.append((letter.right, letter is each, index, each.text, id(letter)))
    shown, end = "", None
    for right, _, _, text, letter in sorted(placed):
        left = lefts.get(letter, right)
        shown += f" {text}" if end is not None and left - end > _GAP * size else text
        end = right
    return shown


def _distance(sign: _Character, letter: _Character) -> tuple[bool, bool, bool, float]:
    """Order letters by how likely a vowel sign is theirs: over it, beside it, the next on its right."""
    middle = (sign.left + sign.right) / 2
    is_beside = min(abs(sign.left - letter.right), abs(sign.right - letter.left)) < _TOUCHING
    is_over = letter.left <= middle <= letter.right
    return not is_over, not is_beside, letter.left < middle, abs(letter.left - middle)


def _as_read(shown: str, mirrored: Mapping[int, int]) -> str:
    number = _NUMBER_OF_ARABIC if "AL" in map(bidirectional, shown) else _NUMBER
    parts, start = list[str](), 0
    while start < len(shown):
        stop, found = start + 1, number.match(shown, start)
        if found:
            stop = found.end()
        elif bidirectional(shown[start]) == "L":
            of_others = re.compile(rf"[^{RIGHT_TO_LEFT}]*[^\W{RIGHT_TO_LEFT}]").match(shown, start)
            stop = of_others.end() if of_others else stop
            is_open = any(
                sum(map(shown[start:stop].count, pair)) % 2
                for pair in _PAIRS
                if shown[stop : stop + 1] in pair
            )
            stop += stop < len(shown) and is_open
        one = shown[start:stop]
        parts.append(one if stop > start + 1 else one.translate(mirrored))
        start = stop
    return " ".join("".join(reversed(parts)).split())


def _paired(text: str) -> str:
    """Turn brackets round that cannot be right: a font may have one shape for both of a pair."""
    for opening, closing in _PAIRS:
        places = [place for place, each in enumerate(text) if each in opening + closing]
        more_open = 2 * text.count(opening) - len(places)
        if len(places) % 2 == 0 and (
            more_open > 0 or (places and not more_open and text[places[0]] == closing)
        ):
            turned = dict(zip(places, (opening + closing) * (len(places) // 2), strict=True))
            text = "".join(turned.get(place, each) for place, each in enumerate(text))
    return text
