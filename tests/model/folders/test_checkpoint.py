from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint, read_tensors, weights_in_memory
from cairn.pipeline.model.folders.model_types import MODEL_TYPES
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


def _change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_read_tokenizer_that_pads_and_truncates_does_neither_after(folder):
    tokenizer = read_checkpoint(folder).tokenizer
    assert len(tokenizer.encode("cat", add_special_tokens=False).ids) == 1
    assert len(tokenizer.encode("cat " * 40, add_special_tokens=False).ids) == 40
    offsets = tokenizer.encode("x" * 20_000 + " y").offsets  # of a long word that it does not know
    assert max(stop - start for start, stop in offsets) <= 101
    assert sum(stop - start for start, stop in offsets) == 20_001


def test_read_norms_published_as_gamma_and_beta_gives_the_same_states(folder, tiny_model_folder):
    stored = load_file(folder / "model.safetensors")
    parts = {".weight": ".gamma", ".bias": ".beta"}
    renamed = {
        "bert."
        + next(
            (name.replace(new, old) for new, old in parts.items() if f"LayerNorm{new}" in name), name
        ): tensor
        for name, tensor in stored.items()
    }
    save_file(renamed, folder / "model.safetensors")
    ids_BT, lengths_B = np.arange(5, 17).reshape(2, 6), np.array([6, 4])
    published, today = (
        load_backbone(EncoderConfig(model=str(each), precision="fp32")).hidden_states(ids_BT, lengths_B)
        for each in (folder, tiny_model_folder)
    )
    assert torch.equal(published[0], today[0])


BOTH_NAMED = {"sep_token": {"content": "[MASK]"}, "eos_token": "[CLS]"}


@pytest.mark.parametrize(
    ("renamed", "added", "files", "first", "last"),
    [
        ({}, None, {"special_tokens_map": BOTH_NAMED}, "[CLS]", "[MASK]"),
        ({"[SEP]": "[END]"}, None, {"special_tokens_map": {"eos_token": "[END]"}}, "[CLS]", "[END]"),
        (
            {"[CLS]": "[NONE]"},
            None,
            {"tokenizer_config": {"bos_token": None, "eos_token": "[SEP]"}},
            None,
            "[SEP]",
        ),
        ({}, "$A [MASK]", {"tokenizer_config": {"eos_token": "[SEP]"}}, None, "[MASK]"),
        ({}, "[CLS] $A", {}, "[CLS]", "[SEP]"),
        ({"[SEP]": "[NONE]"}, None, {}, "[CLS]", None),
    ],
    ids=["named", "eos", "neither cls nor bos", "ending added", "beginning added", "neither sep nor eos"],
)
def test_read_first_and_last_token_are_those_the_tokenizer_adds_or_the_folder_names(
    folder, renamed, added, files, first, last
):
    path = folder / "tokenizer.json"
    for old, new in renamed.items():
        path.write_text(path.read_text().replace(old, new))
    if added:
        tokenizer = Tokenizer.from_file(str(path))
        tokens = [token for token in added.split() if token != "$A"]
        special = [(token, tokenizer.token_to_id(token)) for token in tokens]
        tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=special)
        tokenizer.save(str(path))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    if last is None:
        with pytest.raises(ModelError, match="must have a landmark token"):
            read_checkpoint(folder)
        return
    checkpoint = read_checkpoint(folder)
    assert checkpoint.cls_id == (None if first is None else checkpoint.tokenizer.token_to_id(first))
    assert checkpoint.tokenizer.id_to_token(checkpoint.landmark_id) == last


