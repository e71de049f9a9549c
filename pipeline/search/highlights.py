"""Which words of a passage answered which words of a query: where token vectors found each other.

    query token ─▶ the passage's token most like it ─▶ whole words ─▶ spans with weights and query words

A span's weight is its share of the passage's MaxSim: what the query's tokens weigh, times their cosine. Words
below :data:`LEAST_COSINE` or :data:`LEAST_SHARE` are left out, as is punctuation.

    q query tokens    P pooled vectors of the passage
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64

from pipeline.index.generation import Generation
from pipeline.search.late import LateQuery
from pipeline.search.passages import ChosenPassage
from pipeline.token_vectors.codes import FAR
from pipeline.types import Highlight, QueryTokens

LEAST_COSINE: Final = 0.5
"""Below, tokens are not alike: unrelated ones reach .4."""
LEAST_SHARE: Final = 0.2
"""Of the strongest word's weight; below, a word is a stop word or hardly alike."""
_WORD: Final = re.compile(r"\w+")

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Explanation:
    """One query whose passages are to be explained; ``words_q`` are the words of its tokens, "" for none."""

    generation: Generation
    late: LateQuery
    words_q: Sequence[str]

    @classmethod
    def of(cls, generation: Generation, text: str, tokens: QueryTokens, late: LateQuery) -> Explanation:
        """Read which word of a query each of its judging tokens belongs to."""
        words = _words_of(text)
        spans = [_word_at(words, int(tokens.start_char[place])) for place in late.places_q]
        return cls(
            generation=generation,
            late=late,
            words_q=["" if span is None else text[span[0] : span[1]] for span in spans],
        )

    def highlights(self, passage: ChosenPassage, text: str) -> tuple[Highlight, ...]:
        """Return the highlights of a passage of this text, in characters of the document."""
        stored = self.generation.token_vectors
        assert stored is not None, "a projected query needs token vectors"
        own = slice(*stored.chunks.offsets_M1[[passage.first, passage.end]].tolist())
        if own.start == own.stop:
            return ()
        cosine_Pq = stored.projection.codec.cosines(stored.chunks.codes[own], self.late.vectors_qV)
        place_q = cosine_Pq.argmax(axis=0)
        cosine_q = cosine_Pq[place_q, np.arange(len(place_q))]
        first_char = int(self.generation.chunk_starts[passage.first])
        starts = self._token_starts(passage)[place_q] - first_char
        words = _words_of(text)
        found: dict[Span, dict[str, float]] = defaultdict(dict)
        weights_q = (cosine_q * self.late.weights_q).tolist()
        for asked, cosine, start, weight in zip(
            self.words_q, cosine_q.tolist(), starts.tolist(), weights_q, strict=True
        ):
            span = _word_at(words, start) if asked and cosine >= LEAST_COSINE else None
            if span is not None:
                found[span][asked] = found[span].get(asked, 0.0) + weight
        return _strongest(found, first_char)

    def _token_starts(self, passage: ChosenPassage) -> Int64[np.ndarray, " P"]:
        """Return where each token begins in the document; before all characters where that is not kept."""
        stored = self.generation.token_vectors
        assert stored is not None, "a projected query needs token vectors"
        starts: list[Int64[np.ndarray, " p"]] = []
        for chunk in range(passage.first, passage.end):
            own = slice(*stored.chunks.offsets_M1[chunk : chunk + 2].tolist())
            steps = stored.chunks.steps_T[own].astype(np.int64)
            start = self.generation.chunk_starts[chunk] + np.cumsum(steps)
            starts.append(np.where(np.logical_or.accumulate(steps == FAR), -1, start))
        return np.concatenate(starts)


def _words_of(text: str) -> list[Span]:
    return [match.span() for match in _WORD.finditer(text)]


def _word_at(words: Sequence[Span], place: int) -> Span | None:
    """Return the word that holds a character, None for punctuation and what lies outside of the text."""
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
