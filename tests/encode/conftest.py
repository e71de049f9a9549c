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
    return _context


def _context(num_documents: int = 5, seed: int = 0) -> ContextSet:
    embeddings = np.random.default_rng(seed).normal(size=(num_documents, 32)).astype(np.float32)
    return ContextSet(
        doc_ids=tuple(f"c{index}" for index in range(num_documents)),
        content_sha256s=("0" * 64,) * num_documents,
        cluster_ids_C=np.zeros(num_documents, np.int32),
        embeddings_CD=embeddings,
        first_stage_fingerprint="first",
    )
