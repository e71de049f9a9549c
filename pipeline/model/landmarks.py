"""Where landmarks stand: texts into chunks of tokens, chunks into the rows a backbone reads.

    text     z1 z2 z3 …                     chunks of at most ``interval`` tokens, cut at words
    chunk    [CLS] z1 [LMK] · [CLS] z2 [LMK] · …      one row a chunk: attention inside the chunk only
    full     [CLS] z1 [LMK] z2 [LMK] … zn [LMK]       one row a window of whole chunks, windows overlapping
    own      z1 [LMK] z2 [LMK] … zn                   the same where the pooling has separators for marks
    title    [CLS] title [LMK] z1 [LMK] …             a text's title at the head of each of its rows

LMK is SEP, else EOS; it counts within a window's tokens and ends a row, but for the pooling `own`. Where a
model has no [CLS], rows begin without one. A landmark stands for the chunk on its left. Chunk attention is
block-diagonal attention with positions restarting in each block, computed as rows of a batch, its fastest
exact form.

Source: LMK pooling, algorithm 1, fixed, variable (an interval drawn for each text, for training) and sentence
granularity; §5 for Mean@k and MultiCLS. Differs: a cut moves left to the start of a word; short sentences
share a chunk, long ones are cut; structure granularity is a way of our own; k of Mean@k is the interval, each
k-th token moved left with its cut; nothing is truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from cairn.pipeline.poolings import Attention, ChunkPlaces, Pooling, pooling_rule
from cairn.pipeline.ragged import ranges
from jaxtyping import Bool, Int32, Int64, UInt8

NO_PREFIX: Final = np.zeros(0, np.int32)

SENTENCE_START: Final = 3
"""Rank of the place before a token that opens a sentence, above the three ranks of words."""

LINE_START, PART_START, ITEM_START, INTRODUCED_START, BLOCK_START, HEADING_START = 4, 5, 6, 7, 8, 9
"""Ranks of structure, above sentences: see :mod:`cairn.pipeline.encode.structure`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """M chunks of N texts, in order.

    Chunk ``i`` owns tokens ``token_offsets[i]:token_offsets[i + 1]`` of all texts laid end to end. Text ``j``
    owns chunks ``chunk_offsets[j]:chunk_offsets[j + 1]``, at least one; only a text without tokens has an
    empty chunk.
    """

    token_offsets: Int64[np.ndarray, " M1"]
    chunk_offsets: Int64[np.ndarray, " N1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """R rows of token ids laid end to end, and for each of M chunks the span of one row that is pooled.

    ``own_start`` is where the chunk's ``num_own`` own tokens begin in that row, behind [CLS],
    prefix and title.
    """

    ids: Int32[np.ndarray, " T"]
    row_offsets: Int64[np.ndarray, " R1"]
    pooled_row: Int64[np.ndarray, " M"]
    pooled_start: Int64[np.ndarray, " M"]
    pooled_end: Int64[np.ndarray, " M"]
    own_start: Int64[np.ndarray, " M"]
    num_own: Int64[np.ndarray, " M"]

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " R"]:
        """Return the tokens of each row."""
        return np.diff(self.row_offsets)

    def take(self, row_r: Int64[np.ndarray, " r"]) -> tuple[Rows, Int64[np.ndarray, " m"]]:
        """Return some of the rows, which must rise, and which chunks they pool."""
        lengths_r = self.lengths[row_r]
        place_R = np.full(len(self), -1)
        place_R[row_r] = np.arange(len(row_r))
        chunk_m = np.flatnonzero(place_R[self.pooled_row] >= 0)
        rows = Rows(
            ids=self.ids[ranges(self.row_offsets[row_r], lengths_r)],
            row_offsets=np.concatenate([[0], np.cumsum(lengths_r)]),
            pooled_row=place_R[self.pooled_row[chunk_m]],
            pooled_start=self.pooled_start[chunk_m],
            pooled_end=self.pooled_end[chunk_m],
            own_start=self.own_start[chunk_m],
            num_own=self.num_own[chunk_m],
        )
        return rows, chunk_m


def draw_intervals(
    num_texts: int, generator: np.random.Generator, intervals: Sequence[int]
) -> Int64[np.ndarray, " N"]:
    """Draw one of ``intervals`` a text, uniformly (LMK §4, variable chunking)."""
    return generator.choice(np.array(intervals, np.int64), num_texts)


def split_into_chunks(
    breaks_T: UInt8[np.ndarray, " T"],
    text_offsets_N1: Int64[np.ndarray, " N1"],
    interval: int | Int64[np.ndarray, " N"],
) -> Chunks:
    """Cut each text into chunks of at most ``interval`` tokens, greedily from the left.

    Texts may have an interval each.
    ``breaks`` ranks the place before each token: 4 and more structure, 3 a sentence, 2 a word after white
    space, 1 a word without, 0 inside a word. What begins at a place of one rank and ends before the next of
    that rank or a higher one is a unit; a text where no place has a rank is a unit of it. A unit that fits
    the interval is never cut. A longer one may be cut at the next lower rank.

    Of the places that are left, a cut stands at the last that the interval allows. In a text with structure
    it stands at the last of the highest rank that gives the chunk half the interval at least, where there is
    one, else at the last of the highest rank. All ranks below 4 count as the same there, and what a heading
    introduces is cut off only where nothing else is left.
    """
    lengths_N = np.diff(text_offsets_N1)
    interval_N = np.broadcast_to(np.asarray(interval, np.int64), lengths_N.shape)
    num_chunks_N = np.ones(len(lengths_N), np.int64)
    long_texts = np.flatnonzero(lengths_N > interval_N)
    starts: list[int] = []
    if len(long_texts):
        is_cut_T = _cuts(breaks_T, text_offsets_N1, interval_N)
        last_cut_T = np.maximum.accumulate(np.where(is_cut_T, np.arange(len(breaks_T)), 0))
        guide_T = _guide(breaks_T, is_cut_T) if breaks_T.max() > SENTENCE_START else None
        for text in long_texts.tolist():
            start, end = text_offsets_N1[text : text + 2].tolist()
            reach = int(interval_N[text])
            before = len(starts)
            starts.append(start)
            while end - start > reach:
                last = int(last_cut_T[start + reach])
                start = last if guide_T is None else _guided_cut(guide_T, start, last, reach // 2)
                starts.append(start)
            num_chunks_N[text] = len(starts) - before
    chunk_offsets = np.concatenate([[0], np.cumsum(num_chunks_N)])
    token_offsets = np.concatenate([np.repeat(text_offsets_N1[:-1], num_chunks_N), text_offsets_N1[-1:]])
    token_offsets[:-1][np.repeat(lengths_N > interval_N, num_chunks_N)] = starts
    return Chunks(token_offsets=token_offsets, chunk_offsets=chunk_offsets)


def _cuts(
    breaks_T: UInt8[np.ndarray, " T"],
    text_offsets_N1: Int64[np.ndarray, " N1"],
    interval_N: Int64[np.ndarray, " N"],
) -> Bool[np.ndarray, " T"]:
    """Mark the tokens a chunk may begin with; no two neighbours lie more than the text's interval apart."""
    interval_T = np.repeat(interval_N, np.diff(text_offsets_N1))
    is_text_start = np.zeros(len(breaks_T), np.bool_)
    is_text_start[text_offsets_N1[:-1][np.diff(text_offsets_N1) > 0]] = True
    highest = max(SENTENCE_START, int(breaks_T.max()))
    is_cut = is_start = (breaks_T >= highest) | is_text_start
    for rank in range(highest - 1, -1, -1):
        is_finer = (breaks_T >= rank) | is_text_start
        is_cut = is_cut | (is_finer & _in_long_group(is_start, interval_T))
        is_start = is_finer
    return is_cut


def _guide(breaks_T: UInt8[np.ndarray, " T"], is_cut_T: Bool[np.ndarray, " T"]) -> UInt8[np.ndarray, " T"]:
    """Return how good a cut before each token is: 0 where there must be none, or only as the last resort."""
    guide_T = np.maximum(breaks_T, SENTENCE_START)
    guide_T[~is_cut_T | (breaks_T == INTRODUCED_START)] = 0
    return guide_T


def _guided_cut(guide_T: UInt8[np.ndarray, " T"], start: int, last: int, least: int) -> int:
    """Return the last of the best places up to ``last``, where possible ``least`` tokens after ``start``."""
    for first in (start + least, start + 1):
        reversed_window = guide_T[first : last + 1][::-1]
        if reversed_window.any():
            return last - int(reversed_window.argmax())
    return last


def _in_long_group(
    is_start_T: Bool[np.ndarray, " T"], interval_T: Int64[np.ndarray, " T"]
) -> Bool[np.ndarray, " T"]:
    group_T = np.cumsum(is_start_T) - 1
    return np.bincount(group_T)[group_T] > interval_T


def chunk_spans(
    chunks: Chunks, start_char_T: Int64[np.ndarray, " T"], text_lengths_N: Int64[np.ndarray, " N"]
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Return start and end of every chunk: contiguous, from 0 to the text's length."""
    is_first_M = np.zeros(int(chunks.chunk_offsets[-1]), np.bool_)
    is_first_M[chunks.chunk_offsets[:-1]] = True
    start_M = np.zeros(len(is_first_M), np.int64)
    start_M[~is_first_M] = start_char_T[chunks.token_offsets[:-1][~is_first_M]]
    end_M = np.empty_like(start_M)
    end_M[:-1] = start_M[1:]
    end_M[chunks.chunk_offsets[1:] - 1] = text_lengths_N
    return start_M, end_M


def lay_out(
    ids_T: Int32[np.ndarray, " T"],
    chunks: Chunks,
    *,
    attention: Attention,
    pooling: Pooling,
    cls_id: int | None,
    landmark_id: int,
    prefix_ids: Int32[np.ndarray, " P"] | Sequence[Int32[np.ndarray, " _"]] = NO_PREFIX,
    pool_prefix: bool = False,
    max_window_tokens: int = 0,
    overlap_tokens: int = 0,
    titles: Sequence[Int32[np.ndarray, " _"]] | None = None,
    are_of_chunks: bool = False,
) -> Rows:
    """Lay chunks out in rows: ``[CLS] prefix z [LMK]`` each, or with full attention windows of whole chunks.

    What is pooled is the pooling's rule. In a row of its own [CLS] counts to the chunk, as
    sentence-transformers has it; with a prefix or a title only what stands after it does, unless
    ``pool_prefix`` keeps the whole row. In a window [CLS] belongs to no chunk (late chunking). ``prefix_ids``
    are one prefix or those of the texts, ``titles`` those of the texts, empty for none: a title stands with a
    landmark of its own at the head of each row of its text. With chunk attention each chunk may have its own:
    then ``are_of_chunks``.

    A window is one row of at most ``max_window_tokens``. Each window after the first begins with the last
    whole chunks of the one before that fit ``overlap_tokens`` and leave room for one more chunk. A chunk in
    several windows is pooled in the one where its end has the most tokens on its scarcer side; ties go to the
    earlier window. ``multi_cls`` puts [CLS] where a window's landmarks stand; ``mean_at_k`` has one landmark
    only, at the end of the row; ``own`` has none there, unless the row's text is empty.
    """
    rule, is_full = pooling_rule(pooling), attention == "full"
    mark_id = cls_id if rule.window_mark == "cls" else landmark_id
    assert mark_id is not None, "a layout of [CLS] tokens is asked of a model that has none"
    num_own, num_texts = np.diff(chunks.token_offsets), len(chunks.chunk_offsets) - 1
    num_marks, tail = {None: (0, 1), "separator": (1, -1)}.get(rule.window_mark, (1, 0))
    marked_offsets = chunks.token_offsets + num_marks * np.arange(len(num_own) + 1)
    marked_ids = np.empty(int(marked_offsets[-1]), np.int32)
    is_text = np.ones(len(marked_ids), np.bool_)
    if num_marks:
        marked_ids[marked_offsets[1:] - 1] = mark_id
        is_text[marked_offsets[1:] - 1] = False
    marked_ids[is_text] = ids_T
    title_ids = [NO_PREFIX] * num_texts if titles is None else titles
    prefixes = [prefix_ids] * len(title_ids) if isinstance(prefix_ids, np.ndarray) else prefix_ids
    title_N, prefix_N = (np.fromiter(map(len, ids), np.int64) for ids in (title_ids, prefixes))
    assert not (are_of_chunks and is_full), "a window holds several chunks"
    has_cls, lead_N = cls_id is not None, prefix_N + title_N
    head_N = has_cls + lead_N + num_marks * (title_N > 0)
    # Rows of chunks first_R to end_R, and the row that each chunk is pooled in.
    row_M = np.arange(len(num_own))
    first_R, end_R = row_M, row_M + 1
    if is_full:
        room_N = max_window_tokens - head_N - tail
        first_R, end_R = _windows(marked_offsets, chunks.chunk_offsets, room_N, overlap_tokens)
        row_M = _roomiest_window(first_R, end_R, marked_offsets)
    text_M = np.repeat(np.arange(num_texts), np.diff(chunks.chunk_offsets))
    text_R = first_R if are_of_chunks else text_M[first_R]
    head_R = head_N[text_R]
    body_R = np.maximum(marked_offsets[end_R] - marked_offsets[first_R] + min(tail, 0), num_marks)
    row_offsets = np.concatenate([[0], np.cumsum(head_R + body_R + max(tail, 0))])
    ids = np.full(int(row_offsets[-1]), landmark_id, np.int32)
    ids[ranges(row_offsets[:-1] + head_R, body_R)] = marked_ids[ranges(marked_offsets[first_R], body_R)]
    if cls_id is not None:
        ids[row_offsets[:-1]] = cls_id
    if lead_N.any():
        leads = np.concatenate([part for both in zip(prefixes, title_ids, strict=True) for part in both])
        starts_N = np.cumsum(lead_N) - lead_N
        led = ranges(row_offsets[:-1] + has_cls, lead_N[text_R])
        ids[led] = leads[ranges(starts_N[text_R], lead_N[text_R])]
        if num_marks:
            ids[(row_offsets[:-1] + head_R)[title_N[text_R] > 0] - 1] = mark_id
    shift_M = (head_R - marked_offsets[first_R])[row_M]
    own_start = marked_offsets[:-1] + shift_M
    is_behind_M = head_R[row_M] > int(has_cls)
    pooled_start, pooled_end = rule.span(
        ChunkPlaces(
            first_M=np.where(is_full | (is_behind_M & (not pool_prefix)), own_start, 0),
            mark_M=marked_offsets[1:] + shift_M - num_marks,
            num_own_M=num_own,
        )
    )
    return Rows(
        ids=ids,
        row_offsets=row_offsets,
        pooled_row=row_M,
        pooled_start=pooled_start,
        pooled_end=pooled_end,
        own_start=own_start,
        num_own=num_own,
    )


def _windows(
    marked_offsets: Int64[np.ndarray, " M1"],
    chunk_offsets: Int64[np.ndarray, " N1"],
    room_N: Int64[np.ndarray, " N"],
    overlap_tokens: int,
) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
    """Return first chunk and end of every window of its text's ``room``, text by text."""
    firsts: list[int] = []
    ends: list[int] = []
    texts = zip(chunk_offsets[:-1].tolist(), chunk_offsets[1:].tolist(), room_N.tolist(), strict=True)
    for text_first, text_end, room in texts:
        first = text_first
        while True:
            reach = np.searchsorted(marked_offsets, marked_offsets[first] + room, side="right")
            end = min(text_end, int(reach) - 1)
            firsts.append(first)
            ends.append(end)
            if end == text_end:
                break
            overlapping = int(np.searchsorted(marked_offsets, marked_offsets[end] - overlap_tokens))
            leaves_room = int(np.searchsorted(marked_offsets, marked_offsets[end + 1] - room))
            first = max(overlapping, leaves_room, first + 1)
    return np.array(firsts, np.int64), np.array(ends, np.int64)


def _roomiest_window(
    first_W: Int64[np.ndarray, " W"], end_W: Int64[np.ndarray, " W"], marked_offsets: Int64[np.ndarray, " M1"]
) -> Int64[np.ndarray, " M"]:
    """Return the window that each chunk is pooled in."""
    num_chunks_W = end_W - first_W
    window = np.repeat(np.arange(len(first_W)), num_chunks_W)
    chunk = ranges(first_W, num_chunks_W)
    landmark = marked_offsets[chunk + 1] - marked_offsets[first_W][window]
    scarcer = np.minimum(landmark, (marked_offsets[end_W] - marked_offsets[first_W])[window] - landmark)
    order = np.lexsort((window, -scarcer, chunk))
    _, first_of_chunk = np.unique(chunk[order], return_index=True)
    return window[order][first_of_chunk]
