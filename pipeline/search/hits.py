"""Rankings become hits: columns of the returned documents, read once, and passages cut from their text.

Metadata keeps Python values (dates stay dates); the command line and the HTTP API turn them into JSON.
Nanoseconds, for which Python has no type, become microseconds.

Where token vectors judge, a passage says which of its words answered which words of the query:

    query token ─▶ the token of passage or title most like it ─▶ whole words ─▶ spans, weights, query words

A span's weight is its share of the passage's MaxSim: what the query's tokens weigh, times their cosine. Left
out are words below :data:`LEAST_COSINE`, :data:`LEAST_GAIN` or :data:`LEAST_SHARE`, function words,
punctuation, letters and numbers that are not the query's, and all but the :data:`MAX_WORDS` strongest.

A passage says, too, where in its file it stands; this is the one place that maps offsets of characters to
pages. Pages stand in the text itself: between two of them is a line with a form feed, as `pdftotext` writes
it. So they go wherever the text goes, and no number can disagree with it. A page that is empty, or could not
be read, has its place, and numbers are those of the file. What a page is called is told by the file's format:
of source code and plain text, it is a line. Documents without pages have headings or lines instead.

    q query tokens    P tokens of a passage or title    n passages
    M chunks of all passages    N titles    C both    T their tokens
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.corpus.formats import FORMAT_OF
from cairn.pipeline.corpus.formats.format import HEADING_ID, PAGE_BREAK
from cairn.pipeline.index.generation import Generation, table_errors
from cairn.pipeline.lexical.languages import FUNCTION_WORDS, languages_shown
from cairn.pipeline.lexical.tokenizer import Span, is_function_word, word_at
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.fusion import ABSENT, BLOCK_ROWS, LateQuery
from cairn.pipeline.search.ranking import ChosenPassage, PreparedSearch, Ranking, columns_shown, joined
from cairn.pipeline.search.reader import IndexReader, MatchesAsked, PassagesAsked, TokenMatches, blocks
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import FAR, RESERVED_COLUMNS, Highlight, Hit, Passage, QueryTokens
from jaxtyping import Float32, Int64, Shaped, UInt8


def make_hits(
    search: PreparedSearch,
    rankings: Sequence[Ranking],
    explanations: Sequence[Explanation | None] | None = None,
) -> list[tuple[Hit, ...]]:
    """Return the hits of each ranking, in its order; a document that several rankings return is read once.

    Passages of a query with an explanation have highlights. Those within a budget that stand side by side
    become one.
    """
    if search.options.max_characters is not None:
        rankings = [
            replace(ranking, passages=[joined(pieces) for pieces in ranking.passages]) for ranking in rankings
        ]
    columns = columns_shown(search)
    metadata = [name for name in columns if name not in RESERVED_COLUMNS]
    positions = np.concatenate([ranking.positions for ranking in rankings])
    if not len(positions):
        return [()] * len(rankings)
    chosen = [passage for ranking in rankings for own in ranking.passages for passage in own]
    first_n, end_n = np.array([(each.first, each.end) for each in chosen], np.int64).reshape(-1, 2).T
    asked = _matches_at_once(rankings, explanations)
    with table_errors("reading the answer's documents", search.generation.layout):
        read = search.reader.read_passages(PassagesAsked(positions, columns, first_n, end_n, asked))
    rows = iter(showable(read.table).to_pylist())
    spans = iter(zip(read.start_n.tolist(), read.end_n.tolist(), strict=True))
    return [
        _hits_of(ranking, [next(rows) for _ in ranking.positions], spans, metadata, explanation, read.matches)
        for ranking, explanation in zip(rankings, explanations or [None] * len(rankings), strict=True)
    ]


def _matches_at_once(
    rankings: Sequence[Ranking], explanations: Sequence[Explanation | None] | None
) -> MatchesAsked | None:
    """Return what is to be matched with a single query, in one block; None where it takes several."""
    if explanations is None or len(explanations) > 1 or explanations[0] is None:
        return None
    passages = list(chain.from_iterable(rankings[0].passages))
    num_chunks = sum(each.end - each.first for each in passages)
    return explanations[0].matches_asked(passages) if 0 < num_chunks <= BLOCK_ROWS else None


def _hits_of(
    ranking: Ranking,
    rows: Sequence[dict[str, Any]],
    spans: Iterator[Span],
    metadata: Sequence[str],
    explanation: Explanation | None,
    matches: TokenMatches | None,
) -> tuple[Hit, ...]:
    row_of = [row for chosen, row in zip(ranking.passages, rows, strict=True) for _ in chosen]
    passages = [
        _cut(chosen, next(spans), row["text"])
        for chosen, row in zip(chain.from_iterable(ranking.passages), row_of, strict=True)
    ]
    if explanation is not None and passages:
        found = explanation.highlights(
            list(chain.from_iterable(ranking.passages)),
            passages,
            [row["title"] or "" for row in row_of],
            matches,
        )
        passages = [
            replace(passage, highlights=each.of_text, title_highlights=each.of_title)
            for passage, each in zip(passages, found, strict=True)
        ]
    left = (
        replace(
            each,
            page=page_of(row["text"], each.start_char, each.end_char, row["source_file"], each.highlights),
        )
        for each, row in zip(passages, row_of, strict=True)
    )
    return tuple(
        Hit(
            doc_id=row["doc_id"],
            title=row["title"],
            score=_within_bounds(float(score)),
            scores=parts,
            metadata={name: row[name] for name in metadata},
            passages=tuple(islice(left, len(chosen))),
        )
        for row, score, parts, chosen in zip(
            rows, ranking.scores, ranking.parts, ranking.passages, strict=True
        )
    )


def _cut(passage: ChosenPassage, span: Span, text: str) -> Passage:
    start_char, end_char = span
    return Passage(
        start_char=start_char,
        end_char=end_char,
        text=text[start_char:end_char],
        score=_within_bounds(passage.score),
        scores=passage.parts,
    )


def _within_bounds(score: float) -> float:
    """Return a score as answers have it, from 0 to 1.

    A window can come nearer to the query than any of its landmarks, whose best is 1. What is less like the
    query than an average chunk falls below 0.
    """
    return min(max(score, 0.0), 1.0)


def read_rows(generation: Generation, positions: np.ndarray, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of the documents at these positions as Python values, in the order asked."""
    with table_errors("reading the answer's documents", generation.layout):
        rows = generation.fetch_documents(positions, columns)
    return showable(rows).to_pylist()


