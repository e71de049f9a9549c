from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ModelError
from pipeline.model.batching import CUDA_BATCH_FACTOR, device_batch_tokens, run_in_batches


def _batches(lengths, budget, **options):
    batches = []
    run_in_batches(np.array(lengths, np.int64), budget, lambda rows: batches.append(rows.tolist()), **options)
    return batches


@given(lengths=st.lists(st.integers(1, 40), max_size=50), budget=st.integers(1, 200))
def test_batches_any_lengths_take_every_row_once_within_the_budget(lengths, budget):
    batches = _batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget for batch in batches)


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

    run_in_batches(np.full(10, 4), 32, run)
    assert sizes == [8, 4, 2, 2, 2, 2, 2]


def test_batches_row_that_never_fits_is_a_model_error():
    def run(rows):
        raise torch.OutOfMemoryError

    with pytest.raises(ModelError, match="one row must fit the device's memory, got 4 tokens"):
        run_in_batches(np.full(3, 4), 8, run)


def test_batches_other_errors_pass_through():
    def run(rows):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run_in_batches(np.full(3, 4), 8, run)


def test_device_batch_tokens_gpu_gets_more():
    assert device_batch_tokens(8, torch.device("cuda")) == 8 * CUDA_BATCH_FACTOR
