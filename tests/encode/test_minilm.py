"""The embedded model against sentence-transformers, its reference implementation."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from pipeline.config import EncoderConfig
from pipeline.encode.documents import DocumentEncoder
from pipeline.model.embedded_weights import embedded_folder

TEXTS = [
    "How do I reverse a list in Python?",
    "A cairn is a stack of stones that marks the way.",
    "Ünïcödé, CJK 你好 and 😀 in one line.",
    "word " * 120,
    "a",
    "[SEP] and [CLS] written out",
]


@pytest.fixture(scope="module")
def published():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(embedded_folder()), device="cpu")
        return model.encode(TEXTS, show_progress_bar=False)


def test_encode_text_of_one_chunk_equals_sentence_transformers(published):
    encoded = DocumentEncoder(EncoderConfig(precision="fp32", landmark_interval=128)).encode(TEXTS)
    assert encoded.chunk_offsets.tolist() == list(range(len(TEXTS) + 1))
    np.testing.assert_allclose(encoded.document_vectors_NV, published, atol=1e-5)


def test_encode_in_bf16_stays_within_cosine_0_999(published):
    encoded = DocumentEncoder(EncoderConfig(precision="bf16", landmark_interval=128)).encode(TEXTS)
    assert (encoded.document_vectors_NV * published).sum(axis=1).min() >= 0.999


def test_load_says_nothing(capfd):
    DocumentEncoder(EncoderConfig())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
