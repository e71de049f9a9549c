from __future__ import annotations

from typing import Any

import pytest
from cairn.pipeline.model.folders.model_defaults import model_defaults
from cairn.pipeline.model.folders.model_types import cde_settings, is_cde

PUBLISHED = {"query_prefix": "search_query: ", "document_prefix": "search_document: ", "use_context": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architecture": "transductive"}, True),
        ({"architectures": ["DatasetTransformer"]}, True),
        ({"architectures": ["ContextualDocumentEmbeddingTransformer"], "model_type": "modernbert"}, True),
        ({"architectures": ["BertModel"], "model_type": "bert"}, False),
        ({"architectures": None}, False),
        ({}, False),
    ],
)
def test_is_cde_knows_the_published_names(config, expected):
    assert is_cde(config) is expected


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {"pool_prefix": True}),
        ({"pool_ignore_instruction_tokens": True}, {"pool_prefix": False}),
        (
            {"query_prompt": "q: ", "document_prompt": ""},
            {"pool_prefix": True, "query_prefix": "q: ", "document_prefix": ""},
        ),
    ],
)
def test_settings_follow_the_configuration(config: dict[str, Any], changes: dict[str, Any]):
    assert cde_settings(config) == PUBLISHED | changes


def test_folder_brings_nothing_that_is_chosen(make_cde):
    chosen = {
        "model": str(make_cde(1)),
        "use_context": False,
        "query_prefix": "",
        "document_prefix": "old: ",
        "pool_prefix": False,
    }
    assert model_defaults(chosen) == {}


@pytest.mark.parametrize(
    "chosen", [{"pooling": "cls"}, {"attention": "full"}, {"query_prefix": "", "document_prefix": ""}]
)
def test_folder_brings_no_pooled_prefix_where_there_is_nothing_to_pool(chosen, make_cde):
    assert "pool_prefix" not in model_defaults({"model": str(make_cde(1)), **chosen})


def test_prompts_of_a_sentence_transformers_folder_go_before_the_published_ones(make_cde, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(make_cde(2), tmp_path / "model")
    (folder / "modules.json").write_text(
        json.dumps([{"path": "", "type": "sentence_transformers_impl.Transformer"}])
    )
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "q: ", "document": "d: "}})
    )
    brought = model_defaults({"model": str(folder)})
    assert brought == {"query_prefix": "q: ", "document_prefix": "d: ", "use_context": True}
