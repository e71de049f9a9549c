from __future__ import annotations

from functools import partial

import numpy as np
from cairn.pipeline.model.document_encoder import pad_rows
from cairn.pipeline.model.landmarks import (
    Chunks,
    lay_out,
)
from cairn.pipeline.poolings import POOLINGS
from hypothesis import given
from hypothesis import strategies as st

from tests.model.splitting import split

CLS, LMK = 101, 102
chunk_rows, window_rows = (partial(lay_out, attention=attention) for attention in ("chunk", "full"))


def _rows(rows) -> list[list[int]]:
    return [
        rows.ids[start:end].tolist()
        for start, end in zip(rows.row_offsets[:-1], rows.row_offsets[1:], strict=True)
    ]


def _chunks(*texts: list[int]) -> tuple[np.ndarray, Chunks]:
    """Token ids 1, 2, 3 … of texts given as the sizes of their chunks."""
    sizes = [size for text in texts for size in text]
    token_offsets = np.cumsum([0, *sizes])
    return np.arange(1, token_offsets[-1] + 1, dtype=np.int32), Chunks(
        token_offsets=token_offsets, chunk_offsets=np.cumsum([0, *map(len, texts)])
    )


@given(
    texts=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=12), min_size=1, max_size=3),
    window=st.integers(9, 24),
    overlap=st.integers(0, 8),
    pooling=st.sampled_from(["lmk", "mean"]),
)
def test_window_rows_any_layout_pools_each_chunk_once_within_the_window(texts, window, overlap, pooling):
    ids, chunks = _chunks(*texts)
    rows = window_rows(
        ids,
        chunks,
        cls_id=CLS,
        landmark_id=LMK,
        pooling=pooling,
        max_window_tokens=window,
        overlap_tokens=overlap,
    )
    laid_out = _rows(rows)
    assert all(row[0] == CLS and row[-1] == LMK and len(row) <= window for row in laid_out)
    for chunk, (row, start, end) in enumerate(
        zip(rows.pooled_row, rows.pooled_start, rows.pooled_end, strict=True)
    ):
        own = ids[chunks.token_offsets[chunk] : chunks.token_offsets[chunk + 1]].tolist()
        assert laid_out[row][start:end] == ([*own, LMK] if pooling == "mean" else [LMK])
        assert laid_out[row][end - 1 - len(own) : end - 1] == own


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=14),
    window=st.integers(9, 24),
    overlap=st.integers(0, 8),
)
def test_window_rows_chosen_window_equals_naive_best(sizes, window, overlap):
    ids, chunks = _chunks(sizes)
    rows = window_rows(
        ids,
        chunks,
        cls_id=CLS,
        landmark_id=LMK,
        pooling="lmk",
        max_window_tokens=window,
        overlap_tokens=overlap,
    )
    laid_out = _rows(rows)
    for chunk, chosen in enumerate(rows.pooled_row.tolist()):
        last_token = int(chunks.token_offsets[chunk + 1])
        room = [
            min(row.index(last_token) + 1, len(row) - 2 - row.index(last_token)) if last_token in row else -1
            for row in laid_out
        ]
        assert chosen == room.index(max(room))


LAYOUTS = [(attention, pooling) for attention, poolings in POOLINGS.items() for pooling in poolings]


