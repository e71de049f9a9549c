from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.encode.prefixes import Prefix, tokenize_after
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs
from cairn.pipeline.lab.train.sequences import (
    NO_TEXT,
    SequenceMaker,
    make_units,
    split_rows,
    units_of_a_batch,
)
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.landmarks import lay_out, split_into_chunks


def pairs_of(*pairs: tuple[str, str, str]) -> TrainingPairs:
    queries, documents, titles = zip(*pairs, strict=True)
    return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=("s",) * len(pairs))


THREE = pairs_of(
    ("the cat", "cat sat on the mat the old cat", "way"),
    ("the mat", "cat sat on the mat the old cat", "way"),
    ("river", "a river", "way"),
)


def maker(folder: Path, pairs: TrainingPairs = THREE, **settings: object) -> SequenceMaker:
    chosen = {"pooling": "lmk", "max_query_tokens": 16, "max_document_tokens": 64} | settings
    return SequenceMaker(read_checkpoint(folder), pairs, **chosen)


def words_of(folder: Path, ids: np.ndarray) -> str:
    return read_checkpoint(folder).tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def rows_as_text(folder: Path, batch_rows: object) -> list[str]:
    ends = np.cumsum(batch_rows.lengths_B)
    return [words_of(folder, part) for part in np.split(batch_rows.ids_N, ends[:-1])]


def test_make_units_are_neighbours_of_one_source():
    pairs = TrainingPairs(
        queries=tuple("abcde"), documents=tuple("vwxyz"), titles=("",) * 5, sources=("a", "a", "a", "b", "a")
    )
    assert make_units(pairs, range(5), 2) == ((0, 1), (2,), (3,), (4,))
    assert make_units(pairs, [0, 2, 4], 3) == ((0, 2, 4),)


def test_make_units_never_stretch_over_two_pages():
    pairs = TrainingPairs(
        queries=tuple("abcd"),
        documents=tuple("wxyz"),
        titles=("",) * 4,
        sources=("s",) * 4,
        pages=("0:0", "0:1", "0:1", "0:1"),
    )
    assert make_units(pairs, range(4), 2) == ((0,), (1, 2), (3,))


def test_make_units_count_documents_and_keep_their_queries_together():
    pairs = TrainingPairs(
        queries=tuple("abcdef"), documents=tuple("xxyyxz"), titles=("",) * 6, sources=("s",) * 6
    )
    assert make_units(pairs, range(6), 2) == ((0, 1, 2, 3, 4), (5,))


def test_units_of_a_batch_hold_about_as_many_pairs_as_asked_for():
    assert units_of_a_batch([(0, 1, 2, 3)] * 10, 32) == 8
    assert units_of_a_batch([(0,), (1, 2, 3)], 4) == 2
    assert units_of_a_batch([(0, 1, 2, 3)], 1) == 1


def test_make_lays_out_queries_titles_and_documents_each_once(tiny_model_folder: Path):
    batch = maker(tiny_model_folder).make([(0, 1, 2)], np.array([5]), np.array([True]))
    assert rows_as_text(tiny_model_folder, batch.rows) == [
        "[CLS] the cat [SEP]",
        "[CLS] the mat [SEP]",
        "[CLS] river [SEP]",
        "[CLS] way [SEP]",
        "[CLS] cat sat on the mat [SEP]",
        "[CLS] the old cat [SEP]",
        "[CLS] a river [SEP]",
    ]
    assert batch.text_B.tolist() == [0, 1, 2, NO_TEXT, 3, 3, 4]
    assert batch.rows.windows_B.tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert batch.positive_Q.tolist() == [0, 0, 1]
    assert batch.pair_D.tolist() == [0, 2]
    assert batch.pair_Q.tolist() == [0, 1, 2]


def test_make_landmark_pooling_takes_the_landmark_and_mean_pooling_the_row(tiny_model_folder: Path):
    units, intervals, titles = [(0, 2)], np.array([64]), np.array([False])
    marks = maker(tiny_model_folder).make(units, intervals, titles).rows
    assert (marks.pooled_start_B == marks.lengths_B - 1).all()
    assert (marks.pooled_end_B == marks.lengths_B).all()
    means = maker(tiny_model_folder, pooling="mean").make(units, intervals, titles).rows
    assert (means.pooled_start_B == 0).all()
    assert (means.pooled_end_B == means.lengths_B).all()


def test_make_units_have_an_interval_each(tiny_model_folder: Path):
    batch = maker(tiny_model_folder).make([(0,), (1,)], np.array([8, 3]), np.array([False, False]))
    assert (batch.text_B == 2).sum() == 1
    assert (batch.text_B == 3).sum() == 3


def test_make_texts_are_cut_after_their_limits(tiny_model_folder: Path):
    short = maker(tiny_model_folder, max_query_tokens=1, max_document_tokens=3).make(
        [(0,)], np.array([64]), np.array([False])
    )
    assert rows_as_text(tiny_model_folder, short.rows) == ["[CLS] the [SEP]", "[CLS] cat sat on [SEP]"]


