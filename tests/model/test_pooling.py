from __future__ import annotations

import torch
from cairn.pipeline.model.pooling import pool_spans

HIDDEN = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
ROW, START, END = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 3, 0, 1, 2]), torch.tensor([3, 7, 5, 2, 7])


def test_pool_spans_ragged_rows_equal_naive_means():
    pooled = pool_spans(HIDDEN, ROW, START, END)
    naive = [HIDDEN[row, start:end].mean(0) for row, start, end in zip(ROW, START, END, strict=True)]
    torch.testing.assert_close(pooled, torch.stack(naive))


def test_pool_spans_single_positions_are_taken_as_they_are():
    assert torch.equal(pool_spans(HIDDEN, ROW, END - 1, END), HIDDEN[ROW, END - 1])


def test_pool_spans_bf16_states_are_summed_in_float32():
    states = torch.full((1, 1000, 1), 1.0078125, dtype=torch.bfloat16)
    assert pool_spans(states, torch.tensor([0]), torch.tensor([0]), torch.tensor([1000])).item() == 1.0078125
