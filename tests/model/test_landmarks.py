from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.document_encoder import pad_rows
from cairn.pipeline.model.landmarks import (
    INTRODUCED_START,
    Chunks,
    chunk_spans,
    draw_intervals,
    lay_out,
    split_into_chunks,
)
from cairn.pipeline.poolings import POOLINGS
from hypothesis import given
from hypothesis import strategies as st

from tests.model.naive_layout import naive_rows


def split(breaks: list[list[int]], interval: int | np.ndarray) -> Chunks:
    """Split texts given by the ranks of their breaks."""
    offsets = np.cumsum([0, *map(len, breaks)])
    return split_into_chunks(
        np.array([rank for text in breaks for rank in text], np.uint8), offsets, interval
    )


def _naive_atoms(breaks: list[int], interval: int, highest: int) -> list[int]:
    """Where a text may be cut: groups that fit stay whole, others are broken further."""

    def groups(first: int, end: int, rank: int) -> list[int]:
        if rank == 0:
            return list(range(first, end))
        starts = [first] + [i for i in range(first + 1, end) if breaks[i] >= rank]
        atoms = []
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            atoms += [start] if stop - start <= interval else groups(start, stop, rank - 1)
        return atoms

    return groups(0, len(breaks), highest)


def _naive_split(breaks: list[int], interval: int) -> list[int]:
    """First tokens of one text's chunks, without structure: what must stay whole is packed."""
    if not breaks:
        return [0]
    atoms = _naive_atoms(breaks, interval, 3)
    chunks = [0]
    for start, stop in zip(atoms, [*atoms[1:], len(breaks)], strict=True):
        if stop - chunks[-1] > interval:
            chunks.append(start)
    return chunks


def _naive_structured_split(breaks: list[int], interval: int) -> list[int]:
    """First tokens of one text's chunks: the last of the best places, if possible half an interval on."""
    atoms, starts = _naive_atoms(breaks, interval, 9), [0]
    while len(breaks) - starts[-1] > interval:
        places = [place for place in atoms if starts[-1] < place <= starts[-1] + interval]
        good = [place for place in places if breaks[place] != INTRODUCED_START]
        far = [place for place in good if place - starts[-1] >= interval // 2]
        starts.append(max(far or good or places, key=lambda place: (max(breaks[place], 3), place)))
    return starts


@pytest.mark.parametrize(
    ("ranks", "opening", "naive"),
    [
        ([0, 0, 1, 2], [], _naive_split),
        ([0, 0, 1, 2, 2, 3], [3], _naive_split),
        ([0, 1, *range(2, 10)], [], _naive_structured_split),
    ],
    ids=["words", "sentences", "structure"],
)
@given(data=st.data(), interval=st.none() | st.integers(2, 12))
def test_split_any_ranks_equals_naive_choice_at_one_interval_or_one_for_each_text(
    ranks, opening, naive, data, interval
):
    drawn = st.tuples(st.lists(st.sampled_from(ranks), max_size=60), st.integers(2, 12))
    texts = data.draw(st.lists(drawn, min_size=1, max_size=4))
    breaks = [[*opening, *text] for text, _ in texts]
    chunks = split(breaks, interval or np.array([own for _, own in texts]))
    starts = chunks.token_offsets[:-1]
    offset = 0
    for index, text in enumerate(breaks):
        own = starts[chunks.chunk_offsets[index] : chunks.chunk_offsets[index + 1]]
        assert (own - offset).tolist() == naive(text, interval or texts[index][1])
        offset += len(text)


def test_draw_intervals_are_the_papers_about_equally_often():
    intervals = TrainConfig(steps=1).landmark_intervals
    drawn = draw_intervals(4_000, np.random.default_rng(0), intervals)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == list(intervals) == [32, 64, 128, 256]
    assert counts.min() > 900


ALPHABET = "abcat .,'\n\t你好éЖ😀👩‍🚀\u0301\u200b\x00[]_"


def _encoded_spans(tokenizer, texts, interval):
    tokens = tokenize(tokenizer, texts)
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, interval)
    start, end = chunk_spans(chunks, tokens.start_char, np.array([len(text) for text in texts]))
    return tokens, chunks, start, end


