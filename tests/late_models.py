"""Tiny models with a random token projection, for tests of late interaction."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import weights_sha256_of
from cairn.pipeline.token_vectors.projection import TokenProjection, quantised_weights, save_token_projection


def random_projection(
    folder: Path, *, dims: int = 8, bits: int = 4, pool_tokens: int = 1, seed: int = 0
) -> TokenProjection:
    """Make a projection for the model in a folder."""
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    generator = np.random.default_rng(seed)
    codes, step = quantised_weights(generator.uniform(0.5, 9, backbone.tokenizer.get_vocab_size()))
    matrix_DV = generator.standard_normal((backbone.model_dim, dims)).astype(np.float16)
    return TokenProjection(
        matrix_DV=matrix_DV.astype(np.float32),
        weight_codes_X=codes,
        weight_step=step,
        rms_V=np.full(dims, dims**-0.5, np.float32),
        pool_tokens=pool_tokens,
        bits=bits,
        base_sha256=weights_sha256_of(folder),
    )


def copy_with_projection(model: Path, folder: Path) -> Path:
    """Copy a model and give it a token projection."""
    shutil.copytree(model, folder)
    save_token_projection(folder, random_projection(folder))
    return folder


@pytest.fixture
def tiny_late_folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny BERT with a token projection."""
    return copy_with_projection(tiny_model_folder, tmp_path / "late-model")
