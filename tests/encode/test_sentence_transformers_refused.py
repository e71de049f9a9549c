"""Sentence-Transformers folders that Cairn does not run, refused in a sentence."""

from __future__ import annotations

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


WHOLE = {"linear.weight": torch.ones(24, 32, dtype=torch.int8), "linear.bias": torch.ones(24)}


@pytest.mark.parametrize(
    ("columns", "config", "tensors", "sentence"),
    [
        (32, {"activation_function": "elsewhere.Mystery"}, None, "activation_function .* must be one of"),
        (32, {"module_input_name": "token_embeddings"}, None, "must read and write sentence_embedding"),
        (
            31,
            {},
            None,
            r"linear\.weight of the model's 2_Dense must have the shape \(24, 32\), got \(24, 31\)",
        ),
        (32, {"out_features": 40}, None, "out_features of the model's 2_Dense must be the 24 of its weights"),
        (32, {"in_features": 40}, None, "in_features of the model's 2_Dense must be the 32 .*, got 40"),
        (32, {}, WHOLE, r"linear\.weight of 2_Dense of the model must hold numbers of .*, got int8"),
        (32, {}, {}, r"2_Dense must hold model\.safetensors"),
    ],
)
def test_dense_layer_that_is_not_run_is_refused(make_folder, columns, config, tensors, sentence):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, columns, **config)
    path = folder / "2_Dense" / "model.safetensors"
    if tensors:
        save_file(tensors, path)
    elif tensors is not None:
        path.unlink()
    with pytest.raises(ModelError, match=sentence):
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
