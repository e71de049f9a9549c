from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cairn.pipeline.lab.train.mixer import score_mixer
from cairn.pipeline.lab.train.mixer_data import BatchMaker
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.lab.train.token_head import principal_rotation
from cairn.pipeline.model.landmark_mixer import LandmarkMixer

CONFIG = MixerConfig(context_documents=40, hold_out=0.25, min_pairs=4)


@pytest.fixture
def maker(make_paged_world: Callable[..., Any]) -> BatchMaker:
    return BatchMaker(make_paged_world(sources=("a", "b")).data(CONFIG), CONFIG)


def test_score_mixer_says_how_often_answers_are_found(maker: BatchMaker):
    mixer = LandmarkMixer(32, 2, 8)
    before = score_mixer(mixer, maker, dims=(32,))[32]
    assert set(before) == {"heldout_score", "heldout_hit", "heldout_ndcg_at_10"}
    assert before["heldout_score"] == pytest.approx(
        (before["heldout_hit"] + before["heldout_ndcg_at_10"]) / 2
    )
    mixer.title_gate.data.fill_(1.0)
    after = score_mixer(mixer, maker, dims=(32,))[32]
    assert after["heldout_hit"] > before["heldout_hit"] + 0.2
    assert after["heldout_ndcg_at_10"] > before["heldout_ndcg_at_10"] + 0.1


def test_score_mixer_of_whole_vectors_does_not_feel_a_turn_and_cut_ones_do(maker: BatchMaker):
    mixer = LandmarkMixer(32, 2, 8)
    rotation_DD = torch.from_numpy(principal_rotation(maker.sample_vectors(200)))
    plain, turned = (
        score_mixer(mixer, maker, dims=(32, 8), rotation_DD=turn) for turn in (None, rotation_DD)
    )
    assert turned[32] == pytest.approx(plain[32])
    assert turned[8]["heldout_score"] != pytest.approx(plain[8]["heldout_score"])


def test_score_mixer_is_the_same_every_time(maker: BatchMaker):
    mixer = LandmarkMixer(32, 2, 8)
    assert score_mixer(mixer, maker, dims=(32,)) == score_mixer(mixer, maker, dims=(32,))


def test_score_mixer_with_nothing_held_out_is_nothing(make_paged_world: Callable[..., Any]):
    config = replace(CONFIG, hold_out=0.0)
    assert (
        score_mixer(LandmarkMixer(32), BatchMaker(make_paged_world().data(config), config), dims=(32,)) == {}
    )
