from __future__ import annotations

import json
import shutil

import pytest
from cairn.pipeline.config import (
    DEFAULT_MODEL,
    TITLE_TOKENS,
    TOKEN_BYTES,
    WHOLE_TEXT_TOKENS,
    EncoderConfig,
    IngestConfig,
)
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.folders.model_defaults import encoder_config, model_defaults, settings_of_a_folder
from cairn.pipeline.model.folders.names import embedded_folder

OURS = EncoderConfig(
    pooling="lmk",
    attention="full",
    landmark_interval=32,
    temperature=0.9,
    query_prefix="query: ",
    dims=16,
    landmarks="sentence",
)


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    """Return a Sentence-Transformers folder that pools [CLS]."""
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return folder


@pytest.fixture
def own_folder(folder):
    """Return the same with settings Cairn saved."""
    (folder / "cairn_config.json").write_text(json.dumps(settings_of_a_folder(OURS)))
    return folder


def test_embedded_model_and_a_plain_transformer_bring_nothing(tiny_model_folder):
    for model in ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2", str(tiny_model_folder)):
        assert model_defaults({"model": model}) == {}


def test_without_a_choice_the_default_model_is_taken_with_its_settings():
    brought = model_defaults({})
    assert brought["model"] == DEFAULT_MODEL
    assert brought["use_context"] is True


def test_embedded_model_given_as_a_folder_has_the_settings_of_its_name():
    folder = str(embedded_folder())
    assert encoder_config({"model": folder}) == EncoderConfig(model=folder, token_bytes=TOKEN_BYTES)
    assert encoder_config({"model": folder}, for_ingest=True) == EncoderConfig(
        model=folder,
        token_bytes=TOKEN_BYTES,
        title_tokens=TITLE_TOKENS,
        whole_text_tokens=WHOLE_TEXT_TOKENS,
    )


def test_nv_embed_brings_latent_attention(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "nvembed"}))
    prefixed = {"model": str(folder), "query_prefix": "Instruct: find\nQuery: "}
    assert model_defaults(prefixed) == {"pooling": "latent"}  # without instructions in its mean
    (folder / "modules.json").unlink()
    assert model_defaults({"model": str(folder)}) == {"pooling": "latent"}
    assert model_defaults({"model": str(folder), "pooling": "mean"}) == {}


def test_decoder_of_sentence_transformers_brings_its_mask_unless_it_says_otherwise(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert model_defaults({"model": str(folder)}) == {"pooling": "cls", "causal": True}
    assert model_defaults({"model": str(folder), "causal": False}) == {"pooling": "cls"}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "is_causal": False}))
    assert model_defaults({"model": str(folder)}) == {"pooling": "cls"}


def test_folder_cairn_saved_brings_nothing_that_is_chosen(own_folder):
    chosen = {"model": str(own_folder), "pooling": "mean", "attention": "chunk", "dims": None}
    config = encoder_config(chosen)
    assert (config.pooling, config.attention, config.dims, config.temperature) == (
        "mean",
        "chunk",
        None,
        0.9,
    )


@pytest.mark.parametrize(
    "content",
    [
        {"format": 2, "encoder": {}},
        {"format": 1},
        {"format": 1, "encoder": {"model": "elsewhere"}},
        {"format": 1, "encoder": {"new_setting": 1}},
        {"format": 1, "encoder": {"pooling": "sum"}},
        {"format": 1, "encoder": {"landmark_interval": "many"}},
    ],
)
def test_settings_that_cairn_did_not_save_are_refused(own_folder, content):
    (own_folder / "cairn_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"cairn_config\.json of the model must"):
        model_defaults({"model": str(own_folder)})


def test_stored_collection_needs_no_model_to_resolve_its_settings(tmp_path):
    stored = IngestConfig(encoder=EncoderConfig(model=str(tmp_path / "gone"))).to_dict()
    assert resolve_ingest_config({}, stored).encoder.model == str(tmp_path / "gone")


def test_pool_prefix_with_a_pooling_that_takes_one_token_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"pool_prefix must go with attention chunk and pooling mean.*, got attention",
    ):
        EncoderConfig(pooling="cls", pool_prefix=True)


@pytest.mark.parametrize("model", [3, ["all-MiniLM-L6-v2"], None], ids=str)
def test_model_of_another_type_is_left_to_the_settings_to_refuse(model):
    with pytest.raises(ConfigError, match=r"^model must be text, got "):
        encoder_config({"model": model})
