from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.batching import CUDA_BATCH_FACTOR, run_in_batches
from hypothesis import given
from hypothesis import strategies as st

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def _batches(lengths, budget, **options):
    return list(
        run_in_batches(np.array(lengths, np.int64), budget, lambda rows: rows.tolist(), CPU, **options)
    )


@given(lengths=st.lists(st.integers(1, 40), max_size=50), budget=st.integers(1, 200))
def test_batches_any_lengths_take_every_row_once_within_the_budget(lengths, budget):
    batches = _batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(
        len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget for batch in batches
    )


def test_batches_longest_rows_come_first_and_ties_keep_their_order():
    assert _batches([2, 5, 5, 2, 5], 10) == [[1, 2], [4, 0], [3]]


def test_batches_extra_tokens_count_in_every_row():
    assert _batches([2, 2, 2, 2], 12, extra_tokens=4) == [[0, 1], [2, 3]]


def test_batches_out_of_memory_halves_now_and_from_then_on():
    sizes = []

    def run(rows):
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError
        return rows.tolist()

    done = list(run_in_batches(np.full(10, 4 * CUDA_BATCH_FACTOR), 32, run, GPU))
    assert [row for batch in done for row in batch] == list(range(10))
    assert sizes == [8, 4, 2, 2, 2, 2, 2]


def test_batches_row_that_never_fits_is_a_model_error():
    def run(rows):
        raise torch.OutOfMemoryError

    with pytest.raises(ModelError, match="one row must fit the device's memory, got 4 tokens"):
        list(run_in_batches(np.full(3, 4), 8, run, GPU))


def test_batches_side_by_side_give_the_results_of_one_thread_in_the_same_order(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    alone = _batches(lengths, 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert _batches(lengths, 60) == alone
