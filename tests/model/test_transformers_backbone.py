"""Models that transformers runs: their states are that library's own, and a collection takes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cairn import Collection, load_encoder
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.model_defaults import transformers_warning
from safetensors.torch import load_file, save_file

from tests.model.transformers_families import FAMILIES


def _backbone(folder: Path, **settings: Any) -> Any:
    return load_backbone(EncoderConfig(model=str(folder), precision="fp32", **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_in_padded_rows_equal_those_of_transformers_row_by_row(make_family, family):
    folder = make_family(family)
    name, _ = FAMILIES[family]
    theirs = getattr(transformers, f"{name}Model").from_pretrained(folder).eval()
    theirs = theirs.get_encoder() if family == "bart" else theirs
    ids_BT, lengths_B = np.random.default_rng(0).integers(5, 40, (3, 20)), np.array([20, 7, 13])
    states_BTD = _backbone(folder).hidden_states(ids_BT, lengths_B)
    for row, length in enumerate(lengths_B):
        with torch.inference_mode():
            own_TD = theirs(torch.from_numpy(ids_BT[row : row + 1, :length])).last_hidden_state[0]
        torch.testing.assert_close(states_BTD[row, :length], own_TD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in ("electra", "t5") else pytest.mark.slow) for each in FAMILIES],
)
def test_collection_of_a_family_is_written_and_searched_with_token_vectors(make_family, tmp_path, family):
    notes = Collection.create("notes", root=tmp_path, model=str(make_family(family)))
    texts = {"cat": "the cat sat on the mat. " * 20, "path": "old stone path, a river and the mountain."}
    notes.add([{"id": name, "text": text} for name, text in texts.items()])
    hits = notes.search(texts["path"]).hits
    assert [hit.doc_id for hit in hits] == ["path", "cat"]
    assert any("run by transformers" in warning for warning in notes.status()["warnings"])


def test_longest_row_counts_positions_from_behind_the_padding(make_family):
    backbone = _backbone(make_family("data2vec-text"))
    assert backbone.max_positions == 95
    row = np.full((1, backbone.max_positions), 7)
    assert backbone.hidden_states(row, np.array([row.shape[1]])).isfinite().all()


@pytest.mark.slow
def test_saved_encoder_gives_the_same_vectors_and_opens_in_sentence_transformers(make_family, tmp_path):
    from sentence_transformers import SentenceTransformer

    encoder = load_encoder(make_family("electra"), precision="fp32")
    assert encoder.save(tmp_path / "saved") == []
    texts = ["the cat sat", "a river"]
    vectors = encoder.encode_documents(texts)
    saved = load_encoder(tmp_path / "saved", precision="fp32").encode_documents(texts)
    np.testing.assert_allclose(saved, vectors, atol=1e-6)
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    np.testing.assert_allclose(theirs, vectors, atol=1e-5)


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 0.9}, {"use_context": True}, {"layers": 1}, {"causal": True}, {"backend": "openvino"}],
)
def test_setting_that_transformers_cannot_follow_is_refused(make_family, setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        load_encoder(make_family("electra"), **setting).encode_documents(["a"])


def test_weight_that_the_file_lacks_is_not_drawn_and_a_model_that_reads_no_text_not_run(
    make_family, tmp_path
):
    folder = shutil.copytree(make_family("electra"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"must hold encoder\.layer\.1\.output\.dense\.weight"):
        _backbone(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match=r"must load in transformers|must hold"):
        _backbone(folder)


def test_families_of_the_engine_are_not_run_by_transformers(tiny_model_folder):
    assert transformers_warning(EncoderConfig(model=str(tiny_model_folder))) is None
