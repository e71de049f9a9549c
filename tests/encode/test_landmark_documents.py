"""Documents encoded by landmark attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.own_tensors import GATE_NAMES
from cairn.pipeline.poolings import POOLINGS

TEXTS = [
    "the cat sat on the mat.",
    "old stone path " * 30,
    "\u200b",
    "walking mountains, rivers; " * 40 + "end",
    "a",
]


@pytest.fixture
def landmark(config):
    return dataclasses.replace(config, attention="landmark")


@pytest.fixture
def gated(config):
    """A model of its own, with gates that are wide open."""
    return _with_gates(load_backbone(config), 1.0)


def _with_gates(backbone, value):
    gates = torch.full((backbone.num_layers, backbone.shape.num_heads), value)
    backbone.own_tensors = {**backbone.own_tensors, **dict.fromkeys(GATE_NAMES, gates)}
    return backbone


@pytest.mark.parametrize("pooling", POOLINGS["landmark"])
def test_encode_closed_gates_equal_chunk_attention(config, landmark, gated, make_context, pooling):
    landmark = dataclasses.replace(landmark, pooling=pooling, use_context=True, document_prefix="old: ")
    ours = DocumentEncoder(landmark, make_context(), _with_gates(gated, float("-inf"))).encode(TEXTS)
    chunk = DocumentEncoder(
        dataclasses.replace(config, pooling=pooling, document_prefix="old: "), None, gated
    ).encode(TEXTS)
    np.testing.assert_allclose(ours.chunk_vectors_MV, chunk.chunk_vectors_MV, atol=1e-5)
    np.testing.assert_array_equal(ours.start_char, chunk.start_char)


def test_encode_text_of_one_chunk_without_context_equals_chunk_attention(config, landmark, gated):
    ours = DocumentEncoder(landmark, None, gated).encode(TEXTS[:1])
    np.testing.assert_allclose(
        ours.document_vectors_NV,
        DocumentEncoder(config, None, gated).encode(TEXTS[:1]).document_vectors_NV,
        atol=1e-5,
    )


@pytest.mark.parametrize("words", [8_192, 20_000])
def test_encode_long_document_in_one_window_shows_its_start_at_its_end(config, gated, words):
    window = dataclasses.replace(config, attention="landmark", landmark_interval=64, window_tokens=32_768)
    encoder = DocumentEncoder(window, None, gated)
    one, other = (
        encoder.encode([start + " old stone path way" * (words // 4)])
        for start in ("cat " * 40, "river " * 40)
    )
    assert one.num_tokens[0] >= words
    assert np.abs(one.chunk_vectors_MV[-1] - other.chunk_vectors_MV[-1]).max() > 1e-5
    narrow = DocumentEncoder(dataclasses.replace(window, window_tokens=512), None, gated)
    ends = [
        narrow.encode([start + " old stone path way" * (words // 4)]).chunk_vectors_MV[-1]
        for start in ("cat " * 40, "river " * 40)
    ]
    np.testing.assert_array_equal(*ends)


def test_encode_temperature_by_length_counts_the_tokens_of_the_window(landmark, gated):
    stepped = dataclasses.replace(landmark, temperature_by_length=((20, 0.5),))
    ours = DocumentEncoder(stepped, None, gated).encode(TEXTS[:2])
    mild, sharp = (
        DocumentEncoder(dataclasses.replace(landmark, temperature=t), None, gated).encode(TEXTS[:2])
        for t in (1.0, 0.5)
    )
    np.testing.assert_allclose(ours.chunk_vectors_MV[0], mild.chunk_vectors_MV[0], atol=1e-5)
    np.testing.assert_allclose(ours.chunk_vectors_MV[1:], sharp.chunk_vectors_MV[1:], atol=1e-5)


def test_fingerprint_gates_change_it_only_with_landmark_attention(config, landmark):
    backbone = load_backbone(config)
    before = [DocumentEncoder(one, None, backbone).fingerprint for one in (config, landmark)]
    _with_gates(backbone, 0.5)
    after = [DocumentEncoder(one, None, backbone).fingerprint for one in (config, landmark)]
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_config_window_of_landmark_attention_is_8192_tokens_unless_told():
    assert EncoderConfig(attention="landmark").window_tokens == 8_192
    assert EncoderConfig(attention="landmark", window_tokens=65_536).window_tokens == 65_536
    assert {EncoderConfig(attention=attention).window_tokens for attention in ("chunk", "full")} == {512}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"landmark_interval": 95, "window_tokens": 200}, "choose at most 94"),
        ({"document_prefix": "a " * 27}, "document_prefix must leave a chunk of 12 tokens room"),
    ],
)
def test_encoder_setting_that_does_not_fit_is_refused(landmark, backbone, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DocumentEncoder(dataclasses.replace(landmark, **change), None, backbone)


def test_config_pooling_of_windows_is_refused():
    with pytest.raises(ConfigError, match="pooling multi_cls must go with attention full, got landmark"):
        EncoderConfig(attention="landmark", pooling="multi_cls")
