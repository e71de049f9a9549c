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
from safetensors.torch import load_file, save_file

from tests.model.cde_reference import Reference

DIM, HEADS, CONTEXT, SOFT = 32, 4, 6, 8
IDS = [[2, 7, 9, 30, 31, 12, 3], [2, 8, 3], [2, *range(5, 42), 40, 3]]
VERSIONS = pytest.mark.parametrize("version", [1, 2])


def load(folder: Path, **settings: Any):
    return load_backbone(EncoderConfig(model=str(folder), precision="fp32", **settings))


def context_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def embed(backbone: Any, rows: list[list[int]], context: np.ndarray | None) -> list[torch.Tensor]:
    """Embed rows of ids in one padded batch: mean over each row, then what the checkpoint has behind it.

    Not normalised.
    """
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    states = backbone.hidden_states(ids, np.array([len(row) for row in rows]), context)
    return [
        backbone.project(states[index, : len(row)].float().mean(0, keepdim=True))[0]
        for index, row in enumerate(rows)
    ]


def require_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


@VERSIONS
def test_first_stage_equals_the_reference(version, make_cde):
    folder = make_cde(version)
    reference = Reference(folder, version)
    require_close(embed(load(folder).first_stage, IDS, None), [reference.first_stage(ids) for ids in IDS])


@VERSIONS
@pytest.mark.parametrize("num_context", [CONTEXT, 2, 1])
def test_second_stage_with_context_equals_the_reference(version, num_context, make_cde):
    folder, context = make_cde(version), context_of(num_context)
    reference = Reference(folder, version)
    expected = [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS]
    require_close(embed(load(folder), IDS, context), expected)


@VERSIONS
@pytest.mark.parametrize("num_context", [CONTEXT, 2])
def test_second_stage_in_packed_rows_equals_the_reference(version, num_context, make_cde):
    folder, context = make_cde(version), context_of(num_context)
    backbone, reference = load(folder), Reference(folder, version)
    backbone._backbone.pattern_type = Packed
    require_close(
        embed(backbone, IDS, context),
        [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS],
    )


@VERSIONS
def test_second_stage_without_context_equals_the_reference_behind_soft_prompts(version, make_cde):
    folder = make_cde(version)
    reference = Reference(folder, version)
    require_close(embed(load(folder), IDS, None), [reference.second_stage(ids, []) for ids in IDS])


@VERSIONS
@pytest.mark.parametrize("num_context", [0, 2, CONTEXT])
def test_second_stage_with_a_null_token_fills_the_context_up(version, num_context, make_cde):
    folder, context = make_cde(version, transductive_sequence_dropout_prob=0.005), context_of(num_context)
    reference = Reference(folder, version)
    expected = [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS]
    require_close(embed(load(folder), IDS, context if num_context else None), expected)


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        {"disable_transductive_rotary_embedding": False},
        {"dataset_backbone": "same"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_second_stage_with_a_setting_changed_equals_the_reference(version, settings, make_cde):
    if "dataset_backbone" in settings:
        settings = {"dataset_backbone": "nomic-bert-2048" if version == 1 else "ModernBERT-base"}
    folder, context = make_cde(version, **settings), context_of(CONTEXT)
    reference = Reference(folder, version)
    expected = [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS]
    require_close(embed(load(folder), IDS, context), expected)


@VERSIONS
def test_second_stage_with_a_temperature_equals_the_reference(version, make_cde):
    folder, context = make_cde(version), context_of(CONTEXT)
    states = load(folder).hidden_states(np.array([IDS[0]]), np.array([len(IDS[0])]), context, 0.7)
    expected = Reference(folder, version, temperature=0.7).second_stage(
        IDS[0], list(torch.from_numpy(context))
    )
    torch.testing.assert_close(
        load(folder).project(states[0].mean(0, keepdim=True))[0], expected, atol=1e-5, rtol=1e-5
    )


@VERSIONS
def test_limits_of_layers_hold_for_their_own_stage(version, make_cde):
    folder, context = make_cde(version, limit_layers=1, limit_layers_first_stage=2), context_of(CONTEXT)
    reference = Reference(folder, version)
    backbone = load(folder)
    require_close(
        embed(backbone, IDS, context),
        [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS],
    )
    require_close(embed(backbone.first_stage, IDS, None), [reference.first_stage(ids) for ids in IDS])


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
def test_embedding_output_dim_is_the_width_of_vectors(version, make_cde):
    folder, context = make_cde(version, embedding_output_dim=12), context_of(CONTEXT)
    backbone, reference = load(folder), Reference(folder, version)
    assert backbone.embedding_dim == 12
    assert backbone.first_stage.embedding_dim == DIM
    require_close(
        embed(backbone, IDS, context),
        [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS],
    )


@VERSIONS
def test_tied_token_table_may_lie_in_the_file_once(version, make_cde):
    folder = make_cde(version, transductive_tie_token_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    name = f"embeddings.{'word' if version == 1 else 'tok'}_embeddings.weight"
    tensors.pop(f"second_stage_model.backbone.{name}")
    save_file(tensors, folder / "model.safetensors")
    backbone = load(folder)
    assert np.array_equal(backbone.token_embeddings, tensors[f"first_stage_model.embedder.{name}"].numpy())
    assert np.array_equal(backbone.token_embeddings, backbone.first_stage.token_embeddings)


def test_tied_token_tables_that_differ_are_refused(make_cde):
    with pytest.raises(ModelError, match="must be the same in both stages"):
        load(make_cde(1, transductive_tie_token_embeddings=True))


@VERSIONS
def test_max_positions_is_the_published_length_of_a_text(version, make_cde):
    assert load(make_cde(version)).max_positions == 40
    assert load(make_cde(version, max_seq_length=4096)).max_positions == 96 - CONTEXT - SOFT


@VERSIONS
def test_row_longer_than_max_positions_is_refused(version, make_cde):
    with pytest.raises(ModelError, match="at most 40 tokens, got 41"):
        load(make_cde(version)).hidden_states(np.full((1, 41), 7), np.array([41]), None)


@VERSIONS
def test_context_of_more_documents_than_the_model_reads_is_refused(version, make_cde):
    with pytest.raises(ConfigError, match=r"at most 6 rows of 32 numbers, got shape \(7, 32\)"):
        load(make_cde(version)).hidden_states(np.array([IDS[0]]), np.array([7]), context_of(7))


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
