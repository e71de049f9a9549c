from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model import document_encoder
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.document_encoder import CUDA_BATCH_FACTOR, embed_chunks, pool_spans, run_in_batches
from cairn.pipeline.model.landmarks import Rows, lay_out, split_into_chunks
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")
LENGTHS = [3, 11, 18, 5]


@pytest.fixture
def backbone(tiny_model_folder: Path) -> Any:
    return load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)


def rows_of(lengths: list[int]) -> Rows:
    ids = np.random.default_rng(0).integers(5, 20, sum(lengths)).astype(np.int32)
    chunks = split_into_chunks(np.zeros(sum(lengths), np.uint8), np.cumsum([0, *lengths]), 64)
    return lay_out(ids, chunks, attention="chunk", cls_id=2, landmark_id=3, pooling="mean")


def test_small_batches_are_a_few_widths_and_large_ones_as_wide_as_their_longest_row(
    backbone: Any, monkeypatch: pytest.MonkeyPatch
):
    widths: list[int] = []
    real = backbone.hidden_states

    def seen(ids_BT: np.ndarray, *arguments: Any) -> torch.Tensor:
        widths.append(ids_BT.shape[1])
        return real(ids_BT, *arguments)

    monkeypatch.setattr(backbone, "hidden_states", seen)
    padded = embed_chunks(backbone, rows_of(LENGTHS), batch_tokens=10_000)
    monkeypatch.setattr(document_encoder, "SMALL_BATCH_TOKENS", 0)
    exact = embed_chunks(backbone, rows_of(LENGTHS), batch_tokens=10_000)
    assert widths == [24, 20]
    np.testing.assert_allclose(padded, exact, atol=1e-6)
    monkeypatch.undo()
    monkeypatch.setattr(backbone, "max_positions", 21)
    assert embed_chunks(backbone, rows_of([19]), batch_tokens=10_000).shape == (1, 32)


def test_pool_spans_bf16_states_are_summed_in_float32():
    states = torch.full((1, 1000, 1), 1.0078125, dtype=torch.bfloat16)
    assert pool_spans(states, torch.tensor([0]), torch.tensor([0]), torch.tensor([1000])).item() == 1.0078125


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

    done = list(run_in_batches(np.full(10, 4 * CUDA_BATCH_FACTOR), 32, run, torch.device("cuda")))
    assert [row for batch in done for row in batch] == list(range(10))
    assert sizes == [8, 4, 2, 2, 2, 2, 2]


def test_batches_row_that_never_fits_is_a_model_error():
    def run(rows):
        raise torch.OutOfMemoryError

    with pytest.raises(ModelError, match="one row must fit the device's memory, got 4 tokens"):
        list(run_in_batches(np.full(3, 4), 8, run, torch.device("cuda")))


def test_batches_side_by_side_give_the_results_of_one_thread_in_the_same_order(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    alone = _batches(lengths, 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert _batches(lengths, 60) == alone
