"""Which words of a passage answered which words of a query: where token vectors found each other.

    query token ─▶ the passage's token most like it ─▶ whole words ─▶ spans with weights and query words

A span's weight is its share of the passage's MaxSim: what the query's tokens weigh, times their cosine. Words
below :data:`LEAST_COSINE` or :data:`LEAST_SHARE` are left out, as is punctuation.

    q query tokens    P tokens of a passage    C chunks of all passages, T their tokens
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import regex
from jaxtyping import Float32, Int64, Shaped, UInt8

from pipeline.index.generation import Generation
from pipeline.ragged import ranges
from pipeline.search.candidates import blocks
from pipeline.search.late import BLOCK_ROWS, LateQuery
from pipeline.search.passages import ChosenPassage
from pipeline.search.reader import IndexReader
from pipeline.token_vectors.codes import FAR
from pipeline.types import Highlight, QueryTokens

LEAST_COSINE: Final = 0.5
"""Below, tokens are not alike: unrelated ones reach .4."""
LEAST_SHARE: Final = 0.2
"""Of the strongest word's weight; below, a word is a stop word or hardly alike."""
LONGEST_ASKED: Final = 100
"""Characters of a query's word, at most: every highlight that it answers repeats it."""
_WORD: Final = regex.compile(r"(?V1)\p{Han}\p{M}*|[\p{L}\p{N}_][[\w\p{N}]--\p{Han}]*")
"""An ideograph, or letters and digits; with their marks, so that no span parts a letter from its accent."""

Span = tuple[int, int]


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
        words = _words_of(text)
        spans = [_word_at(text, words, int(tokens.start_char[place])) for place in late.places_q]
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
        self, passages: Sequence[ChosenPassage], texts: Sequence[str]
    ) -> list[tuple[Highlight, ...]]:
        """Return the highlights of passages with these texts, in characters of their documents.

        Only so many chunks are compared at a time, or one longer passage.
        """
        num_chunks = np.array([passage.end - passage.first for passage in passages], np.int64)
        found: list[tuple[Highlight, ...]] = []
        for start, stop in blocks(num_chunks, BLOCK_ROWS):
            found += self._highlights_of_block(passages[start:stop], texts[start:stop])
        return found

    def _highlights_of_block(
        self, passages: Sequence[ChosenPassage], texts: Sequence[str]
    ) -> list[tuple[Highlight, ...]]:
        chunk_C = ranges(
            np.array([passage.first for passage in passages], np.int64),
            np.array([passage.end - passage.first for passage in passages], np.int64),
        )
        matches = self.reader.token_matches(chunk_C, self.late)
        cosine_Tq = matches.cosine_Tq
        start_T = self._token_starts(matches.step_T, chunk_C, matches.size_C)
        bounds = np.cumsum([0, *(each.end - each.first for each in passages)])
        ends = np.cumsum([0, *matches.size_C])[bounds].tolist()
        return [
            self._highlights_of(cosine_Tq[start:end], start_T[start:end], passage, text)
            for passage, text, start, end in zip(passages, texts, ends[:-1], ends[1:], strict=True)
        ]

    def _highlights_of(
        self,
        cosine_Pq: Float32[np.ndarray, "P q"],
        start_P: Int64[np.ndarray, " P"],
        passage: ChosenPassage,
        text: str,
    ) -> tuple[Highlight, ...]:
        if not len(cosine_Pq):
            return ()
        place_q = cosine_Pq.argmax(axis=0)
        cosine_q = cosine_Pq[place_q, np.arange(len(place_q))]
        first_char = int(self.generation.chunk_starts[passage.first])
        starts = start_P[place_q] - first_char
        words = _words_of(text)
        found: dict[Span, dict[str, float]] = defaultdict(dict)
        weights_q = (cosine_q * self.late.weights_q).tolist()
        for asked, cosine, start, weight in zip(
            self.words_q, cosine_q.tolist(), starts.tolist(), weights_q, strict=True
        ):
            span = _word_at(text, words, start) if asked and cosine >= LEAST_COSINE else None
            if span is not None:
                found[span][asked] = found[span].get(asked, 0.0) + weight
        return _strongest(found, first_char)

    def _token_starts(
        self,
        step_T: UInt8[np.ndarray, " T"],
        chunk_C: Int64[np.ndarray, " C"],
        size_C: Int64[np.ndarray, " C"],
    ) -> Int64[np.ndarray, " T"]:
        """Return where each token of some chunks begins in its document.

        Before all characters where that is not kept: from the first step of a chunk that is too long.
        """
        first_C = np.cumsum(size_C) - size_C
        far_T = _sums_of_each(step_T == FAR, first_C, size_C)
        start_T = np.repeat(self.generation.chunk_starts[chunk_C], size_C) + _sums_of_each(
            step_T, first_C, size_C
        )
        return np.where(far_T > 0, -1, start_T)


def _sums_of_each(
    step_T: Shaped[np.ndarray, " T"], first_C: Int64[np.ndarray, " C"], size_C: Int64[np.ndarray, " C"]
) -> Int64[np.ndarray, " T"]:
    """Return running sums that begin again with every stretch."""
    sums_T1 = np.concatenate([[0], np.cumsum(step_T, dtype=np.int64)])
    return sums_T1[1:] - np.repeat(sums_T1[first_C], size_C)


def _words_of(text: str) -> list[Span]:
    return [match.span() for match in _WORD.finditer(text)]


def _word_at(text: str, words: Sequence[Span], place: int) -> Span | None:
    """Return the word of a token that begins at a character, None for punctuation and outside of the text.

    Some tokenizers count the space before a word to its first token.
    """
    place += place >= 0 and text[place : place + 1].isspace()
    index = bisect_right(words, place, key=lambda word: word[0]) - 1
    return words[index] if index >= 0 and place < words[index][1] else None


def _strongest(found: dict[Span, dict[str, float]], first_char: int) -> tuple[Highlight, ...]:
    weights = {span: sum(by_word.values()) for span, by_word in found.items()}
    least = LEAST_SHARE * max(weights.values(), default=0.0)
    return tuple(
        Highlight(
            start_char=first_char + span[0],
            end_char=first_char + span[1],
            weight=weights[span],
            query_words=tuple(sorted(found[span], key=lambda word: (-found[span][word], word))),
        )
        for span in sorted(found)
        if weights[span] >= least
    )
