"""Units, rows of batches, and which units a batch is of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.batches import BatchPlan, greedy_tour, mean_cosine, pack
from cairn.pipeline.lab.train.documents import read_document_pairs
from cairn.pipeline.lab.train.packed_rows import alone, split
from cairn.pipeline.lab.train.pair_data import PairVectors
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs, read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker, in_order_of_content, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.landmarks import Rows
from hypothesis import given, settings
from hypothesis import strategies as st

Batches = Callable[[range], list[list[tuple[str, int, int]]]]


def pages_of(documents: str, pages: Sequence[str], sources: str | None = None) -> TrainingPairs:
    """Return a pair for each letter, which is its document, of these pages."""
    columns = zip(documents, pages, sources or "s" * len(documents), strict=True)
    return TrainingPairs(
        rows=tuple(PairRow("q", document, "", source, page) for document, page, source in columns)
    )


THREE = TrainingPairs(
    rows=(
        PairRow("the cat", "cat sat on the mat the old cat", "way"),
        PairRow("the mat", "cat sat on the mat the old cat", "way"),
        PairRow("river", "a river", "way"),
    )
)


def maker(
    folder: Path, pairs: TrainingPairs = THREE, sizes: tuple[int, int] = (16, 64), **served: Any
) -> SequenceMaker:
    config = EncoderConfig(**{"pooling": "lmk", "attention": "full", **served})
    most = dict(zip(("max_query_tokens", "max_document_tokens"), sizes, strict=True))
    return SequenceMaker(read_checkpoint(folder), pairs, config, **most)


def rows_as_text(folder: Path, rows: Rows) -> list[str]:
    tokenizer, ends = read_checkpoint(folder).tokenizer, np.cumsum(rows.lengths)
    return [
        tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in np.split(rows.ids, ends[:-1])
    ]


def test_make_units_are_neighbours_of_one_source():
    pairs = pages_of("vwxyz", "ppppp", sources="aaaba")
    assert make_units(pairs, range(5), 2) == ((0, 1), (2,), (3,), (4,))
    assert make_units(pairs, [0, 2, 4], 3) == ((0, 2, 4),)
    assert make_units(pages_of("vwx", ["", "", ""]), range(3), 2) == ((0,), (1,), (2,))
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
    queries: list[list[str]] = []
    for number, own in enumerate((texts, texts[::-1])):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(json.dumps({"text": text, "source": "s"}) for text in own))
        rows = in_order_of_content(read_document_pairs([file], 128)).rows
        queries.append([row.query for row in rows])

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
    made = maker(tiny_model_folder, sizes=(1, 3))
    batch = made.make([(0,)], np.array([64]), np.array([False]), negatives=[2])
    assert rows_as_text(tiny_model_folder, batch.rows) == [
        "[CLS] the [SEP]",
        "[CLS] cat sat on [SEP]",
        "[CLS] a river [SEP]",
    ]
    assert (batch.pair_D.tolist(), batch.positive_Q.tolist()) == ([0, 2], [0])
    rows = maker(tiny_model_folder).context([0, 2], 5)
    assert rows_as_text(tiny_model_folder, rows) == ["[CLS] cat sat on [SEP]", "[CLS] a river [SEP]"]


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 10_000])
def test_split_rows_parts_are_whole_rows_within_the_budget(tiny_model_folder, make_pairs, max_tokens):
    pairs = make_pairs(24)
    units = make_units(pairs, range(len(pairs)), 3)
    drawn = np.full(len(units), 8), np.ones(len(units), np.bool_)
    rows = maker(tiny_model_folder, pairs).make(units, *drawn).rows
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
    made = maker(tiny_model_folder, TrainingPairs(rows=tuple(rows)), query_prefix="walk")
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
    rows = (PairRow(name, name, "", source) for name, source in zip(names, sources, strict=True))
    pairs = TrainingPairs(rows=tuple(rows))
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


def circle(num_clusters: int) -> np.ndarray:
    angles = 2 * np.pi * np.arange(num_clusters) / num_clusters
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), batch_size=st.integers(1, 17))
def test_pack_every_point_comes_once_and_large_clusters_fill_batches_of_their_own(
    sizes: list[int], batch_size: int
):
    clusters = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    batches, left_over = pack(clusters, circle(len(sizes)), batch_size, np.random.default_rng(3))
    assert batches.shape == (len(clusters) // batch_size, batch_size)
    assert sorted([*batches.ravel().tolist(), *left_over.tolist()]) == list(range(len(clusters)))
    alone = sum(len(np.unique(clusters[batch])) == 1 for batch in batches)
    assert alone >= sum(size // batch_size for size in sizes)


def test_greedy_tour_equals_the_search_written_out_and_joins_neighbouring_clusters():
    centroids = np.random.default_rng(5).standard_normal((23, 4)).astype(np.float32)
    found = greedy_tour(centroids, np.random.default_rng(7)).tolist()
    expected = found[:1]
    while len(expected) < 23:
        rest = [cluster for cluster in range(23) if cluster not in expected]
        expected.append(
            max(rest, key=lambda cluster: (float(centroids[cluster] @ centroids[expected[-1]]), -cluster))
        )
    assert found == expected
    clusters = np.repeat(np.arange(16, dtype=np.int32), 4)
    first, again, other = (
        pack(clusters, circle(16), 8, np.random.default_rng(seed))[0] for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    for batch in first:
        one, other = np.unique(clusters[batch]).tolist()
        assert min(other - one, 16 - other + one) == 1


def test_mean_cosine_equals_the_mean_over_all_pairs_of_rows():
    vectors = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = np.mean([unit[one] @ unit[other] for one in range(7) for other in range(7) if one != other])
    assert mean_cosine(vectors) == pytest.approx(expected, abs=1e-6)
    assert mean_cosine(vectors[:1]) == 0
