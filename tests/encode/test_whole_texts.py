from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError

SHORT, LONG = " ".join(["word"] * 7), " ".join(["word"] * 30)


def _encoder(folder, **settings):
    return DocumentEncoder(
        EncoderConfig(model=str(folder), landmark_interval=16, precision="fp32", **settings)
    )


def test_a_text_of_few_tokens_is_one_chunk_and_a_longer_one_is_cut(tiny_model_folder):
    encoder = _encoder(tiny_model_folder, whole_text_tokens=40)
    plain = _encoder(tiny_model_folder)
    encoded, cut = encoder.encode([SHORT, LONG]), plain.encode([SHORT, LONG])
    tokens = encoded.num_tokens.tolist()
    assert 16 < tokens[0] <= 40 < tokens[1]
    assert np.diff(encoded.chunk_offsets)[0] == 1 < np.diff(cut.chunk_offsets)[0]
    assert np.diff(encoded.chunk_offsets)[1] == np.diff(cut.chunk_offsets)[1]
    assert (encoded.start_char[0], encoded.end_char[0]) == (0, len(SHORT))
    whole = DocumentEncoder(
        EncoderConfig(model=str(tiny_model_folder), landmark_interval=40, precision="fp32")
    )
    np.testing.assert_allclose(
        encoded.document_vectors_NV[0], whole.encode([SHORT]).document_vectors_NV[0], atol=1e-6
    )


def test_the_setting_changes_the_fingerprint_where_it_is_used(tiny_model_folder):
    plain = _encoder(tiny_model_folder).fingerprint
    assert (
        _encoder(tiny_model_folder, whole_text_tokens=0).fingerprint
        == plain
        != _encoder(tiny_model_folder, whole_text_tokens=40).fingerprint
    )


def test_a_whole_text_has_room_in_its_row(tiny_model_folder):
    with pytest.raises(ConfigError, match="whole_text_tokens must lie between 0 and 510"):
        EncoderConfig(whole_text_tokens=511)
    with pytest.raises(ConfigError, match="whole_text_tokens must be a whole number of at least 0"):
        EncoderConfig(whole_text_tokens=-1)
    with pytest.raises(ConfigError, match="whole_text_tokens must leave special tokens room"):
        _encoder(tiny_model_folder, whole_text_tokens=500)
