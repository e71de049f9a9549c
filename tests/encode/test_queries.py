from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode import documents
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import TextEncoder
from cairn.pipeline.errors import ConfigError


@pytest.fixture(scope="module")
def config(tiny_model_folder):
    return EncoderConfig(
        model=str(tiny_model_folder),
        precision="fp32",
        landmark_interval=12,
        window_tokens=40,
        window_overlap_tokens=15,
    )


@pytest.fixture(scope="module")
def queries(config):
    return TextEncoder(config)


@pytest.mark.parametrize("text", ["old path?", "old stone path " * 20], ids=["short", "long"])
def test_encode_query_equals_a_document_of_the_same_text(config, queries, text):
    np.testing.assert_allclose(
        queries.encode_queries([text]), DocumentEncoder(config).encode([text]).document_vectors_NV, atol=1e-6
    )


def test_encode_query_with_its_prefix_equals_a_document_with_the_same(config):
    queries = TextEncoder(dataclasses.replace(config, query_prefix="walk on: ", document_prefix="mat: "))
    documents = DocumentEncoder(dataclasses.replace(config, document_prefix="walk on: "))
    np.testing.assert_allclose(
        queries.encode_queries(["old path?"]), documents.encode(["old path?"]).document_vectors_NV, atol=1e-6
    )


def test_encode_queries_keep_their_order(queries):
    both = queries.encode_queries(["cat", "old stone path"])
    np.testing.assert_allclose(
        both,
        np.concatenate([queries.encode_queries(["cat"]), queries.encode_queries(["old stone path"])]),
        atol=1e-5,
    )


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_encode_empty_query_is_refused(queries, text):
    with pytest.raises(ConfigError, match="a query must hold text, got an empty one at position 1"):
        queries.encode_queries(["cat", text])


def test_encode_lone_surrogate_is_refused(queries):
    with pytest.raises(ConfigError, match="valid Unicode"):
        queries.encode_queries(["cat \ud800"])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("texts", "threads"), [(["a stone"], 1), (["a stone"] * 200, 2)])
def test_short_queries_are_encoded_on_one_thread(config, two_threads, monkeypatch, texts, threads):
    seen = []
    embedding = documents.embed_chunks

    def listening(*args, **options):
        seen.append(torch.get_num_threads())
        return embedding(*args, **options)

    monkeypatch.setattr(documents, "embed_chunks", listening)
    DocumentEncoder(config).encode_queries(texts)
    assert seen == [threads]
    assert torch.get_num_threads() == 2
