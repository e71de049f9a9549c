"""Find the query side of each document: the q of the pair (φ(d), ψ(q)) that is clustered.

A corpus that is indexed seldom has queries. The query column stands first, then the title, then the leading
sentence.

Deliberately simple: no language detection, no abbreviation lists. A sentence shorter than a few words is read
on past its full stop, which is what most abbreviations, initials and headings need.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_SENTENCE_CHARACTERS = 300
HEAD_CHARACTERS = 4 * MAX_SENTENCE_CHARACTERS
"""How much of a text is looked at: whitespace that collapses later must not use up the sentence."""

MIN_SPACED_CHARACTERS = 24
"""A full stop before this many characters ends "Dr." or "1." more often than a sentence."""

MIN_IDEOGRAPHIC_CHARACTERS = 8
"""Scripts with a full stop of their own need fewer characters a word.

They never use that stop for abbreviations.
"""

_SENTENCE_END = re.compile(
    r"""
    # This one needs whitespace behind it. An empty line ends a paragraph.
    (?P<spaced> [.!?…؟۔]+ ["'”’»)\]]* (?=\s|$) | \n[^\S\n]*\n )
    | (?P<unspaced> [。．｡！？।॥።။។]+ [”’」』）]* )
    """,  # noqa: RUF001 - the full stops of other scripts are meant
    re.VERBOSE,
)


def query_side(
    titles: Sequence[str | None], queries: Sequence[str | None], texts: Sequence[str]
) -> list[str]:
    """Return one query a document: its query, else its title, else its leading sentence.

    Blank counts as absent.
    """
    return [
        (query or "").strip() or (title or "").strip() or leading_sentence(text)
        for title, query, text in zip(titles, queries, texts, strict=True)
    ]


def leading_sentence(text: str) -> str:
    """Cut the first sentence, whitespace collapsed, at most :data:`MAX_SENTENCE_CHARACTERS` long.

    Blank text gives an empty string.
    """
    head = text.lstrip()[:HEAD_CHARACTERS]
    sentence = " ".join(head[: _end_of_sentence(head)].split())
    if len(sentence) <= MAX_SENTENCE_CHARACTERS:
        return sentence
    cut = sentence[: MAX_SENTENCE_CHARACTERS + 1]
    whole_words = cut.rpartition(" ")[0]
    return whole_words or cut[:MAX_SENTENCE_CHARACTERS]


def _end_of_sentence(head: str) -> int:
    for match in _SENTENCE_END.finditer(head):
        least = MIN_SPACED_CHARACTERS if match["spaced"] else MIN_IDEOGRAPHIC_CHARACTERS
        if match.start() >= least:
            return match.end()
    return len(head)