def showable(rows: pa.Table) -> pa.Table:
    """Return rows whose values Python has types for."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            rows = rows.set_column(
                index, field.name, rows.column(index).cast(pa.timestamp("us", field.type.tz), safe=False)
            )
    return rows


LEAST_COSINE: Final = 0.5
"""Below, tokens are not alike: unrelated ones reach .4."""
LEAST_GAIN: Final = 0.45
"""The same of what is left above an average token's cosine, for states that have much in common.

Of words that found another than themselves, 70 to 75 % lie below it with all-MiniLM-L6-v2, whose average
token has .08, and with multilingual-e5-small, whose average token has .63.
"""
OTHER_WORD: Final = 0.2
"""How far above those, of what is left, a word of another stem lies. Of 66 such pairs of 14 questions, 20 of
the 29 below had nothing in common, and 8 of the 27 words above."""
STEM_LETTERS: Final = 4
LEAST_SHARE: Final = 0.2
"""Of the strongest word's weight; below, a word is hardly alike, or weighs little in the query."""
MAX_WORDS: Final = 6
"""Words of a passage and its title, the strongest: more are not read."""
LONGEST_ASKED: Final = 100
"""Characters of a query's word, at most: every highlight that it answers repeats it."""
_Place = tuple[bool, Span]
"""Whether a word stands in the title, and where."""


