"""Claims of token stream."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError, SourceError
from cairn.pipeline.lab.train.token_stream import smoothed
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

from tests.lab.train.test_pretrain import make_stream

__all__ = ["make_stream"]

CLS, LANDMARK = 2, 3


def words_of(texts_file: Path, folder: Path) -> Counter[int]:
    tokenizer = read_checkpoint(folder).tokenizer
    lines = texts_file.read_text().splitlines()
    return Counter(
        token
        for line in lines
        for token in tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
    )


def parts(batch: Any) -> list[np.ndarray]:
    return np.split(batch.rows.ids_N, np.cumsum(batch.rows.lengths_B)[:-1])


def test_stream_an_epoch_reads_every_token_of_the_texts_once(
    make_stream: Any, texts_file: Path, tiny_model_folder: Path
):
    stream = make_stream(heldout_rows=0, batch_rows=1, steps=1_000)
    found: Counter[int] = Counter()
    for step in range(stream.num_rows):
        batch = stream.batch(step)
        found.update(batch.rows.ids_N[batch.is_text_N].tolist())
    assert found == words_of(texts_file, tiny_model_folder)


def test_stream_rows_are_full_and_never_longer_than_asked(make_stream: Any):
    stream = make_stream(heldout_rows=0, batch_rows=1, steps=200)
    lengths = [len(stream.batch(step).rows.ids_N) for step in range(stream.num_rows)]
    assert max(lengths) <= 48
    assert np.mean(lengths) > 0.8 * 48


def test_stream_part_begins_with_cls_and_each_chunk_ends_with_a_landmark(make_stream: Any):
    for part in parts(make_stream().batch(3)):
        assert part[0] == CLS
        assert part[-1] == LANDMARK
        chunks = np.diff(np.flatnonzero(np.isin(part, [CLS, LANDMARK]))) - 1
        assert set(chunks[:-1]) <= {4, 8}
        assert 1 <= chunks[-1] <= 8


def test_stream_intervals_vary_within_a_part_unless_they_are_drawn_for_a_row(make_stream: Any):
    def kinds(**settings: Any) -> list[set[int]]:
        stream = make_stream(max_tokens=90, **settings)
        return [
            set((np.diff(np.flatnonzero(np.isin(part, [CLS, LANDMARK]))) - 1)[:-1].tolist())
            for part in parts(stream.batch(0))
        ]

    assert {4, 8} in kinds()
    assert max(map(len, kinds(intervals_for="row"))) == 1
    assert {4} in kinds(intervals_for="row")
    assert {8} in kinds(intervals_for="row")


def test_stream_without_intervals_has_one_mark_at_the_end_of_a_part(make_stream: Any):
    for part in parts(make_stream(landmark_intervals=()).batch(0)):
        assert np.flatnonzero(np.isin(part, [CLS, LANDMARK])).tolist() == [0, len(part) - 1]


def test_stream_step_is_the_same_whatever_came_before_and_another_seed_another(make_stream: Any):
    first, second, other = make_stream(), make_stream(), make_stream(seed=1)
    for step in range(4):
        first.batch(step)
    again = second.batch(3).rows
    assert np.array_equal(first.batch(3).rows.ids_N, again.ids_N)
    assert not np.array_equal(other.batch(3).rows.ids_N[:20], again.ids_N[:20])


def test_stream_held_out_rows_are_of_no_batch(make_stream: Any):
    stream = make_stream(batch_rows=1, steps=500, heldout_rows=3)
    held = {place for start, end in stream.heldout for place in range(start, end)}
    seen = {
        place
        for step in range(stream.num_rows)
        for start, end in stream._row(step)
        for place in range(start, end)
    }
    assert held
    assert not held & seen
    assert len(held) + len(seen) == stream.num_tokens


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
def test_stream_languages_are_drawn_by_their_smoothed_share(make_stream: Any, exponent: float):
    stream = make_stream(steps=2_000, batch_rows=10, heldout_rows=0, language_smoothing=exponent)
    tokens = np.array([sum(end - start for row in rows for start, end in row) for rows in stream._rows_of])
    drawn = np.bincount(stream._language_S) / 20_000
    assert np.abs(drawn - tokens**exponent / (tokens**exponent).sum()).max() < 0.015


def test_smoothed_shares_equal_the_papers_formula():
    sizes = np.array([900.0, 90.0, 10.0])
    shares = smoothed(sizes, 0.7)
    assert shares == pytest.approx([0.8049, 0.1606, 0.0345], abs=1e-4)
    assert shares.sum() == pytest.approx(1.0)
    assert smoothed(np.array([5.0, 0.0]), 0.0).tolist() == [1.0, 0.0]


def test_stream_smoothing_of_one_language_is_refused(make_stream: Any, texts_file: Path):
    texts_file.write_text(texts_file.read_text().replace('"de"', '"en"'))
    with pytest.raises(ConfigError, match="several languages, got en; leave it out"):
        make_stream(language_smoothing=0.7)


def test_stream_of_too_little_text_is_refused(make_stream: Any):
    with pytest.raises(SourceError, match="must fill the 5000 rows of a batch, got"):
        make_stream(batch_rows=5_000)


def test_stream_split_keeps_every_part_whole(make_stream: Any):
    batch = make_stream().batch(0)
    split = batch.split(60)
    assert len(split) > 1
    assert max(len(part.rows.ids_N) for part in split) <= 60
    assert np.array_equal(np.concatenate([part.rows.ids_N for part in split]), batch.rows.ids_N)
    assert np.array_equal(np.concatenate([part.is_text_N for part in split]), batch.is_text_N)
