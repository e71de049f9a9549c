"""Words of texts in every script, as BM25 counts them, a query asks for them and highlights show them.

    text ─▶ runs ─▶ pieces ─▶ terms of a language
    "maxOpenFiles はC++で書く" ─▶ maxOpenFiles は C++ で書く ─▶
                                maxopenfil max open file は c++ c で書 書く

- A run is of letters, their marks, digits and underscores, or of a script that is written without spaces. It
  ends where one kind of script meets the other.
- A run with spaces around it is kept whole, without underscores; where its case, its script or the kind of
  its characters changes, its parts of two characters or more are kept as well. `C++`, `C#` and `.NET` are
  words. Of a word longer than :data:`MAX_WORD_CHARACTERS` the beginning is kept, and parts only where
  underscores divide it.
- Han, Kana, Hangul, Thai, Lao, Khmer and Burmese are kept as pairs of neighbouring characters with their
  marks, a single one as it is. Of documents every ideograph is kept as well, for queries of a single one.
- Pieces are folded: compatibility forms (NFKC), case, and digits of all scripts. What is left is the stem of
  a language without accents, points of Hebrew, vowels of Arabic and the dot of Indian letters, unless the
  word is one of its function words.

A collection keeps the rules it was built with: who changes them, or :mod:`cairn.pipeline.lexical.languages`,
counts :data:`cairn.pipeline.manifest.TOKENIZER_VERSION` up.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Final, NamedTuple

import numpy as np
import regex
from cairn.pipeline.lexical.languages import (
    LEAST_ASKED,
    STOP_WORDS,
    UNASKED_WORDS,
    UNTOLD_WORDS,
    WITHOUT_LATIN,
    languages_shown,
    stemmer_of,
)

MAX_WORD_CHARACTERS: Final = 40
"""Longer runs are keys, hashes or encoded bytes; their beginnings tell them apart."""
WITH_ACCENTS: Final = frozenset({"vi"})
"""Languages in which accents tell most words apart: 1.5 points of nDCG@10 in Vietnamese."""
MAX_PARTS: Final = 8
"""What has more parts between two underscores, such as a hash, has none."""
KEPT_TERMS: Final = 1 << 16
MAIN_SHARE: Final = 0.01
"""Of a collection's documents that a language needs, for queries to be read in it."""
MAX_QUERY_WORDS: Final = 512
"""Of a query, pairs of characters included; each reads its postings."""

_UNSPACED_BLOCKS: Final = (
    # Ideographs and Kana, which stand in one word.
    (
        "\u2e80-\u2fdf\u3005-\u3007\u3021-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
        "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
    ),
    "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff\uffa0-\uffdc",  # Hangul
    "\u0e00-\u0e7f",  # Thai
    "\u0e80-\u0eff",  # Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f",  # Burmese
    "\u1780-\u17ff",  # Khmer
)
_ASTRAL: Final = (
    "\U00010000-\U0001cfff\U0001d2c0-\U0001d378\U0001d400-\U0001d7ff\U0001df00-\U0001efff"
    "\U0001f100-\U0001f10c\U0001fbf0-\U0001fbf9"
)
"""Letters and numbers beyond 16 bits, and a few symbols among them."""
_BASIC: Final = "".join(map(chr, range(0x80, 0x10000)))
_SELECTORS: Final = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_JOINERS: Final = "\u00ad\u200c\u200d"
_LIKE_MARKS: Final = "\u0e33\u0eb3"
"""Vowels of Thai and Lao that never begin a syllable."""
_LAST_SPACED: Final = "\u0dff"
"""No script before is written without spaces."""


class _Patterns(NamedTuple):
    """Patterns of Python's own engine: it finds a letter in a table, three times as fast as regex."""

    run: re.Pattern[str]
    unspaced: re.Pattern[str]
    mark: re.Pattern[str]
    cluster: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    blocks = [re.compile(f"[{block}]") for block in _UNSPACED_BLOCKS]
    block_of = {letter: n for n, block in enumerate(blocks) for letter in block.findall(_BASIC)}
    spaced, marks, unspaced = list[str](), list[str](_LIKE_MARKS), [list[str]() for _ in blocks]
    for letter in _BASIC:
        kind = unicodedata.category(letter)
        if kind[0] in "LMN" or letter in _JOINERS or "\u2e80" <= letter <= "\u2fdf":  # radicals are symbols
            place = None if kind == "Nd" else block_of.get(letter)
            (spaced if place is None else unspaced[place]).append(letter)
        if kind[0] == "M":
            marks.append(letter)
    of_blocks = [*map(_ranges, unspaced)]
    of_blocks[0] += "\U00020000-\U0003ffff"
    of_marks = _ranges(marks) + _SELECTORS
    return _Patterns(
        run=re.compile(
            rf"\.?[a-zA-Z0-9_{_ranges(spaced)}{_ASTRAL}]+(?:\+\+|#)?|"
            + "|".join(f"[{own}][{own}{_SELECTORS}]*" for own in of_blocks)
        ),
        unspaced=re.compile(f"[{''.join(of_blocks)}]"),
        mark=re.compile(f"[{of_marks}]"),
        cluster=re.compile(f"[^{of_marks}][{of_marks}]*|[{of_marks}]+"),
    )


