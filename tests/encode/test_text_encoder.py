"""An encoder by itself; tests/model/folders/test_encoder_folder.py has the folder it is saved to."""

from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder, require_texts
from cairn.pipeline.errors import ConfigError

TEXTS = ["the cat sat on the mat.", "old stone path", "walking mountains, rivers; " * 12 + "end"]


def test_landmark_embeddings_are_the_chunks_of_the_document_encoder(tiny_model_folder):
    encoder = load_encoder(tiny_model_folder, pooling="lmk", landmark_interval=12, precision="fp32")
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
