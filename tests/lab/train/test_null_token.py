"""The null token (CDE §4.2): drawn for each example in training, and read in place of a missing context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train import landmark_encoder
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder, remember
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.landmark_attention import Memory
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.own_tensors import NULL_CONTEXT
from cairn.pipeline.model.landmark_reader import LandmarkReader
from safetensors.torch import load_file

from tests.lab.train.conftest import LOOP_SETTINGS
from tests.lab.train.test_landmark_encoder import moved, rectangle, rows_of, saved

C = 5


@pytest.fixture
def made(tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]) -> Any:
    generator = torch.Generator().manual_seed(1)
    model = LandmarkEncoder(
        read_checkpoint(tiny_model_folder), initial_gate=0.5, context_size=C, null_token=True
    )
    with torch.no_grad():
        model.null_token.copy_(torch.randn(model.model_dim, generator=generator))
    maker = SequenceMaker(
        read_checkpoint(tiny_model_folder),
        make_pairs(4),
        pooling="lmk",
        max_query_tokens=16,
        max_document_tokens=64,
    )
    rows, _ = maker.documents(range(4), 9)
    return model, rows, torch.randn(C, model.model_dim, generator=generator)


def replaced(model: LandmarkEncoder, dropped_C: torch.Tensor) -> Any:
    """Return what memories become where dropped vectors' keys and values are those of the null token."""

    def memories(engine: Any, context_CD: torch.Tensor, num_layers: int) -> tuple[Memory, ...]:
        own = remember(engine, context_CD, num_layers)
        null = remember(engine, model.null_token[None], num_layers)
        return tuple(
            Memory(
                key_GCd=torch.where(dropped_C[None, :, None], other.key_GCd, one.key_GCd),
                value_GCd=torch.where(dropped_C[None, :, None], other.value_GCd, one.value_GCd),
            )
            for one, other in zip(own, null, strict=True)
        )

    return memories


def test_rows_see_the_null_token_in_the_place_of_their_own_dropped_vectors(
    made: Any, monkeypatch: pytest.MonkeyPatch
):
    model, rows, context_CD = made
    dropped_WC = torch.rand(4, C, generator=torch.Generator().manual_seed(3)) < 0.5
    dropped_WC[0], dropped_WC[1] = False, True
    windows = torch.from_numpy(rows.windows_B)
    with torch.no_grad():
        found = model.read(rows, context_CD, dropped_BC=dropped_WC[windows])[0]
        assert torch.allclose(found[windows == 0], model(rows, context_CD)[windows == 0], atol=1e-5)
        for window in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(landmark_encoder, "remember", replaced(model, dropped_WC[window]))
                expected = model(rows, context_CD)
            assert torch.allclose(found[windows == window], expected[windows == window], atol=1e-5)
    assert len(np.unique(rows.windows_B)) == 4


def test_gradient_reaches_the_null_token_of_one_example_alone(made: Any):
    model, rows, context_CD = made
    dropped_BC = torch.zeros(len(rows), C, dtype=torch.bool)
    dropped_BC[torch.from_numpy(rows.windows_B) == 2, 1] = True
    embedded_BD = model.read(rows, context_CD, dropped_BC=dropped_BC)[0]
    for window, is_reached in ((1, False), (2, True)):
        own = embedded_BD[torch.from_numpy(rows.windows_B) == window].sum()
        (gradient,) = torch.autograd.grad(own, [model.null_token], retain_graph=True)
        assert bool(gradient.abs().max() > 0) == is_reached


def without_context(folder: Path, rows: PackedRows) -> np.ndarray:
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    hidden = LandmarkReader(backbone).hidden_states(rectangle(rows), rows.lengths_B, rows.windows_B)
    spans = zip(rows.pooled_start_B.tolist(), rows.pooled_end_B.tolist(), strict=True)
    return np.stack([hidden[row, start:end].mean(0).numpy() for row, (start, end) in enumerate(spans)])


def test_served_without_a_context_as_trained_with_every_vector_dropped(
    tiny_model_folder: Path, tmp_path: Path
):
    checkpoint = read_checkpoint(tiny_model_folder)
    model = moved(LandmarkEncoder(checkpoint, context_size=C, null_token=True))
    rows = rows_of([9, 4, 12, 7], [0, 0, 0, 1])
    served = without_context(saved(model, tiny_model_folder, tmp_path / "with"), rows)
    with torch.no_grad():
        dropped = model.read(rows, torch.randn(C, model.model_dim), dropped_BC=torch.ones(4, C).bool())[0]
        np.testing.assert_allclose(served, dropped.numpy(), atol=1e-5)
        np.testing.assert_allclose(served, model(rows).numpy(), atol=1e-5)
        model.reads_null = False
        assert np.abs(served - model(rows).numpy()).max() > 0.01
    without = saved(model, tiny_model_folder, tmp_path / "without")
    np.testing.assert_allclose(without_context(without, rows), model(rows).detach().numpy(), atol=1e-5)
    assert NULL_CONTEXT in load_file(tmp_path / "with" / EXTRA_NAME)
    assert NULL_CONTEXT not in load_file(tmp_path / "without" / EXTRA_NAME)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_folder_holds_the_null_token_where_it_was_trained(
    dropout: float, tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    config = TrainConfig(**{**LOOP_SETTINGS, "steps": 2, "context_dropout": dropout, "heldout_pairs": 0})
    train([pairs_file], tmp_path / "run", config, base=str(tiny_model_folder))
    found = load_file(tmp_path / "run" / "model" / EXTRA_NAME).get(NULL_CONTEXT)
    first = LandmarkEncoder(read_checkpoint(tiny_model_folder)).null_token
    assert (found is not None) == (dropout > 0)
    assert found is None or not torch.equal(found, first.detach())


def test_null_token_of_another_width_is_refused(tiny_model_folder: Path, tmp_path: Path):
    checkpoint = read_checkpoint(tiny_model_folder)
    broken = replace(checkpoint, tensors={**checkpoint.tensors, NULL_CONTEXT: torch.zeros(3)})
    save_encoder_folder(tmp_path / "model", broken, EncoderConfig())
    with pytest.raises(ModelError, match="null_token must be 32 finite numbers, got others of shape"):
        without_context(tmp_path / "model", rows_of([9], [0]))
