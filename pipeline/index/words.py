"""The words of a text as BM25 counts them, alike in documents and queries.

A word is a run of letters, their marks and digits in any script: lower case, without accents, reduced to its
English stem (Snowball's Porter2), and left out where it is an English stop word.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import regex
import Stemmer

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
    "they this to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Lucene's."""
MAX_WORD_CHARACTERS = 40
"""Longer runs are keys, hashes or encoded bytes, not words that someone searches for."""
NO_TERM = -1

_WORD = regex.compile(r"[^\W_]+")
_ACCENT = regex.compile(r"[\u0300-\u036f]+")


def words_of(text: str) -> list[str]:
    """Return the runs of letters and digits of a text, as they stand there."""
    return _WORD.findall(text)


def terms_of(text: str) -> list[str]:
    """Return the terms of a query, in order, repeats kept."""
    stemmer = Stemmer.Stemmer("english")
    terms = [_term_of(word, stemmer) for word in words_of(text)]
    return [term for term in terms if term]


class TermNumbers(dict[str, int]):
    """Words to numbers of terms, given in the order in which terms are met.

    A word that is left out has :data:`NO_TERM`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[str] = []
        self._numbers: dict[str, int] = {}
        self._stemmer = Stemmer.Stemmer("english")

    def __missing__(self, word: str) -> int:
        term = _term_of(word, self._stemmer)
        number = NO_TERM
        if term:
            number = self._numbers.setdefault(term, len(self.terms))
            if number == len(self.terms):
                self.terms.append(term)
        self[word] = number
        return number

    def of(self, words: Sequence[str]) -> list[int]:
        """Return the number of each word's term."""
        return [self[word] for word in words]


def _term_of(word: str, stemmer: Stemmer.Stemmer) -> str:
    """Return a word's term, empty where the word is left out."""
    if len(word) > MAX_WORD_CHARACTERS:
        return ""
    plain = word.lower()
    if not plain.isascii():
        plain = _ACCENT.sub("", unicodedata.normalize("NFKD", plain))
    return "" if plain in STOP_WORDS else stemmer.stemWord(plain)
