"""Compressed folders: what they hold, that they load, and what is refused.

Importance of parts that are known to matter, or not to.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn import load_encoder
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError, StorageError
from cairn.pipeline.lab.compress import compression
from cairn.pipeline.lab.compress.compression import compress
from cairn.pipeline.lab.compress.pruning import embed_rows, most_important_layers
from cairn.pipeline.lab.compress.quantization import read_engine
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.model.folders.checkpoint import (
    DESCRIPTION_NAME,
    EXTRA_NAME,
    QUANTIZED_NAME,
    read_checkpoint,
)
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import trained_context
from cairn.pipeline.quantized_matrix import QuantizedTensors
from cairn.pipeline.types import silent_progress
from safetensors.torch import load_file, save_file

TEXTS = ["the old cat sat on the mat.", "a river by the mountain"]


def vectors(folder: Path) -> np.ndarray:
    return load_encoder(str(folder), precision="fp32").encode_queries(TEXTS)


def test_pruned_model_is_an_ordinary_smaller_one(tiny_model_folder, texts_path, tmp_path):
    report = compress(str(tiny_model_folder), [texts_path], tmp_path / "small", CompressConfig(layers=1))
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    before, after = report.steps
    assert after.parameters < before.parameters
    assert after.matrix_bytes < before.matrix_bytes
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(tmp_path / "small"), device="cpu").encode(
        TEXTS, normalize_embeddings=True
    )
    np.testing.assert_allclose(vectors(tmp_path / "small"), theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "least_cosine"),
    [
        ({"weights": "int8"}, 0.999),
        ({"weights": "int4", "group_size": 16}, 0.9),
    ],
)
def test_quantised_model_loads_with_nearly_the_same_vectors(
    tiny_model_folder, texts_path, tmp_path, settings, least_cosine
):
    compress(str(tiny_model_folder), [texts_path], tmp_path / "small", CompressConfig(**settings))
    cosines = (vectors(tmp_path / "small") * vectors(tiny_model_folder)).sum(1)
    assert least_cosine < cosines.min() < 1 - 1e-7
    assert not (tmp_path / "small" / "model.safetensors").exists()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_model_has_the_same_vectors_on_openvino(tiny_model_folder, texts_path, tmp_path, weights):
    pytest.importorskip("openvino")
    config = CompressConfig(weights=weights, group_size=16)
    compress(str(tiny_model_folder), [texts_path], tmp_path / "small", config)
    encoder = load_encoder(str(tmp_path / "small"), backend="openvino", precision="fp32")
    np.testing.assert_allclose(
        encoder.landmark_embeddings(TEXTS)[0].vectors_LV,
        load_encoder(str(tmp_path / "small"), precision="fp32").landmark_embeddings(TEXTS)[0].vectors_LV,
        atol=1e-4,
    )


def test_saved_quantised_encoder_is_the_same_again(tiny_model_folder, texts_path, tmp_path):
    compress(str(tiny_model_folder), [texts_path], tmp_path / "small", CompressConfig(weights="int8"))
    encoder = load_encoder(str(tmp_path / "small"), precision="fp32")
    assert "quantised weights" in encoder.save(tmp_path / "saved")
    assert np.array_equal(vectors(tmp_path / "saved"), vectors(tmp_path / "small"))


def test_smaller_model_keeps_the_context_it_was_trained_with(tiny_model_folder, texts_path, tmp_path):
    trained = ContextConfig(context_documents=64, max_document_tokens=32)
    save_encoder_folder(
        tmp_path / "trained",
        read_checkpoint(tiny_model_folder),
        EncoderConfig(use_context=True),
        context=trained,
    )
    compress(str(tmp_path / "trained"), [texts_path], tmp_path / "small", CompressConfig(weights="int8"))
    load_encoder(str(tmp_path / "small"), precision="fp32").save(tmp_path / "saved")
    for name in ("small", "saved"):
        assert trained_context(str(tmp_path / name)) == trained


def test_matrix_trained_since_is_read_in_place_of_the_rounded_one(tiny_model_folder, texts_path, tmp_path):
    compress(str(tiny_model_folder), [texts_path], tmp_path / "small", CompressConfig(weights="int8"))
    name = next(iter(quantized(tmp_path / "small").matrices))
    trained = torch.zeros(quantized(tmp_path / "small")[name].shape)
    save_file({name: trained}, tmp_path / "small" / EXTRA_NAME)
    tensors = quantized(tmp_path / "small")
    assert torch.equal(tensors[name], trained)
    assert list(tensors).count(name) == 1


def quantized(folder: Path) -> QuantizedTensors:
    tensors = read_checkpoint(folder).tensors
    assert isinstance(tensors, QuantizedTensors)
    return tensors


def test_same_texts_give_the_same_bytes(tiny_model_folder, texts_path, tmp_path):
    written: list[bytes] = []
    for name in ("one", "two"):
        config = CompressConfig(layers=1, weights="int4", group_size=16)
        compress(str(tiny_model_folder), [texts_path], tmp_path / name, config)
        written.append((tmp_path / name / QUANTIZED_NAME).read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("damage", ["another tensor", "another version"])
def test_quantised_file_that_is_not_as_written_is_refused(tiny_model_folder, texts_path, tmp_path, damage):
    compress(str(tiny_model_folder), [texts_path], tmp_path / "small", CompressConfig(weights="int8"))
    if damage == "another tensor":
        tensors = load_file(tmp_path / "small" / QUANTIZED_NAME)
        save_file(
            tensors | {"embeddings.LayerNorm.bias": tensors["embeddings.LayerNorm.bias"] + 1},
            tmp_path / "other",
        )
        shutil.move(tmp_path / "other", tmp_path / "small" / QUANTIZED_NAME)
    else:
        path = tmp_path / "small" / DESCRIPTION_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(ModelError, match=r"must have the SHA-256|must be of version 1, got 99"):
        vectors(tmp_path / "small")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layers": 3}, "layers must be at most the model's 2, got 3"),
        ({"weights": "int4", "group_size": 24}, "group_size must divide the width of every matrix"),
    ],
)
def test_sizes_the_model_does_not_have_are_refused(
    tiny_model_folder, texts_path, tmp_path, settings, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        compress(str(tiny_model_folder), [texts_path], tmp_path / "small", CompressConfig(**settings))
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({}, "compression must take something away"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CompressConfig(**settings)


def test_texts_beyond_the_positions_of_the_model_are_refused(tiny_model_folder, tmp_path):
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"text": [f"{'the cat ' * 80} {number}" for number in range(9)]}), path)
    with pytest.raises(ConfigError, match="max_tokens must be at most the model's 96 positions, got a text"):
        compress(str(tiny_model_folder), [path], tmp_path / "small", CompressConfig(layers=1))


def test_a_model_with_nan_is_refused(tiny_model_folder, texts_path, tmp_path):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.output.dense.bias"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    for settings in ({"layers": 1}, {"weights": "int8"}):
        with pytest.raises(ModelError, match="must be finite"):
            compress(str(folder), [texts_path], tmp_path / "small", CompressConfig(**settings))
    assert not (tmp_path / "small").exists()


def test_model_whose_states_overflow_is_refused(tiny_model_folder, texts_path, tmp_path):
    folder = tmp_path / "overflowing"
    shutil.copytree(tiny_model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    large = {
        name: tensor * 3e37 if ".layer." in name and name.endswith("weight") else tensor
        for name, tensor in tensors.items()
    }
    save_file(large, folder / "model.safetensors")
    config = CompressConfig(weights="int8")
    with pytest.raises(ModelError, match="must be finite on the calibration texts, got NaN or infinity"):
        compress(str(folder), [texts_path], tmp_path / "small", config)
    assert not (tmp_path / "small").exists()


def test_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tiny_model_folder, texts_path, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.delattr(compression, "measure_model")
    with pytest.raises(StorageError, match=r"making a folder beside .*file/small failed: File exists"):
        compress(str(tiny_model_folder), [texts_path], tmp_path / "file" / "small", CompressConfig(layers=1))


ROWS = [np.random.default_rng(seed).integers(5, 40, 10) for seed in range(4)]


@pytest.fixture
def engine(make_bert, model_size):
    return read_engine(read_checkpoint(make_bert(model_size(layers=3))), is_causal=False)


def test_layer_that_moves_embeddings_least_goes_first(engine):
    whole = embed_rows(engine, ROWS, (0, 1, 2))
    changes = {
        left_out: -float((embed_rows(engine, ROWS, tuple({0, 1, 2} - {left_out})) * whole).sum())
        for left_out in range(3)
    }
    least = min(changes, key=changes.__getitem__)
    kept = most_important_layers(engine, ROWS, 2, keeps_first=False, progress=silent_progress)
    assert kept == tuple(sorted({0, 1, 2} - {least}))
    assert most_important_layers(engine, ROWS, 1, keeps_first=True, progress=silent_progress) == (0,)