def test_make_title_that_the_unit_does_not_share_is_left_out(tiny_model_folder: Path):
    pairs = pairs_of(("cat", "the cat", "one"), ("mat", "the mat", "two"))
    batch = maker(tiny_model_folder, pairs).make([(0, 1)], np.array([64]), np.array([True]))
    assert NO_TEXT not in batch.text_B


def test_make_hard_negatives_are_documents_in_windows_of_their_own(tiny_model_folder: Path):
    batch = maker(tiny_model_folder).make([(0,)], np.array([64]), np.array([False]), negatives=[2])
    assert batch.pair_D.tolist() == [0, 2]
    assert batch.positive_Q.tolist() == [0]
    assert rows_as_text(tiny_model_folder, batch.rows)[-1] == "[CLS] a river [SEP]"
    assert batch.rows.windows_B.tolist() == [0, 1, 2]


def test_context_holds_one_row_a_document_its_opening(tiny_model_folder: Path):
    rows = maker(tiny_model_folder).context([0, 2], 5)
    assert rows_as_text(tiny_model_folder, rows) == ["[CLS] cat sat on [SEP]", "[CLS] a river [SEP]"]


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 10_000])
def test_split_rows_parts_are_whole_windows_within_the_budget(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs], max_tokens: int
):
    pairs = make_pairs(24)
    units = make_units(pairs, range(len(pairs)), 3)
    rows = (
        maker(tiny_model_folder, pairs)
        .make(units, np.full(len(units), 8), np.ones(len(units), np.bool_))
        .rows
    )
    parts = split_rows(rows, max_tokens)
    for name in ("ids_N", "lengths_B", "windows_B", "pooled_start_B", "pooled_end_B"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(rows, name))
    windows = [set(part.windows_B.tolist()) for part in parts]
    assert sum(map(len, windows)) == len(set(rows.windows_B.tolist()))
    assert all(
        len(part.ids_N) <= max_tokens or len(seen) == 1 for part, seen in zip(parts, windows, strict=True)
    )
    assert len(parts) == 1 or max_tokens < len(rows.ids_N)


@pytest.mark.parametrize("pooling", ["mean", "lmk", "cls"])
@pytest.mark.parametrize("pool_prefix", [False, True])
def test_prefixes_stand_in_rows_as_at_serving(tiny_model_folder: Path, pooling: str, pool_prefix: bool):
    checkpoint = read_checkpoint(tiny_model_folder)
    prefix = Prefix.of("the old: ", checkpoint.tokenizer)
    tokens = tokenize_after(prefix, checkpoint.tokenizer, THREE.documents)
    expected = lay_out(
        tokens.ids,
        split_into_chunks(tokens.breaks, tokens.text_offsets, 3),
        cls_id=checkpoint.cls_id,
        landmark_id=checkpoint.landmark_id,
        pooling=pooling,
        prefix_ids=prefix.ids,
        pool_prefix=pool_prefix,
        attention="chunk",
    )
    made = maker(tiny_model_folder, pooling=pooling, document_prefix="the old: ", pool_prefix=pool_prefix)
    rows, _ = made.documents(range(3), 3)
    assert np.array_equal(rows.ids_N, expected.ids)
    assert np.array_equal(rows.pooled_start_B, expected.pooled_start)
    assert np.array_equal(rows.pooled_end_B, expected.pooled_end)
    assert rows.own_lengths.sum() == len(tokens.ids)
    is_whole = pool_prefix and pooling == "mean"
    assert (rows.alone.pooled_start_B == (0 if is_whole else 1 + len(prefix.ids))).all()


def test_instructions_stand_before_their_query_and_before_both_of_two_alike_texts(tiny_model_folder: Path):
    rows = [
        PairRow("cat", "mat", "", "s", instruction="the way", negatives=("path",)),
        PairRow("river", "stone", "", "s", instruction="the way", negatives=("old",), task="similarity"),
    ]
    made = maker(tiny_model_folder, TrainingPairs.of(rows, {}), query_prefix="walk")
    batch = made.make([(0,), (1,)], np.array([9, 9]), np.zeros(2, np.bool_), [2, 3])
    has_prefix = [int(count) > 1 for count in batch.rows.num_prefix_B]
    # Two queries, two documents, two negatives.
    assert has_prefix == [True, True, False, True, False, True]


def test_make_units_texts_that_are_no_documents_stand_alone():
    rows = [
        PairRow(name, name, "", "s", task=task)
        for name, task in zip("abcd", ("class",) * 2 + ("retrieval",) * 2, strict=True)
    ]
    assert make_units(TrainingPairs.of(rows, {}), range(4), 4) == ((0,), (1,), (2, 3))
