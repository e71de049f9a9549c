from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.document_encoder import first_dims, require_dims
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.first_layers import first_layers


def test_first_layers_have_a_fingerprint_of_their_own(tiny_model_folder):
    checkpoint = read_checkpoint(tiny_model_folder)
    fingerprints = {first_layers(checkpoint, number).fingerprint for number in (None, 1, 2)}
    assert (len(fingerprints), first_layers(checkpoint, None)) == (3, checkpoint)


def test_first_layers_cut_the_list_of_layer_types(tiny_model_folder):
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    typed = dataclasses.replace(read_checkpoint(tiny_model_folder), config=config)
    assert first_layers(typed, 1).config["layer_types"] == ["full_attention"]


@pytest.mark.parametrize("num_layers", [0, 3])
def test_layers_the_model_does_not_have_are_refused(tiny_model_folder, num_layers):
    with pytest.raises(ConfigError, match=f"must lie between 1 and the model's 2, got {num_layers}"):
        first_layers(read_checkpoint(tiny_model_folder), num_layers)


def test_layers_of_a_model_that_does_not_count_them_are_refused(tiny_model_folder):
    with pytest.raises(ModelError, match="num_hidden_layers or n_layer"):
        first_layers(dataclasses.replace(read_checkpoint(tiny_model_folder), config={}), 1)


def test_first_dims_of_zeros_are_not_a_vector():
    assert np.isnan(first_dims(np.array([[0.0, 1.0]], np.float32), 1)).all()


@pytest.mark.parametrize("truncate_dim", [0, 33])
def test_dims_the_model_does_not_have_are_refused(truncate_dim):
    with pytest.raises(ConfigError, match=f"must lie between 1 and the model's 32, got {truncate_dim}"):
        require_dims(truncate_dim, 32)
