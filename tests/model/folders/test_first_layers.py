"""Fewer layers, and fewer dimensions, of a model: what they compute, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.compress.pruning import embed_rows, smaller_checkpoint
from cairn.pipeline.lab.compress.quantization import read_engine, run_one_layer
from cairn.pipeline.model.document_encoder import first_dims, require_dims
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers

from tests.model.published import LENGTHS, load, published, published_hidden, random_ids, worst

IDS = np.array([2, 9, 11, 7, 30, 31, 12, 8, 40, 15, 22, 3])
FAMILIES = ["bert", "mpnet", "modernbert", "nomic_bert", "new", "mistral", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_tell_their_inputs_equal_the_engine(make, family):
    engine = read_engine(read_checkpoint(make(family)), is_causal=False)
    expected = engine.hidden_states(IDS[None], np.array([len(IDS)]))[0]
    with torch.no_grad():
        x_TD = engine.norm_embeddings(engine.embed_tokens(IDS[None])[0])
        for index in range(engine.num_layers):
            x_TD = run_one_layer(engine, index, x_TD)
        found = x_TD if engine.final_norm is None else engine.final_norm(x_TD)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "layers"), [("bert", (1,)), ("modernbert", (0, 2, 3)), ("mistral", (1,))])
def test_fewer_layers_equal_the_whole_model_that_skips_the_others(make, family, layers):
    checkpoint = read_checkpoint(make(family))
    engine = read_engine(checkpoint, is_causal=False)
    smaller = read_engine(smaller_checkpoint(checkpoint, layers), is_causal=False)
    assert smaller.num_layers == len(layers)
    expected = embed_rows(engine, [IDS], layers)
    found = embed_rows(smaller, [IDS], tuple(range(len(layers))))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_pruned_decoder_saved_is_read_alike_by_transformers(make, family, tmp_path):
    smaller = smaller_checkpoint(read_checkpoint(make(family)), (1,))
    save_encoder_folder(tmp_path / "small", smaller, EncoderConfig())
    backbone = load(tmp_path / "small")
    ids = random_ids(backbone)
    theirs = published_hidden(published(tmp_path / "small"), ids, LENGTHS, is_causal=False)
    assert worst(backbone.hidden_states(ids, LENGTHS), theirs) < 1e-4


def test_first_layers_have_a_fingerprint_of_their_own_and_cut_the_list_of_layer_types(tiny_model_folder):
    checkpoint = read_checkpoint(tiny_model_folder)
    fingerprints = {first_layers(checkpoint, number).fingerprint for number in (None, 1, 2)}
    assert (len(fingerprints), first_layers(checkpoint, None)) == (3, checkpoint)
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    assert first_layers(replace(checkpoint, config=config), 1).config["layer_types"] == ["full_attention"]
    stage = {"first_stage.encoder.layer.1.output.dense.bias": torch.zeros(32)}
    deeper = replace(checkpoint, config=config, tensors={**checkpoint.tensors, **stage})
    assert first_layers(deeper, 1).config["layer_types"] == config["layer_types"]
    with pytest.raises(ModelError, match="num_hidden_layers or n_layer"):
        first_layers(replace(checkpoint, config={}), 1)


@pytest.mark.parametrize("number", [0, 3])
def test_layers_and_dims_the_model_does_not_have_are_refused(tiny_model_folder, number):
    with pytest.raises(ConfigError, match=f"must lie between 1 and the model's 2, got {number}"):
        first_layers(read_checkpoint(tiny_model_folder), number)
    with pytest.raises(ConfigError, match=f"must lie between 1 and the model's 2, got {number}"):
        require_dims(number, 2)


def test_first_dims_of_zeros_are_not_a_vector():
    assert np.isnan(first_dims(np.array([[0.0, 1.0]], np.float32), 1)).all()