class Highlights(NamedTuple):
    """The words of a passage, and of its document's title, in order; spans are those of the document."""

    of_text: tuple[Highlight, ...]
    of_title: tuple[Highlight, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Explanation:
    """One query whose passages are to be explained; ``words_q`` are the words of its tokens, "" for none.

    ``least_q`` is the cosine from which a token is like one of the query. ``languages`` are those of queries
    and the query's own: their function words are not shown.
    """

    generation: Generation
    reader: IndexReader
    late: LateQuery
    languages: tuple[str, ...]
    words_q: Sequence[str]
    least_q: Float32[np.ndarray, " q"]

    @classmethod
    def of(
        cls, search: PreparedSearch, codebook: TokenCoder, text: str, tokens: QueryTokens, late: LateQuery
    ) -> Explanation:
        """Read which word of a query each of its judging tokens belongs to."""
        shown = languages_shown(text.lower().split(), tuple(FUNCTION_WORDS))
        languages = (*search.languages, *shown)
        average_q = codebook.average_similarities(late.vectors_qV)
        spans = [_word_at(text, int(tokens.start_char[place]), languages) for place in late.places_q]
        return cls(
            generation=search.generation,
            reader=search.reader,
            late=late,
            languages=languages,
            least_q=np.maximum(LEAST_COSINE, average_q + LEAST_GAIN * (1.0 - average_q)),
            words_q=[
                "" if span is None or span[1] - span[0] > LONGEST_ASKED else text[span[0] : span[1]]
                for span in spans
            ],
        )

    def matches_asked(self, passages: Sequence[ChosenPassage]) -> MatchesAsked:
        """Return what of some passages is to be matched with the query."""
        bounds_n2 = np.array([(each.first, each.end) for each in passages], np.int64)
        first_n, end_n = bounds_n2.T
        return MatchesAsked(
            chunk_M=ranges(first_n, end_n - first_n),
            title_N=np.unique(self._titles_of(first_n)),
            query=self.late,
        )

    def _titles_of(self, first_n: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return self.generation.chunks_of(self.generation.owners_of(first_n))[0]

    def highlights(
        self,
        passages: Sequence[ChosenPassage],
        read: Sequence[Passage],
        titles: Sequence[str],
        matches: TokenMatches | None,
    ) -> list[Highlights]:
        """Return the highlights of passages as they were read, in documents with these titles.

        Where they are not matched yet, only so many chunks are compared at a time, or one longer passage.
        """
        if matches is not None:
            return self._highlights_of_block(passages, read, titles, matches)
        num_chunks = np.array([passage.end - passage.first for passage in passages], np.int64)
        found: list[Highlights] = []
        for start, stop in blocks(num_chunks, BLOCK_ROWS):
            own = passages[start:stop]
            matches = self.reader.token_matches(self.matches_asked(own))
            found += self._highlights_of_block(own, read[start:stop], titles[start:stop], matches)
        return found

    def _highlights_of_block(
        self,
        passages: Sequence[ChosenPassage],
        read: Sequence[Passage],
        titles: Sequence[str],
        matches: TokenMatches,
    ) -> list[Highlights]:
        first_n = np.array([passage.first for passage in passages], np.int64)
        size_n = np.array([passage.end - passage.first for passage in passages], np.int64)
        _, title_of_n = np.unique(self._titles_of(first_n), return_inverse=True)
        start_T = _token_starts(matches.step_T, matches.start_C, matches.size_C)
        ends = np.cumsum([0, *matches.size_C])
        ends_n = ends[np.cumsum([0, *size_n])]
        heading_N = [
            _best_matches(matches.cosine_Tq[start:stop], start_T[start:stop])
            for start, stop in pairwise(ends[size_n.sum() :].tolist())
        ]
        found: list[Highlights] = []
        for place, (passage, title) in enumerate(zip(read, titles, strict=True)):
            own = slice(ends_n[place], ends_n[place + 1])
            first_char = passage.start_char
            best = _best_matches(matches.cosine_Tq[own], start_T[own] - first_char)
            places = self._found_words(best, heading_N[title_of_n[place]], passage.text, title)
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
        for token in np.flatnonzero(cosine_q >= self.least_q).tolist():
            asked, is_title = self.words_q[token], bool(is_title_q[token])
            start = int((of_title if is_title else of_text).start_q[token])
            own_text = title if is_title else text
            span = _word_at(own_text, start, self.languages) if asked else None
            span = span and _same_word(asked, span, own_text)
            is_close = cosine_q[token] - self.least_q[token] >= OTHER_WORD * (1.0 - self.least_q[token])
            if span is not None and _answers(own_text[slice(*span)], asked, bool(is_close)):
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


def _word_at(text: str, place: int, languages: Sequence[str]) -> Span | None:
    """Return the word of a token that begins at a character, None for other tokens and outside of the text.

    Function words are no words here. Some tokenizers count the space before a word to its first token.
    """
    place += place >= 0 and text[place : place + 1].isspace()
    span = word_at(text, place) if 0 <= place < len(text) else None
    return None if span is None or is_function_word(text[slice(*span)], languages) else span


def _answers(word: str, asked: str, is_close: bool) -> bool:
    """Whether a word answers one of the query: itself, one of its stem, or one that is close to a word."""
    word, asked = word.casefold(), asked.casefold()
    is_letter = any(len(each) == 1 and each.upper() != each for each in (word, asked))
    is_sign = is_letter or any(map(str.isdigit, asked))
    return word == asked or (not is_sign and (is_close or word[:STEM_LETTERS] == asked[:STEM_LETTERS]))


def _same_word(asked: str, found: Span, text: str) -> Span:
    """Return where a word of the query stands itself, if what was found is another word that is like it.

    Of error codes, one is as like the other to a model, and they may be on several pages.
    """
    if text[slice(*found)].casefold() == asked.casefold():
        return found
    same = re.search(rf"(?<!\w){re.escape(asked)}(?!\w)", text, re.IGNORECASE)
    return same.span() if same else found


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


_PAGE_MARK: Final = PAGE_BREAK.strip("\n")
_HEADING_CHARACTERS: Final = 100
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
    whole = _place_in_file(text, start, end, unit)
    if unit == "line" or not (whole.startswith("sections ") or _PAGE_MARK in text[start:end].strip()):
        return whole
    weight_of = defaultdict[str, float](float)
    for each in highlights:
        weight_of[_place_in_file(text, each.start_char, each.end_char, unit)] += each.weight
    best = max(weight_of, key=weight_of.__getitem__, default=whole)
    return best if 2 * weight_of[best] > sum(weight_of.values()) else whole


def _place_in_file(text: str, start: int, end: int, unit: str) -> str:
    passage = text[start:end]
    start += len(passage) - len(passage.lstrip())
    if unit == "sheet" and (name := _heading(text, text.rfind(_PAGE_MARK, 0, start) + 1, start + 1)):
        return f"sheet {name}"
    if unit == "section":
        names = [_heading(text, 0, start + 1), _heading(text, 0, end)]
        first, last = names if names[0] else names[::-1]
        if first:
            return f"section {first}" if last in (first, None) else f"sections {first} - {last}"
        unit = "line"
    mark = "\n" if unit == "line" else _PAGE_MARK
    first = 1 + text.count(mark, 0, start)
    last = first + passage.strip().count(mark)
    return f"{unit}s {first}-{last}" if last > first else f"{unit} {first}"


def pages_in(text: str, source_file: str) -> str | None:
    """Return how many pages a document has, such as `48 pages`, None where it has none."""
    unit = _unit_of(text, source_file)
    if unit in (None, "section"):
        return None
    number = 1 + text.count("\n" if unit == "line" else _PAGE_MARK)
    return f"{number:,} {unit}{'s' if number > 1 else ''}"


def _unit_of(text: str, source_file: str) -> str | None:
    """Return what the pages of a document are called, `section` for one of a file without, None for a row."""
    found = FORMAT_OF.get(PurePosixPath(source_file.lower()).suffix)
    if found is not None and found.unit is not None:
        return found.unit
    if _PAGE_MARK in text:
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
            names.append(name if len(name) <= _HEADING_CHARACTERS else f"{name[: _HEADING_CHARACTERS - 1]}…")
    return starts, names
