"""The embedded model against sentence-transformers, its reference implementation."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import TextEncoder
from cairn.pipeline.model.folders.names import embedded_folder

TEXTS = [
    "How do I reverse a list in Python?",
    "A cairn is a stack of stones that marks the way.",
    "Ünïcödé, CJK 你好 and 😀 in one line.",
    "word " * 120,
    "a",
    "[SEP] and [CLS] written out",
]


@pytest.fixture
def reference():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(embedded_folder()), device="cpu")


@pytest.fixture
def published(reference):
    return reference.encode(TEXTS, show_progress_bar=False)


def test_encode_text_of_one_chunk_equals_sentence_transformers(published):
    encoded = DocumentEncoder(EncoderConfig(precision="fp32", landmark_interval=128)).encode(TEXTS)
    assert encoded.chunk_offsets.tolist() == list(range(len(TEXTS) + 1))
    np.testing.assert_allclose(encoded.document_vectors_NV, published, atol=1e-5)


def test_encode_query_with_a_prefix_equals_sentence_transformers_with_the_prompt_left_out_of_pooling(
    reference,
):
    reference.set_pooling_include_prompt(False)
    published = reference.encode(TEXTS, prompt="query: ", show_progress_bar=False)
    queries = TextEncoder(EncoderConfig(precision="fp32", landmark_interval=128, query_prefix="query: "))
    np.testing.assert_allclose(queries.encode_queries(TEXTS), published, atol=1e-5)


def test_encode_truncated_equals_sentence_transformers_truncated_and_normalised(reference):
    published = reference.encode(TEXTS, truncate_dim=64, normalize_embeddings=True, show_progress_bar=False)
    encoded = DocumentEncoder(EncoderConfig(precision="fp32", landmark_interval=128, dims=64)).encode(TEXTS)
    np.testing.assert_allclose(encoded.document_vectors_NV, published, atol=1e-5)


def test_load_says_nothing(capfd):
    DocumentEncoder(EncoderConfig())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
