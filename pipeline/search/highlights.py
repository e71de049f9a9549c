"""Which words of a passage answered which words of a query: where token vectors found each other.

    query token ─▶ the token of passage or title most like it ─▶ whole words ─▶ spans, weights, query words

A span's weight is its share of the passage's MaxSim: what the query's tokens weigh, times their cosine. Left
out are words below :data:`LEAST_COSINE` or :data:`LEAST_SHARE`, function words, punctuation, and all but the
:data:`MAX_WORDS` strongest.

    q query tokens    P tokens of a passage or title    n passages
    M chunks of all passages    N titles    C both    T their tokens
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import regex
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.words import STOP_WORDS
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.candidates import blocks
from cairn.pipeline.search.late import ABSENT, BLOCK_ROWS, LateQuery
from cairn.pipeline.search.passages import ChosenPassage
from cairn.pipeline.search.reader import IndexReader
from cairn.pipeline.token_vectors.codes import FAR
from cairn.pipeline.types import Highlight, QueryTokens
from jaxtyping import Float32, Int64, Shaped, UInt8

LEAST_COSINE: Final = 0.5
"""Below, tokens are not alike: unrelated ones reach .4."""
LEAST_SHARE: Final = 0.2
"""Of the strongest word's weight; below, a word is hardly alike, or weighs little in the query."""
MAX_WORDS: Final = 6
"""Words of a passage and its title, the strongest: more are not read."""
LONGEST_ASKED: Final = 100
"""Characters of a query's word, at most: every highlight that it answers repeats it."""
_WORD: Final = regex.compile(r"(?V1)\p{Han}\p{M}*|[\p{L}\p{N}_][[\w\p{N}]--\p{Han}]*")
"""An ideograph, or letters and digits; with their marks, so that no span parts a letter from its accent."""

Span = tuple[int, int]
_Place = tuple[bool, Span]
"""Whether a word stands in the title, and where."""