def _ranges(letters: Sequence[str]) -> str:
    """Return the inside of a class of letters."""
    codes = np.unique([ord(letter) for letter in letters])
    groups = np.split(codes, np.flatnonzero(np.diff(codes) > 1) + 1)
    return "".join(f"{chr(own[0])}-{chr(own[-1])}" for own in groups)


_ASCII_RUN = re.compile(r"\.?\w+(?:\+\+|#)?", re.ASCII)
_CORE = regex.compile(r"(?s)[\p{L}\p{N}](?:.*[\p{L}\p{N}\p{M}])?")
"""A run from its first letter or digit to its last one, with its marks."""
_PLAIN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+", re.ASCII)
_PART = regex.compile(
    r"(?V1)[\p{N}\p{M}]+|\p{Lu}{2,}s(?![\p{L}\p{M}])|(?:\p{Lu}\p{M}*)+(?!\p{M}*\p{Ll})|\p{Lu}?\p{M}*[[\p{L}\p{M}]--\p{Lu}]+|\p{Lu}\p{M}*"
)
_SCRIPT_PART = regex.compile(
    r"(?V1)[\p{Latin}\p{M}]+|[\p{Greek}\p{M}]+|[\p{Cyrillic}\p{M}]+|[^\p{Latin}\p{Greek}\p{Cyrillic}]+"
)
_IDEOGRAPH = regex.compile(r"\p{Han}")
_ACCENT = regex.compile(
    r"[\u0300-\u036f\u0591-\u05c7\u0640\u064b-\u0652\u0670\u093c\u09bc\u0a3c\u0abc\u0b3c\u0cbc]+"
)
"""Accents of Europe, points of Hebrew, vowels of Arabic with its line filler, the dot (nukta) of India."""
_UNDIVIDED = str.maketrans(
    {"ı": "i", "ł": "l", "đ": "d", "ð": "d", "ħ": "h", "ŧ": "t", "ø": "o", "œ": "oe", "æ": "ae", "þ": "th"}
)
"""Letters that Unicode does not divide into one with an accent, as who has no key for them writes them."""
_FOREIGN_DIGIT = regex.compile(r"(?V1)[\p{Nd}--[0-9]]")
_DROPPED = dict.fromkeys([*map(ord, _JOINERS), *range(0xFE00, 0xFE10), *range(0x20D0, 0x2100)])
"""Joiners, selectors of variants and marks around symbols."""


def runs_of(text: str, *, is_query: bool = False) -> list[str]:
    """Return the runs of a text: what :func:`pieces_of` takes, equal ones as often as they stand there.

    Of a script without spaces these are its pairs of characters, and ideographs unless ``is_query``.
    """
    if text.isascii():
        return _ASCII_RUN.findall(text)
    patterns = _patterns()
    found = patterns.run.findall(text)
    if patterns.unspaced.search(text) is None:
        return found
    runs: list[str] = []
    for run in found:
        if _is_unspaced(run):
            runs += _pairs(run, has_ideographs=not is_query)
        else:
            runs.append(run)
    return runs


def _pairs(run: str, *, has_ideographs: bool) -> list[str]:
    if not unicodedata.is_normalized("NFKC", run):
        run = _folded(run)
    patterns = _patterns()
    letters: Sequence[str] = run
    if patterns.mark.search(run):
        run = run.translate(_DROPPED)
        letters = patterns.cluster.findall(run)
    if len(letters) < 2:
        return [run]
    pairs = [*map(str.__add__, letters, letters[1:])]
    if has_ideographs:
        pairs += _IDEOGRAPH.findall(run)
    return pairs


def _folded(run: str) -> str:
    """Return a run without differences of case and form."""
    if run.isascii():
        return run.lower()
    folded = unicodedata.normalize("NFKC", run).casefold().translate(_DROPPED)
    return _FOREIGN_DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), folded)


def _is_unspaced(run: str) -> bool:
    return run > _LAST_SPACED and _patterns().unspaced.match(run) is not None


