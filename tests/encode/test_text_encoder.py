"""An encoder by itself, and the folder it is saved to, read back by Cairn and by Sentence-Transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder, require_texts
from cairn.pipeline.errors import ConfigError, DiskFullError
from cairn.pipeline.model.folders import encoder_folder
from cairn.pipeline.model.folders.encoder_folder import beyond_stock_modules
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

SHORT = ["the cat sat on the mat.", "old stone path", "a"]
TEXTS = [*SHORT, "walking mountains, rivers; " * 12 + "end"]
FP32 = {"precision": "fp32"}
WINDOW = {"window_tokens": 90, "window_overlap_tokens": 15}


def published(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def assert_equal_encoders(one, other):
    # The same weights may lie elsewhere in memory, which may change how a product is summed.
    np.testing.assert_allclose(one.encode_documents(TEXTS), other.encode_documents(TEXTS), atol=1e-6)
    np.testing.assert_allclose(one.encode_queries(TEXTS), other.encode_queries(TEXTS), atol=1e-6)


SETTINGS = [
    {},
    {"pooling": "lmk", "landmark_interval": 12},
    {"pooling": "cls", "dims": 20},
    {"pooling": "lmk", "attention": "full", "landmark_interval": 12, "window_tokens": 40},
    {"query_prefix": "old mark: ", "document_prefix": "stone: "},
    {"query_prefix": "old mark: ", "pool_prefix": True},
    {"query_prefix": "old mark: ", "pooling": "last", "landmarks": "sentence"},
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
def test_saved_encoder_loads_without_loss(tiny_latent_folder, tmp_path, settings):
    encoder = load_encoder(tiny_latent_folder, **(WINDOW | FP32 | settings))
    encoder.save(tmp_path / "saved")
    loaded = load_encoder(tmp_path / "saved", **FP32)
    assert_equal_encoders(encoder, loaded)
    assert (
        dataclasses.replace(loaded.config, model=encoder.config.model, layers=encoder.config.layers)
        == encoder.config
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_saved_encoder_is_a_sentence_transformer_of_the_same_vectors(tiny_latent_folder, tmp_path, settings):
    encoder = load_encoder(tiny_latent_folder, **(WINDOW | FP32 | settings))
    assert encoder.save(tmp_path / "saved") == []
    model = published(tmp_path / "saved")
    documents = model.encode_document(SHORT, normalize_embeddings=True, show_progress_bar=False)
    queries = model.encode_query(SHORT, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode_documents(SHORT), documents, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(SHORT), queries, atol=1e-5)


@pytest.mark.parametrize("settings", BEYOND, ids=str)
def test_saved_encoder_beyond_stock_modules_loads_there_and_says_so(tiny_latent_folder, tmp_path, settings):
    encoder = load_encoder(tiny_latent_folder, **(WINDOW | FP32 | settings))
    named = encoder.save(tmp_path / "saved")
    assert named == beyond_stock_modules(encoder.config, {"model_type": "bert"}) != []
    assert published(tmp_path / "saved").encode(SHORT, show_progress_bar=False).shape == (3, 32)


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


def test_saved_dense_layers_are_kept(tiny_model_folder, tmp_path):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, config in (
        ("1_Pooling", {"pooling_mode": "cls"}),
        ("2_Dense", {"in_features": 32, "out_features": 24}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "linear.weight": torch.randn(24, 32, generator=generator),
        "linear.bias": torch.randn(24, generator=generator),
    }
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    encoder = load_encoder(folder, **FP32)
    encoder.save(tmp_path / "saved")
    assert_equal_encoders(encoder, load_encoder(tmp_path / "saved", **FP32))
    assert encoder.vector_dim == 24
    vectors = published(tmp_path / "saved").encode(SHORT, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode_documents(SHORT), vectors, atol=1e-5)


def test_saved_tokenizer_frames_texts_as_the_model_was_run(tiny_model_folder, tmp_path):
    load_encoder(tiny_model_folder).save(tmp_path / "saved")
    tokenizer = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert tokenizer.encode("cat").tokens == ["[CLS]", "cat", "[SEP]"]


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


def test_landmark_embeddings_are_the_chunks_of_the_document_encoder(tiny_model_folder):
    encoder = load_encoder(tiny_model_folder, pooling="lmk", landmark_interval=12, **FP32)
    encoded = DocumentEncoder(encoder.config).encode(TEXTS)
    found = encoder.landmark_embeddings(TEXTS)
    np.testing.assert_array_equal(
        np.concatenate([each.vectors_LV for each in found]), encoded.chunk_vectors_MV
    )
    assert [len(each.start_char) for each in found] == np.diff(encoded.chunk_offsets).tolist()
    for text, each in zip(TEXTS, found, strict=True):
        assert (
            "".join(text[start:end] for start, end in zip(each.start_char, each.end_char, strict=True))
            == text
        )


def test_load_encoder_refuses_a_setting_there_is_not():
    with pytest.raises(
        ConfigError, match=r"setting must be one of model, pooling, .*, got 'pool'; leave it out"
    ):
        load_encoder(pool="mean")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("hello", r"query texts must come in a list, got 'hello'; write \[text\]"),
        (b"hello", r"query texts must come in a list, got a value of type bytes"),
        (None, r"query texts must come in a list, got None"),
        (3, r"query texts must come in a list, got 3"),
        ("long " * 50, r"query texts must come in a list, got '(long ){15}long'…; write"),
        (["cat", None], r"a query must be text, got None at position 1; leave it out"),
        (["cat", ["dog"]], r"a query must be text, got \['dog'\] at position 1"),
        (
            ["cat", "\udcff"],
            r"a query must be valid Unicode, got a lone surrogate in the one at position 1; remove it",
        ),
    ],
    ids=["string", "bytes", "none", "number", "long string", "none within", "list within", "surrogate"],
)
def test_what_is_no_list_of_texts_is_refused(texts, words):
    with pytest.raises(ConfigError, match=rf"^{words}"):
        require_texts(texts, "query")
