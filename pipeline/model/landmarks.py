"""Where landmarks stand: texts into chunks of tokens, chunks into the rows a backbone reads.

    text     z1 z2 z3 …                     chunks of at most ``interval`` tokens, cut at words
    chunk    [CLS] z1 [LMK] · [CLS] z2 [LMK] · …      one row a chunk: attention inside the chunk only
    full     [CLS] z1 [LMK] z2 [LMK] … zn [LMK]       one row a window of whole chunks, windows overlapping

LMK is SEP, else EOS; it counts within a window's tokens and always ends a row. A landmark stands for the chunk on its left. Chunk
attention is block-diagonal attention with positions restarting in each block, computed as rows of a batch, its fastest exact form.

Source: LMK pooling, algorithm 1, fixed granularity. Differs: a cut moves left to the start of a word. Sentence and variable granularity
are not built; nothing is truncated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

from pipeline.config import Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """M chunks of N texts, in order; chunk ``i`` owns tokens ``token_offsets[i]:token_offsets[i + 1]`` of all texts laid end to end.

    Text ``j`` owns chunks ``chunk_offsets[j]:chunk_offsets[j + 1]``, at least one; only a text without tokens has an empty chunk.
    """

    token_offsets: Int64[np.ndarray, " M1"]
    chunk_offsets: Int64[np.ndarray, " N1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """R rows of token ids laid end to end, and for each of M chunks the positions ``start:end`` of one row whose mean is its embedding."""

    ids: Int32[np.ndarray, " T"]
    row_offsets: Int64[np.ndarray, " R1"]
    pooled_row: Int64[np.ndarray, " M"]
    pooled_start: Int64[np.ndarray, " M"]
    pooled_end: Int64[np.ndarray, " M"]


def split_into_chunks(breaks_T: UInt8[np.ndarray, " T"], text_offsets_N1: Int64[np.ndarray, " N1"], interval: int) -> Chunks:
    """Cut each text into chunks of at most ``interval`` tokens, greedily from the left.

    ``breaks`` ranks the place before each token: 2 a word after white space, 1 a word without, 0 inside a word. A cut stands at the last
    place of rank 2 that the interval allows; inside a run without white space longer than the interval it may have rank 1, inside a word
    longer than the interval any rank.
    """
    lengths_N = np.diff(text_offsets_N1)
    num_chunks_N = np.ones(len(lengths_N), np.int64)
    long_texts = np.flatnonzero(lengths_N > interval)
    starts: list[int] = []
    if len(long_texts):
        places = np.arange(len(breaks_T))
        last_cut_T = np.maximum.accumulate(np.where(_cuts(breaks_T, text_offsets_N1, interval), places, 0))
        for text in long_texts.tolist():
            start, end = int(text_offsets_N1[text]), int(text_offsets_N1[text + 1])
            before = len(starts)
            starts.append(start)
            while end - start > interval:
                start = int(last_cut_T[start + interval])
                starts.append(start)
            num_chunks_N[text] = len(starts) - before
    chunk_offsets = np.concatenate([[0], np.cumsum(num_chunks_N)])
    token_offsets = np.concatenate([np.repeat(text_offsets_N1[:-1], num_chunks_N), text_offsets_N1[-1:]])
    token_offsets[:-1][np.repeat(lengths_N > interval, num_chunks_N)] = starts
    return Chunks(token_offsets=token_offsets, chunk_offsets=chunk_offsets)


def _cuts(breaks_T: UInt8[np.ndarray, " T"], text_offsets_N1: Int64[np.ndarray, " N1"], interval: int) -> Bool[np.ndarray, " T"]:
    """Mark the tokens a chunk may begin with, so that no two neighbours lie more than ``interval`` apart."""
    is_run_start, is_word_start = breaks_T >= 2, breaks_T >= 1
    text_starts = text_offsets_N1[:-1][np.diff(text_offsets_N1) > 0]
    is_run_start[text_starts] = is_word_start[text_starts] = True
    return is_run_start | (is_word_start & _in_long_group(is_run_start, interval)) | _in_long_group(is_word_start, interval)


def _in_long_group(is_start_T: Bool[np.ndarray, " T"], interval: int) -> Bool[np.ndarray, " T"]:
    group_T = np.cumsum(is_start_T) - 1
    return (np.bincount(group_T) > interval)[group_T]


def chunk_spans(
    chunks: Chunks, start_char_T: Int64[np.ndarray, " T"], text_lengths_N: Int64[np.ndarray, " N"]
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Return start and end character of every chunk: contiguous, from 0 to the text's length, each but the first from its first token."""
    is_first_M = np.zeros(int(chunks.chunk_offsets[-1]), np.bool_)
    is_first_M[chunks.chunk_offsets[:-1]] = True
    start_M = np.zeros(len(is_first_M), np.int64)
    start_M[~is_first_M] = start_char_T[chunks.token_offsets[:-1][~is_first_M]]
    end_M = np.empty_like(start_M)
    end_M[:-1] = start_M[1:]
    end_M[chunks.chunk_offsets[1:] - 1] = text_lengths_N
    return start_M, end_M


