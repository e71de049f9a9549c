"""Shared by the tests of encoding: a tiny model and its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone


@pytest.fixture(scope="session")
def config(tiny_latent_folder: Path) -> EncoderConfig:
    """Return settings of a model that supports every pooling, with windows that overlap in short texts."""
    return EncoderConfig(
        model=str(tiny_latent_folder),
        precision="fp32",
        landmark_interval=12,
        window_tokens=40,
        window_overlap_tokens=15,
        batch_tokens=100,
    )


@pytest.fixture(scope="session")
def backbone(config: EncoderConfig) -> Backbone:
    """Return the model of those settings."""
    return load_backbone(config)
