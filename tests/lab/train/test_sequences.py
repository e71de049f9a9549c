"""Units and rows of batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.lab.train.batches import BatchPlan, mean_cosine
from cairn.pipeline.lab.train.documents import read_document_pairs
from cairn.pipeline.lab.train.packed_rows import alone, split
from cairn.pipeline.lab.train.pair_data import PairVectors
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs, read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker, in_order_of_content, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

Batches = Callable[[range], list[list[tuple[str, int, int]]]]


def pairs_of(*pairs: tuple[str, str, str]) -> TrainingPairs:
    queries, documents, titles = zip(*pairs, strict=True)
    return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=("s",) * len(pairs))


def pages_of(documents: str, pages: Sequence[str], sources: str | None = None) -> TrainingPairs:
    """Return a pair for each letter, which is its document, of these pages."""
    size = len(documents)
    return TrainingPairs(
        queries=tuple(map(str, range(size))),
        documents=tuple(documents),
        titles=("",) * size,
        sources=tuple(sources or "s" * size),
        pages=tuple(pages),
    )


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
    ends = np.cumsum(batch_rows.lengths)
    return [words_of(folder, part) for part in np.split(batch_rows.ids, ends[:-1])]


def test_make_units_are_neighbours_of_one_source():
    pairs = pages_of("vwxyz", "ppppp", sources="aaaba")
    assert make_units(pairs, range(5), 2) == ((0, 1), (2,), (3,), (4,))
    assert make_units(pairs, [0, 2, 4], 3) == ((0, 2, 4),)
    assert make_units(replace(pairs, pages=()), range(3), 2) == ((0,), (1,), (2,))
    # Never over two pages, and of documents, not of queries.
    assert make_units(pages_of("wxyz", ("0:0", "0:1", "0:1", "0:1")), range(4), 2) == ((0,), (1, 2), (3,))
    assert make_units(pages_of("xxyyxz", "pppppp"), range(6), 2) == ((0, 1, 2, 3, 4), (5,))


def test_pairs_of_a_file_that_follow_one_another_with_one_title_are_a_unit(tmp_path):
    titles = ["T", "T ", "", "", "U", "T"]
    rows = [{"query": f"q{row}", "document": f"d{row}", "title": title} for row, title in enumerate(titles)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = read_pairs([tmp_path])
    assert make_units(pairs, range(len(pairs)), 4) == ((0, 1), (2,), (3,), (4,), (5,))


def test_in_order_of_content_sorts_sections_of_documents_whatever_the_order_of_these(tmp_path):
    texts = [
        " ".join(f"The {word} {number} is a stone on the old path." for number in range(40)) for word in "abc"
    ]
    queries: list[tuple[str, ...]] = []
    for number, own in enumerate((texts, texts[::-1])):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(json.dumps({"text": text, "source": "s"}) for text in own))
        queries.append(in_order_of_content(read_document_pairs([file], 128)).queries)

    assert len(queries[0]) > 5
    assert queries[0] == queries[1]


def test_make_lays_out_queries_titles_and_documents_each_once(tiny_model_folder):
    batch = maker(tiny_model_folder, title_tokens=4).make([(0, 1, 2)], np.array([5]), np.array([True]))
    assert rows_as_text(tiny_model_folder, batch.rows) == [
        "[CLS] the cat [SEP]",
        "[CLS] the mat [SEP]",
        "[CLS] river [SEP]",
        "[CLS] way [SEP] cat sat on the mat [SEP] the old cat [SEP]",
        "[CLS] way [SEP] a river [SEP]",
    ]
    assert batch.text_B.tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.rows.pooled_row.tolist() == [0, 1, 2, 3, 3, 4]
    assert rows_as_text(tiny_model_folder, alone(batch.rows, has_cls=True))[3:5] == [
        "[CLS] way [SEP] cat sat on the mat [SEP]",
        "[CLS] way [SEP] the old cat [SEP]",
    ]
    assert batch.positive_Q.tolist() == [0, 0, 1]
    assert batch.pair_D.tolist() == [0, 2]
    assert batch.pair_Q.tolist() == [0, 1, 2]


def test_make_cuts_texts_at_their_limits_and_lays_hard_negatives_and_a_context_out(tiny_model_folder):
    made = maker(tiny_model_folder, max_query_tokens=1, max_document_tokens=3)
    batch = made.make([(0,)], np.array([64]), np.array([False]), negatives=[2])
    assert rows_as_text(tiny_model_folder, batch.rows) == [
        "[CLS] the [SEP]",
        "[CLS] cat sat on [SEP]",
        "[CLS] a river [SEP]",
    ]
    assert (batch.pair_D.tolist(), batch.positive_Q.tolist()) == ([0, 2], [0])
    rows = maker(tiny_model_folder).context([0, 2], 5)
    assert rows_as_text(tiny_model_folder, rows) == ["[CLS] cat sat on [SEP]", "[CLS] a river [SEP]"]


def test_make_landmark_pooling_takes_the_landmark_and_mean_pooling_the_row(tiny_model_folder):
    units, intervals, titles = [(0, 2)], np.array([64]), np.array([False])
    marks = maker(tiny_model_folder, attention="chunk").make(units, intervals, titles).rows
    assert (marks.pooled_start == marks.lengths - 1).all()
    assert (marks.pooled_end == marks.lengths).all()
    means = maker(tiny_model_folder, pooling="mean", attention="chunk").make(units, intervals, titles).rows
    assert (means.pooled_start == 0).all()
    assert (means.pooled_end == means.lengths).all()


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 10_000])
def test_split_rows_parts_are_whole_rows_within_the_budget(tiny_model_folder, make_pairs, max_tokens):
    pairs = make_pairs(24)
    units = make_units(pairs, range(len(pairs)), 3)
    rows = (
        maker(tiny_model_folder, pairs)
        .make(units, np.full(len(units), 8), np.ones(len(units), np.bool_))
        .rows
    )
    parts = split(rows, max_tokens)
    for name in ("ids", "lengths", "pooled_start", "pooled_end"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(rows, name))
    assert all(len(part.ids) <= max_tokens or len(part) == 1 for part in parts)
    assert len(parts) == 1 or max_tokens < len(rows.ids)


def test_instructions_stand_before_their_query_alone(tiny_model_folder):
    rows = [
        PairRow("cat", "mat", "", "s", instruction="the way", negatives=("path",)),
        PairRow("river", "stone", "", "s", instruction="the way", negatives=("old",)),
    ]
    made = maker(tiny_model_folder, TrainingPairs.of(rows, {}), query_prefix="walk")
    batch = made.make([(0,), (1,)], np.array([9, 9]), np.zeros(2, np.bool_), [2, 3])
    has_prefix = [int(start) > 1 for start in batch.rows.own_start]
    # Two queries, two documents, two negatives.
    assert has_prefix == [True, True, False, False, False, False]


TOPICS, SIZE = 4, 16


def plan_of(sizes: dict[str, int], heldout: Sequence[int] = (), **settings: Any) -> Batches:
    """Return what takes source and topic of the pairs of each step; every source has the same topics."""
    generator = np.random.default_rng(0)
    sources = tuple(source for source, size in sizes.items() for _ in range(size))
    topics = generator.integers(TOPICS, size=len(sources))
    vectors = np.eye(2 * TOPICS)[topics] + 0.1 * generator.standard_normal((2, len(topics), 2 * TOPICS))
    names = tuple(map(str, range(len(topics))))
    pairs = TrainingPairs(queries=names, documents=names, titles=("",) * len(names), sources=sources)
    config = TrainConfig(steps=8, batch_pairs=SIZE, sequence_documents=1, **settings)
    of_pairs = PairVectors(*vectors.astype(np.float32))
    plan = BatchPlan(pairs, np.array(heldout, np.int64), of_pairs, config)

    def batches(steps: range) -> list[list[tuple[str, int, int]]]:
        return [[(sources[pair], topics[pair], pair) for (pair,) in plan.at(step)] for step in steps]

    return batches


def kinds(batches: list[list[tuple[str, int, int]]], place: int) -> np.ndarray:
    """Return how many sources, or topics, each batch has."""
    return np.array([len({pair[place] for pair in batch}) for batch in batches])


def test_plan_every_pair_that_is_not_held_out_comes_once_an_epoch_or_is_left_over():
    batches = plan_of({"a": 103, "b": 70, "c": 7}, heldout=(3, 110))
    first, second = batches(range(11)), batches(range(11, 22))
    for epoch in (first, second):
        seen = {pair for batch in epoch for _, _, pair in batch}
        assert len(seen) == 11 * SIZE
        assert not seen & {3, 110}
    assert first != second
    assert batches(range(11)) == first


def test_plan_batches_hold_one_topic_of_one_source_far_more_often_than_chance():
    batches = plan_of({"a": 400, "b": 400})(range(50))
    assert (kinds(batches, 1) == 1).mean() > 0.6
    assert (kinds(batches, 0) == 1).mean() > 0.9


def test_plan_sources_smaller_than_a_batch_share_batches():
    batches = plan_of(dict.fromkeys("abcdefgh", 5))(range(4))
    assert batches[:2] != batches[2:]
    assert sorted(map(len, batches)) == [SIZE] * 4
    assert kinds(batches, 0).min() > 2


def test_plan_mixed_batches_are_of_all_topics_and_sources():
    batches = plan_of(dict.fromkeys("abcdefgh", 24), batches="mixed")(range(12))
    assert sorted(pair for batch in batches for _, _, pair in batch) == list(range(192))
    assert kinds(batches, 0).mean() > 6  # of eight
    assert kinds(batches, 1).mean() > 3  # of four


def test_mean_cosine_equals_the_mean_over_all_pairs_of_rows():
    vectors = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = np.mean([unit[one] @ unit[other] for one in range(7) for other in range(7) if one != other])
    assert mean_cosine(vectors) == pytest.approx(expected, abs=1e-6)
    assert mean_cosine(vectors[:1]) == 0