def test_read_sentence_transformers_layout_finds_the_transformers_folder(folder, tmp_path):
    outer = tmp_path / "outer"
    shutil.copytree(folder, outer / "0_Transformer")
    module = {"idx": 0, "name": "0", "path": "0_Transformer"}
    modules = [{**module, "type": "sentence_transformers.models.Transformer"}]
    (outer / "modules.json").write_text(json.dumps(modules))
    assert read_checkpoint(outer).fingerprint == read_checkpoint(folder).fingerprint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_read_file_that_is_damaged_pickled_or_missing_is_named(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=name):
        read_checkpoint(folder)
    (folder / name).unlink()
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=f"must hold {name}"):
        read_checkpoint(folder)


def test_read_matrices_share_no_memory_with_what_may_stay(folder):
    torch.manual_seed(0)
    written = {
        "embeddings.word_embeddings.weight": torch.randn(200, 128),
        "encoder.dense.weight": torch.randn(128, 128),
        "encoder.norm.weight": torch.randn(128),
    }
    save_file(written, folder / "model.safetensors")
    read = read_checkpoint(folder).tensors
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in read.values()}) == len(read)


def _split_weights(folder):
    """Lay the weights out in two files and an index, as large models are published."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {
        name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": files})
    )
    return folder


def test_read_weights_in_several_files_are_the_same_tensors(folder, tiny_model_folder):
    whole, split = read_checkpoint(tiny_model_folder).tensors, read_checkpoint(_split_weights(folder)).tensors
    assert set(split) == set(whole)
    assert all(torch.equal(split[name], whole[name]) for name in whole)
    before, path = read_checkpoint(folder).fingerprint, folder / "model-00001-of-00002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    assert read_checkpoint(folder).fingerprint != before
    first, second = path.name, "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match=f"{first} of the model must be a whole safetensors file"):
        read_checkpoint(folder)
    (folder / second).unlink()
    with pytest.raises(ModelError, match=f"must hold {second}, got none; fetch the rest"):
        read_checkpoint(folder)
    index = folder / "model.safetensors.index.json"
    for weight_map in ({}, None, {"x": "../model.safetensors"}, {"x": "weights.bin"}, {"x": 3}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=r"must name safetensors files beside it"):
            read_checkpoint(folder)
    shutil.copy(tiny_model_folder / "model.safetensors", folder)
    assert read_checkpoint(folder).tensors, "one whole file wins over an index"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_fingerprint_any_changed_file_changes_it(folder, name):
    before = read_checkpoint(folder).fingerprint
    if name == "model.safetensors":
        tensors = load_file(folder / name)
        tensors["embeddings.LayerNorm.bias"] += 1
        save_file(tensors, folder / name)
    elif name == "config.json":
        _change_config(folder, layer_norm_eps=1e-6)
    else:
        (folder / name).write_text(
            (folder / name).read_text().replace('"lowercase": true', '"lowercase": false')
        )
    assert read_checkpoint(folder).fingerprint != before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model_type": "of_its_own_code"},
            rf"^model_type must be one of {', '.join(MODEL_TYPES)}, or one that the installed transformers",
        ),
        ({"position_embedding_type": "relative_key"}, "absolute positions"),
        ({"hidden_act": "swish"}, "hidden_act must be one of"),
        ({"num_hidden_layers": 3}, r"must hold encoder\.layer\.2"),
    ],
)
def test_load_model_of_another_kind_is_refused(folder, change, sentence):
    _change_config(folder, **change)
    with pytest.raises(ModelError, match=sentence):
        load_backbone(EncoderConfig(model=str(folder)))


@pytest.mark.parametrize("name", ["model.safetensors", "cairn_extra.safetensors"])
def test_weights_in_memory_do_not_change_with_their_file(tmp_path, name):
    path = tmp_path / name
    save_file({"embeddings": torch.ones(200, 200)}, path)
    mapped = read_tensors(path)["embeddings"]
    with weights_in_memory():
        copied = read_tensors(path)["embeddings"]
    with path.open("r+b") as file:
        file.seek(-4 * 40_000, 2)
        file.write(bytes(4 * 40_000))
    assert (copied.sum(), mapped.sum()) == (40_000, 0)