def pieces_of(run: str) -> tuple[str, ...]:
    """Return a run, folded, and its parts if there are several; nothing where it has no letter or digit."""
    if _is_unspaced(run):
        return (run,)
    if _PLAIN.fullmatch(run):
        return (run.lower()[:MAX_WORD_CHARACTERS],)
    if run.lower() == ".net":
        return ".net", "net"
    found = _CORE.search(run)
    core = unicodedata.normalize("NFC", found[0]).translate(_DROPPED) if found else ""
    sign = run[len(run.rstrip("+#")) :]
    if sign and len(core) == 1 and core.isascii() and core.isalpha():
        return core.lower() + sign, core.lower()
    words = [word for word in core.split("_") if word]
    parts = list(words) if len(words) > 1 else []
    for word in words:
        inside = _parts_of(word)
        parts += inside if len(inside) > 1 else ()
    pieces = [core.replace("_", ""), *parts]
    folded = (_folded(piece)[:MAX_WORD_CHARACTERS] for piece in pieces)
    kept = [piece for number, piece in enumerate(folded) if number == 0 or len(piece) > 1]
    return tuple(kept) if kept[0] else ()


def _parts_of(word: str) -> Sequence[str]:
    """Return the parts of what stands between underscores."""
    if len(word) > MAX_WORD_CHARACTERS:
        return ()
    found = [part for same in _SCRIPT_PART.findall(word) for part in _PART.findall(same)]
    return found if len(found) <= MAX_PARTS else ()


@lru_cache(KEPT_TERMS)
def term_of(piece: str, language: str) -> str:
    """Return what is counted of a piece in a text of a language, empty for a function word.

    Of "none" all words are counted as they stand. Latin words among letters of another script are English.
    """
    if _is_unspaced(piece):
        return piece
    if piece.isascii() and language in WITHOUT_LATIN:
        language = "en"
    stops = STOP_WORDS.get(language, ())
    if language == "en":
        piece = _without_accents(piece)
    if piece in stops:
        return ""
    stemmer = stemmer_of(language)
    term = stemmer.stemWord(piece) if stemmer else piece
    return term if language in WITH_ACCENTS else _without_accents(term)


def _without_accents(word: str) -> str:
    if word.isascii():
        return word
    return _ACCENT.sub("", unicodedata.normalize("NFKD", word)).translate(_UNDIVIDED)


def main_languages(documents: Mapping[str, int]) -> tuple[str, ...]:
    """Return the languages that queries are read in, given how many documents are in each, most first."""
    least = MAIN_SHARE * sum(documents.values())
    return tuple(
        sorted((each for each in documents if documents[each] >= least), key=lambda each: -documents[each])
    )


Variants = tuple[str, ...]
"""The terms of one word of a query in several languages, each once: they count as one word."""


def terms_of_query(query: str, languages: Sequence[str]) -> list[Variants]:
    """Return the words of a query in order, repeats kept, without function words.

    Those are left out that no language counts, or that the language does not which the query shows. So are
    those that a question is put with, as `what`, where words enough are left; in capitals they are names.
    """
    pieces = [(piece, run) for run in runs_of(query, is_query=True) for piece in pieces_of(run)]
    pieces = pieces[:MAX_QUERY_WORDS]
    shown = languages_shown((piece for piece, _ in pieces), languages) if len(languages) > 1 else ()
    own = languages if len(languages) == 1 else shown
    unasked = frozenset[str]().union(*(UNASKED_WORDS.get(language, ()) for language in own))
    found: list[Variants] = []
    asked: list[Variants] = []
    for piece, run in pieces:
        variants = dict.fromkeys(term_of(piece, language) for language in languages)
        is_left_out = any(not term_of(piece, language) for language in shown)
        variants.pop("", None)
        if variants and not is_left_out:
            found.append(tuple(variants))
            if piece not in unasked or (len(run) > 1 and run.isupper()):
                asked.append(tuple(variants))
    return asked if len(asked) >= LEAST_ASKED else found


def is_function_word(word: str, languages: Sequence[str]) -> bool:
    """Whether a word says nothing of a subject in one of some languages."""
    folded = _folded(word)
    return any(folded in UNTOLD_WORDS.get(language, ()) for language in languages)


Span = tuple[int, int]

_SHOWN = regex.compile(r"\p{Hiragana}+|[\p{Katakana}ーｰﾞﾟ]+|(?:\p{Hangul}\p{M}*)+|\X")


def word_at(text: str, place: int) -> Span | None:
    """Return the word that a character is part of, as it is shown, None where there is none.

    A word with spaces around it is whole, with its marks; of a script without spaces it is a character, or
    a run of Kana or Hangul.
    """
    end = text.find(" ", place)
    begin = text.rfind(" ", 0, place) + 1
    runs = _patterns().run.finditer(text, begin, len(text) if end < 0 else end)
    run = next((run for run in runs if place < run.end()), None)
    if run is None or place < run.start():
        return None
    if _is_unspaced(run[0]):
        found = _SHOWN.finditer(text, *run.span())
    elif pieces_of(run[0])[:1] == (run[0].lower(),):  # C++ and .NET have their signs
        return run.span()
    else:
        found = _CORE.finditer(text, *run.span())
    return next((match.span() for match in found if match.start() <= place < match.end()), None)
