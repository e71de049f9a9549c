from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder, encoded_head

TEXTS = ["the cat sat on the mat", "", "stone " * 200, "old river. " * 5, "x" * 4000 + " cat"]


@pytest.fixture(scope="module")
def backbone(tiny_model_folder):
    return load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))


@pytest.fixture(scope="module")
def encoder(backbone):
    return ContextEncoder(backbone, 20)


@pytest.mark.parametrize("has_cls", [True, False])
def test_embed_batch_equals_one_mean_a_text(backbone, has_cls):
    model = copy(backbone)
    model.cls_id = backbone.cls_id if has_cls else None
    opening = [backbone.cls_id] * has_cls
    for row, text in zip(ContextEncoder(model, 20).embed(TEXTS), TEXTS, strict=True):
        own = backbone.tokenizer.encode(text, add_special_tokens=False).ids[: 19 - has_cls]
        ids = [*opening, *own, backbone.landmark_id]
        naive = backbone.hidden_states(np.array([ids]), np.array([len(ids)]))[0].mean(0)
        torch.testing.assert_close(torch.from_numpy(row), naive, atol=1e-5, rtol=0)


def test_of_a_long_text_only_the_head_is_tokenised_and_rows_have_positions(backbone):
    with pytest.raises(ConfigError, match="96 positions, got 97"):
        ContextEncoder(backbone, 97)
    assert 20 <= len(encoded_head(backbone.tokenizer, "cat " * 100_000, 20).ids) < 1_000


def test_temperature_and_prefix_change_fingerprint_and_embeddings(tiny_model_folder, backbone, encoder):
    plain = encoder.embed(TEXTS[:1])
    sharp, behind = (
        ContextEncoder(backbone, 20, **how) for how in ({"temperature": 0.5}, {"prefix": "old: "})
    )
    assert len({each.fingerprint for each in (encoder, sharp, behind)}) == 3
    assert float(np.abs(sharp.embed(TEXTS[:1]) - plain).max()) > 1e-2
    assert np.array_equal(behind.embed(TEXTS[:1]), encoder.embed([f"old: {TEXTS[0]}"])), "it is pooled"
    config = EncoderConfig(model=str(tiny_model_folder), document_prefix="old: ")
    made = ContextEncoder.of(backbone, config, ContextConfig(max_document_tokens=20))
    assert made.fingerprint == encoder.fingerprint, "its own first stage has no prefix"


def test_context_encoder_of_a_checkpoint_with_a_first_stage_stands_behind_the_documents_prefix(make_cde):
    config = EncoderConfig(model=str(make_cde(1)), precision="fp32", document_prefix="old: ", temperature=0.9)
    loaded = load_backbone(config)
    made = ContextEncoder.of(loaded, config, ContextConfig(max_document_tokens=256))
    expected = ContextEncoder(loaded.first_stage, 40, temperature=0.9, prefix="old: ")
    assert made.fingerprint == expected.fingerprint
    assert np.array_equal(made.embed(TEXTS), expected.embed(TEXTS))
