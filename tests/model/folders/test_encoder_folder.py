"""Saved folders, read back by Cairn and by Sentence-Transformers: every setting, and every family.

Qwen2 is left out, since transformers insists on Qwen's own tokenizer for it.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, DiskFullError, ModelError
from cairn.pipeline.model.folders import encoder_folder
from cairn.pipeline.model.folders.encoder_folder import beyond_stock_modules
from safetensors.torch import load_file, save_file

from tests.encode.sentence_transformers_folders import published, write_dense

SHORT = ["the cat sat on the mat.", "old stone path", "a"]
TEXTS = [*SHORT, "walking mountains, rivers; " * 12 + "end"]
FP32 = {"precision": "fp32"}
WINDOW = {"window_tokens": 90, "window_overlap_tokens": 15, **FP32}


def assert_equal_encoders(one, other, texts=TEXTS):
    # The same weights may lie elsewhere in memory, which may change how a product is summed.
    np.testing.assert_allclose(one.encode_documents(texts), other.encode_documents(texts), atol=1e-6)
    np.testing.assert_allclose(one.encode_queries(texts), other.encode_queries(texts), atol=1e-6)


def assert_published(encoder, folder):
    model, told = published(folder), {"normalize_embeddings": True, "show_progress_bar": False}
    for ours, theirs in (
        (encoder.encode_documents(SHORT), model.encode_document(SHORT, **told)),
        (encoder.encode_queries(SHORT), model.encode_query(SHORT, **told)),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


SETTINGS = [
    {},
    {"pooling": "lmk", "landmark_interval": 12},
    {"pooling": "cls", "dims": 20},
    {"pooling": "lmk", "attention": "full", "landmark_interval": 12, "window_tokens": 40},
    {"query_prefix": "old mark: ", "document_prefix": "stone: "},
    {"query_prefix": "old mark: ", "pool_prefix": True},
    {"query_prefix": "old mark: ", "pooling": "last", "landmarks": "sentence"},
    {"query_prefix": "old mark: ", "pooling": "cls"},
    {"layers": 1},
]
BEYOND = [
    {"temperature": 0.8, "query_temperature": 0.9},
    {"pooling": "latent"},
    {"pooling": "mean_at_k", "landmark_interval": 12},
    {"pooling": "multi_cls", "attention": "full"},
    {"pooling": "mean", "attention": "full"},
    {"pooling": "lmk", "attention": "full", "landmark_interval": 12, "title_tokens": 4},
]


@pytest.mark.parametrize("settings", [*SETTINGS, *BEYOND], ids=str)
def test_saved_encoder_loads_without_loss_and_in_sentence_transformers_as_far_as_its_modules_go(
    tiny_latent_folder, tmp_path, settings
):
    encoder = load_encoder(tiny_latent_folder, **(WINDOW | settings))
    named = encoder.save(tmp_path / "saved")
    loaded = load_encoder(tmp_path / "saved", **FP32)
    assert_equal_encoders(encoder, loaded)
    own = {name: getattr(encoder.config, name) for name in ("model", "layers")}
    assert dataclasses.replace(loaded.config, **own) == encoder.config
    assert named == beyond_stock_modules(encoder.config, {"model_type": "bert"})
    assert bool(named) is (settings in BEYOND)
    if named:
        assert published(tmp_path / "saved").encode(SHORT, show_progress_bar=False).shape == (3, 32)
    else:
        assert_published(encoder, tmp_path / "saved")


def test_saved_base_model_keeps_its_fingerprint_and_is_a_sentence_transformer(tmp_path):
    encoder = load_encoder("all-MiniLM-L6-v2", **FP32)
    assert encoder.save(tmp_path / "saved") == []
    loaded = load_encoder(tmp_path / "saved", **FP32)
    assert loaded.fingerprint == encoder.fingerprint
    texts = ["A cairn is a stack of stones.", "Ünïcödé, CJK 你好 and 😀 in one line."]
    vectors = published(tmp_path / "saved").encode(texts, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode_documents(texts), vectors, atol=1e-5)


def test_saved_encoder_keeps_its_fingerprint_and_its_extra_tensors(tiny_latent_folder, tmp_path):
    encoder = load_encoder(tiny_latent_folder, pooling="latent", **FP32)
    encoder.save(tmp_path / "one")
    once = load_encoder(tmp_path / "one", **FP32)
    once.save(tmp_path / "two")
    assert load_encoder(tmp_path / "two", **FP32).fingerprint == once.fingerprint
    before, after = (
        load_file(tiny_latent_folder / "cairn_extra.safetensors"),
        load_file(tmp_path / "two" / "cairn_extra.safetensors"),
    )
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_saved_dense_layers_are_kept(make_folder, tmp_path):
    folder = make_folder({"pooling_mode": "cls"}, modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    encoder = load_encoder(folder, **FP32)
    encoder.save(tmp_path / "saved")
    assert_equal_encoders(encoder, load_encoder(tmp_path / "saved", **FP32))
    assert encoder.vector_dim == 24
    assert_published(encoder, tmp_path / "saved")


def test_save_to_a_folder_that_holds_something_is_refused(tiny_model_folder, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="must be new or empty"):
        load_encoder(tiny_model_folder).save(tmp_path / "saved")
    assert (tmp_path / "saved" / "mine.txt").read_text() == "keep"


def test_save_on_a_full_disk_leaves_nothing(tiny_model_folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    encoder = load_encoder(tiny_model_folder)
    monkeypatch.setattr(encoder_folder, "_write_modules", full)
    with pytest.raises(DiskFullError):
        encoder.save(tmp_path / "new" / "saved")
    assert list((tmp_path / "new").iterdir()) == []


FAMILIES = ("roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "mistral", "qwen3", "llama")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *product(FAMILIES, [{}, {"pooling": "lmk", "query_prefix": "the path "}]),
        ("qwen3", {"pooling": "last", "causal": True}),
    ],
    ids=str,
)
def test_saved_folder_of_each_family_is_a_sentence_transformer_of_the_same_vectors(
    make, tmp_path, family, settings
):
    encoder = load_encoder(make(family), **(WINDOW | settings))
    assert encoder.save(tmp_path / "saved") == []
    loaded = load_encoder(tmp_path / "saved", **WINDOW)
    assert dataclasses.replace(loaded.config, model=encoder.config.model) == encoder.config
    assert_equal_encoders(encoder, loaded, SHORT)
    assert_published(encoder, tmp_path / "saved")


def test_saved_nv_embed_is_a_bidirectional_mistral_with_its_latents_beside_it(make_nv_embed, tmp_path):
    encoder = load_encoder(make_nv_embed(2), query_prefix="the path ", **WINDOW)
    assert encoder.save(tmp_path / "saved") == ["pooling latent"]
    loaded = load_encoder(tmp_path / "saved", **WINDOW)
    assert (loaded.config.pooling, loaded.config.causal) == ("latent", False)
    assert_equal_encoders(encoder, loaded, SHORT)
    mean = load_encoder(tmp_path / "saved", pooling="mean", query_prefix="", **WINDOW)
    vectors = published(tmp_path / "saved").encode_document(SHORT, show_progress_bar=False)
    np.testing.assert_allclose(mean.encode_documents(SHORT), vectors, atol=1e-5)


@pytest.mark.parametrize("model_type", ["new", "m3bert"])
def test_model_that_transformers_does_not_know_is_named_as_beyond_it(model_type):
    assert beyond_stock_modules(EncoderConfig(), {"model_type": model_type}) == [f"model_type {model_type}"]
    assert beyond_stock_modules(EncoderConfig(), {"model_type": "bert"}) == []


def test_save_of_a_model_of_two_stages_is_refused(make_cde, tmp_path):
    encoder = load_encoder(make_cde(2), use_context=False, landmark_interval=12, precision="fp32")
    with pytest.raises(ConfigError, match="must be one transformer, got a CDE model of two; copy its folder"):
        encoder.save(tmp_path / "saved")


def test_save_of_a_model_with_a_weight_that_is_no_number_is_refused_and_leaves_nothing(make, tmp_path):
    folder = make("mistral")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    encoder = load_encoder(folder, **WINDOW)
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight of a model to save must be finite, got NaN or infinity"
    ):
        encoder.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
