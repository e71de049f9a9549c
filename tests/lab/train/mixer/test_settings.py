from __future__ import annotations

from typing import Any

import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.settings import MixerConfig


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"context_documents": -1}, "context_documents must be a whole number from 0 to 65,536, got -1"),
        ({"grouped_share": 1.5}, "grouped_share must be a number from 0 to 1, got 1.5"),
        ({"temperature": float("nan")}, "temperature must be a number above 0, got nan"),
        ({"peak_lr": float("inf")}, "peak_lr must be a number above 0 and at most 1, got inf"),
        ({"distillation_weight": -0.1}, "distillation_weight must be a number of at least 0, got -0.1"),
        ({"batch_queries": 1}, "batch_queries must be a whole number of at least 2"),
        ({"max_pairs": 0}, "max_pairs must be a whole number of at least 1, got 0"),
        ({"hold_out": 0.6}, "hold_out must be a number from 0 to 0.5, got 0.6"),
    ],
)
def test_mixer_config_values_it_must_not_have_are_refused(changed: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        MixerConfig(**changed)


def test_mixer_config_dims_are_a_third_and_a_sixth_unless_chosen():
    assert MixerConfig().dims_of(384) == (128, 64)
    assert MixerConfig(rotation_dims=(16, 64)).dims_of(384) == (64, 16)


@pytest.mark.parametrize("dims", [(384,), (0,), (64, 64)])
def test_mixer_config_dims_the_model_does_not_have_are_refused(dims: tuple[int, ...]):
    with pytest.raises(
        ConfigError, match="rotation_dims must be different numbers below the base model's 384"
    ):
        MixerConfig(rotation_dims=dims).dims_of(384)
