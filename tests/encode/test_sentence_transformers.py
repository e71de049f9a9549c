"""Sentence-Transformers folders, loaded as they are, against that library's own reading of them."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest
import torch
from cairn import Collection, load_encoder
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config, settings_warnings
from cairn.pipeline.model.folders.names import embedded_folder
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.encode.sentence_transformers_folders import (
    MEAN,
    published,
    write_dense,
    write_layer_norm,
    write_modules,
)

TEXTS = ["the cat sat on the mat.", "old stone path", "a", "", "Walking MOUNTAINS, rivers; " * 5]
QUERIES = ["which path?", "the OLD river"]


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


@pytest.mark.parametrize("is_model2vec", [False, True])
def test_vectors_of_a_static_model_equal_sentence_transformers(tiny_model_folder, tmp_path, is_model2vec):
    tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    tensors = {"embedding.weight": torch.randn(size, 32, generator=generator)}
    if is_model2vec:
        tensors = {
            "embeddings": torch.randn(9, 32, generator=generator),
            "mapping": torch.arange(size) % 9,
            "weights": torch.rand(size, generator=generator),
        }
    save_file(tensors, tmp_path / "model.safetensors")
    write_modules(tmp_path, ("", "StaticEmbedding"), ("1_Normalize", "Normalize"))
    (tmp_path / "1_Normalize").mkdir()
    texts = [text for text in TEXTS if text]
    vectors = published(tmp_path).encode(texts, show_progress_bar=False)
    encoder = ours(tmp_path)
    np.testing.assert_allclose(encoder.encode(texts).document_vectors_NV, vectors, atol=1e-5)
    _, (tokens,) = encoder.encode_query_tokens(["the cat"])
    assert tokens.states_TD.shape == (2, 32)
    assert np.isfinite(encoder.encode([""]).document_vectors_NV).all()
    with pytest.raises(ConfigError, match="pooling must be left out"):
        ours(tmp_path, pooling="lmk")


@pytest.fixture
def make_routed(make_folder, tokenizer, tmp_path):
    """Return a writer of a folder whose Router reads queries by a table, or by a BERT through a layer."""

    def make(asks, prompts=None, rows=32):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules

        inner = str(make_folder())
        torch.manual_seed(1)
        if asks == "table":
            query = [modules.StaticEmbedding(tokenizer, embedding_dim=rows)]
        else:
            body = modules.Transformer(inner)
            with torch.no_grad():
                for parameter in body.parameters():
                    parameter *= 1.1
            query = [body, modules.Pooling(32, "cls"), modules.Dense(32, rows)]
        document = [modules.Transformer(inner), modules.Pooling(32)]
        router = modules.Router.for_query_document(query, document)
        model = SentenceTransformer(modules=[router, modules.Normalize()], prompts=prompts, device="cpu")
        model.save(str(tmp_path / "routed"))
        return tmp_path / "routed"

    return make


@pytest.mark.parametrize("asks", ["table", "transformer"])
@pytest.mark.parametrize("prompts", [None, {"query": "old mark: ", "document": "stone: "}])
def test_vectors_of_both_routes_of_a_router_equal_sentence_transformers(make_routed, asks, prompts):
    folder = make_routed(asks, prompts)
    encoder = assert_equal_vectors(folder)
    vectors_QV, tokens = encoder.encode_query_tokens(QUERIES)
    np.testing.assert_array_equal(vectors_QV, encoder.encode_queries(QUERIES))
    assert [len(each.states_TD) for each in tokens] == [0, 0]


def test_router_is_ingested_and_answers_and_says_what_it_lacks(make_routed, tmp_path):
    folder = make_routed("table")
    rows = [{"id": str(number), "text": text or "old"} for number, text in enumerate(TEXTS)]
    collection = Collection.create("c", root=tmp_path / "root", model=str(folder))
    collection.add(rows)
    said = settings_warnings(encoder_config({"model": str(folder)}), ContextConfig())
    assert len(collection.search("old stone path").hits) > 0
    assert any("reads queries by a model of their own" in each for each in said)
    with pytest.raises(ConfigError, match="token_bytes must be left out"):
        ours(folder, token_bytes=24)
    with pytest.raises(ModelError, match="must be one transformer, got one with a Router"):
        load_encoder(folder).save(tmp_path / "saved")
    with pytest.raises(ModelError, match="must be one transformer, got one with a Router"):
        LandmarkEncoder(read_checkpoint(folder))
    before, path = ours(folder).fingerprint, folder / "query_0_StaticEmbedding" / "model.safetensors"
    save_file({name: 2 * each for name, each in load_file(path).items()}, path)
    assert ours(folder).fingerprint != before


@pytest.mark.parametrize("kinds", [["Router", "Transformer"], ["Transformer", "Router"]])
def test_router_without_the_routes_of_texts_or_of_two_widths_is_refused(make_routed, kinds):
    folder = make_routed("transformer", rows=24)
    with pytest.raises(ModelError, match="must have vectors of one width, got 24 and 32"):
        ours(folder)
    (folder / "router_config.json").write_text(json.dumps({"types": {}, "structure": {"image": []}}))
    write_modules(folder, *(("", kind) for kind in kinds))
    with pytest.raises(ModelError, match=r"must have the routes query and document|got 'Router'"):
        ours(folder)


NORMALIZE = [("2_Normalize", "Normalize")]
PROMPTS = {"prompts": {"query": "old mark: ", "document": "stone: "}}
FOLDERS = {
    "mean": {"pooling": MEAN},
    "cls": {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}},
    "last": {"pooling": {"pooling_mode_lasttoken": True}, "transformer": "0_Transformer"},
    "root of the length": {"pooling": {"pooling_mode_mean_sqrt_len_tokens": True}},
    "mean by its name": {"pooling": {"pooling_mode": "mean"}, "transformer": "0_Transformer"},
    "cls by its name": {"pooling": {"pooling_mode": "cls"}},
    "list of names": {"pooling": {"pooling_mode": ["lasttoken"]}},
    "nothing said": {"pooling": {}},
    "cls behind prompts": {"pooling": {"pooling_mode": "cls"}, "settings": PROMPTS},
    "last behind prompts": {"pooling": {"pooling_mode": "lasttoken"}, "settings": PROMPTS},
    "truncated": {"settings": {"prompts": {}, "truncate_dim": 20}},
    **{
        f"prompts {number}, {'pooled' if is_pooled else 'not pooled'}": {
            "pooling": MEAN | {"include_prompt": is_pooled},
            "settings": settings,
        }
        for is_pooled in (True, False)
        for number, settings in enumerate(
            [
                {"prompts": {"query": "old mark: ", "document": "stone:"}},
                {"prompts": {"query": "a path, "}},
                {"prompts": {"query": "", "document": "", "any": "the way "}, "default_prompt_name": None},
            ]
        )
    },
}


@pytest.mark.parametrize("given", FOLDERS.values(), ids=FOLDERS)
def test_vectors_of_what_a_folder_says_equal_sentence_transformers(make_folder, given):
    encoder = assert_equal_vectors(make_folder(**{"modules": NORMALIZE, **given}))
    assert encoder.vector_dim == given.get("settings", {}).get("truncate_dim", 32)


@pytest.fixture
def make_decoder_folder(make_folder):
    """Return a writer of such folders around a tiny Qwen3, whose tokenizer ends texts and opens none."""

    def make(pooling, **config):
        from transformers import Qwen3Config, Qwen3Model

        folder = make_folder(pooling, NORMALIZE)
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single="$A [MASK]", special_tokens=[("[MASK]", 4)])
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
        names["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
        config = {"vocab_size": tokenizer.get_vocab_size(), "initializer_range": 0.3, **sizes, **config}
        Qwen3Model(Qwen3Config(**config)).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("pooling", [{"pooling_mode_lasttoken": True}, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_vectors_of_a_decoder_equal_sentence_transformers(make_decoder_folder, pooling, is_causal):
    folder = make_decoder_folder(pooling, **({} if is_causal else {"is_causal": False}))
    encoder = assert_equal_vectors(folder, landmark_interval=90)
    assert encoder.config.causal is is_causal


def test_vector_of_a_long_text_differs_from_sentence_transformers_only_where_it_is_cut(make_decoder_folder):
    folder = make_decoder_folder({"pooling_mode_lasttoken": True})
    text = "the cat sat on the old stone path. " * 9
    theirs = published(folder).encode_document([text], normalize_embeddings=True, show_progress_bar=False)
    whole, cut = (ours(folder, landmark_interval=interval).encode([text]) for interval in (90, 16))
    assert (len(whole.chunk_vectors_MV), len(cut.chunk_vectors_MV)) == (1, 6)
    np.testing.assert_allclose(whole.document_vectors_NV, theirs, atol=1e-5)
    assert np.abs(cut.document_vectors_NV - theirs).max() > 1e-2


def test_prompt_by_default_stands_before_queries_and_documents_where_none_is_theirs(make_folder):
    folder = make_folder(settings={"prompts": {"query": "", "any": "the way "}, "default_prompt_name": "any"})
    vectors = published(folder).encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    for found in (ours(folder).encode(TEXTS).document_vectors_NV, ours(folder).encode_queries(TEXTS)):
        np.testing.assert_allclose(found, vectors, atol=1e-5)


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
    encoder = assert_equal_vectors(folder)
    assert encoder.vector_dim == encoder.backbone.embedding_dim == dense["rows"]
    assert encoder.backbone.context_dim == encoder.backbone.first_stage.embedding_dim == 32


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
    path.write_text(re.sub(r'"lowercase": ?true', '"lowercase":false', path.read_text()))
    upper = ours(folder).encode(["THE OLD CAT"]).document_vectors_NV
    np.testing.assert_array_equal(upper, ours(folder).encode(["the old cat"]).document_vectors_NV)
    assert_equal_vectors(folder)


def test_fingerprint_of_a_tokenizer_that_lowercases_anyway_does_not_change(make_folder):
    folder = make_folder(transformer_settings={"do_lower_case": True})
    before = ours(folder).fingerprint
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert ours(folder).fingerprint == before


def test_settings_chosen_win_over_what_the_folder_brings(make_folder):
    folder = make_folder({"pooling_mode": "cls"}, settings={**PROMPTS, "truncate_dim": 20})
    chosen = {"pooling": "mean", "query_prefix": "", "document_prefix": "", "dims": 8}
    config = encoder_config({"model": str(folder), **chosen})
    assert {name: getattr(config, name) for name in chosen} == chosen
    for where, is_pooled in (({"pooling": "mean"}, True), ({"pooling": "lmk"}, False), (chosen, False)):
        assert encoder_config({"model": str(folder), **where}).pool_prefix is is_pooled
    assert not encoder_config({"model": str(folder), "pooling": "mean", "attention": "full"}).pool_prefix


def test_fingerprint_any_changed_dense_layer_changes_it(make_folder):
    folder = make_folder(modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    prints = {ours(folder).fingerprint}
    config, weights = folder / "2_Dense" / "config.json", folder / "2_Dense" / "model.safetensors"
    config.write_text(config.read_text().replace("activation.Tanh", "activation.ReLU"))
    prints.add(ours(folder).fingerprint)
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    prints.add(ours(folder).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("max", "must be one of mean, cls, lasttoken"),
        ("weightedmean", "must be one of mean, cls, lasttoken"),
        (["mean", "cls"], "must be one of mean, cls, lasttoken"),
        ("mean_sqrt_len_tokens", "a model with dense layers"),
    ],
)
def test_pooling_that_is_not_run_is_refused_where_none_is_chosen(make_folder, mode, sentence):
    folder = make_folder({"pooling_mode": mode}, modules=[("2_Dense", "Dense")])
    write_dense(folder / "2_Dense", 24, 32)
    with pytest.raises(ModelError, match=sentence):
        encoder_config({"model": str(folder)})
    assert encoder_config({"model": str(folder), "pooling": "mean"}).pooling == "mean"


WHOLE = {"linear.weight": torch.ones(24, 32, dtype=torch.int8), "linear.bias": torch.ones(24)}


@pytest.mark.parametrize(
    ("columns", "config", "tensors", "sentence"),
    [
        (32, {"activation_function": "elsewhere.Mystery"}, None, "activation_function .* must be one of"),
        (32, {"module_input_name": "token_embeddings"}, None, "must read and write sentence_embedding"),
        (31, {}, None, r"linear\.weight of the model's 2_Dense must have the shape \(24, 32\), got \(24, 31"),
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


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", r"modules\.json"),
        ("[3]", r"modules\.json"),
        ("not json", r"modules\.json"),
        ('[{"type": "Dense", "path": "../elsewhere"}]', "must name folders inside it"),
        ('[{"type": "Dense", "path": "/etc"}]', "must name folders inside it"),
    ],
)
def test_module_list_that_is_none_or_names_folders_outside_is_refused(make_folder, content, sentence):
    folder = make_folder()
    (folder / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=sentence):
        ours(folder)


OF_MINILM = [
    "How do I reverse a list in Python?",
    "A cairn is a stack of stones that marks the way.",
    "Ünïcödé, CJK 你好 and 😀 in one line.",
    "word " * 120,
    "a",
    "[SEP] and [CLS] written out",
]


def test_vectors_of_the_embedded_model_equal_sentence_transformers(capfd):
    model, whole = published(embedded_folder()), {"precision": "fp32", "landmark_interval": 128}
    capfd.readouterr()
    documents, short = (DocumentEncoder(EncoderConfig(**whole, dims=dims)) for dims in (None, 64))
    assert capfd.readouterr() == ("", ""), "loading says nothing"
    found, told = documents.encode(OF_MINILM), {"show_progress_bar": False}
    assert found.chunk_offsets.tolist() == list(range(len(OF_MINILM) + 1))
    np.testing.assert_allclose(found.document_vectors_NV, model.encode(OF_MINILM, **told), atol=1e-5)
    truncated = model.encode(OF_MINILM, truncate_dim=64, normalize_embeddings=True, **told)
    np.testing.assert_allclose(short.encode(OF_MINILM).document_vectors_NV, truncated, atol=1e-5)
    model.set_pooling_include_prompt(False)
    asked = DocumentEncoder(EncoderConfig(**whole, query_prefix="query: ")).encode_queries(OF_MINILM)
    np.testing.assert_allclose(asked, model.encode(OF_MINILM, prompt="query: ", **told), atol=1e-5)
