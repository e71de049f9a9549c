from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.token_states import embed_tokens
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone

TEXTS = ["the old stone on the path", "", "a river", "the cat sat on the mat and the stone marks the way"]


@pytest.fixture
def backbone(tiny_model_folder: Path) -> Backbone:
    return load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))


def test_states_are_those_of_the_last_layer_without_the_special_tokens(backbone: Backbone):
    found = embed_tokens(backbone, TEXTS, batch_tokens=64)
    for number, text in enumerate(TEXTS):
        ids = backbone.tokenizer.encode(text, add_special_tokens=False).ids
        row = np.array([[backbone.cls_id, *ids, backbone.landmark_id]])
        states = backbone.hidden_states(row, np.array([row.shape[1]]))[0, 1:-1]
        expected = torch.nn.functional.normalize(states, dim=1).numpy()

        assert found.ids_T[found.of(number)].tolist() == ids
        assert found.states_TV[found.of(number)] == pytest.approx(expected, abs=1e-3)


def test_states_are_rewritten_and_progress_counts_every_token(backbone: Backbone):
    heard: list[int] = []
    found = embed_tokens(
        backbone, TEXTS, batch_tokens=16, rewrite=lambda states: states[:, :4], on_tokens=heard.append
    )

    assert found.states_TV.shape == (len(found.ids_T), 4)
    assert sum(heard) == len(found.ids_T)


def test_a_prefix_is_read_and_left_out(backbone: Backbone):
    prefix = np.array(backbone.tokenizer.encode("the river", add_special_tokens=False).ids, np.int32)
    plain, prefixed = (
        embed_tokens(backbone, TEXTS, batch_tokens=64, prefix_ids=ids) for ids in (prefix[:0], prefix)
    )

    assert np.array_equal(plain.ids_T, prefixed.ids_T)
    assert not np.allclose(plain.states_TV, prefixed.states_TV, atol=1e-2)


def test_rows_of_a_long_text_are_read_apart_and_none_of_its_tokens_is_lost(backbone: Backbone):
    text = "the old stone on the path marks the way past the river and the mat " * 20
    whole, cut = (embed_tokens(backbone, [text], batch_tokens=64, max_tokens=most) for most in (None, 7))
    apart = embed_tokens(backbone, [text], batch_tokens=64, row_tokens=8)
    ids = backbone.tokenizer.encode(text, add_special_tokens=False).ids

    assert whole.ids_T.tolist() == apart.ids_T.tolist() == ids
    assert cut.ids_T.tolist() == ids[:7]
    assert apart.states_TV.shape == whole.states_TV.shape
    assert not np.allclose(apart.states_TV, whole.states_TV, atol=1e-2)
