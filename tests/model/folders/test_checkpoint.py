from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import CairnError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint, read_tensors, weights_in_memory
from cairn.pipeline.model.folders.model_types import MODEL_TYPES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


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


def test_read_weights_in_several_files_are_the_same_tensors(folder, tiny_model_folder):
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(whole)}
    for file in set(names.values()):
        save_file({name: whole[name] for name in whole if names[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    split = read_checkpoint(folder).tensors
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
    for weight_map in ({}, None, {"x": "../model.safetensors"}, {"x": "weights.bin"}, {"x": 3}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=r"must name safetensors files beside it"):
            read_checkpoint(folder)
    shutil.copy(tiny_model_folder / "model.safetensors", folder)
    assert read_checkpoint(folder).tensors, "one whole file wins over an index"


def test_fingerprint_any_changed_file_changes_it(folder):
    tensors = load_file(folder / "model.safetensors")
    prints = {read_checkpoint(folder).fingerprint}
    save_file(tensors | {"embeddings.LayerNorm.bias": torch.ones(32)}, folder / "model.safetensors")
    prints.add(read_checkpoint(folder).fingerprint)
    for name, old, new in (
        ("tokenizer.json", '"lowercase": true', '"lowercase": false'),
        ("config.json", "1e-12", "1e-06"),
    ):
        (folder / name).write_text((folder / name).read_text().replace(old, new))
        prints.add(read_checkpoint(folder).fingerprint)
    assert len(prints) == 4


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
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=sentence):
        load_backbone(EncoderConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("file", "name"),
    [("model.safetensors", "embeddings"), ("cairn_extra.safetensors", "landmark_mixer.turn")],
)
def test_weights_in_memory_do_not_change_with_their_file(tmp_path, file, name):
    path = tmp_path / file
    save_file({name: torch.ones(200, 200)}, path)
    mapped = read_tensors(path)[name]
    with weights_in_memory():
        copied = read_tensors(path)[name]
    with path.open("r+b") as stream:
        stream.seek(-4 * 40_000, 2)
        stream.write(bytes(4 * 40_000))
    assert (copied.sum(), mapped.sum()) == (40_000, 0)


LONG = "x" * 50_000
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([LONG, "", "0", [], [1, [LONG]], {}, {LONG: LONG}]),
)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "special_tokens_map.json"])
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_folder_with_odd_values_loads_or_is_refused_in_one_sentence_without_its_content(folder, name, data):
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    keys = sorted({*content, "sep_token", "rope_theta", "model_type", "layer_types", "auto_map"})
    changes = data.draw(st.dictionaries(st.sampled_from(keys), ODD_VALUES, min_size=1, max_size=3))
    path.write_text(json.dumps(content | changes))
    sentence = ""
    try:
        load_encoder(str(folder)).encode_documents(["a cairn marks the way"])
    except CairnError as error:
        sentence = str(error)
    finally:
        path.write_text(json.dumps(content))
    assert "\n" not in sentence
    assert len(sentence) < 2_000
