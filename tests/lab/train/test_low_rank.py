from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.adapters import add_low_rank, dropped_inputs, low_rank_parameters
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.own_tensors import GATE_NAMES

ROWS = PackedRows(
    ids_N=(np.arange(21, dtype=np.int32) * 7) % 45 + 5,
    lengths_B=np.array([9, 5, 7]),
    windows_B=np.array([0, 0, 1]),
    pooled_start_B=np.zeros(3, np.int64),
    pooled_end_B=np.array([9, 5, 7]),
)


@pytest.fixture
def base(tiny_model_folder: Path) -> Checkpoint:
    return read_checkpoint(tiny_model_folder)


def adapted(base: Checkpoint, seed: int | None = 0, **settings: object) -> LandmarkEncoder:
    """Return a model with updates; with a ``seed`` they have moved away from nothing."""
    model = LandmarkEncoder(base)
    add_low_rank(model, TrainConfig(**{"steps": 1, "lora_rank": 3} | settings))
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for name, parameter in low_rank_parameters(model).items():
            if seed is not None and name.endswith("up"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def embeddings(model: LandmarkEncoder) -> torch.Tensor:
    context_CD = torch.randn(4, model.model_dim, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ROWS, context_CD)


def test_low_rank_new_updates_leave_every_vector_as_it_was(base: Checkpoint):
    assert torch.equal(embeddings(adapted(base, seed=None)), embeddings(LandmarkEncoder(base)))


@pytest.mark.parametrize("matrices", ["all", "attention"])
def test_low_rank_merged_into_a_saved_folder_gives_the_same_vectors(
    base: Checkpoint, tmp_path: Path, matrices: str
):
    model = adapted(base, lora_matrices=matrices)
    save_encoder_folder(
        tmp_path / "merged",
        replace(base, tensors={**base.tensors, **model.published_tensors()}),
        EncoderConfig(),
    )
    merged = LandmarkEncoder(read_checkpoint(tmp_path / "merged"))
    assert set(read_checkpoint(tmp_path / "merged").tensors) == set(base.tensors) | set(GATE_NAMES)
    assert float((embeddings(merged) - embeddings(model)).abs().max()) <= 1e-5
    assert float((embeddings(model) - embeddings(LandmarkEncoder(base))).abs().max()) > 1e-2


@pytest.mark.parametrize(("matrices", "num_updates"), [("all", 12), ("attention", 8)])
def test_low_rank_updates_stand_beside_the_matrices_asked_for(
    base: Checkpoint, matrices: str, num_updates: int
):
    assert len(low_rank_parameters(adapted(base, lora_matrices=matrices))) == 2 * num_updates


def test_low_rank_difference_from_the_base_has_the_rank_asked_for(base: Checkpoint):
    for name, tensor in adapted(base).published_tensors().items():
        if name not in OWN_NAMES:
            difference = tensor - base.tensors[name]
            is_matrix = name.endswith("weight") and ".layer." in name and "LayerNorm" not in name
            assert (
                torch.linalg.matrix_rank(difference, atol=1e-4) == 3 if is_matrix else not difference.any()
            ), name


def test_low_rank_only_updates_gates_and_null_token_are_trained(base: Checkpoint):
    model = LandmarkEncoder(base, context_size=3, null_token=True)
    add_low_rank(model, TrainConfig(steps=1, lora_rank=3))
    model(ROWS, model.null_token[None].repeat(3, 1)).square().sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(low_rank_parameters(model)) | set(OWN_NAMES)


def test_low_rank_alpha_scales_the_update(base: Checkpoint):
    name = "encoder.layer.0.attention.self.query.weight"
    twice, sixfold = (
        adapted(base, lora_alpha=alpha).published_tensors()[name] - base.tensors[name]
        for alpha in (None, 18.0)
    )
    assert torch.allclose(3 * twice, sixfold, atol=1e-6)


def test_low_rank_in_bf16_products_are_with_the_matrix_that_is_saved(base: Checkpoint):
    model = adapted(base)
    merged = LandmarkEncoder(replace(base, tensors={**base.tensors, **model.published_tensors()}))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embeddings(model), embeddings(merged))


def test_low_rank_dropout_leaves_inputs_out_for_a_step_and_scales_the_others(base: Checkpoint):
    model, name = adapted(base), "encoder.layer.0.attention.self.query"
    update = 2.0 * low_rank_parameters(model)[f"{name}.parametrizations.weight.0.up"].detach()
    down_RI = low_rank_parameters(model)[f"{name}.parametrizations.weight.0.down"].detach()
    whole = model.get_submodule(name).weight.detach()
    with dropped_inputs(model, 0.25, seed=5):
        found = model.get_submodule(name).weight.detach() - base.tensors[f"{name}.weight"]
    is_left_out_I = ~found.abs().sum(0).bool()
    assert 0 < is_left_out_I.sum() < 20
    expected = update @ (down_RI * ~is_left_out_I / 0.75)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(model.get_submodule(name).weight, whole)


def test_low_rank_dropout_is_that_of_its_seed_and_of_no_share_the_whole_update(base: Checkpoint):
    model, found = adapted(base), []
    for share, seed in ((0.3, 1), (0.3, 1), (0.3, 2), (0.0, 3)):
        with dropped_inputs(model, share, seed):
            found.append(embeddings(model))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[3], embeddings(model))


def test_low_rank_beyond_the_models_width_is_refused(base: Checkpoint):
    with pytest.raises(ConfigError, match="lora_rank must be at most 32, the base model's width, got 33"):
        adapted(base, lora_rank=33)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 4.0},
        {"lora_matrices": "attention"},
        {"lora_dropout": 0.1},
        {"lora_rank": 2, "lora_alpha": 0.0},
    ],
)
def test_low_rank_settings_that_do_not_go_together_are_refused(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=r"lora_(rank|alpha) must be"):
        TrainConfig(**{"steps": 1, **settings})
