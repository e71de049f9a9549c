"""Shared by the tests of encoding: a tiny model, its settings and contexts for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone

from tests.tiny_models import context_of


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


@pytest.fixture(scope="session")
def make_context() -> Callable[..., ContextSet]:
    """Return a maker of random contexts."""
    return lambda seed=0: context_of(np.random.default_rng(seed).normal(size=(5, 32)))
