"""Sentence-Transformers folders that Cairn does not run, refused in a sentence."""

from __future__ import annotations

import json

import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.folders.model_defaults import encoder_config
from safetensors.torch import save_file

from tests.encode.sentence_transformers_folders import write_dense


def ours(folder, **chosen):
    return DocumentEncoder(encoder_config({"model": str(folder), "precision": "fp32", **chosen}))


@pytest.mark.parametrize("mode", ["max", "weightedmean", ["mean", "cls"]])
def test_pooling_that_is_not_run_is_refused_where_none_is_chosen(make_folder, mode):
    folder = make_folder({"pooling_mode": mode})
    with pytest.raises(ModelError, match="must be one of mean, cls, lasttoken"):
        encoder_config({"model": str(folder)})
    assert encoder_config({"model": str(folder), "pooling": "mean"}).pooling == "mean"


def test_pooling_by_the_root_of_the_length_before_a_dense_layer_is_refused(make_folder):
    folder = make_folder({"pooling_mode": "mean_sqrt_len_tokens"}, modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    with pytest.raises(ModelError, match="a model with dense layers"):
        encoder_config({"model": str(folder)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"in_features": 32, "activation_function": "elsewhere.Mystery"},
            "activation_function .* must be one of",
        ),
        ({"module_input_name": "token_embeddings"}, "must read and write sentence_embedding"),
    ],
)
def test_dense_layer_of_another_kind_is_refused(make_folder, change, sentence):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=sentence):
        ours(folder)


def test_dense_layer_that_does_not_fit_the_transformer_is_refused(make_folder):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 31)
    with pytest.raises(
        ModelError,
        match=r"linear\.weight of the model's 2_Dense must have the shape \(24, 32\), got \(24, 31\)",
    ):
        ours(folder)


@pytest.mark.parametrize(("changed", "found"), [("out_features", 24), ("in_features", 32)])
def test_dense_layer_that_its_configuration_describes_otherwise_is_refused(make_folder, changed, found):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32, **{changed: 40})
    with pytest.raises(
        ModelError, match=f"{changed} of the model's 2_Dense must be the {found} of its weights, got 40"
    ):
        ours(folder)


def test_dense_layer_in_whole_numbers_is_refused(make_folder):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    tensors = {"linear.weight": torch.ones(24, 32, dtype=torch.int8), "linear.bias": torch.ones(24)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(
        ModelError,
        match=r"linear\.weight of 2_Dense of the model must hold numbers of a type among .*, got int8",
    ):
        ours(folder)


def test_dense_layer_without_safetensors_is_refused(make_folder):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2_Dense must hold model\.safetensors"):
        ours(folder)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc"])
def test_module_outside_the_folder_is_refused(make_folder, path):
    with pytest.raises(ModelError, match="must name folders inside it"):
        ours(make_folder(modules=[(path, "Dense")]))


@pytest.mark.parametrize("content", ["{}", "[3]", "not json"])
def test_module_list_that_is_none_is_refused(make_folder, content):
    folder = make_folder()
    (folder / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        ours(folder)
