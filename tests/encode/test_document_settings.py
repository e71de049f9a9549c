"""What of the document encoder's settings names its space, and which settings a model has no room for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.manifest import fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollingEncoder(EncoderConfig):
    roll_metres: int = 3


def test_fingerprint_added_option_changes_it_where_it_is_not_the_default(config, backbone):
    encoders = [
        DocumentEncoder(RollingEncoder(**dataclasses.asdict(config), roll_metres=metres), None, backbone)
        for metres in (3, 4)
    ]
    before = DocumentEncoder(config, None, backbone).fingerprint
    assert [encoder.fingerprint == before for encoder in encoders] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "lmk"},
        {"attention": "full"},
        {"landmark_interval": 13},
        {"window_tokens": 41},
        {"window_overlap_tokens": 14},
        {"landmarks": "sentence"},
        {"landmarks": "structure"},
        {"dims": 16},
        {"layers": 1},
        {"query_prefix": "query: "},
        {"document_prefix": "passage: "},
        {"temperature": 0.9},
        {"query_temperature": 0.9},
        {"whole_text_tokens": 38},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_setting_that_moves_vectors_changes_it(config, backbone, change):
    other = DocumentEncoder(dataclasses.replace(config, **change), None, backbone)
    assert other.fingerprint != DocumentEncoder(config, None, backbone).fingerprint


def test_fingerprint_of_settings_older_than_the_younger_ones_stays_as_it_was(config, backbone):
    older = (
        "pooling",
        "attention",
        "landmark_interval",
        "window_overlap_tokens",
        "temperature",
    )
    expected = fingerprint(
        kind="encoder",
        format=1,
        weights=backbone.weights_fingerprint,
        context=None,
        max_window_tokens=config.window_tokens,
        **{name: getattr(config, name) for name in older},
    )
    assert DocumentEncoder(config, None, backbone).fingerprint == expected


def test_fingerprint_precision_and_batch_size_leave_it_alone(config, backbone):
    other = DocumentEncoder(dataclasses.replace(config, precision="bf16", batch_tokens=7))
    assert other.fingerprint == DocumentEncoder(config, None, backbone).fingerprint


def test_fingerprint_context_changes_it_only_when_used(config, backbone, make_context):
    used = dataclasses.replace(config, use_context=True)
    one, two = (DocumentEncoder(used, make_context(seed=seed), backbone).fingerprint for seed in (0, 1))
    alone = DocumentEncoder(config, None, backbone).fingerprint
    assert len({one, two, alone}) == 3
    assert DocumentEncoder(config, make_context(), backbone).fingerprint == alone


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_context": True}, "use_context must come with a context"),
        ({"landmark_interval": 95, "window_tokens": 200}, "choose at most 94"),
        ({"attention": "full", "window_tokens": 97}, "window_tokens must be at most"),
        ({"dims": 33}, "must lie between 1 and the model's 32, got 33"),
        (
            {"document_prefix": "a " * 27},
            "document_prefix must leave a chunk of 12 tokens room .* may have 26, got 27",
        ),
        ({"query_prefix": "a " * 27}, "query_prefix must leave a chunk of 12 tokens room"),
    ],
)
def test_encoder_setting_that_does_not_fit_is_refused(config, backbone, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DocumentEncoder(dataclasses.replace(config, **change), None, backbone)


SHORT, LONG = " ".join(["word"] * 7), " ".join(["word"] * 30)


def _encoder(folder, **settings):
    return DocumentEncoder(
        EncoderConfig(**{"model": str(folder), "landmark_interval": 16, "precision": "fp32", **settings})
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
    whole = _encoder(tiny_model_folder, landmark_interval=40)
    np.testing.assert_allclose(
        encoded.document_vectors_NV[0], whole.encode([SHORT]).document_vectors_NV[0], atol=1e-6
    )


def test_a_whole_text_has_room_in_its_row(tiny_model_folder):
    with pytest.raises(ConfigError, match="whole_text_tokens must lie between 0 and 510"):
        EncoderConfig(whole_text_tokens=511)
    with pytest.raises(ConfigError, match="whole_text_tokens must be a whole number of at least 0"):
        EncoderConfig(whole_text_tokens=-1)
    with pytest.raises(ConfigError, match="whole_text_tokens must leave special tokens room"):
        _encoder(tiny_model_folder, whole_text_tokens=500)