class Highlights(NamedTuple):
    """The words of a passage, and of its document's title, in order; spans are those of the document."""

    of_text: tuple[Highlight, ...]
    of_title: tuple[Highlight, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Explanation:
    """One query whose passages are to be explained; ``words_q`` are the words of its tokens, "" for none."""

    generation: Generation
    reader: IndexReader
    late: LateQuery
    words_q: Sequence[str]

    @classmethod
    def of(
        cls, generation: Generation, reader: IndexReader, text: str, tokens: QueryTokens, late: LateQuery
    ) -> Explanation:
        """Read which word of a query each of its judging tokens belongs to."""
        spans = [_word_at(text, int(tokens.start_char[place])) for place in late.places_q]
        return cls(
            generation=generation,
            reader=reader,
            late=late,
            words_q=[
                "" if span is None or span[1] - span[0] > LONGEST_ASKED else text[span[0] : span[1]]
                for span in spans
            ],
        )

    def highlights(
        self, passages: Sequence[ChosenPassage], texts: Sequence[str], titles: Sequence[str]
    ) -> list[Highlights]:
        """Return the highlights of passages with these texts, in documents with these titles.

        Only so many chunks are compared at a time, or one longer passage.
        """
        num_chunks = np.array([passage.end - passage.first for passage in passages], np.int64)
        found: list[Highlights] = []
        for start, stop in blocks(num_chunks, BLOCK_ROWS):
            found += self._highlights_of_block(passages[start:stop], texts[start:stop], titles[start:stop])
        return found

    def _highlights_of_block(
        self, passages: Sequence[ChosenPassage], texts: Sequence[str], titles: Sequence[str]
    ) -> list[Highlights]:
        generation = self.generation
        first_n = np.array([passage.first for passage in passages], np.int64)
        size_n = np.array([passage.end - passage.first for passage in passages], np.int64)
        chunk_M = ranges(first_n, size_n)
        title_N, title_of_n = np.unique(
            generation.chunk_offsets[generation.chunk_documents[first_n]], return_inverse=True
        )
        matches = self.reader.token_matches(chunk_M, title_N, self.late)
        start_C = np.concatenate([generation.chunk_starts[chunk_M], np.zeros(len(title_N), np.int64)])
        start_T = _token_starts(matches.step_T, start_C, matches.size_C)
        ends = np.cumsum([0, *matches.size_C])
        ends_n = ends[np.cumsum([0, *size_n])]
        heading_N = [
            _best_matches(matches.cosine_Tq[start:stop], start_T[start:stop])
            for start, stop in pairwise(ends[len(chunk_M) :].tolist())
        ]
        found: list[Highlights] = []
        for place, (text, title) in enumerate(zip(texts, titles, strict=True)):
            own = slice(ends_n[place], ends_n[place + 1])
            first_char = int(generation.chunk_starts[first_n[place]])
            best = _best_matches(matches.cosine_Tq[own], start_T[own] - first_char)
            places = self._found_words(best, heading_N[title_of_n[place]], text, title)
            found.append(_strongest(places, first_char))
        return found

    def _found_words(
        self, of_text: _BestMatches, of_title: _BestMatches, text: str, title: str
    ) -> dict[_Place, dict[str, float]]:
        """Return the words of text and title that answered, and by how much each word of the query did."""
        is_title_q = of_title.cosine_q > of_text.cosine_q
        cosine_q = np.where(is_title_q, of_title.cosine_q, of_text.cosine_q)
        weight_q = cosine_q * self.late.weights_q
        found: dict[_Place, dict[str, float]] = defaultdict(dict)
        for token in np.flatnonzero(cosine_q >= LEAST_COSINE).tolist():
            asked, is_title = self.words_q[token], bool(is_title_q[token])
            start = int((of_title if is_title else of_text).start_q[token])
            span = _word_at(title if is_title else text, start) if asked else None
            if span is not None:
                by_word = found[is_title, span]
                by_word[asked] = by_word.get(asked, 0.0) + float(weight_q[token])
        return found


class _BestMatches(NamedTuple):
    """The best match of each query token in a text: its cosine, and the character it begins at."""

    cosine_q: Float32[np.ndarray, " q"]
    start_q: Int64[np.ndarray, " q"]


def _best_matches(cosine_Pq: Float32[np.ndarray, "P q"], start_P: Int64[np.ndarray, " P"]) -> _BestMatches:
    num_asked = cosine_Pq.shape[1]
    if not len(cosine_Pq):
        return _BestMatches(np.full(num_asked, ABSENT, np.float32), np.full(num_asked, -1))
    place_q = cosine_Pq.argmax(axis=0)
    return _BestMatches(cosine_Pq[place_q, np.arange(num_asked)], start_P[place_q])


def _token_starts(
    step_T: UInt8[np.ndarray, " T"], start_C: Int64[np.ndarray, " C"], size_C: Int64[np.ndarray, " C"]
) -> Int64[np.ndarray, " T"]:
    """Return where each token begins, given where each stretch of tokens does.

    Before all characters where that is not kept: from the first step of a stretch that is too long.
    """
    first_C = np.cumsum(size_C) - size_C
    far_T = _sums_of_each(step_T == FAR, first_C, size_C)
    start_T = np.repeat(start_C, size_C) + _sums_of_each(step_T, first_C, size_C)
    return np.where(far_T > 0, -1, start_T)


def _sums_of_each(
    step_T: Shaped[np.ndarray, " T"], first_C: Int64[np.ndarray, " C"], size_C: Int64[np.ndarray, " C"]
) -> Int64[np.ndarray, " T"]:
    """Return running sums that begin again with every stretch."""
    sums_T1 = np.concatenate([[0], np.cumsum(step_T, dtype=np.int64)])
    return sums_T1[1:] - np.repeat(sums_T1[first_C], size_C)


def _word_at(text: str, place: int) -> Span | None:
    """Return the word of a token that begins at a character, None for other tokens and outside of the text.

    Function words are no words here. Some tokenizers count the space before a word to its first token.
    """
    place += place >= 0 and text[place : place + 1].isspace()
    if not 0 <= place < len(text):
        return None
    end = text.find(" ", place)
    for match in _WORD.finditer(text, text.rfind(" ", 0, place) + 1, len(text) if end < 0 else end):
        if match.start() <= place < match.end():
            return None if match[0].casefold() in STOP_WORDS else match.span()
    return None


def _strongest(found: Mapping[_Place, Mapping[str, float]], first_char: int) -> Highlights:
    weights = {place: sum(by_word.values()) for place, by_word in found.items()}
    least = LEAST_SHARE * max(weights.values(), default=0.0)
    of_text: list[Highlight] = []
    of_title: list[Highlight] = []
    strongest = sorted(weights, key=lambda place: (-weights[place], place))[:MAX_WORDS]
    for place in sorted(place for place in strongest if weights[place] >= least):
        is_title, (start, end) = place
        moved = 0 if is_title else first_char
        (of_title if is_title else of_text).append(
            Highlight(
                start_char=moved + start,
                end_char=moved + end,
                weight=weights[place],
                query_words=tuple(sorted(found[place], key=lambda word: (-found[place][word], word))),
            )
        )
    return Highlights(tuple(of_text), tuple(of_title))
