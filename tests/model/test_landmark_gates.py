from __future__ import annotations

import shutil

import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME
from cairn.pipeline.model.folders.own_tensors import CONTEXT_GATES, LANDMARK_GATES
from cairn.pipeline.model.landmark_reader import gates_of
from safetensors.torch import load_file, save_file

LAYERS, HEADS = 2, 4


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


def _gates(seed, layers=LAYERS, heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(layers, heads, generator=generator) for name in (LANDMARK_GATES, CONTEXT_GATES)}


def _gates_in(folder, **changes):
    return gates_of(load_backbone(EncoderConfig(model=str(folder), precision="fp32", **changes)))


def test_gates_of_a_model_without_any_start_nearly_closed(folder):
    gates = _gates_in(folder)
    assert gates.landmarks_LH.tolist() == gates.context_LH.tolist() == [[-3.0] * HEADS] * LAYERS


def test_gates_among_the_weights_are_read(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | _gates(0), path)
    gates = _gates_in(folder)
    torch.testing.assert_close(gates.landmarks_LH, _gates(0)[LANDMARK_GATES])
    torch.testing.assert_close(gates.context_LH, _gates(0)[CONTEXT_GATES])


def test_gates_beside_the_weights_go_before_those_among_them(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | _gates(0), path)
    save_file({LANDMARK_GATES: _gates(1)[LANDMARK_GATES]}, folder / EXTRA_NAME)
    gates = _gates_in(folder)
    torch.testing.assert_close(gates.landmarks_LH, _gates(1)[LANDMARK_GATES])
    torch.testing.assert_close(gates.context_LH, _gates(0)[CONTEXT_GATES])


def test_gates_of_the_first_layers_are_the_first_gates(folder):
    save_file(_gates(1), folder / EXTRA_NAME)
    gates = _gates_in(folder, layers=1)
    torch.testing.assert_close(gates.landmarks_LH, _gates(1)[LANDMARK_GATES][:1])


def test_gates_fingerprint_has_the_contexts_only_where_it_is_used(folder):
    save_file(_gates(1), folder / EXTRA_NAME)
    one = _gates_in(folder)
    save_file(_gates(1) | {CONTEXT_GATES: _gates(2)[CONTEXT_GATES]}, folder / EXTRA_NAME)
    other = _gates_in(folder)
    assert one.fingerprint(with_context=False) == other.fingerprint(with_context=False)
    assert one.fingerprint(with_context=True) != other.fingerprint(with_context=True)


@pytest.mark.parametrize(
    ("gates", "sentence"),
    [
        (
            {LANDMARK_GATES: torch.zeros(3, HEADS)},
            r"landmark_attention.gates must have the shape \(2, 4\), .* got \(3, 4\)",
        ),
        (
            {CONTEXT_GATES: torch.zeros(LAYERS)},
            r"landmark_attention.context_gates must have the shape \(2, 4\), .* got \(2,\)",
        ),
        (
            {LANDMARK_GATES: torch.full((LAYERS, HEADS), float("nan"))},
            "must be numbers or -inf, which closes a gate, got NaN",
        ),
        (
            {CONTEXT_GATES: torch.full((LAYERS, HEADS), float("inf"))},
            "must be numbers or -inf, which closes a gate, got NaN or",
        ),
    ],
)
def test_gates_that_do_not_fit_are_refused(folder, gates, sentence):
    save_file(gates, folder / EXTRA_NAME)
    with pytest.raises(ModelError, match=sentence):
        _gates_in(folder)


def test_closed_gates_are_saved_with_their_model(folder, tmp_path):
    closed = _gates(1) | {CONTEXT_GATES: torch.full((LAYERS, HEADS), float("-inf"))}
    save_file(closed, folder / EXTRA_NAME)
    load_encoder(folder, window_tokens=90, window_overlap_tokens=15).save(tmp_path / "saved")
    torch.testing.assert_close(_gates_in(tmp_path / "saved").context_LH, closed[CONTEXT_GATES])
