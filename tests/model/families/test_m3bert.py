from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder

from tests.lab.train.families import tiny_new
from tests.m3bert_reference import states_by_layer

LENGTHS = (17, 9, 1)


@pytest.fixture(scope="module")
def saved(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Mapping[str, torch.Tensor]]:
    """Return the folder of a tiny m³BERT far from its start, where every term counts, and its weights."""
    generator = torch.Generator().manual_seed(2)
    checkpoint = tiny_new("m3bert", tiny_model_folder)
    weights = {
        name: tensor + torch.randn(tensor.shape, generator=generator) * 0.15
        for name, tensor in checkpoint.tensors.items()
    }
    folder = tmp_path_factory.mktemp("m3bert") / "model"
    save_encoder_folder(folder, replace(checkpoint, tensors=weights), EncoderConfig())
    return folder, weights


def require_same(
    saved: tuple[Path, Mapping[str, torch.Tensor]], layer: int, temperature: float, **settings: Any
) -> None:
    folder, weights = saved
    ids = np.random.default_rng(3).integers(5, 50, (len(LENGTHS), max(LENGTHS)))
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32", **settings))
    found = backbone.hidden_states(ids, np.array(LENGTHS), temperature=temperature)
    for row, length in enumerate(LENGTHS):
        states = states_by_layer(
            weights, torch.from_numpy(ids[row, :length]), num_heads=4, theta=10_000.0, temperature=temperature
        )
        assert float((found[row, :length] - states[layer - 1]).abs().max()) <= 1e-5


@pytest.mark.parametrize("num_layers", [1, 2])
def test_backbone_equals_layers_written_out_at_every_exit(saved: Any, num_layers: int):
    require_same(saved, num_layers, 1.0, layers=num_layers)


def test_backbone_temperature_equals_logits_divided_by_it(saved: Any):
    require_same(saved, 2, 0.5)
