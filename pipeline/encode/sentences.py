"""Where sentences begin, in any language, for landmarks of sentence granularity.

    text ─▶ spans between boundaries ─▶ the tokens that open them, ranked above words ─▶ (landmarks)

The default rules of Unicode: terminators of all scripts, with their closing quotes and brackets; a full stop
before a digit, inside an abbreviation such as U.S. or before a small letter ends nothing.

Abbreviations are known without a list. A full stop and white space end no sentence after one letter, after a
number of one or two digits ("am 3. Oktober", not "at 3.15. Then"), and after a word of two or three letters,
or of four with a capital, that the text has more often with a full stop than without: at least two times more
often where the word is in small letters and no digit follows, as a rare word may end a sentence. The page has
the same rule, in excerpt.js.

Source: Unicode Standard Annex #29, sentence boundary rules SB3 to SB11. Differs: abbreviations; a line break
inside a paragraph is white space, as texts come wrapped; an empty line, or a paragraph separator, ends a
sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import regex
from cairn.pipeline.encode.tokenization import TokenizedTexts
from cairn.pipeline.model.landmarks import SENTENCE_START
from jaxtyping import Int64, UInt8


def _class(*names: str) -> str:
    return "".join(rf"\p{{Sentence_Break={name}}}" for name in names)


_IGNORED: Final = f"[{_class('Extend', 'Format')}]*+"  # SB5
_CLOSERS: Final = f"(?:[{_class('Close')}]{_IGNORED})*+"
_STOPS: Final = ("OLetter", "Upper", "Lower", "STerm", "ATerm", "Sep", "CR", "LF")
_LINE_BREAK: Final = r"(?>\r\n|[\n\r\x85\u2028])"
_BLANKS: Final = f"(?:[{_class('Sp')}]{_IGNORED})*+"
_SPACES: Final = f"(?:[{_class('Sp')}]{_IGNORED}|{_LINE_BREAK}|\\u2029)*+"
_ANY_IGNORED: Final = f"[{_class('Extend', 'Format')}]*"  # a look behind cannot be possessive
_BEFORE_TERMINATOR: Final = (
    f"(?<=[{_class('Upper', 'Lower')}]{_ANY_IGNORED}[{_class('ATerm')}]{_ANY_IGNORED})"
)
_BOUNDARY: Final = regex.compile(
    rf"""
    (?: {_LINE_BREAK} {_BLANKS} {_LINE_BREAK} | \u2029 ) {_SPACES}    # SB4, empty lines only
    | (?:
        [{_class("STerm")}] {_IGNORED} {_CLOSERS}
        | [{_class("ATerm")}] {_IGNORED}
          (?! [{_class("Numeric")}])                                                         # SB6
          (?! {_BEFORE_TERMINATOR} [{_class("Upper")}])                                      # SB7
          {_CLOSERS}
          (?! {_SPACES} [^{_class(*_STOPS)}]*+ [{_class("Lower")}])                          # SB8
      )
      {_SPACES}                                                                              # SB9, SB10
      (?! [{_class("SContinue", "STerm", "ATerm")}])                                         # SB8a
    """,
    regex.VERBOSE | regex.VERSION1,
)
_INSIDE_WORD: Final = r"\p{L}\p{M}\p{N}\p{Pd}'\u2019"
_SHORT_WORD: Final = r"\p{Lu}\p{Ll}{1,3}|\p{Ll}{2,3}"
_SHORT_WORDS: Final = regex.compile(rf"(?<![{_INSIDE_WORD}])(?:{_SHORT_WORD})(?:\.|(?![{_INSIDE_WORD}]))")
_ABBREVIATION: Final = regex.compile(
    rf"(?<![{_INSIDE_WORD}])(?:[\p{{Lu}}\p{{Ll}}]|(?<![.,])[0-9]{{1,2}}|(?P<word>{_SHORT_WORD}))\."
    r"(?!\s*?\n\s*?\n|\s*\u2029)\s+"
)


def sentence_starts(text: str) -> list[int]:
    """Return the character each sentence after the first begins at; one that ends the text begins none."""
    starts = [place for match in _BOUNDARY.finditer(text) if (place := match.end()) < len(text)]
    words = {match.end(): match["word"] for match in _ABBREVIATION.finditer(text)} if starts else {}
    if not words:
        return starts
    count = Counter(_SHORT_WORDS.findall(text)) if any(words.values()) else Counter[str]()

    def is_abbreviation(word: str | None, place: int) -> bool:
        may_end_sentence = word is not None and word.islower() and not text[place].isdecimal()
        return word is None or count[f"{word}."] > count[word] + may_end_sentence

    return [place for place in starts if place not in words or not is_abbreviation(words[place], place)]


def rank_sentences(tokens: TokenizedTexts, texts: Sequence[str]) -> None:
    """Raise the rank of the place before every token that opens a sentence, in place."""
    for index, text in enumerate(texts):
        rank_starts(tokens, index, np.array(sentence_starts(text), np.int64), SENTENCE_START)


def rank_starts(
    tokens: TokenizedTexts,
    index: int,
    start_char_S: Int64[np.ndarray, " S"],
    rank_S: int | UInt8[np.ndarray, " S"],
) -> None:
    """Raise ranks of one text, in place, before the tokens that open what begins at these characters.

    A token across a beginning opens what begins. No rank becomes lower.
    """
    first, end = tokens.text_offsets[index : index + 2].tolist()
    opening_S = first + np.searchsorted(tokens.end_char[first:end], start_char_S, side="right")
    ranks_S = np.broadcast_to(np.asarray(rank_S, np.uint8), opening_S.shape)
    has_token_S = opening_S < end
    np.maximum.at(tokens.breaks, opening_S[has_token_S], ranks_S[has_token_S])
