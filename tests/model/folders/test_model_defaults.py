"""What a model's folder brings to an encoder's settings, and what it was not trained for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.config import (
    DEFAULT_MODEL,
    TITLE_TOKENS,
    TOKEN_BYTES,
    WHOLE_TEXT_TOKENS,
    ContextConfig,
    EncoderConfig,
    IngestConfig,
)
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.folders.model_defaults import (
    encoder_config,
    model_defaults,
    settings_of_a_folder,
    settings_warnings,
    untrained_settings_warning,
)
from cairn.pipeline.model.folders.model_types import is_cde
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
def bring(tiny_model_folder, tmp_path):
    """Return what a folder of such files brings for the settings that are not chosen."""

    def defaults(config: dict[str, Any], chosen: dict[str, Any], **files: Any) -> dict[str, Any]:
        folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
        (folder / "config.json").write_text(json.dumps(config))
        for name, content in files.items():
            path = folder / f"{name}.json"
            if name == "pooling":
                path = folder / "1_Pooling" / "config.json"
                path.parent.mkdir()
            path.write_text(json.dumps(content))
        brought = model_defaults({"model": str(folder), **chosen})
        assert brought.pop("model", None) is None, "it is chosen"
        return brought

    return defaults


KINDS = {"": "Transformer", "1_Pooling": "Pooling"}
MODULES = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in KINDS.items()]
CLS = {"modules": MODULES, "pooling": {"pooling_mode_cls_token": True}}
OF_CDE = {"architecture": "transductive"}
OF_CAIRN = {"cairn_config": settings_of_a_folder(OURS)}
PUBLISHED = {"query_prefix": "search_query: ", "document_prefix": "search_document: ", "use_context": True}
PROMPTS = {"query_prefix": "q: ", "document_prefix": "d: "}
OF_NV_EMBED = {"model_type": "nvembed"}
ALL_CHOSEN = {"use_context": False, "query_prefix": "", "document_prefix": "old: ", "pool_prefix": False}


@pytest.mark.parametrize(
    ("config", "files", "chosen", "brought"),
    [
        ({"model_type": "bert"}, {}, {}, {}),
        (OF_NV_EMBED, {}, {}, {"pooling": "latent"}),
        (OF_NV_EMBED, {}, {"pooling": "mean"}, {}),
        # Without instructions in its mean.
        (OF_NV_EMBED, CLS, {"query_prefix": "Instruct: find\nQuery: "}, {"pooling": "latent"}),
        ({"model_type": "qwen2"}, CLS, {}, {"pooling": "cls", "causal": True}),
        ({"model_type": "qwen2"}, CLS, {"causal": False}, {"pooling": "cls"}),
        ({"model_type": "qwen2", "is_causal": False}, CLS, {}, {"pooling": "cls"}),
        (OF_CDE, {}, {}, PUBLISHED | {"pool_prefix": True}),
        (OF_CDE | {"pool_ignore_instruction_tokens": True}, {}, {}, PUBLISHED),
        (
            OF_CDE | {"query_prompt": "q: ", "document_prompt": ""},
            {},
            {},
            {"use_context": True, "query_prefix": "q: ", "document_prefix": "", "pool_prefix": True},
        ),
        (OF_CDE, {}, ALL_CHOSEN, {}),
        (OF_CDE, {}, {"pooling": "cls"}, PUBLISHED),
        (OF_CDE, {}, {"attention": "full"}, PUBLISHED),
        (OF_CDE, {}, {"query_prefix": "", "document_prefix": ""}, {"use_context": True}),
        (
            OF_CDE | {"pool_ignore_instruction_tokens": True},
            {
                "modules": [{"path": "", "type": "sentence_transformers_impl.Transformer"}],
                "config_sentence_transformers": {"prompts": {"query": "q: ", "document": "d: "}},
            },
            {},
            PROMPTS | {"use_context": True},
        ),
    ],
)
def test_folder_brings_what_its_files_say_and_nothing_that_is_chosen(bring, config, files, chosen, brought):
    assert bring(config, chosen, **files) == brought


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OF_CDE, True),
        ({"architectures": ["DatasetTransformer"]}, True),
        ({"architectures": ["ContextualDocumentEmbeddingTransformer"], "model_type": "modernbert"}, True),
        ({"architectures": ["BertModel"], "model_type": "bert"}, False),
        ({"architectures": None}, False),
        ({}, False),
    ],
)
def test_is_cde_knows_the_published_names(config, expected):
    assert is_cde(config) is expected


def test_embedded_model_brings_nothing_and_the_default_one_what_it_was_trained_with():
    for model in ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert model_defaults({"model": model}) == {}
    brought = model_defaults({})
    assert (brought["model"], brought["use_context"]) == (DEFAULT_MODEL, True)


def test_embedded_model_given_as_a_folder_has_the_settings_of_its_name():
    own = EncoderConfig(model=str(embedded_folder()), token_bytes=TOKEN_BYTES)
    assert encoder_config({"model": own.model}) == own
    of_ingest = {"title_tokens": TITLE_TOKENS, "whole_text_tokens": WHOLE_TEXT_TOKENS}
    assert encoder_config({"model": own.model}, for_ingest=True) == EncoderConfig(
        model=own.model, token_bytes=TOKEN_BYTES, **of_ingest
    )


def test_folder_cairn_saved_brings_its_settings_but_those_that_are_chosen(bring):
    chosen = {"pooling": "mean", "attention": "chunk", "dims": None}
    brought = bring({"model_type": "bert"}, chosen, **OF_CAIRN)
    assert not brought.keys() & chosen.keys()
    assert {name: brought[name] for name in ("temperature", "landmarks", "query_prefix")} == {
        "temperature": 0.9,
        "landmarks": "sentence",
        "query_prefix": "query: ",
    }


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
def test_settings_that_cairn_did_not_save_are_refused(bring, content):
    with pytest.raises(ModelError, match=r"cairn_config\.json of the model must"):
        bring({"model_type": "bert"}, {}, cairn_config=content)


def test_stored_collection_needs_no_model_to_resolve_its_settings(tmp_path):
    stored = IngestConfig(encoder=EncoderConfig(model=str(tmp_path / "gone"))).to_dict()
    assert resolve_ingest_config({}, stored).encoder.model == str(tmp_path / "gone")


def test_pool_prefix_with_a_pooling_that_takes_one_token_is_refused():
    with pytest.raises(
        ConfigError, match=r"pool_prefix must go with attention chunk and pooling mean.*, got attention"
    ):
        EncoderConfig(pooling="cls", pool_prefix=True)


@pytest.mark.parametrize("model", [3, ["all-MiniLM-L6-v2"], None], ids=str)
def test_model_of_another_type_is_left_to_the_settings_to_refuse(model):
    with pytest.raises(ConfigError, match=r"^model must be text, got "):
        encoder_config({"model": model})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 4}, "layers 4"),
        ({"use_context": True}, "use_context true"),
        ({"pooling": "lmk"}, "pooling lmk"),
        ({"attention": "full"}, "attention full"),
        ({"dims": 64}, "dims 64"),
        ({"landmark_interval": 32}, "landmark_interval 32"),
        ({"temperature": 0.95}, "temperature 0.95"),
        ({"layers": 3, "use_context": True}, "layers 3, use_context true"),
    ],
    ids=str,
)
def test_setting_the_base_was_not_trained_for_is_named(changes: dict[str, Any], words: str) -> None:
    warning = untrained_settings_warning(EncoderConfig(**changes))
    assert warning is not None
    assert f"was not trained for {words}, which may find less" in warning


def test_what_a_model_brings_what_cost_nothing_and_an_absent_model_warn_of_nothing(tmp_path: Path) -> None:
    brought = (encoder_config({"model": model}) for model in ("cairn-minilm", "all-MiniLM-L6-v2"))
    cheap = (EncoderConfig(dims=128), EncoderConfig(landmark_interval=48))
    for config in (*brought, *cheap, encoder_config({"model": "cairn-minilm", "dims": 64})):
        assert untrained_settings_warning(config) is None
    assert settings_warnings(EncoderConfig(model=str(tmp_path / "absent"), layers=4), ContextConfig()) == ()


def test_window_without_effect_is_said_and_one_that_a_chunk_needs_is_not() -> None:
    (warning,) = settings_warnings(EncoderConfig(window_tokens=256), ContextConfig())
    assert warning.startswith("window_tokens has no effect with attention chunk")
    used = EncoderConfig(window_tokens=1024, landmark_interval=600)
    assert settings_warnings(used, ContextConfig()) == ()


@pytest.mark.parametrize("settings", [{}, {"model": "https://host/v1#m"}, {"given_dims": 8}])
def test_codes_of_tokens_below_any_that_was_measured_are_warned_about(settings: dict[str, Any]) -> None:
    for token_bytes in (1, 11, 12, 24, 0):
        config = EncoderConfig(**settings, token_bytes=token_bytes)
        told = " ".join(settings_warnings(config, ContextConfig()))
        assert ("the smallest codes that were measured" in told) is (0 < token_bytes < 12)
