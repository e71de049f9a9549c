from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.document_encoder import first_dims, require_dims
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.first_layers import first_layers
from safetensors.torch import load_file, save_file

IDS, LENGTHS = np.array([[2, 10, 11, 3], [2, 12, 3, 0]]), np.array([4, 3])


@pytest.fixture(scope="module")
def one_layer_folder(tiny_model_folder, tmp_path_factory):
    """The tiny model's folder with its second layer deleted by hand."""
    folder = tmp_path_factory.mktemp("one") / "model"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "layer.1." not in name
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def _hidden(folder, **settings):
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32", **settings))
    return backbone.hidden_states(IDS, LENGTHS)


def test_first_layers_of_a_model_equal_a_model_of_those_layers(tiny_model_folder, one_layer_folder):
    torch.testing.assert_close(_hidden(tiny_model_folder, layers=1), _hidden(one_layer_folder))


def test_first_layers_have_a_fingerprint_of_their_own(tiny_model_folder):
    checkpoint = read_checkpoint(tiny_model_folder)
    fingerprints = {first_layers(checkpoint, number).fingerprint for number in (None, 1, 2)}
    assert (len(fingerprints), first_layers(checkpoint, None)) == (3, checkpoint)


def test_first_layers_cut_the_list_of_layer_types(tiny_model_folder):
    checkpoint = read_checkpoint(tiny_model_folder)
    typed = dataclasses.replace(
        checkpoint, config={**checkpoint.config, "layer_types": ["full_attention", "sliding_attention"]}
    )
    assert first_layers(typed, 1).config["layer_types"] == ["full_attention"]


def test_first_layers_read_the_other_name_of_their_number(tiny_model_folder):
    checkpoint = read_checkpoint(tiny_model_folder)
    nomic = dataclasses.replace(checkpoint, config={"n_layer": 2})
    assert first_layers(nomic, 1).config == {"n_layer": 1}


@pytest.mark.parametrize("num_layers", [0, 3])
def test_layers_the_model_does_not_have_are_refused(tiny_model_folder, num_layers):
    with pytest.raises(ConfigError, match=f"must lie between 1 and the model's 2, got {num_layers}"):
        first_layers(read_checkpoint(tiny_model_folder), num_layers)


def test_layers_of_a_model_that_does_not_count_them_are_refused(tiny_model_folder):
    with pytest.raises(ModelError, match="num_hidden_layers or n_layer"):
        first_layers(dataclasses.replace(read_checkpoint(tiny_model_folder), config={}), 1)


def test_first_dims_equal_naive_heads_divided_by_their_length():
    rows = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    naive = [[value / sum(other**2 for other in row[:5]) ** 0.5 for value in row[:5]] for row in rows]
    np.testing.assert_allclose(first_dims(rows, 5), naive, atol=1e-6)


def test_first_dims_of_zeros_are_not_a_vector():
    assert np.isnan(first_dims(np.array([[0.0, 1.0]], np.float32), 1)).all()


@pytest.mark.parametrize("truncate_dim", [0, 33])
def test_dims_the_model_does_not_have_are_refused(truncate_dim):
    with pytest.raises(ConfigError, match=f"must lie between 1 and the model's 32, got {truncate_dim}"):
        require_dims(truncate_dim, 32)
