"""Two-stage checkpoints against a reference written from the published facts.

Matrices, loops and nothing of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.rectangle import Rectangle

from tests.model.cde_reference import CONTEXT, DIM, IDS, SOFT, VERSIONS, Reference


def load(folder: Path, **settings: Any):
    config = EncoderConfig(model=str(folder), precision="fp32", **settings)
    return load_backbone(config, torch.device("cpu"))


def context_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def embed(
    backbone: Any, rows: list[list[int]], context: np.ndarray | None, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Embed rows of ids in one padded batch: mean over each row, then what the checkpoint has behind it.

    Not normalised.
    """
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    states = backbone.hidden_states(ids, np.array([len(row) for row in rows]), context, temperature)
    return [
        backbone.project(states[index, : len(row)].float().mean(0, keepdim=True))[0]
        for index, row in enumerate(rows)
    ]


def require_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


CASES: dict[str, tuple[dict[str, Any], int, float]] = {
    "whole context": ({}, CONTEXT, 1.0),
    "part of a context": ({}, 2, 1.0),
    "one document": ({}, 1, 1.0),
    "soft prompts alone": ({}, 0, 1.0),
    "temperature": ({}, CONTEXT, 0.7),
    "placed context": ({"disable_transductive_rotary_embedding": False}, CONTEXT, 1.0),
}


@VERSIONS
@pytest.mark.parametrize(("settings", "num_context", "temperature"), CASES.values(), ids=CASES)
def test_both_stages_equal_the_reference_in_padded_and_in_packed_rows(
    version, settings, num_context, temperature, make_cde
):
    folder, context = make_cde(version, **settings), context_of(num_context)
    backbone, reference = load(folder), Reference(folder, version, temperature)
    assert backbone.embedding_dim == backbone.first_stage.embedding_dim == DIM
    first = [reference.first_stage(ids) for ids in IDS]
    second = [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS]
    for pattern_type in (Rectangle, Packed):
        backbone._backbone.pattern_type = backbone.first_stage._backbone.pattern_type = pattern_type
        require_close(embed(backbone.first_stage, IDS, None, temperature), first)
        require_close(embed(backbone, IDS, context if num_context else None, temperature), second)


@VERSIONS
def test_num_layers_cuts_the_second_stage_alone(version, make_cde):
    folder, context = make_cde(version), context_of(CONTEXT)
    reference = Reference(folder, version)
    cut = load(folder, layers=1)
    require_close(embed(cut.first_stage, IDS, None), [reference.first_stage(ids) for ids in IDS])
    name = "encoder.layers" if version == 1 else "layers"
    reference.tensors = {
        key: value
        for key, value in reference.tensors.items()
        if f"second_stage_model.backbone.{name}.1." not in key
    }
    require_close(
        embed(cut, IDS, context),
        [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS],
    )
    assert cut.first_stage.weights_fingerprint == load(folder).first_stage.weights_fingerprint
    assert cut.weights_fingerprint != load(folder).weights_fingerprint


@VERSIONS
def test_max_positions_is_the_published_length_of_a_text(version, make_cde):
    assert load(make_cde(version)).max_positions == 40
    assert load(make_cde(version, max_seq_length=4096)).max_positions == 96 - CONTEXT - SOFT


@VERSIONS
def test_row_or_context_that_is_longer_than_the_model_reads_is_refused(version, make_cde):
    backbone = load(make_cde(version))
    with pytest.raises(ModelError, match="at most 40 tokens, got 41"):
        backbone.hidden_states(np.full((1, 41), 7), np.array([41]), None)
    with pytest.raises(ConfigError, match=r"at most 6 rows of 32 numbers, got shape \(7, 32\)"):
        backbone.hidden_states(np.array([IDS[0]]), np.array([7]), context_of(7))


def least_cosine(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float(torch.cosine_similarity(torch.stack(found).cpu(), torch.stack(expected), dim=1).min())


@pytest.mark.gpu
@VERSIONS
@pytest.mark.parametrize("num_context", [0, CONTEXT])
def test_both_stages_on_a_gpu_agree_with_the_cpu(version, num_context, make_cde):
    folder, context = make_cde(version), context_of(num_context) if num_context else None
    for precision, least in (("bf16", 0.999), ("fp32", 0.99999)):
        rounded = load_backbone(EncoderConfig(model=str(folder), precision=precision), torch.device("cuda"))
        assert least_cosine(embed(rounded, IDS, context), embed(load(folder), IDS, context)) >= least
        assert (
            least_cosine(embed(rounded.first_stage, IDS, None), embed(load(folder).first_stage, IDS, None))
            >= least
        )
