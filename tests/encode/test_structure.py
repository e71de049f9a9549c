from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cairn.pipeline.encode.documents import shown_chunks
from cairn.pipeline.encode.sentences import rank_sentences
from cairn.pipeline.encode.structure import heading_at, rank_structure, structure_of
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.model.landmarks import SENTENCE_START, Chunks, chunk_spans, split_into_chunks
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

# Every line with the rank before it, as cairn.pipeline.model.landmarks has them; 0 where no cut is better
# than inside prose.
LINES = [
    (8, "An opening paragraph"),
    (0, "wrapped over lines."),
    (0, ""),
    (9, "Install"),
    (0, "======="),
    (0, ""),
    (7, "Run this:"),
    (0, ""),
    (7, "```sh"),
    (0, "# not a heading"),
    (4, "- not an item"),
    (0, ""),
    (5, "| not | a table |"),
    (4, "|-----|---------|"),
    (0, "```"),
    (8, "At once a paragraph, 2. of which"),
    (0, "2. is wrapped, and no item."),
    (8, "- outer"),
    (5, "  - inner"),
    (0, "    wrapped"),
    (5, "    1. innermost"),
    (0, ""),
    (5, "  a paragraph of the item"),
    (5, "  ~~~"),
    (0, "  code"),
    (0, ""),
    (4, "  more code"),
    (0, "  ~~~"),
    (5, "  after it"),
    (6, "- second"),
    (0, ""),
    (6, "* third"),
    (0, ""),
    (8, "| name | size |"),
    (0, "| ---- | ---: |"),
    (0, "| one  | 1    |"),
    (4, "| two  | 2    |"),
    (8, "After the table"),
    (0, ""),
    (9, "## Use ##"),
    (7, "### Inside"),
    (7, "1. first"),
    (6, "2) second"),
    (0, ""),
    (8, "The end"),
    (0, ""),
    (9, "== Of a wiki =="),
    (7, "> a quotation"),
    (0, "> goes on"),
]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_structure_of_a_document_has_the_rank_of_every_line(end):
    found = structure_of(end.join(line for _, line in LINES))
    ranks = dict(zip(found.start_char_S.tolist(), found.rank_S.tolist(), strict=True))
    starts = np.cumsum([0, *(len(line + end) for _, line in LINES)]).tolist()
    assert [(ranks.pop(start, 0), line) for start, (_, line) in zip(starts, LINES, strict=False)] == LINES
    assert not ranks


@pytest.mark.parametrize(
    "line",
    [
        "# a" + " " * 60_000 + "b",
        "== a" + " " * 60_000 + "b",
        "=" * 60_000 + "b",
        "#" * 60_000,
        "- " * 60_000,
    ],
)
def test_structure_of_a_hostile_line_takes_linear_time(line):
    assert structure_of(line).start_char_S.tolist() == [0]


@pytest.mark.parametrize(
    ("lines", "heading"),
    [
        (["# C#"], ("C", 1)),
        (["#"], ("", 1)),
        (["####### seven"], ("", 1)),
        (["==== ===="], ("", 1)),
        (["-----", "Words", "-----"], ("Words", 3)),
    ],
)
def test_heading_at_first_line(lines, heading):
    assert heading_at(lines, 0) == heading


def _chunks(tokenizer, text, interval, rank=rank_structure) -> tuple[Chunks, list[tuple[int, int]]]:
    tokens = tokenize(tokenizer, [text])
    rank(tokens, [text])
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, interval)
    start, end = chunk_spans(chunks, tokens.start_char, np.array([len(text)]))
    return chunks, list(zip(start.tolist(), end.tolist(), strict=True))


def _num_tokens(tokenizer, text):
    return len(tokenize(tokenizer, [text]).ids)