@given(
    texts=st.lists(
        st.tuples(st.lists(st.sampled_from([0, 1, 2, 2]), max_size=40), st.integers(2, 7)),
        min_size=1,
        max_size=4,
    ),
    granularity=st.sampled_from(["fixed", "variable", "sentence"]),
    layout=st.sampled_from(LAYOUTS),
    num_prefix=st.integers(0, 2),
    pad_id=st.sampled_from([0, LMK]),
)
def test_rows_of_any_granularity_end_as_the_pooling_says_and_are_padded_by_true_length(
    texts, granularity, layout, num_prefix, pad_id
):
    attention, pooling = layout
    breaks = [
        [3 if granularity == "sentence" and place % 5 == 0 else rank for place, rank in enumerate(text)]
        for text, _ in texts
    ]
    chunks = split(breaks, np.array([interval for _, interval in texts]) if granularity == "variable" else 5)
    # A text may hold the landmark's own id: only its place makes a token a landmark.
    ids = np.where(np.arange(chunks.token_offsets[-1]) % 4 == 3, LMK, 7).astype(np.int32)
    prefix_ids = np.full(num_prefix, 8, np.int32)
    special = {"cls_id": CLS, "landmark_id": LMK, "pooling": pooling, "prefix_ids": prefix_ids}
    if attention == "chunk":
        rows = chunk_rows(ids, chunks, **special)
    else:
        rows = window_rows(ids, chunks, max_window_tokens=16, overlap_tokens=4, **special)
    laid_out = _rows(rows)
    mark = CLS if pooling == "multi_cls" else LMK
    assert all(
        row[0] == CLS
        and row[1 : 1 + num_prefix] == prefix_ids.tolist()
        and (row[-1] == mark or (pooling == "own" and len(row) > 1 + num_prefix))
        for row in laid_out
    )
    last_chunks = chunks.chunk_offsets[1:] - 1
    if pooling in ("lmk", "multi_cls"):
        ends = [
            (laid_out[row], start)
            for row, start in zip(rows.pooled_row[last_chunks], rows.pooled_start[last_chunks], strict=True)
        ]
        assert all(start == len(row) - 1 for row, start in ends)
    backwards = np.arange(len(laid_out))[::-1].copy()
    ids_BT, lengths_B = pad_rows(rows, backwards, pad_id)
    assert [
        row[:length] for row, length in zip(ids_BT.tolist(), lengths_B.tolist(), strict=True)
    ] == laid_out[::-1]
    assert all(
        set(row[length:]) <= {pad_id} for row, length in zip(ids_BT.tolist(), lengths_B.tolist(), strict=True)
    )


@given(
    texts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=4),
    titles=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    layout=st.sampled_from(LAYOUTS),
    num_prefix=st.integers(0, 2),
    pool_prefix=st.booleans(),
)
def test_rows_with_titles_are_the_rows_without_behind_a_title_with_a_mark(
    texts, titles, layout, num_prefix, pool_prefix
):
    attention, pooling = layout
    ids, chunks = _chunks(*texts)
    prefix = np.full(num_prefix, 8, np.int32)
    given_ids = [np.arange(1000, 1000 + size, dtype=np.int32) for size in titles[: len(texts)]]
    special = {"cls_id": CLS, "landmark_id": LMK, "pooling": pooling, "prefix_ids": prefix}
    special |= {"attention": attention, "pool_prefix": pool_prefix}
    mark = {"multi_cls": [CLS], "mean_at_k": []}.get(pooling, [LMK])
    titled = lay_out(ids, chunks, max_window_tokens=30, overlap_tokens=4, titles=given_ids, **special)
    for text, title in enumerate(given_ids):
        # A text alone, in windows that are shorter by its title: the same rows without it.
        own = slice(*chunks.chunk_offsets[text : text + 2])
        start, end = chunks.token_offsets[[own.start, own.stop]]
        alone = Chunks(
            token_offsets=chunks.token_offsets[own.start : own.stop + 1] - start,
            chunk_offsets=np.array([0, own.stop - own.start]),
        )
        head = [*title.tolist(), *mark] if len(title) else []
        plain = lay_out(ids[start:end], alone, max_window_tokens=30 - len(head), overlap_tokens=4, **special)
        rows_of_text = np.unique(titled.pooled_row[own])
        opening = 1 + num_prefix
        expected = [[*row[:opening], *head, *row[opening:]] for row in _rows(plain)]
        found = [_rows(titled)[row] for row in rows_of_text]
        assert [row for row in expected if row in found] == found
        assert (titled.own_start[own] - plain.own_start == len(head)).all()
        assert (titled.pooled_end[own] - plain.pooled_end == len(head) * (pooling != "cls")).all()
        if len(title) and pooling in ("mean", "latent") and (attention == "full" or not pool_prefix):
            assert (titled.pooled_start[own] == titled.own_start[own]).all()
