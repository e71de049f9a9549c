from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.analysis.traced_pass import require_attention
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.transformer import Transformer

from tests.model.conftest import make_modernbert
from tests.tiny_models import TINY_WORDS

__all__ = ["make_modernbert"]

WORDS = [word for word in TINY_WORDS if not word.startswith("##")]


@pytest.fixture
def config(tiny_model_folder: Path) -> EncoderConfig:
    return EncoderConfig(model=str(tiny_model_folder), precision="fp32")


@pytest.fixture
def backbone(config: EncoderConfig) -> Transformer:
    return require_attention(load_backbone(config), config.model)


@pytest.fixture
def rows() -> list[list[int]]:
    """Return token ids of three texts of 24 tokens, without special ones."""
    return np.random.default_rng(3).integers(5, 22, (3, 24)).tolist()


@pytest.fixture
def texts() -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, size)) for size in (20, 40, 90, 90, 90)]