def _shown(tokenizer, text: str, interval: int) -> list[str]:
    tokens = tokenize(tokenizer, [text])
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, interval)
    _, start, end = shown_chunks(chunks, tokens, [text])
    return [text[s:e] for s, e in zip(start.tolist(), end.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("unit", "opening", "size"),
    [
        ("The cat sat on the river. ", "The", 4),
        ("- the cat sat on the mat\n", "- ", 4),
        ("| cat | mat |\n", "| cat", 4),
        ("cat = mat(old, path)\n", "cat", 4),
        ("    cat = mat(old, path)\n", "    cat", 4),
        ("| The old cat. | A mat. Old. |\n", "| The", 4),
        # Not at sentences of comments.
        ("mat = cat(old)  # The river. The stone. A path is old, (a)\n", "mat", 1.5),
    ],
)
def test_shown_chunk_begins_and_ends_where_a_sentence_an_item_a_row_or_a_line_does(
    backbone, unit, opening, size
):
    head = "| a | b |\n|---|---|\n" if unit.startswith("|") else ""
    interval = int(size * _num_tokens(backbone.tokenizer, unit)) + 1
    pieces = _shown(backbone.tokenizer, head + unit * 60, interval)
    assert len(pieces) > 10
    assert all(piece.startswith(opening) for piece in pieces[1:])
    assert all(piece.endswith(unit) for piece in pieces)


def test_shown_chunk_does_not_end_with_the_heading_of_the_next(backbone):
    text = "\n\n".join(f"The cat sat on mat {number}.\n\n## Old way {number}" for number in range(60))
    pieces = _shown(backbone.tokenizer, text, 33)
    assert len(pieces) > 20
    assert not [piece for piece in pieces[:-1] if piece.strip().rpartition("\n")[2].startswith("##")]


@pytest.mark.parametrize(
    "text",
    [
        ("the cat on the mat" + "\n" * 30 + "A cat sat. It is old. ") * 8,
        "the 😀👩‍🚀 stone, the mat " * 9,
        "é" * 50,
        "\n\t the",
    ],
)
def test_shown_chunks_of_bytes_cover_the_text_and_are_never_white_space_alone(text):
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = _shown(tokenizer, text, 32)
    assert "".join(pieces) == text
    assert all(piece.strip() for piece in pieces)


@pytest.mark.parametrize("mark", ["123. ", "12) ", "# 123. "])
def test_chunk_is_not_cut_behind_the_number_of_an_item_or_heading(backbone, mark):
    sentence = "The cat sat on the old mat."
    text, interval = mark + sentence + " A path.", _num_tokens(backbone.tokenizer, sentence)
    assert len(mark) not in [start for start, _ in _chunks(backbone.tokenizer, text, interval)[1]]
    if "." in mark:
        of_sentences = _chunks(backbone.tokenizer, text, interval, rank_sentences)[1]
        assert len(mark) in [start for start, _ in of_sentences]


WORDS = st.sampled_from(["cat", "mat", "the", "old", "river", "Path", "stone", "walking", "ümlaut", "你好"])
PROSE = st.lists(WORDS, min_size=1, max_size=14).map(" ".join)
PARAGRAPH = st.lists(PROSE.map(lambda words: words + ". "), min_size=1, max_size=3).map("".join)
HEADING = st.tuples(st.sampled_from(["# {}", "### {}", "{}\n" + "=" * 200]), WORDS).map(
    lambda drawn: drawn[0].format(drawn[1])
)
LIST = st.lists(st.tuples(st.sampled_from(["- ", "  - "]), PROSE), min_size=1, max_size=5).map(
    lambda items: "\n".join(("- " if not at else mark) + words for at, (mark, words) in enumerate(items))
)
CODE = st.lists(PROSE | st.just(""), max_size=6).map(lambda lines: "\n".join(["```", *lines, "```"]))
TABLE = st.lists(st.tuples(WORDS, WORDS), max_size=6).map(
    lambda rows: "\n".join(["| a | b |", "|---|---|", *(f"| {one} | {two} |" for one, two in rows)])
)
BLOCKS = st.lists(
    st.tuples(st.just("heading"), HEADING)
    | st.tuples(st.sampled_from(["list"]), LIST)
    | st.tuples(st.sampled_from(["block"]), PARAGRAPH | CODE | TABLE),
    min_size=1,
    max_size=7,
).filter(lambda blocks: all(one[0] != "list" or two[0] != "list" for one, two in pairwise(blocks)))


@given(
    texts=st.lists(
        st.lists(PARAGRAPH | PROSE | LIST | CODE | TABLE, min_size=1).map("\n".join), min_size=1, max_size=3
    ),
    interval=st.integers(8, 24),
)
def test_shown_cut_is_at_the_nearest_beginning_that_is_less_than_half_a_chunk_away(backbone, texts, interval):
    tokens, ranked = (tokenize(backbone.tokenizer, texts) for _ in range(2))
    rank_structure(ranked, texts)
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, interval)
    shown, start, end = shown_chunks(chunks, tokens, texts)
    cuts = chunks.token_offsets.tolist()
    for place in set(range(len(cuts))) - set(chunks.chunk_offsets.tolist()):
        before, cut, after = cuts[place - 1 : place + 2]
        near = [
            token
            for token in range(before, after)
            if 2 * abs(token - cut) < (cut - before if token < cut else after - cut)
        ]
        begins = [token for token in near if ranked.breaks[token] >= SENTENCE_START]
        text = texts[int(np.searchsorted(tokens.text_offsets, cut, side="right")) - 1]
        lines = [
            token for token in near if "\n" in text[tokens.end_char[token - 1] : tokens.start_char[token]]
        ]
        expected = min(begins or lines or [cut], key=lambda token: (abs(token - cut), token))
        assert shown.token_offsets[place] == expected
    own = np.split(np.arange(len(start)), chunks.chunk_offsets[1:-1])
    assert [
        "".join(text[start[m] : end[m]] for m in of) for text, of in zip(texts, own, strict=True)
    ] == texts


