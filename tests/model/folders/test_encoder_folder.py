"""Saved folders of every family that transformers reads by itself.

Qwen2 is left out, since transformers insists on Qwen's own tokenizer for it. The files of such a folder are
tested in tests/encode/test_text_encoder.py.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.folders.encoder_folder import beyond_stock_modules
from safetensors.torch import load_file, save_file

TEXTS = ["the cat sat on the mat.", "old stone path", "a"]
WINDOW = {"window_tokens": 90, "window_overlap_tokens": 15, "precision": "fp32"}


def published(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize(
    "settings", [{}, {"pooling": "lmk", "query_prefix": "the path "}], ids=["mean", "lmk"]
)
@pytest.mark.parametrize(
    "family", ["roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "mistral", "qwen3", "llama"]
)
def test_saved_folder_of_each_family_is_a_sentence_transformer_of_the_same_vectors(
    make, tmp_path, family, settings
):
    encoder = load_encoder(make(family), **(WINDOW | settings))
    assert encoder.save(tmp_path / "saved") == []
    loaded = load_encoder(tmp_path / "saved", **WINDOW)
    np.testing.assert_allclose(loaded.encode_documents(TEXTS), encoder.encode_documents(TEXTS), atol=1e-6)
    model = published(tmp_path / "saved")
    np.testing.assert_allclose(
        encoder.encode_documents(TEXTS), model.encode_document(TEXTS, show_progress_bar=False), atol=1e-5
    )
    np.testing.assert_allclose(
        encoder.encode_queries(TEXTS), model.encode_query(TEXTS, show_progress_bar=False), atol=1e-5
    )


def test_saved_causal_decoder_keeps_its_mask_in_both_libraries(make, tmp_path):
    encoder = load_encoder(make("qwen3"), pooling="last", causal=True, **WINDOW)
    encoder.save(tmp_path / "saved")
    assert load_encoder(tmp_path / "saved", **WINDOW).config.causal
    vectors = published(tmp_path / "saved").encode_document(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode_documents(TEXTS), vectors, atol=1e-5)


def test_saved_nv_embed_is_a_bidirectional_mistral_with_its_latents_beside_it(make_nv_embed, tmp_path):
    encoder = load_encoder(make_nv_embed(2), query_prefix="the path ", **WINDOW)
    assert encoder.save(tmp_path / "saved") == ["pooling latent"]
    loaded = load_encoder(tmp_path / "saved", **WINDOW)
    assert (loaded.config.pooling, loaded.config.causal) == ("latent", False)
    # The same weights, but elsewhere in memory, which may change how a product is summed.
    np.testing.assert_allclose(loaded.encode_documents(TEXTS), encoder.encode_documents(TEXTS), atol=1e-6)
    np.testing.assert_allclose(loaded.encode_queries(TEXTS), encoder.encode_queries(TEXTS), atol=1e-6)
    mean = load_encoder(tmp_path / "saved", pooling="mean", query_prefix="", **WINDOW)
    vectors = published(tmp_path / "saved").encode_document(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(mean.encode_documents(TEXTS), vectors, atol=1e-5)


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
