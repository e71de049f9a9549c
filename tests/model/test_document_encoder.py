from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model import document_encoder
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.document_encoder import embed_chunks, pool_spans
from cairn.pipeline.model.landmarks import Rows, lay_out, split_into_chunks

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
