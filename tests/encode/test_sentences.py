from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import regex
from cairn.pipeline.encode.sentences import rank_sentences, sentence_starts
from cairn.pipeline.encode.tokenization import TokenizedTexts
from hypothesis import example, given
from hypothesis import strategies as st

CLASSES = (
    *("Extend", "Format", "Sp", "Sep", "CR", "LF", "Lower", "Upper", "OLetter", "Numeric", "ATerm", "STerm"),
    *("SContinue", "Close"),
)
ALPHABET = 'aBé語1.!?。,;-)"”( \t\n\r\u2029\u0301\u00ad'


def _class_of(character: str) -> str:
    return next(
        (name for name in CLASSES if regex.fullmatch(rf"\p{{Sentence_Break={name}}}", character)), "Other"
    )


def _naive_starts(text: str) -> list[int]:
    """Rules SB3 to SB11 read off one place at a time, with the tailoring.

    Only an empty line or U+2029 separates paragraphs.
    """
    return [
        place
        for place in range(1, len(text))
        if _is_empty_line_before(text, place)
        or (_ends_sentence(text, place) and not _is_after_abbreviation(text, place))
    ]


def _is_after_abbreviation(text: str, place: int) -> bool:
    head = text[:place].rstrip()
    if head == text[:place] or not head.endswith("."):
        return False
    word = _last_word(head[:-1])
    if word.isdigit():
        return len(word) < 3 and not head[: -1 - len(word)].endswith((".", ","))
    ends = [end for end in range(1, len(text) + 1) if _last_word(text[:end]) == word]
    ends = [end for end in ends if not _last_word(text[: end + 1])[len(word) :]]
    stops = sum(text[end : end + 1] == "." for end in ends)
    is_short = regex.fullmatch(r"\p{Lu}\p{Ll}{1,3}|\p{Ll}{2,3}", word)
    return bool(
        regex.fullmatch(r"[\p{Lu}\p{Ll}]", word)
        or (is_short and stops - (len(ends) - stops) > (word.islower() and not text[place].isdecimal()))
    )


def _last_word(head: str) -> str:
    return regex.search(r"[\p{L}\p{M}\p{N}\p{Pd}'\u2019]*$", head)[0]


def _is_empty_line_before(text: str, place: int) -> bool:
    names = _resolved(text)
    visible = "".join(character for character, name in zip(text[:place], names, strict=False) if name)
    white = regex.search(r"[\p{SB=Sp}\p{SB=Sep}\p{SB=CR}\p{SB=LF}]*$", visible)[0]
    is_paragraph = "\u2029" in white or len(regex.findall(r"\r\n|[\r\n]", white)) > 1
    return is_paragraph and names[place] not in (None, "Sp", "Sep", "CR", "LF")


def _resolved(text: str) -> list[str | None]:
    """Return the class of each character; None where SB5 ignores it.

    SB5 never ignores the first character of the text or the first one after a separator.
    """
    names: list[str | None] = []
    for character in text:
        name = _class_of(character)
        is_ignored = name in ("Extend", "Format") and bool(names) and names[-1] not in ("Sep", "CR", "LF")
        names.append(None if is_ignored else name)
    return names


def _ends_sentence(text: str, place: int) -> bool:
    names = _resolved(text)
    before, after = [name for name in names[:place] if name], [name for name in names[place:] if name]
    spaces = ("Sp", "Sep", "CR", "LF")
    if not names[place] or after[0] in spaces:
        return False
    has_space = False
    while before and before[-1] in spaces:
        before.pop()
        has_space = True
    has_close = False
    while before and before[-1] == "Close":
        before.pop()
        has_close = True
    if not before or before[-1] not in ("ATerm", "STerm") or after[0] in ("SContinue", "ATerm", "STerm"):
        return False
    if after[0] == "Close" and not has_space:
        return False
    if before[-1] == "STerm":
        return True
    if not has_space and not has_close:
        if after[0] == "Numeric":
            return False
        if after[0] == "Upper" and len(before) > 1 and before[-2] in ("Upper", "Lower"):
            return False
    stops = ("OLetter", "Upper", "Lower", "ATerm", "STerm", "Sep", "CR", "LF")
    return next((name for name in after if name in stops), None) != "Lower"


PIECES = st.sampled_from(
    ["St", "al", "Prof", "time", "2", "23", "PC", "e", ". ", ".", " ", ", ", ".\n\n", "."]
)


@given(text=st.text(alphabet=ALPHABET, max_size=14) | st.lists(PIECES, max_size=14).map("".join))
@example(".2. St")
def test_starts_any_text_equal_the_rules_read_one_place_at_a_time(text):
    assert sentence_starts(text) == _naive_starts(text)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("First. Seven! Eight?", ["First. ", "Seven! ", "Eight?"]),
        ("He said “Stop.” Then he left.", ["He said “Stop.” ", "Then he left."]),
        (
            "It is 3.14 in the U.S. today, e.g. here. Good.",
            ["It is 3.14 in the U.S. today, e.g. here. ", "Good."],
        ),
        ("Gehe am 3. Mai nach St. Leonhard. Dann", ["Gehe am 3. Mai nach St. Leonhard. ", "Dann"]),
        ("Ask Dr. Li, e.g. Abs. 2. Dr. Li knows.", ["Ask Dr. Li, e.g. Abs. 2. Dr. Li knows."]),
        (
            "They (Li et al. 2020, Wu et al. 2021) sat. So",
            ["They (Li et al. 2020, Wu et al. 2021) sat. ", "So"],
        ),
        ("It is page no. 4 of five. Six are there.", ["It is page no. 4 of five. ", "Six are there."]),
        ("I saw a cat. The cat sat. No cat ate.", ["I saw a cat. ", "The cat sat. ", "No cat ate."]),
        ("今天很好。我们走吧\uff01好的", ["今天很好。", "我们走吧\uff01", "好的"]),
        ("यह है। वह है।", ["यह है। ", "वह है।"]),
        ("هل هذا؟ نعم.", ["هل هذا؟ ", "نعم."]),
        ("wrapped\nline. Next\n\nHeading\n\nlast", ["wrapped\nline. ", "Next\n\n", "Heading\n\n", "last"]),
    ],
)
def test_starts_cut_texts_of_many_scripts_at_sentences(text, sentences):
    places = [0, *sentence_starts(text), len(text)]
    assert [text[start:end] for start, end in pairwise(places)] == sentences


@pytest.mark.parametrize(
    ("spans", "text_offsets", "texts", "ranks"),
    [
        # "A b?" and "C" with a token for each word, one that holds the space before it, in the second text.
        ([(0, 1), (0, 1), (1, 3), (3, 4), (4, 6)], [0, 1, 5], ["X", "A b? C"], [1, 1, 1, 1, 3]),
        ([(0, 1), (1, 2)], [0, 2], ["A. \u200b"], [1, 1]),
    ],
)
def test_rank_goes_to_the_token_that_opens_a_sentence_where_it_has_one(spans, text_offsets, texts, ranks):
    start_char, end_char = np.array(spans, np.int64).T.copy()
    tokens = TokenizedTexts(
        ids=np.zeros(len(spans), np.int32),
        start_char=start_char,
        end_char=end_char,
        breaks=np.ones(len(spans), np.uint8),
        text_offsets=np.array(text_offsets, np.int64),
    )
    rank_sentences(tokens, texts)
    assert tokens.breaks.tolist() == ranks
