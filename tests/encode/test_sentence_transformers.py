"""Sentence-Transformers folders, loaded as they are, against that library's own reading of them."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from pipeline.encode.documents import DocumentEncoder
from pipeline.errors import ModelError
from pipeline.model.folders.model_defaults import encoder_config

TEXTS = ["the cat sat on the mat.", "old stone path", "a", "", "Walking MOUNTAINS, rivers; " * 5]
QUERIES = ["which path?", "the OLD river"]
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write_dense(
    folder, rows, columns, *, bias=True, activation="torch.nn.modules.activation.Tanh", seed=0, **settings
):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(rows, columns, generator=generator) * 0.3}
    if bias:
        tensors["linear.bias"] = torch.randn(rows, generator=generator)
    if settings.get("use_residual") and rows != columns:
        tensors["residual.weight"] = torch.randn(rows, columns, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "in_features": columns,
        "out_features": rows,
        "bias": bias,
        "activation_function": activation,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_layer_norm(folder, width):
    folder.mkdir()
    generator = torch.Generator().manual_seed(4)
    tensors = {
        "norm.weight": 1 + torch.randn(width, generator=generator) * 0.2,
        "norm.bias": torch.randn(width, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dimension": width}))


@pytest.fixture
def make_folder(tiny_model_folder, tmp_path):
    """Return a writer of Sentence-Transformers folders around the tiny BERT.

    Its pooling, its further modules, its settings.
    """

    def make(pooling=MEAN, modules=(), settings=None, transformer="", transformer_settings=None):
        outer = tmp_path / "model"
        inner = outer / transformer
        shutil.copytree(tiny_model_folder, inner)
        tokenizer = Tokenizer.from_file(str(inner / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.no_truncation()
        tokenizer.save(str(inner / "tokenizer.json"))
        names = {
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "mask_token": "[MASK]",
        }
        (inner / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
        )
        (inner / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": 90, **(transformer_settings or {})})
        )
        (outer / "1_Pooling").mkdir()
        (outer / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 32, **pooling})
        )
        listed = [(transformer, "Transformer"), ("1_Pooling", "Pooling"), *modules]
        (outer / "modules.json").write_text(
            json.dumps(
                [
                    {
                        "idx": index,
                        "name": str(index),
                        "path": path,
                        "type": f"sentence_transformers.models.{kind}",
                    }
                    for index, (path, kind) in enumerate(listed)
                ]
            )
        )
        if settings is not None:
            (outer / "config_sentence_transformers.json").write_text(json.dumps(settings))
        return outer

    return make


def published(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def ours(folder, **chosen):
    return DocumentEncoder(encoder_config({"model": str(folder), "precision": "fp32", **chosen}))


def assert_equal_vectors(folder, **chosen):
    model, encoder = published(folder), ours(folder, **chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        documents = model.encode_document(TEXTS, normalize_embeddings=True, show_progress_bar=False)
        queries = model.encode_query(QUERIES, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode(TEXTS).document_vectors_NV, documents, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(QUERIES), queries, atol=1e-5)
    return encoder


@pytest.mark.parametrize(
    "pooling",
    [
        MEAN,
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_lasttoken": True},
        {"pooling_mode_mean_sqrt_len_tokens": True},
        {"pooling_mode": "mean"},
        {"pooling_mode": "cls"},
        {"pooling_mode": ["lasttoken"]},
        {},
    ],
)
@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_vectors_of_each_pooling_equal_sentence_transformers(make_folder, pooling, transformer):
    assert_equal_vectors(make_folder(pooling, [("2_Normalize", "Normalize")], transformer=transformer))


@pytest.fixture
def make_decoder_folder(make_folder):
    """Return a writer of such folders around a tiny Qwen3, whose tokenizer ends texts and opens none."""

    def make(pooling, **config):
        from transformers import Qwen3Config, Qwen3Model

        folder = make_folder(pooling, [("2_Normalize", "Normalize")])
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single="$A [MASK]", special_tokens=[("[MASK]", 4)])
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {
            "eos_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        scale = {"initializer_range": 0.3, "head_dim": 8, "max_position_embeddings": 96}
        Qwen3Model(
            Qwen3Config(vocab_size=tokenizer.get_vocab_size(), **sizes, **scale, **config)
        ).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("pooling", [{"pooling_mode_lasttoken": True}, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_vectors_of_a_decoder_equal_sentence_transformers(make_decoder_folder, pooling, is_causal):
    encoder = assert_equal_vectors(
        make_decoder_folder(pooling, **({} if is_causal else {"is_causal": False})), landmark_interval=90
    )
    assert encoder.config.causal is is_causal


def test_vector_of_a_long_text_differs_from_sentence_transformers_only_where_it_is_cut(make_decoder_folder):
    folder, text = (
        make_decoder_folder({"pooling_mode_lasttoken": True}),
        "the cat sat on the old stone path. " * 9,
    )
    theirs = published(folder).encode_document([text], normalize_embeddings=True, show_progress_bar=False)
    whole, cut = (ours(folder, landmark_interval=interval).encode([text]) for interval in (90, 16))
    assert (len(whole.chunk_vectors_MV), len(cut.chunk_vectors_MV)) == (1, 6)
    np.testing.assert_allclose(whole.document_vectors_NV, theirs, atol=1e-5)
    assert np.abs(cut.document_vectors_NV - theirs).max() > 1e-2


@pytest.mark.parametrize("pools_prompt", [True, False])
@pytest.mark.parametrize(
    "prompts",
    [
        {"prompts": {"query": "old mark: ", "document": "stone:"}},
        {"prompts": {"query": "a path, "}},
        {"prompts": {"query": "", "document": "", "any": "the way "}, "default_prompt_name": None},
    ],
)
def test_vectors_behind_prompts_equal_sentence_transformers(make_folder, prompts, pools_prompt):
    assert_equal_vectors(make_folder(MEAN | {"include_prompt": pools_prompt}, settings=prompts))


@pytest.mark.parametrize("mode", ["cls", "lasttoken"])
def test_vectors_of_one_token_behind_prompts_equal_sentence_transformers(make_folder, mode):
    assert_equal_vectors(
        make_folder(
            {"pooling_mode": mode}, settings={"prompts": {"query": "old mark: ", "document": "stone: "}}
        )
    )


def test_prompt_by_default_stands_before_queries_and_documents_where_none_is_theirs(make_folder):
    folder = make_folder(settings={"prompts": {"query": "", "any": "the way "}, "default_prompt_name": "any"})
    model, encoder = published(folder), ours(folder)
    vectors = model.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode(TEXTS).document_vectors_NV, vectors, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), vectors, atol=1e-5)


def test_vectors_behind_a_prefix_of_ones_own_equal_sentence_transformers(make_folder):
    folder = make_folder()
    vectors = published(folder).encode(
        TEXTS, prompt="old stone: ", normalize_embeddings=True, show_progress_bar=False
    )
    encoder = ours(folder, document_prefix="old stone: ")
    np.testing.assert_allclose(encoder.encode(TEXTS).document_vectors_NV, vectors, atol=1e-5)


@pytest.mark.parametrize(
    "dense",
    [
        {"rows": 24},
        {"rows": 48, "bias": False, "activation": "torch.nn.modules.linear.Identity"},
        {"rows": 32, "activation": "torch.nn.modules.activation.GELU", "use_residual": True},
        {"rows": 16, "activation": "torch.nn.modules.activation.ReLU", "use_residual": True},
    ],
)
def test_vectors_through_a_dense_layer_equal_sentence_transformers(make_folder, dense):
    folder = make_folder(modules=[("2_Dense", "Dense"), ("3_Normalize", "Normalize")])
    write_dense(folder / "2_Dense", columns=32, **dense)
    assert assert_equal_vectors(folder).vector_dim == dense["rows"]


def test_vectors_through_several_modules_equal_sentence_transformers(make_folder):
    kinds = ["Normalize", "Dense", "LayerNorm", "Dropout", "Dense"]
    folder = make_folder(modules=[(f"{index}_{kind}", kind) for index, kind in enumerate(kinds, start=2)])
    write_dense(folder / "3_Dense", 20, 32, activation="torch.nn.modules.activation.SiLU")
    write_layer_norm(folder / "4_LayerNorm", 20)
    (folder / "5_Dropout").mkdir()
    (folder / "5_Dropout" / "config.json").write_text(json.dumps({"dropout": 0.5}))
    write_dense(folder / "6_Dense", 12, 20, seed=1)
    assert assert_equal_vectors(folder).vector_dim == 12


def test_vectors_of_a_model_that_lowercases_equal_sentence_transformers(make_folder):
    folder = make_folder(transformer_settings={"do_lower_case": True})
    path = folder / "tokenizer.json"
    path.write_text(
        path.read_text()
        .replace('"lowercase":true', '"lowercase":false')
        .replace('"lowercase": true', '"lowercase": false')
    )
    upper = ours(folder).encode(["THE OLD CAT"]).document_vectors_NV
    np.testing.assert_array_equal(upper, ours(folder).encode(["the old cat"]).document_vectors_NV)
    assert_equal_vectors(folder)


def test_fingerprint_of_a_tokenizer_that_lowercases_anyway_does_not_change(make_folder):
    folder = make_folder(transformer_settings={"do_lower_case": True})
    before = ours(folder).fingerprint
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert ours(folder).fingerprint == before


def test_vectors_that_the_folder_truncates_equal_sentence_transformers(make_folder):
    folder = make_folder(settings={"prompts": {}, "truncate_dim": 20})
    assert assert_equal_vectors(folder).vector_dim == 20


def test_settings_chosen_win_over_what_the_folder_brings(make_folder):
    folder = make_folder(
        {"pooling_mode": "cls"},
        settings={"prompts": {"query": "old mark: ", "document": "stone: "}, "truncate_dim": 20},
    )
    config = encoder_config(
        {
            "model": str(folder),
            "pooling": "mean",
            "query_prefix": "",
            "document_prefix": "",
            "truncate_dim": 8,
        }
    )
    assert (config.pooling, config.query_prefix, config.document_prefix, config.truncate_dim) == (
        "mean",
        "",
        "",
        8,
    )
    assert not config.pool_prefix


def test_pool_prefix_is_not_brought_where_no_pooling_could_use_it(make_folder):
    folder = make_folder(settings={"prompts": {"query": "old mark: "}})
    assert encoder_config({"model": str(folder)}).pool_prefix
    assert not encoder_config({"model": str(folder), "attention": "full"}).pool_prefix
    assert not encoder_config({"model": str(folder), "pooling": "lmk"}).pool_prefix


def test_fingerprint_any_changed_dense_layer_changes_it(make_folder):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    prints = {ours(folder).fingerprint}
    (folder / "2_Dense" / "config.json").write_text(
        (folder / "2_Dense" / "config.json").read_text().replace("activation.Tanh", "activation.ReLU")
    )
    prints.add(ours(folder).fingerprint)
    tensors = load_file(folder / "2_Dense" / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in tensors.items()}, folder / "2_Dense" / "model.safetensors"
    )
    prints.add(ours(folder).fingerprint)
    assert len(prints) == 3


def test_context_of_a_model_with_a_dense_layer_keeps_the_backbones_width(make_folder):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    backbone = ours(folder).backbone
    assert (backbone.embedding_dim, backbone.context_dim, backbone.first_stage.embedding_dim) == (24, 32, 32)


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