@given(
    texts=st.lists(st.text(alphabet=ALPHABET, max_size=120), min_size=1, max_size=3),
    interval=st.integers(4, 12),
)
def test_spans_any_text_are_contiguous_and_cover_it(tokenizer, texts, interval):
    _, chunks, start, end = _encoded_spans(tokenizer, texts, interval)
    for index, text in enumerate(texts):
        own = slice(*chunks.chunk_offsets[index : index + 2])
        assert start[own][0] == 0
        assert end[own][-1] == len(text)
        assert (start[own][1:] == end[own][:-1]).all()
        assert (start[own] <= end[own]).all()


@given(text=st.text(alphabet=ALPHABET, max_size=200), interval=st.integers(4, 12))
def test_spans_start_inside_a_word_only_where_it_is_longer_than_the_interval(tokenizer, text, interval):
    tokens, _, start, _ = _encoded_spans(tokenizer, [text], interval)
    for place in start[1:].tolist():
        if (
            text[place - 1].isalpha()
            and text[place].isalpha()
            and text[place - 1].isascii()
            and text[place].isascii()
        ):
            left = place
            while left and not text[left - 1].isspace():
                left -= 1
            right = place
            while right < len(text) and not text[right].isspace():
                right += 1
            assert ((tokens.start_char >= left) & (tokens.start_char < right)).sum() > interval


CLS, LMK = 101, 102
LAYOUTS = [(attention, pooling) for attention, poolings in POOLINGS.items() for pooling in poolings]


@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_rows_and_pooled_spans_of_any_layout_equal_naive_ones_and_are_padded_by_true_length(data, layout):
    attention, pooling = layout
    texts = data.draw(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=4))
    titles = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(texts), max_size=len(texts)))
    prefix, window, overlap = (data.draw(st.integers(*ends)) for ends in ((0, 2), (16, 40), (0, 12)))
    pool_prefix, has_cls = data.draw(st.booleans()), "cls" in pooling or data.draw(st.booleans())
    # A text may hold the landmark's own id: only its place makes a token a landmark.
    offsets = np.cumsum([0, *(size for text in texts for size in text)])
    ids = np.where(np.arange(offsets[-1]) % 4 == 3, LMK, np.arange(offsets[-1])).astype(np.int32)
    pieces = [ids[start:end].tolist() for start, end in pairwise(offsets)]
    chunks = Chunks(token_offsets=offsets, chunk_offsets=np.cumsum([0, *map(len, texts)]))
    given_ids = None if titles is None else [np.arange(1000, 1000 + size, dtype=np.int32) for size in titles]
    settings = {"attention": attention, "pooling": pooling, "pool_prefix": pool_prefix}
    settings |= {"cls_id": CLS if has_cls else None, "landmark_id": LMK}
    rows = lay_out(
        ids,
        chunks,
        prefix_ids=np.full(prefix, 8, np.int32),
        max_window_tokens=window,
        overlap_tokens=overlap,
        titles=given_ids,
        **settings,
    )
    expected, spans = [], {}
    for text, first in enumerate(chunks.chunk_offsets[:-1].tolist()):
        title = () if given_ids is None else given_ids[text].tolist()
        own = pieces[first : first + len(texts[text])]
        for row, pooled in naive_rows(
            own, prefix=[8] * prefix, title=title, window=window, overlap=overlap, **settings
        ):
            spans |= {first + chunk: (len(expected), *span) for chunk, span in pooled.items()}
            expected.append(row)
    assert [rows.ids[start:end].tolist() for start, end in pairwise(rows.row_offsets)] == expected
    found = zip(
        *(each.tolist() for each in (rows.pooled_row, rows.pooled_start, rows.pooled_end)), strict=True
    )
    assert list(found) == [spans[chunk] for chunk in range(len(pieces))]
    for row, start, piece in zip(rows.pooled_row, rows.own_start, pieces, strict=True):
        assert expected[row][start : start + len(piece)] == piece
    pad_id = data.draw(st.sampled_from([0, LMK]))
    ids_BT, lengths_B = pad_rows(rows, np.arange(len(expected))[::-1].copy(), pad_id)
    for padded, length, row in zip(ids_BT.tolist(), lengths_B.tolist(), expected[::-1], strict=True):
        assert (padded[:length], set(padded[length:]) <= {pad_id}) == (row, True)