def chunk_rows(ids_T: Int32[np.ndarray, " T"], chunks: Chunks, *, cls_id: int, landmark_id: int, pooling: Pooling) -> Rows:
    """Lay every chunk out as a row of its own, ``[CLS] z [LMK]``; the mean is over the whole row, as sentence-transformers takes it."""
    row_lengths = np.diff(chunks.token_offsets) + 2
    row_offsets = np.concatenate([[0], np.cumsum(row_lengths)])
    ids = np.empty(int(row_offsets[-1]), np.int32)
    is_text = np.ones(len(ids), np.bool_)
    is_text[row_offsets[:-1]] = is_text[row_offsets[1:] - 1] = False
    ids[is_text] = ids_T
    ids[row_offsets[:-1]] = cls_id
    ids[row_offsets[1:] - 1] = landmark_id
    return Rows(
        ids=ids,
        row_offsets=row_offsets,
        pooled_row=np.arange(len(row_lengths)),
        pooled_start=row_lengths - 1 if pooling == "lmk" else np.zeros_like(row_lengths),
        pooled_end=row_lengths,
    )


def window_rows(
    ids_T: Int32[np.ndarray, " T"],
    chunks: Chunks,
    *,
    cls_id: int,
    landmark_id: int,
    pooling: Pooling,
    max_window_tokens: int,
    overlap_tokens: int,
) -> Rows:
    """Lay every text out in rows of whole chunks, ``[CLS] z1 [LMK] … zn [LMK]``, at most ``max_window_tokens`` long.

    Each window after the first begins with the last whole chunks of the one before that, with their landmarks, fit ``overlap_tokens`` and
    leave room for one more chunk. A chunk in several windows is pooled in the one where its landmark has the most tokens on its scarcer
    side; ties go to the earlier window. The mean is over the chunk's tokens and its landmark, without [CLS], which belongs to no chunk
    (late chunking).
    """
    num_chunks = len(chunks.token_offsets) - 1
    marked_offsets = chunks.token_offsets + np.arange(num_chunks + 1)
    marked_ids = np.empty(int(marked_offsets[-1]), np.int32)
    is_text = np.ones(len(marked_ids), np.bool_)
    is_text[marked_offsets[1:] - 1] = False
    marked_ids[is_text] = ids_T
    marked_ids[~is_text] = landmark_id
    first_W, end_W = _windows(marked_offsets, chunks.chunk_offsets, max_window_tokens - 1, overlap_tokens)
    row_lengths = marked_offsets[end_W] - marked_offsets[first_W] + 1
    row_offsets = np.concatenate([[0], np.cumsum(row_lengths)])
    source = np.arange(int(row_offsets[-1])) + np.repeat(marked_offsets[first_W] - row_offsets[:-1] - 1, row_lengths)
    ids = marked_ids[np.maximum(source, 0)]
    ids[row_offsets[:-1]] = cls_id
    window_M = _roomiest_window(first_W, end_W, marked_offsets, row_lengths)
    shift_M = 1 - marked_offsets[first_W][window_M]
    pooled_end = marked_offsets[1:] + shift_M
    return Rows(
        ids=ids,
        row_offsets=row_offsets,
        pooled_row=window_M,
        pooled_start=pooled_end - 1 if pooling == "lmk" else marked_offsets[:-1] + shift_M,
        pooled_end=pooled_end,
    )


def _windows(
    marked_offsets: Int64[np.ndarray, " M1"], chunk_offsets: Int64[np.ndarray, " N1"], room: int, overlap_tokens: int
) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
    """Return the first chunk and the chunk after the last of every window, text by text; a window holds ``room`` tokens and landmarks."""
    firsts: list[int] = []
    ends: list[int] = []
    for text_first, text_end in zip(chunk_offsets[:-1].tolist(), chunk_offsets[1:].tolist(), strict=True):
        first = text_first
        while True:
            end = min(text_end, int(np.searchsorted(marked_offsets, marked_offsets[first] + room, side="right")) - 1)
            firsts.append(first)
            ends.append(end)
            if end == text_end:
                break
            overlapping = int(np.searchsorted(marked_offsets, marked_offsets[end] - overlap_tokens))
            leaves_room = int(np.searchsorted(marked_offsets, marked_offsets[end + 1] - room))
            first = max(overlapping, leaves_room, first + 1)
    return np.array(firsts, np.int64), np.array(ends, np.int64)


def _roomiest_window(
    first_W: Int64[np.ndarray, " W"],
    end_W: Int64[np.ndarray, " W"],
    marked_offsets: Int64[np.ndarray, " M1"],
    row_lengths: Int64[np.ndarray, " W"],
) -> Int64[np.ndarray, " M"]:
    num_chunks_W = end_W - first_W
    window = np.repeat(np.arange(len(first_W)), num_chunks_W)
    chunk = np.arange(len(window)) - np.repeat(np.cumsum(num_chunks_W) - num_chunks_W - first_W, num_chunks_W)
    landmark = marked_offsets[chunk + 1] - marked_offsets[first_W][window]
    scarcer = np.minimum(landmark, row_lengths[window] - 1 - landmark)
    order = np.lexsort((window, -scarcer, chunk))
    is_best = np.ones(len(order), np.bool_)
    is_best[1:] = chunk[order][1:] != chunk[order][:-1]
    return window[order][is_best]