@given(blocks=BLOCKS, interval=st.integers(8, 40))
def test_chunks_of_any_blocks_cover_the_text_within_the_interval_and_cut_none_that_fits(
    backbone, blocks, interval
):
    text = "\n\n".join(block for _, block in blocks)
    chunks, spans = _chunks(backbone.tokenizer, text, interval)
    assert "".join(text[start:end] for start, end in spans) == text
    assert np.diff(chunks.token_offsets).max() <= interval
    place = 0
    for _, block in blocks:
        if _num_tokens(backbone.tokenizer, block) <= interval:
            assert not [start for start, _ in spans if place < start < place + len(block)]
        place += len(block) + 2


@given(blocks=BLOCKS, interval=st.integers(8, 40))
def test_chunk_ends_with_a_heading_only_where_it_does_not_fit_with_the_block_below(
    backbone, blocks, interval
):
    text = "\n\n".join(block for _, block in blocks)
    starts = {start for start, _ in _chunks(backbone.tokenizer, text, interval)[1]}
    place = first = 0
    for number, (kind, block) in enumerate(blocks):
        if kind != "heading" or number == 0 or blocks[number - 1][0] != "heading":
            first = place
        place += len(block) + 2
        if kind == "heading" and place in starts:
            below = next((body for kind, body in blocks[number + 1 :] if kind != "heading"), "")
            end = text.index(below, place) + len(below) if below else len(text)
            assert _num_tokens(backbone.tokenizer, text[first:end]) > interval


@given(
    text=st.text(alphabet="abcat .,'!?。\t你好éЖ😀\u0301\u200b1", max_size=200).filter(
        lambda text: "|" not in text
    ),
    interval=st.integers(4, 12),
)
def test_chunks_of_a_text_of_one_line_are_those_of_sentences(backbone, text, interval):
    text = f"a {text}"
    structured = _chunks(backbone.tokenizer, text, interval)
    assert structured[1] == _chunks(backbone.tokenizer, text, interval, rank_sentences)[1]
