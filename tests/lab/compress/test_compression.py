"""Compressed folders: what they hold, that they load, what is refused; GPTQ against explicit inverses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from cairn.pipeline.lab.compress.quantization import read_engine, rounded_with_feedback
from cairn.pipeline.lab.compress.settings import CompressConfig
from cairn.pipeline.model.folders.checkpoint import (
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


@pytest.fixture
def small(tiny_model_folder: Path, texts_path: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of the folder that compression by some settings leaves."""

    def make(model: Path = tiny_model_folder, texts: Path = texts_path, **settings: Any) -> Path:
        compress(str(model), [texts], tmp_path / "small", CompressConfig(**settings))
        return tmp_path / "small"

    return make


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
def test_quantised_model_loads_with_nearly_the_same_vectors(tiny_model_folder, small, settings, least_cosine):
    folder = small(**settings)
    cosines = (vectors(folder) * vectors(tiny_model_folder)).sum(1)
    assert least_cosine < cosines.min() < 1 - 1e-7
    assert not (folder / "model.safetensors").exists()
    written = (folder / QUANTIZED_NAME).read_bytes()
    shutil.rmtree(folder)
    assert (small(**settings) / QUANTIZED_NAME).read_bytes() == written, "the same texts give the same bytes"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_model_has_the_same_vectors_on_openvino(small, weights):
    folder = str(small(weights=weights, group_size=16))
    found, expected = (
        load_encoder(folder, backend=backend, precision="fp32").landmark_embeddings(TEXTS)[0].vectors_LV
        for backend in ("openvino", "torch")
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_smaller_model_keeps_the_context_it_was_trained_with(tiny_model_folder, small, tmp_path):
    trained = ContextConfig(context_documents=64, max_document_tokens=32)
    save_encoder_folder(
        tmp_path / "trained",
        read_checkpoint(tiny_model_folder),
        EncoderConfig(use_context=True),
        context=trained,
    )
    load_encoder(str(small(tmp_path / "trained", weights="int8")), precision="fp32").save(tmp_path / "saved")
    for name in ("small", "saved"):
        assert trained_context(str(tmp_path / name)) == trained


def test_matrix_trained_since_is_read_in_place_of_the_rounded_one(small, tmp_path):
    folder = small(weights="int8")
    name = next(iter(quantized(folder).matrices))
    encoder = load_encoder(str(folder), precision="fp32")
    assert "quantised weights" in encoder.save(tmp_path / "saved")
    assert np.array_equal(vectors(tmp_path / "saved"), vectors(folder)), "saved, it is the same again"
    trained = torch.zeros(quantized(folder)[name].shape)
    save_file({name: trained}, folder / EXTRA_NAME)
    tensors = quantized(folder)
    assert torch.equal(tensors[name], trained)
    assert list(tensors).count(name) == 1


def quantized(folder: Path) -> QuantizedTensors:
    tensors = read_checkpoint(folder).tensors
    assert isinstance(tensors, QuantizedTensors)
    return tensors


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layers": 3}, "layers must be at most the model's 2, got 3"),
        ({"weights": "int4", "group_size": 24}, "group_size must divide the width of every matrix"),
        ({"layers": 1}, "max_tokens must be at most the model's 96 positions, got a text"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({}, "compression must take something away"),
    ],
)
def test_settings_that_cannot_be_are_refused(small, tmp_path, settings, sentence):
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"text": [f"{'the cat ' * 80} {number}" for number in range(9)]}), path)
    texts = {"texts": path} if "positions" in sentence else {}
    with pytest.raises(ConfigError, match=sentence):
        small(**texts, **settings)
    assert not (tmp_path / "small").exists()


def test_a_model_with_nan_is_refused(tiny_model_folder, small, tmp_path):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.output.dense.bias"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    for settings in ({"layers": 1}, {"weights": "int8"}):
        with pytest.raises(ModelError, match="must be finite"):
            small(folder, **settings)
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


HEIGHT, WIDTH, GROUP = 6, 16, 8


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator)
    x = torch.randn(200, WIDTH, generator=generator) @ mixing
    return torch.randn(HEIGHT, WIDTH, generator=generator), x


def naive(weight: np.ndarray, moment: np.ndarray, kind: str) -> np.ndarray:
    """Quantise a column, then move all later ones by the minimiser of the error that is left."""
    weight, moment = weight.astype(np.float64).copy(), moment.astype(np.float64)
    moment += 0.01 * np.diag(moment).mean() * np.eye(len(moment))
    group = GROUP if kind == "int4" else WIDTH
    found = np.zeros_like(weight)
    for column in range(weight.shape[1]):
        if column % group == 0:
            part = weight[:, column : column + group]
            scale, zero = np.abs(part).max(1) / 127, 0.0
            if kind == "int4":
                low = np.minimum(part.min(1), 0)
                scale = ((np.maximum(part.max(1), 0) - low) / 15).astype(np.float16).astype(np.float64)
                zero = np.clip(np.rint(-low / scale), 0, 15)
        least, most = (0, 15) if kind == "int4" else (-127, 127)
        code = np.clip(np.rint(weight[:, column] / scale) + zero, least, most)
        found[:, column] = (code - zero) * scale
        inverse = np.linalg.inv(moment[column:, column:])
        error = (weight[:, column] - found[:, column]) / inverse[0, 0]
        weight[:, column + 1 :] -= error[:, None] * inverse[0, 1:]
    return found


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_feedback_equals_the_naive_reference(kind):
    weight, x = inputs()
    moment = x.T @ x / len(x)
    ours = rounded_with_feedback(weight, moment, kind, GROUP if kind == "int4" else WIDTH).dequantized()
    np.testing.assert_allclose(ours.numpy(), naive(weight.numpy(), moment.numpy(), kind), atol=2e-3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_moments_that_are_no_numbers_raise(value):
    weight, _ = inputs()
    with pytest.raises(ModelError, match="must be finite on the calibration texts, got NaN or infinity"):
        rounded_with_feedback(weight, torch.full((WIDTH, WIDTH), value), "int4", GROUP)


@pytest.fixture(scope="session")
def texts_path(tmp_path_factory):
    """Return a Parquet file of twelve short texts."""
    words = ["the", "old", "cat", "sat", "on", "a", "mat", "by", "river", "stone", "and", "path"]
    texts = [" ".join(words[start:] + words[:start]) for start in range(12)]
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    return path
