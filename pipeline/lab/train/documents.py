"""Training pairs made of long documents: queries that a section answers only in the light of its document.

    title, text ─▶ sections at headings, long ones cut at paragraphs ─▶ a pair a section

    query       title and heading, or title and a sentence cut out of the section
    document    the section, without its heading and without that sentence: it seldom says what it belongs to
    negatives   the other sections of the document, neighbours in one sequence

A heading is a line of Markdown (``## Install``), of a wiki (``== Install ==``) or underlined
(reStructuredText). A text without any is cut at its paragraphs, and asks with sentences alone. What is drawn
is drawn by a hash of the text.

Source: a way of our own; cut-out sentences are the inverse cloze task (Lee et al. 2019).
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from cairn.pipeline.encode.sentences import sentence_starts
from cairn.pipeline.encode.structure import FENCES, heading_at
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.pairs import (
    PairRow,
    TrainingPairs,
    counted,
    read_rows,
    stem,
    training_files,
)

CHARACTERS_PER_TOKEN: Final = 4
"""So long are sections at most for each token that is read of a document: English prose.

What is longer is cut off in the middle.
"""

MIN_SECTION_CHARACTERS: Final = 200
"""Two or three sentences: less says too little to be found by."""

MIN_QUERY_WORDS, MAX_QUERY_WORDS = 6, 40

_PARAGRAPH: Final = re.compile(r"\n[ \t]*\n\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a document; ``is_whole`` when all that stands below the heading is in it."""

    heading: str
    body: str
    is_whole: bool


def read_document_pairs(paths: Sequence[Path], max_document_tokens: int) -> TrainingPairs:
    """Return a pair for each section of the documents; what makes no pair is counted."""
    kept: dict[PairRow, None] = {}
    skipped: Counter[str] = Counter()
    for file_number, file in enumerate(training_files(paths)):
        rows = read_rows(file, ("title", "text", "source"), "text")
        for number, (title, text, source) in enumerate(rows):
            if not text.strip():
                skipped["empty document"] += 1
                continue
            page = f"{file_number}:{number}"
            for section in split_sections(text, CHARACTERS_PER_TOKEN * max_document_tokens):
                asked = _ask(title.strip(), section)
                if isinstance(asked, str):
                    skipped[asked] += 1
                    continue
                row = PairRow(*asked, title=title, source=source or stem(file), page=page)
                if row in kept:
                    skipped["repeated pair"] += 1
                kept[row] = None
    if not kept:
        raise SourceError(
            f"documents must have at least one section of {MIN_SECTION_CHARACTERS} characters, got "
            f"{counted(skipped)}; name others"
        )
    return TrainingPairs(rows=tuple(kept), skipped=dict(skipped))


def split_sections(text: str, max_characters: int) -> list[Section]:
    """Cut a text at its headings, and what is longer at the last paragraph, else sentence, that fits."""
    sections: list[Section] = []
    for heading, body in _headed(text):
        parts = list(_fitting(body.strip(), max_characters))
        sections += [Section(heading=heading, body=part, is_whole=len(parts) == 1) for part in parts]
    return sections


def _headed(text: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before the first heading, then every heading with what stands below it."""
    lines = text.splitlines()
    heading, body, in_fence = "", list[str](), False
    place = 0
    while place < len(lines):
        in_fence ^= lines[place].startswith(FENCES)
        found, num_lines = ("", 1) if in_fence else heading_at(lines, place)
        if found:
            yield heading, "\n".join(body)
            heading, body = found, []
        else:
            body.append(lines[place])
        place += num_lines
    yield heading, "\n".join(body)


def _fitting(body: str, max_characters: int) -> Iterator[str]:
    if len(body) <= max_characters:
        yield body
        return
    paragraphs, sentences = [match.end() for match in _PARAGRAPH.finditer(body)], sentence_starts(body)
    start = 0
    while len(body) - start > max_characters:
        end = (
            _last(paragraphs, start + max_characters // 2, start + max_characters)
            or _last(sentences, start, start + max_characters)
            or next((place for place in sentences if place > start), len(body))
        )
        yield body[start:end].strip()
        start = end
    if body[start:].strip():
        yield body[start:].strip()


def _last(places: Sequence[int], after: int, until: int) -> int:
    """Return the last place in such a range, 0 without one."""
    found = bisect_right(places, until)
    return places[found - 1] if found and places[found - 1] > after else 0


def _ask(title: str, section: Section) -> tuple[str, str] | str:
    """Return a query and what answers it, or why the section has none."""
    if len(section.body) < MIN_SECTION_CHARACTERS:
        return "short section"
    content = section.body.encode("utf-8", "surrogatepass")
    draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    about = f"{title}: " if title else ""
    is_named = bool(title and section.heading) and section.is_whole
    has_heading = is_named and section.heading.casefold() != title.casefold()
    if has_heading and draw % 2:
        return about + section.heading, section.body
    bounds = [0, *sentence_starts(section.body), len(section.body)]
    spans = [
        (start, end)
        for start, end in pairwise(bounds)
        if MIN_QUERY_WORDS <= len(section.body[start:end].split()) <= MAX_QUERY_WORDS
        and len(section.body) - (end - start) >= MIN_SECTION_CHARACTERS
    ]
    if spans:
        start, end = spans[(draw >> 1) % len(spans)]
        sentence = " ".join(section.body[start:end].split())
        return about + sentence, (section.body[:start] + section.body[end:]).strip()
    if has_heading:
        return about + section.heading, section.body
    return "section without a sentence to ask with"
